"""A Checkpoint of a state dict in Hugging Face names, or its refusal: nothing may stay randomly initialized.

Finds the prefix of the names in a state dict of a wrapped model, or of one without a head:
`lit.model.transformer.wte.weight` has the prefix `lit.model.`; `wte.weight` of a GPT2Model lacks `transformer.`, which
is added as transformers adds it when it loads (`base_model_prefix`).

Of PEFT (LoRA) runs, the adapter is merged into its base, written next to it, or alone. Layout: the whole PeftModel, as
trainers save it, with `adapter_config.json` next to it; adapter and base are separated by their names. Composer
(mosaicml/composer `models/huggingface.py`) holds that file as `peft_config`, and with `should_save_peft_only` (the
default) keeps only the tensors of `filter_state_dict_peft`. Names are those of the running model (PEFT
`tuners/lora/layer.py`, `utils/other.py`): `….q_proj.base_layer.weight`, `….q_proj.lora_A.default.weight`,
`lm_head.original_module.weight`, `lm_head.modules_to_save.default.weight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json, read_side_files
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.edits import base_in_memory
from llmconv.convert.adapters.lora_config import FORMULA, AdapterFields, parse_config
from llmconv.convert.adapters.merging import merged
from llmconv.convert.adapters.peft_file import to_adapter
from llmconv.convert.adapters.tensor_names import AS_STORED, match_names
from llmconv.convert.models.completeness import BUFFERS, Leaf, as_loaded, check_complete, select
from llmconv.convert.models.config_file import causal_lm_config, without_code
from llmconv.convert.models.head_and_dtype import settled, with_tied_head
from llmconv.convert.models.mpt_config import enlarged
from llmconv.convert.models.transformers_source import ModelNames, causal_lm_classes, model_names
from llmconv.convert.state_dicts.files import EMBEDDING, StateFile, refuse_objects, refuse_quantized
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

# Names of a LayerNorm's parameters in models that came from TensorFlow (`LayerNorm.gamma`)
OLD_NORM = {"gamma": "weight", "beta": "bias"}
AROUND = {
    "optimizer": "the optimizer's state",
    "optimizer_states": "the optimizer's state",
    "optimizer_state_dict": "the optimizer's state",
    "scheduler": "the learning rate schedule",
    "lr_schedulers": "the learning rate schedule",
    "scheduler_state_dict": "the learning rate schedule",
    "callbacks": "the callbacks' state",
    "loops": "the training loops' state",
    "hyper_parameters": "the hyper-parameters",
}


def config_folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def stored_config(path: Path) -> dict[str, Any]:
    """`config.json` in or next to `path`, or empty; those of 2019 without `model_type` get that of their class."""
    file = config_folder(path) / "config.json"
    config = read_json(file) if file.is_file() else {}
    classes = config.get("architectures")
    if "model_type" in config or not isinstance(classes, list):
        return config
    known = causal_lm_classes().items()
    kinds = [kind for kind, name in known if classes[:1] == [name] and model_names(kind).embedding]
    return {**config, "model_type": kinds[0]} if len(kinds) == 1 else config


def side_files_of(path: Path, tokenizer: Path | None) -> dict[str, bytes]:
    """Tokenizer and generation files in or next to `path`; `tokenizer` replaces the tokenizer if it is given."""
    found = read_side_files(config_folder(path))
    if tokenizer is None:
        return found
    return {name: found[name] for name in found if name == "generation_config.json"} | read_tokenizer(tokenizer)


def contents_around(file: StateFile) -> tuple[str, ...]:
    """The other contents of a file with a state dict, one phrase each."""
    phrases = [AROUND.get(str(key), "") for key, value in file.around.items() if value not in (None, {}, [])]
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase))


def assemble(
    file: StateFile, format: str, given: Mapping[str, Any], tokenizer: Path | None, version: str = ""
) -> Checkpoint:
    """The whole model in `file`, with any one prefix; InputRefused without a config, or if it describes another model.

    `given` are the user's fields (`drop` leaves out other tensors), `tokenizer` is the user's, `version` the writer's.
    """
    source, warnings = file.path.name, list[str]()
    fields = {name: value for name, value in given.items() if name != "drop"}
    stored = stored_config(file.path)
    settings = causal_lm_config(stored, fields, source, warnings)
    refuse_quantized(file.state, source)
    refuse_objects(file.state, source)
    if settings.get("quantization_config"):
        raise UnsupportedInput(
            f"the configuration of `{source}` declares it quantized",
            hint="give the weights from before quantization, and a configuration without `quantization_config`",
        )
    if lora := [name for name in file.state if "lora_" in name]:
        raise UnsupportedInput(
            f"`{source}` holds LoRA matrices that are not merged: {listing(lora)}",
            hint="merge them where it was trained, or save the adapter with PEFT and use `llmconv merge-lora`",
        )
    if AUTO_MAP in settings:
        tensors, dropped = select(file.state, file.tensor, source, warnings, buffers=True), list[str]()
    else:
        tensors, dropped = _native_tensors(file, settings, warnings, drop=bool(given.get("drop")))
        if settings["model_type"] == "mpt":
            tensors = enlarged(tensors, {**stored, **fields}, source)
        settings = as_loaded(tensors, settings)
    writer = settings.get("transformers_version")  # usually that which wrote the weights
    version = version or (f"transformers {writer[:20]}" if isinstance(writer, str) else "")
    more = (tuple(warnings), version, file.shards, (*contents_around(file), *dropped))
    return Checkpoint(file.path, format, tensors, settings, side_files_of(file.path, tokenizer), *more)


def _native_tensors(
    file: StateFile, settings: Mapping[str, Any], warnings: list[str], *, drop: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors in transformers' names, and a phrase for each kind of those that are left out."""
    source = file.path.name
    counts: Counter[str] = Counter()
    state: dict[str, Any] = {}  # without buffers that the model recomputes
    for name, leaf in file.state.items():
        rank = len(leaf.shape) if isinstance(leaf, Leaf) else -1
        if kind := next((kind for kind, sign, ranks in BUFFERS if sign.search(name) and rank in ranks), None):
            counts[kind] += 1
        else:
            state[name] = leaf
    dropped = [f"{count} {kind}, which the model computes" for kind, count in counts.items()]
    stored = select(state, file.tensor, source, warnings)
    names, outside, added = map_names(list(stored), model_names(str(settings["model_type"])), source)
    tensors = {}
    for name, target in names.items():
        stem, dot, last = target.rpartition(".")
        tensors[stem + dot + OLD_NORM.get(last, last)] = stored[name]
    dropped += dropped_outside(outside, source, drop=drop)
    if added:
        warnings.append(f"added `{added}` to the names, which are those of the model without its head")
    return tensors, dropped


def dropped_outside(outside: Sequence[str], source: str, *, drop: bool) -> list[str]:
    """A phrase about the tensors outside the model, if any; UnsupportedInput unless they may be dropped."""
    if outside and not drop:
        raise UnsupportedInput(
            f"`{source}` has {len(outside)} unexpected keys outside the model: {listing(outside)}",
            hint="`--drop` leaves them out, if the model computes its logits without them",
        )
    return [f"{len(outside)} tensors outside the model: {listing(outside)}"] if outside else []


def map_names(stored: Sequence[str], model: ModelNames, source: str) -> tuple[dict[str, str], list[str], str]:
    """Stored names to Hugging Face's by the only prefix, those outside it, and the prefix that a base model lacks.

    Raises MalformedInput without an embedding, UnsupportedInput for several models.
    """
    whole: dict[str, None] = {}  # the prefixes of whole models, and those of base models
    base_only: dict[str, None] = {}
    for name in stored:
        embedding = model.embedding
        if not embedding and EMBEDDING.search(name):  # of an unknown model: from the last `base` on
            start = f".{name}".rfind(f".{model.base}.")
            embedding = name[start:] if start >= 0 else f"{model.base}.{name}"
        short = embedding.removeprefix(f"{model.base}.")
        if _ends_with(name, embedding):
            whole[name.removesuffix(embedding)] = None
        elif _ends_with(name, short):
            base_only[name.removesuffix(short)] = None
    if not (found := [*(whole or base_only)]):
        raise MalformedInput(
            f"missing key `{model.embedding or 'embed_tokens.weight'}` in `{source}`; it begins with {listing(stored)}",
            hint="the configuration belongs to another model, or the checkpoint is partial",
        )
    if len(found) > 1:
        raise UnsupportedInput(
            f"`{source}` contains {len(found)} models, with the prefixes {listing(found)}",
            hint="save the `state_dict()` of one model alone",
        )
    prefix, added = found[0], "" if whole else f"{model.base}."
    names: dict[str, str] = {}
    outside: list[str] = []
    for name in stored:
        rest = name.removeprefix(prefix)
        target = rest if rest.startswith(model.roots[1:]) else added + rest
        if not name.startswith(prefix) or not target.startswith(model.roots):
            outside.append(name)
        else:
            names[name] = target
    return names, outside, added


def _ends_with(name: str, ending: str) -> bool:
    return bool(ending) and (name == ending or name.endswith(f".{ending}"))


OPTIONS = ("base", "adapter")
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields of `adapter_config.json` with which PEFT skips modules of `target_modules`."""


def without_adapter(options: Mapping[str, Any], source: str) -> None:
    """Raises UsageProblem for options that have no meaning for a run without PEFT."""
    if given := [name for name in OPTIONS if options.get(name)]:
        raise UsageProblem(f"`--{given[0]}` is given, but `{source}` contains no adapter", hint="leave it out")


def opened_with_adapter(
    tensors: dict[str, LazyTensor],
    path: Path,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model, with the adapter whose config is in the folder or above (else MalformedInput); see `with_adapter`."""
    if not any(".lora_" in name for name in tensors):
        without_adapter(options, path.name)
        return open_model(tensors, None)
    homes = [path, *path.absolute().parents[:2]]
    file = next((home / ADAPTER_CONFIG for home in homes if (home / ADAPTER_CONFIG).is_file()), None)
    run = find_adapter(read_json(file) if file else {}, tensors, path)
    assert run
    return with_adapter(run, options, open_model)


def assembled_run(file: StateFile, format: str, options: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    """The model of a state dict, with its adapter if it is a PeftModel's; arguments and errors as in `assemble`."""
    given = {name: value for name, value in options.items() if name not in OPTIONS}
    if not any(".lora_" in name for name in file.state):
        without_adapter(options, file.path.name)
        return assemble(file, format, given, tokenizer)

    def open_model(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        side_files = {**(base.side_files if base else {}), **side_files_of(file.path, tokenizer)}
        if not tensors:
            return Checkpoint(file.path, format, {}, {}, side_files, shards=file.shards)
        part = replace(file, state=tensors, tensor=lambda name, leaf: leaf)
        settings = {**(base.config if base else {}), **given}
        return replace(assemble(part, format, settings, tokenizer), side_files=side_files)

    warnings: list[str] = []
    tensors = select(file.state, file.tensor, file.path.name, warnings)
    opened = opened_with_adapter(tensors, file.path, options, open_model)
    return replace(opened, warnings=(*warnings, *opened.warnings))


def with_adapter(
    run: PeftRun,
    options: Mapping[str, Any],
    open_model: Callable[[dict[str, LazyTensor], Checkpoint | None], Checkpoint],
) -> Checkpoint:
    """The model with its adapter merged or (`split`) kept separately, or the adapter alone, by the `options`.

    `open_model(tensors, base)` returns the base model, of `base` if its tensors are not the run's; without tensors the
    other contents. Raises UsageProblem for a superfluous base, UnsupportedInput without a needed one, or if the adapter
    cannot be merged, MalformedInput for another base.
    """
    if run.base:  # without options for changes that PEFT made to it before training, which it has
        own = {name: value for name, value in run.config.items() if name != "layer_replication"}
        made = {"init_lora_weights": True} if isinstance(own.get("init_lora_weights"), str) else {}
        run = replace(run, config=own | made)
    split, folder = options.get("adapter") == "split", options.get("base")
    if run.base and folder:
        raise UsageProblem(f"`{run.path.name}` holds the base's weights too", hint="leave out `--base`")
    if not run.base and not folder and not split:
        raise UnsupportedInput(
            f"`{run.path.name}` holds a LoRA adapter without its base model",
            hint="give the base's Hugging Face folder with `--base`, or write the adapter alone with `--adapter split`",
        )
    if base := open_checkpoint(Path(folder)) if folder else None:
        require_model_type(base.config, base.path)
    model = settled(open_model(dict(base.tensors) if base else run.base, base))
    if base:
        check_complete(model.tensors, model.config, run.path.name)  # or the names of its modules are compared in vain
    if model.tensors and not run.config.get("target_parameters"):
        _check_places(run, model)
    if split:
        return _separate(run, model)
    try:
        adapter = run.opened()
    except UnsupportedInput as problem:
        hint = f"{problem.hint}; `--adapter split` writes it separately"
        raise UnsupportedInput(problem.message, hint=hint) from problem
    result, edits = merged(model, [adapter])
    note = f"the LoRA adapter is merged into {len(edits.changes)} weights; `--adapter split` keeps it apart"
    return replace(result, warnings=(*model.warnings, *edits.warnings, note))


def _separate(run: PeftRun, model: Checkpoint) -> Checkpoint:
    try:
        config = parse_config(run.config)
    except UnsupportedInput:
        pass  # written unchanged: PEFT supports it
    else:
        adapter = to_adapter(run.path, (run.path,), config, run.adapter)
        if model.tensors:
            merged(model, [adapter])  # only to check it
    place = "in the sub-folder `adapter`" if model.tensors else "alone; it needs its base model"
    note = f"the LoRA adapter is written {place}"
    parts = Checkpoint(run.path, "adapter", run.adapter, run.config)
    lost = []
    if not run.base and run.config.get("bias") == "lora_only" and not any(n.endswith(".bias") for n in run.adapter):
        # Composer looks for them under a name of old PEFT versions, and drops them
        lost.append("`bias` is 'lora_only', but the file holds no bias: Composer leaves them out of adapter-only files")
    return replace(model, adapter=parts, warnings=(*model.warnings, note, *lost))


def _check_places(run: PeftRun, model: Checkpoint) -> None:
    """Refuses factors without a module, and modules that PEFT adapts (`check_target_module_exists`) without factors."""
    wanted = {f"{module}.weight" for module in run.modules}
    whole = with_tied_head(model, model.config)
    names: Collection[str] = whole.keys()
    naming = AS_STORED
    adapters = []
    with suppress(UnsupportedInput):  # written unchanged, or refused later
        adapters = [] if wanted <= {*names} else [run.opened()]
    if adapters and (memory := base_in_memory(model, whole, adapters)):
        names, naming = memory.model, memory.naming
    homes = match_names(wanted, names, run.path.name, naming.spelled)
    targets = run.config.get("target_modules")
    if not isinstance(targets, list) or any(run.config.get(field) for field in NARROWING):
        return
    ends = tuple(f".{target}.weight" for target in targets)
    adapted = {*homes.values(), *(name.removeprefix(PREFIX) for name in run.adapter)}
    if absent := [name for name in names if f".{name}".endswith(ends) and name not in adapted]:
        raise MalformedInput(
            f"the adapter in `{run.path.name}` lacks the factors of {listing(absent)}",
            hint="the checkpoint is incomplete; give another one of the run",
        )


VERSIONED = ("transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields that may differ between a base and its run without changing the results."""


def differences(stored: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """A warning if shared fields of the run's and the base folder's config differ; MalformedInput for `model_type`."""
    differing = sorted(name for name in stored.keys() & base.keys() if stored[name] != base[name])
    if "model_type" in differing:
        raise MalformedInput(
            f"the run is of a `{stored['model_type']}`, the base folder of a `{base['model_type']}`",
            hint="give the model that training started from with `--base`",
        )
    named = [name for name in differing if name not in VERSIONED and not name.startswith("_")]
    return [f"the run's configuration differs from the base's in {listing(named)}; the run's is used"] if named else []


PREFIX = "base_model.model."
LEAVES = ("weight", "bias")
WHOLE = "modules_to_save"
# Components that PEFT inserts into the names of the base's own tensors
PARTS_OF_BASE = ("base_layer", "original_module", "token_adapter")
SAVE_ALL = "give a checkpoint with the whole model; Composer saves one with `should_save_peft_only=False`"


@dataclass(frozen=True)
class PeftRun:
    """The adapter of a PEFT run, as PEFT saves it, and the base; empty if only the adapter was saved."""

    path: Path
    config: dict[str, Any]
    base: dict[str, LazyTensor]
    adapter: dict[str, LazyTensor]

    @property
    def modules(self) -> set[str]:
        """Paths of the modules with low-rank factors."""
        plain_names = (name.removeprefix(PREFIX) for name in self.adapter)
        return {name.partition(".lora_")[0] for name in plain_names if ".lora_" in name}

    def opened(self) -> Adapter:
        """UnsupportedInput if it cannot be merged."""
        return to_adapter(self.path, (self.path,), parse_config(self.config), self.adapter)


def find_adapter(stored: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: Path) -> PeftRun | None:
    """Adapter (`stored`: its config, or empty) and base model; None if the run does not use PEFT.

    Raises MalformedInput for contradictions or foreign names, UnsupportedInput for another method, several adapters, or
    trained parts that were not saved.
    """
    if not stored and not any(".lora_" in name for name in tensors):
        return None
    config, _ = without_code(dict(stored))
    _require(path, config, tensors)
    base: dict[str, LazyTensor] = {}
    adapter: dict[str, LazyTensor] = {}
    labels: set[str] = set()
    for name, tensor in tensors.items():
        saved, label = saved_name(name)
        half, key = (adapter, saved) if saved else (base, _base_name(name))
        labels |= {label} if saved else set()
        if key in half and len(labels) == 1:
            raise MalformedInput(f"duplicate key `{key}` in `{path.name}`, under different names", hint="save it again")
        if key in half or len(labels - {""}) > 1:
            label = listing(sorted(labels - {""}))
            raise UnsupportedInput(
                f"`{path.name}` holds several adapters: {label}", hint="save with all but one deleted"
            )
        half[key] = tensor
    if all(name.endswith(".bias") for name in base):
        adapter |= {PREFIX + name: tensor for name, tensor in base.items()}
        base = {}
    found = PeftRun(path, config, base, adapter)
    # adds trained biases, which lie in the base's modules, to the adapter, as PEFT does
    given = AdapterFields(found.config)
    if (expected := found.config.get("bias") or "none") not in ("none", "all", "lora_only"):
        raise given.invalid("bias", expected)
    for name, tensor in tensors.items() if expected != "none" else ():
        module = _base_name(name).removesuffix(".bias")
        if name.endswith(".bias") and not saved_name(name)[0] and (expected == "all" or module in found.modules):
            found.adapter.pop(PREFIX + _base_name(name), None)
            found.adapter[name] = tensor
    _require_complete(found)
    return found


def saved_name(name: str) -> tuple[str, str]:
    """PEFT's name in files of a tensor of a running PeftModel, and the adapter's label; empty for a tensor of the base.

    PEFT (`utils/save_and_load.py`, `get_peft_model_state_dict`) removes the label, the component `modules_to_save`, and
    the `.weight` of a DoRA magnitude. `name` may also be as PEFT saves it.
    """
    parts = name.split(".")
    kinds = (WHOLE, "trainable_tokens_delta")
    if (at := next((i for i, part in enumerate(parts) if part.startswith("lora_") or part in kinds), None)) is None:
        return "", ""
    kind, tail = parts[at], parts[at + 1 :]
    label = tail.pop(0) if tail and tail[0] not in LEAVES else ""
    if kind == "lora_magnitude_vector":
        tail = []
    return ".".join([*parts[:at], *([] if kind == WHOLE else [kind]), *tail]), label


def _base_name(name: str) -> str:
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in PARTS_OF_BASE)


def _require(path: Path, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    if not config:
        raise MalformedInput(
            f"`{path.name}` holds LoRA tensors and no `peft_config`, so their scale is unknown",
            hint="put the run's `adapter_config.json` next to it; of Composer, give one saved with its `integrations`",
        )
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedInput(f"the adapter in `{path.name}` has `peft_type` {kind!r}, not 'LORA'", hint=FORMULA)
    if not any(".lora_" in name for name in tensors):
        raise MalformedInput(
            f"`{path.name}` is a PEFT run, but holds no LoRA tensors", hint="it is incomplete; give another checkpoint"
        )
    if foreign := [name for name in tensors if not name.startswith(PREFIX)]:
        raise MalformedInput(
            f"`{path.name}` is a PEFT run, but {len(foreign)} tensors are not of its PeftModel: {listing(foreign)}",
            hint="two models are mixed in one file; save the PEFT model alone",
        )


def _require_complete(run: PeftRun) -> None:
    """Refuses a run that lacks a factor, or another trained part."""
    names = {name.removeprefix(PREFIX) for name in run.adapter}
    for a, b in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
        halves = [{name.removesuffix(half) for name in names if name.endswith("." + half)} for half in (a, b)]
        if single := sorted(halves[0] ^ halves[1]):
            raise MalformedInput(
                f"the adapter in `{run.path.name}` lacks a factor of {listing([name[:-1] for name in single])}",
                hint="the checkpoint is incomplete; give another one of the run",
            )
    modules = {name.rpartition(".")[0] for name in names if ".lora_" not in name}
    below = {name.rpartition(".")[0] for name in run.base}
    saved = AdapterFields(run.config).names(WHOLE)
    lost = [
        f"`{WHOLE}` ({expected})"
        for expected in saved
        if not _holds(modules, expected) and (not run.base or _holds(below, expected))
    ]
    if run.config.get("trainable_token_indices") and not any(name.endswith("trainable_tokens_delta") for name in names):
        lost.append("`trainable_token_indices`")
    if lost:
        raise UnsupportedInput(f"`{run.path.name}` was saved without the tensors trained by {lost[0]}", hint=SAVE_ALL)


def _holds(modules: set[str], expected: str) -> bool:
    return any(f".{expected}." in f".{module}." for module in modules)
