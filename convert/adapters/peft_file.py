"""Opens PEFT's adapters, of LoRA and of the kinds in `tuners/kinds/`.

A folder has `adapter_config.json` next to `adapter_model.safetensors` or `adapter_model.bin` (PEFT `save_pretrained`).
Tensors of kinds other than LoRA are `base_model.model.<module>.<part>` for each of the tuner's parts, some followed by
`.weight`, and `base_model.<part>` if all modules share them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.convert.adapters.adapter import Adapter, check
from llmconv.convert.adapters.lora.config import LoraConfig, parse_config, task_of
from llmconv.convert.adapters.lora.saved_modules import WholeTensors, place_once
from llmconv.convert.adapters.peft_tensors import CONFIG, plain_name, to_adapter
from llmconv.convert.adapters.tuners import Tuner, by_peft_type
from llmconv.convert.adapters.tuners.module_tensors import AdapterFields, ModuleTensors, invalid_field
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.files.safetensors_file import read_header
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import LazyTensor

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def open_adapter(path: Path, alpha: float | None = None, *, initial: bool = False) -> Adapter:
    """Opens an adapter folder (or the `adapter_model.*` file in one).

    Args:
        alpha: `lora_alpha` if the config does not contain it.
        initial: the adapter as it was before training is given too, or this is that adapter.

    Raises:
        InputRefused: config or weights are missing.
        MalformedInput: incomplete pairs, mismatched ranks, or values that are not finite.
        UnsupportedInput: a variant of LoRA that cannot be merged.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise _not_an_adapter(path)
    config = parse_config(read_json(folder / CONFIG), alpha, initial=initial)
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise InputRefused(f"`{folder}` contains no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    return to_adapter(folder, (weights,), config, read_tensors(weights))


GRAPH_ADAPTER = ".onnx_adapter"
"""Suffix of the files that `llmconv onnx-adapter` writes."""


def _not_an_adapter(path: Path) -> InputRefused:
    hint = "give the folder that PEFT's `save_pretrained` wrote, or another program's adapter, see docs/merging.md"
    if path.is_file():
        if path.suffix == GRAPH_ADAPTER:
            return InputRefused(
                f"`{path}` has the factors of an adapter for graphs", hint="give the adapter that it was made from"
            )
        refuse_git_lfs(path.read_bytes()[:64] if path.stat().st_size < 1024 else b"", path.name)
        return InputRefused(f"`{path}` is not an adapter: it has no `{CONFIG}` next to it", hint=hint)
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return InputRefused(f"`{path}` is a model, not an adapter: it has no `{CONFIG}`", hint=hint)
    if (path / "delta.json").is_file():
        return InputRefused(
            f"`{path}` is a delta, not an adapter", hint=f"run `llmconv delta apply BASE {path} -o OUT`"
        )
    inner = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: (len(file.parent.name), file.parent.name))
    if inner:
        names = ", ".join(file.parent.name for file in inner)
        hint = f"give one of its folders: {names}"
    elif not any(path.iterdir()):
        return InputRefused(f"`{path}` is an empty folder", hint="is the copy or the download complete?")
    return InputRefused(f"`{path}` is not a PEFT adapter: it has no `{CONFIG}`", hint=hint)


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch file with one state dict (else MalformedInput)."""
    if path.suffix == ".safetensors":
        return dict(read_header(path).tensors)
    torch_file = open_torch_file(path)
    content = torch_file.content
    if not isinstance(content, dict) or not all(isinstance(value, TensorRef) for value in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="save the adapter again with PEFT")
    return {str(name): torch_file.tensor(str(name), ref) for name, ref in content.items()}


KNOWN = {
    *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path"),
    *("revision", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("bias", "fan_in_fan_out", "init_weights", "init_ia3_weights"),
}
"""Fields that most tuners have: read, or irrelevant to the merged weight."""

LORA_ONLY = (
    *("use_dora", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora", "kasa_config", "megatron_config"),
)
"""Fields without a known meaning for other tuners."""


def is_tuned(path: Path) -> bool:
    """Whether the folder's config has another `peft_type` than LORA."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    return config.is_file() and isinstance(kind := read_json(config).get("peft_type"), str) and kind != "LORA"


def open_tuned(path: Path, alpha: float | None = None) -> Adapter:
    """Opens an adapter folder (or the `adapter_model.*` file in one) of a kind in `tuners/kinds/`.

    Raises:
        InputRefused: the weights are missing.
        MalformedInput: incomplete, two adapters in one file, or values that are not finite.
        UnsupportedInput: a kind that cannot be merged, or an unknown one.
        UsageProblem: `alpha` is given; these kinds store their scale in the config.
    """
    folder = path if path.is_dir() else path.parent
    fields = read_json(folder / CONFIG)
    tuner = by_peft_type(fields["peft_type"])
    if alpha is not None:
        raise UsageProblem(
            f"`--alpha` is for LoRA, the adapter is of `peft_type` {tuner.peft_type!r}",
            hint="leave out `--alpha`; to merge more or less of an adapter give `--weight`",
        )
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise InputRefused(f"`{folder}` contains no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    settings = AdapterFields(fields)
    learned, wholes = _sort(read_tensors(weights), weights.name, tuner, settings)
    config = _config(settings, tuner)
    whole, originals = wholes.all(), wholes.untrained(config.modules_to_save)
    adapter = Adapter(folder, (weights,), folder / CONFIG, config, {}, whole, originals, learned=learned, tuner=tuner)
    check(adapter)
    return adapter


def _config(settings: AdapterFields, tuner: Tuner) -> LoraConfig:
    """The fields that LoRA has, too."""
    if alien := [name for name in LORA_ONLY if settings.fields.get(name) and name not in tuner.fields]:
        raise UnsupportedInput(
            f"the adapter is of `peft_type` {tuner.peft_type!r} and sets `{alien[0]}`, which only LoRA has",
            hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
        )
    unknown = sorted(name for name, value in settings.fields.items() if value and name not in {*KNOWN, *tuner.fields})
    if not isinstance(bias := settings.fields.get("bias") or "none", str):
        raise invalid_field("bias", bias)
    return LoraConfig(
        rank=None,
        alpha=1,
        use_rslora=False,
        rank_pattern={},
        alpha_pattern={},
        task=task_of(settings.fields),
        modules_to_save=settings.names("modules_to_save"),
        bias=bias,
        warnings=tuple(f"the adapter config sets `{name}`, an unknown field, which is ignored" for name in unknown),
    )


def _sort(
    tensors: Mapping[str, LazyTensor], file: str, tuner: Tuner, settings: AdapterFields
) -> tuple[dict[str, ModuleTensors], WholeTensors]:
    """Parts by module, and whole tensors; every tensor goes to exactly one place."""
    part = re.compile(rf"(?P<module>.+?)\.(?P<part>{'|'.join(tuner.parts) or '(?!)'})(?:\.\w+)??(?:\.weight)?")
    common = re.compile(rf"(?:base_model\.)?(?P<part>{'|'.join(tuner.shared) or '(?!)'})(?:\.\w+)?")
    modules: dict[str, dict[str, LazyTensor]] = {}
    shared: dict[str, LazyTensor] = {}
    wholes = WholeTensors()
    for name, tensor in tensors.items():
        plain = plain_name(name)
        if match := common.fullmatch(plain):
            place, key = shared, match["part"]
        elif match := part.fullmatch(plain):
            place, key = modules.setdefault(match["module"], {}), match["part"]
        else:
            place, key = wholes.place(plain)
        place_once(place, key, tensor, f"`{file}` contains `{name}`", may_repeat=place is wholes.trained)
    return {module: ModuleTensors(module, {**shared, **parts}, settings) for module, parts in modules.items()}, wholes
