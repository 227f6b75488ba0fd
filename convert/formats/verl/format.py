"""verl, SkyRL and EasyR1 on FSDP: each rank saves its part of the model, `model_world_size_N_rank_R.pt`.

Layout (verl `utils/checkpoint/fsdp_checkpoint_manager.py`, `utils/checkpoint/checkpoint_manager.py`): a folder such as
`global_step_20/actor` with the files of all ranks, `fsdp_config.json` (since 0.4), and under `huggingface/` the
configuration and the tokenizer, which were in the folder itself before 0.3. The optimizer is in
`optim_world_size_N_rank_R.pt`, the schedule and the random numbers in `extra_state_world_size_N_rank_R.pt`. Next to
`actor` are `critic` and the state of the data loader. A LoRA run holds the whole PeftModel; rank and alpha are in
`lora_adapter/adapter_config.json`, or since 0.7 in `lora_train_meta.json`. With Megatron for a backend
(`megatron_checkpoint_manager.py`) the model is in `dist_ckpt/`, without arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmconv.causal_lm import architecture
from llmconv.checkpoint import ADAPTER_CONFIG, INDEX, SINGLE, Checkpoint, read_json
from llmconv.convert.algebra import first_missing
from llmconv.convert.assembly import (
    OPTIONS,
    assembled_run,
    config_of_run,
    opened_with_adapter,
    side_files_of,
    stored_config,
    without_adapter,
)
from llmconv.convert.formats import AdapterFormat, Format
from llmconv.convert.formats.megatron.format import FORMAT as megatron
from llmconv.convert.formats.megatron.save_folder import is_megatron_distributed
from llmconv.convert.formats.verl.ranks import join_ranks
from llmconv.convert.models.config_file import OPTION, plain_fields, trusted_code
from llmconv.convert.models.transformers_source import causal_lm_classes
from llmconv.convert.state_dicts.files import RANK_FILE, StateFile, select, tracked
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, short, word
from llmconv.files.torch_reader import open_torch_blob
from llmconv.model_code import AUTO_MAP
from llmconv.not_a_model_folder import training_files_in
from llmconv.tensors import LazyTensor

if TYPE_CHECKING:
    from llmconv.convert.adapters.adapter import Adapter

STEP = re.compile(r"global_step_(\d{1,12})")
ROLES = ("actor", "policy")  # the folder of the model that is trained, in that of a step; SkyRL calls it `policy`
POINTERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")  # verl's and SkyRL's
META, LORA = "lora_train_meta.json", "lora_adapter"
HUGGING_FACE = "huggingface"
MEGATRON = "dist_ckpt"  # a distributed checkpoint of Megatron core, of a run with that backend
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
HALVES = ("bfloat16", "float16")
CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of causal language models, old classes included


@dataclass(frozen=True)
class Save:
    """One save: the files of all ranks, by rank."""

    folder: Path
    files: Mapping[int, Path]

    @property
    def home(self) -> Path:
        """The folder with the configuration, which old versions put next to the weights."""
        inner = self.folder / HUGGING_FACE
        return self.folder if (self.folder / "config.json").is_file() and not _has_config(inner) else inner


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _holds_ranks(folder: Path) -> bool:
    return folder.is_dir() and any(RANK_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def _folder_of(step: Path) -> Path | None:
    """The folder with the model: `step` or the one in it, of the model that is trained."""
    places = [step, *(step / role for role in ROLES)]
    try:
        return next((place for place in places if _holds_ranks(place) or _holds_megatron(place)), None)
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return None


def _holds_megatron(folder: Path) -> bool:
    """Whether the run was trained with Megatron, and not with FSDP."""
    return (folder / MEGATRON).is_dir() and is_megatron_distributed(folder / MEGATRON)


def _saves(path: Path) -> dict[str, Path]:
    """The folders of a run's steps that hold a model, by name, in order."""
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := STEP.fullmatch(entry.name))]
    return {entry.name: entry for _, entry in sorted(found) if _folder_of(entry)}


def _detect(path: Path) -> bool:
    if path.is_file():
        return bool(RANK_FILE.fullmatch(path.name))
    return path.is_dir() and bool(_folder_of(path) or _saves(path) or _is_pruned(path))


def _is_pruned(folder: Path) -> bool:
    """Whether only the small files of a save are left."""
    small = (folder / "fsdp_config.json").is_file() and (folder / HUGGING_FACE).is_dir()
    return small and not _has_config(folder) and not _holds_ranks(folder)


def open_save(path: Path) -> Save:
    """The save at `path`, the model's in that of a step, or of several steps the newest.

    Raises InputRefused for one of several files, saves of different numbers of ranks, or several steps without a
    pointer, MalformedInput if the file of a rank is missing, or the run says another number of ranks.
    """
    if path.is_file():
        match = RANK_FILE.fullmatch(path.name)
        if match and int(match[1]) > 1:
            raise InputRefused(
                f"`{path.name}` is the part of one rank of {match[1]}",
                hint=f"give the folder that contains all of them: `{path.parent}`",
            )
        return Save(path.parent, {0: path})
    folder = path if _is_pruned(path) else _newest(path)
    found = {entry.name: match for entry in sorted(folder.iterdir()) if (match := RANK_FILE.fullmatch(entry.name))}
    if len(worlds := {int(match[1]) for match in found.values()}) > 1:
        raise InputRefused(
            f"`{folder.name}` contains saves of {' and '.join(map(str, sorted(worlds)))} ranks",
            hint="move the files of one of them into a separate folder",
        )
    world = next(iter(worlds), 0)
    files = {int(match[2]): folder / name for name, match in found.items() if (folder / name).is_file()}
    if not files:
        inner = folder / HUGGING_FACE
        whole = any((inner / name).is_file() for name in (SINGLE, INDEX))
        raise InputRefused(
            f"`{folder.name}` is of a run on FSDP, without the parts of its ranks (`model_world_size_N_rank_R.pt`)",
            hint=f"give the model that is in it: `{inner}`" if whole else "copy them too; was the step pruned?",
        )
    if (missing := first_missing(files, world)) is not None:
        raise MalformedInput(
            f"`{folder.name}` lacks the part of rank {missing}: `model_world_size_{world}_rank_{missing}.pt`",
            hint=f"each of the {world} ranks wrote one, on its own host; copy all of them",
        )
    if beyond := [path.name for rank, path in files.items() if rank >= world]:
        raise MalformedInput(f"`{beyond[0]}` is of no rank of {world}", hint="remove it, or copy the folder again")
    stated = _settings(folder).get("world_size", world)
    if type(stated) is not int or stated != world:
        raise MalformedInput(
            f"`fsdp_config.json` in `{folder.name}` is of {short(stated, 20)} ranks, the files of {world}",
            hint="two saves were written into one folder; copy the files of one of them",
        )
    save = Save(folder, dict(sorted(files.items())))
    _require_one_step(save)
    return save


def _newest(path: Path) -> Path:
    """The folder with the model of the save at `path`, or of several steps the newest; errors as in `open_save`."""
    if folder := _folder_of(path):
        return folder
    pointer = next((path / name for name in POINTERS if (path / name).is_file()), path / POINTERS[0])
    return _folder_of(tracked(path, _saves(path), pointer, lambda word: f"global_step_{word}")) or path


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "fsdp_config.json"
    return read_json(file) if file.is_file() else {}


def _require_one_step(save: Save) -> None:
    """Refuses files of different steps, as far as the schedules next to them tell."""
    steps: dict[int, str] = {}
    for path in save.files.values():
        extra = path.with_name(path.name.replace("model_", "extra_state_", 1))
        with suppress(LlmconvError, OSError):
            content = open_torch_blob(extra, 0, extra.stat().st_size).content
            schedule = content.get("lr_scheduler") if isinstance(content, dict) else None
            step = schedule.get("last_epoch") if isinstance(schedule, dict) else None
            if type(step) is int:
                steps.setdefault(step, extra.name)
    if len(steps) > 1:
        (step, first), (other, second) = [*steps.items()][:2]
        raise MalformedInput(
            f"`{save.folder.name}` mixes saves of different steps: `{first}` is of step {step}, `{second}` of {other}",
            hint="copy the files of all ranks again, from one save",
        )


def _state(save: Save) -> StateFile:
    state = join_ranks(save.folder.name, save.files)
    return StateFile(save.folder, state, lambda _, leaf: leaf, shards=len(save.files), home=save.home)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    if path.is_dir() and not _is_pruned(path) and not _holds_ranks(folder := _newest(path)):
        return replace(_open_megatron(folder, config, tokenizer), path=path)
    save = open_save(path)
    state = _state(save)
    given = dict(config)
    if code := trusted_code(given):
        given[OPTION] = replace(code, others=(*code.others, save.home))
    stored = stored_config(save.home)
    has_value_head = any(name.startswith("v_head.") for name in state.state)  # of TRL, next to a causal model
    is_other = not has_value_head and _is_other_class({**stored, **given})
    opens = _open_other_class if is_other else assembled_run
    opened = opens(state, FORMAT.name, given, tokenizer, _adapter_config(save, state.state))
    warnings = [*opened.warnings]
    half = stored.get("dtype", stored.get("torch_dtype"))
    if half in HALVES and any(tensor.dtype.name == "float32" for tensor in opened.tensors.values()):
        warnings.append(f"these are the float32 master weights; `--dtype {half}` converts to the dtype of the run")
    if any((save.home / name).is_file() for name in (SINGLE, INDEX)):
        warnings.append(f"`{save.folder.name}/{save.home.name}` also contains the model as a Hugging Face folder")
    version = _settings(save.folder).get("FSDP_version")
    named = f"FSDP {version}" if type(version) is int and 0 < version < 100 else ""
    rest = ["the critic"] if (save.folder.parent / "critic").is_dir() and save.folder.name in ROLES else []
    dropped = (*training_files_in(save.folder), *rest, *opened.dropped)
    return replace(opened, path=path, warnings=tuple(warnings), version=named or opened.version, dropped=dropped)


def _open_megatron(folder: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    """The model in `dist_ckpt`, whose sizes are in the configuration next to it, not in arguments of Megatron."""
    home = Save(folder, {}).home
    without_adapter(config, folder.name)
    own = home if any((home / name).is_file() for name in TOKENIZERS) else None
    given = {name: value for name, value in config.items() if name not in ("drop", *OPTIONS)}
    opened = megatron.open(folder / MEGATRON, {**stored_config(home), **given}, tokenizer or own)
    side_files = {**side_files_of(home, tokenizer), **opened.side_files}
    return replace(opened, format=FORMAT.name, side_files=side_files)


def _is_other_class(config: Mapping[str, Any]) -> bool:
    """Whether the run is of no causal language model: one with images, or a classifier such as a reward model."""
    named, known = architecture(config), causal_lm_classes().get(str(config.get("model_type")))
    return bool(named) and named != known and not named.endswith(CAUSAL) and not config.get(AUTO_MAP)


def _open_other_class(
    file: StateFile, format: str, options: Mapping[str, Any], tokenizer: Path | None, adapter: Mapping[str, Any] | None
) -> Checkpoint:
    """As `assembled_run`, of a model of any class of transformers, every tensor under its own name."""
    home, warnings = file.home or file.path, list[str]()
    given = {name: value for name, value in options.items() if name not in FORMAT.options}
    tensors = select(file.state, file.tensor, file.path.name, warnings)

    def open_model(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        side_files = {**(base.side_files if base else {}), **side_files_of(home, tokenizer)}
        settings = plain_fields({**config_of_run(stored_config(home), base, warnings), **given}, warnings)
        return Checkpoint(file.path, format, tensors, settings, side_files, tuple(warnings), shards=file.shards)

    return opened_with_adapter(tensors, file.path, options, open_model, adapter)


def _adapter_config(save: Save, names: Iterable[str]) -> dict[str, Any] | None:
    """The config of the run's adapter; None: none of this system's, so that it is looked for where PEFT saves it.

    Raises UnsupportedInput without rank and alpha.
    """
    meta = read_json(save.folder / META) if (save.folder / META).is_file() else {}
    rank, alpha = meta.get("r"), meta.get("lora_alpha")
    if (file := save.folder / LORA / ADAPTER_CONFIG).is_file():
        config = read_json(file)
        for key in ("r", "lora_alpha"):
            if meta and meta.get(key, config.get(key)) != config.get(key):
                raise MalformedInput(
                    f"`{key}` is {short(meta[key], 20)} in `{META}` and {short(config.get(key), 20)} in `lora_adapter`",
                    hint=f"one of them is of another run; remove it from `{save.folder.name}`",
                )
        return config
    if not meta:
        return None
    if type(rank) is not int or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise UnsupportedInput(
            f"`{META}` in `{save.folder.name}` has no `r` and `lora_alpha`, so the scale of the adapter is unknown",
            hint=f"put the run's `{ADAPTER_CONFIG}` into a folder `lora_adapter` in it",
        )
    paths = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in names if ".lora_" in name}
    ends = {path.rpartition(".")[2] for path in paths}
    others = [name for name in names if name.endswith(tuple(f".{end}.weight" for end in ends))]
    kind = meta.get("task_type")
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        # the ends of the names, unless modules of the same name were not trained, such as those of a vision tower
        "target_modules": sorted(paths if others else ends),
        "task_type": kind if isinstance(kind, str) else None,
        "bias": "none",
    }


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    if path.is_dir() and not _is_pruned(path) and not _holds_ranks(folder := _newest(path)):
        return megatron.peek(folder / MEGATRON) if megatron.peek else {}
    return _state(open_save(path)).tensors()


FORMAT = Format(
    name="verl",
    title="verl, SkyRL and EasyR1: a folder of `model_world_size_N_rank_R.pt`, one per process, or with `dist_ckpt`",
    detect=_detect,
    open=_open,
    covers="any model of transformers, also with images, and reward models; sharded by FSDP 1 or 2 over any mesh of "
    "ranks, with replicas and tensor parallelism; the newest step of a run; LoRA runs, merged or kept apart; what the "
    "format `megatron` reads, of runs with that backend",
    options=("drop", *OPTIONS, OPTION),
    peek=_peek,
)


def _open_adapter(path: Path, base: Checkpoint, alpha: float | None) -> Adapter:
    """The LoRA adapter of a run: PEFT's files in `lora_adapter`, else the factors that the ranks saved.

    Raises InputRefused: the run has none; UnsupportedInput, MalformedInput: an unknown scale, or lacking factors.
    """
    from llmconv.convert.adapters.peft_file import WEIGHTS, open_adapter  # noqa: PLC0415 - `to-hf` merges runs by itself
    from llmconv.convert.peft_runs import find_adapter  # noqa: PLC0415

    folder = path.parent if path.is_file() else path if _is_pruned(path) else _newest(path)
    inner = folder / LORA
    if (inner / ADAPTER_CONFIG).is_file() and any((inner / name).is_file() for name in WEIGHTS):
        return open_adapter(inner, alpha)
    whole = InputRefused(
        f"`{path}` is a training run (`{FORMAT.name}`) without a LoRA adapter",
        hint=f"convert its model: `llmconv to-hf {word(path)} -o OUT`",
    )
    if _holds_megatron(folder) and not _holds_ranks(folder):
        raise whole
    save = open_save(folder)
    state = _state(save)
    if not any(".lora_" in name for name in state.state):
        raise whole
    stored = _adapter_config(save, state.state) or {}
    run = find_adapter(stored, select(state.state, state.tensor, save.folder.name, []), save.folder)
    settings = inner / ADAPTER_CONFIG if (inner / ADAPTER_CONFIG).is_file() else folder / META
    return replace(run.opened(alpha), weights=(*save.files.values(),), settings=settings)


ADAPTER = AdapterFormat(
    "verl, SkyRL or EasyR1 (a run's folder of `model_world_size_N_rank_R.pt`)",
    _detect,
    _open_adapter,
)
