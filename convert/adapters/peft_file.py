"""Opens PEFT's adapters, of LoRA and of the kinds in `tuner_kinds.py`: `adapter_config.json` next to the weights.

LoRA's tensors are sorted into pairs A and B, whole tensors and trained rows. Names (PEFT `utils/save_and_load.py`):
`base_model.model.<module>.lora_A.weight` (r×in), `.lora_B.weight` (out×r), `.lora_B.bias` (out), `.lora_embedding_A`
(r×vocab), `.lora_embedding_B` (dim×r), `.lora_magnitude_vector` (out), for a convolution r×in×k… and out×r×1…; trained
rows as `.token_adapter.trainable_tokens_delta`, whole tensors as `<module>.weight`.

NeMo AutoModel keeps the factors of all experts in one tensor, which is split by expert (NVIDIA-NeMo/Automodel
`components/_peft/lora_experts.py`, `components/moe/state_dict_mixin.py`; vLLM has the same):
`experts.lora_gate_and_up_A` E×in×r, `experts.lora_gate_and_up_B` E×r×2·out, gate before up, and `experts.lora_down_A`,
`experts.lora_down_B`. A is shared by gate and up.

Tinker (tinker-cookbook `weights/_merge_utils.py`) calls the head `model.unembed_tokens`, and has the
factors of all experts in `experts.w1`, `.w2` and `.w3` (gate, down, up): `lora_A` E×r×in and `lora_B` E×out×r, one of
them with E = 1 where all experts share it, none at all (no elements) where the model lacks the projection.

Tensors of other kinds are `base_model.model.<module>.<part>` for each of the tuner's parts, some followed by `.weight`,
and `base_model.<part>` if all modules share them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import INDEX, SINGLE, WRAPPED, read_json
from llmconv.convert.adapters.adapter import (
    Adapter,
    ModuleTensors,
    Pair,
    Tuner,
    WholeTensors,
    check,
    grouped_convolution,
    pair_tokens,
    place_once,
)
from llmconv.convert.adapters.lora_config import AdapterFields, BlockDiagonal, LoraConfig, parse_config, task_of
from llmconv.convert.algebra import reshaped, split
from llmconv.errors import LISTED, InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem, word
from llmconv.files.paths import refuse_git_lfs
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import Array, LazyTensor

CONFIG = "adapter_config.json"
AUTOMODEL = "automodel_peft_config.json"  # what NeMo AutoModel's config has besides; `moe_rank_scaling` of it counts
MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.\w+)??(?:\.weight)?")
TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.\w+)?")
# Training state of VeLoRA and MonteCLoRA, which PEFT's merge does not use
TRAINING_ONLY = re.compile(r"\.lora_(?:velora_\w+|monteclora_\w+|mcsampler\w*)(?:\.|$)")
FACTOR = re.compile(r"(?P<module>.+?)\.lora_(?P<kind>embedding_)?(?P<part>[AB])(?:\.\w+)??(?:\.(?P<leaf>weight|bias))?")


def to_adapter(path: Path, weights: tuple[Path, ...], config: LoraConfig, tensors: Mapping[str, LazyTensor]) -> Adapter:
    """The adapter of `tensors`, in the names that PEFT saves or has at run time; errors as in `open_adapter`."""
    # the tensors with those of grouped experts as factors of each expert's layers; MalformedInput for other shapes
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if match := GROUPED.fullmatch(name):
            result |= _of_experts(name, tensor, match)
        elif (match := TINKER.fullmatch(name)) and len(tensor.shape) == 3:
            result |= _of_tinker(tensor, match, tensors)
        else:
            result[name.replace(UNEMBED, "lm_head.")] = tensor
    found = _sort(result, weights[0].name)
    # refuses modules without exactly one A and one B; a misnamed key shows as two of them
    absent = {module: _absent(parts) for module, parts in found.factors.items()}
    if missing := [f"{part} of `{module}`" for module, part in absent.items() if part]:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise MalformedInput(
            f"the adapter lacks {', '.join(missing[:LISTED])}{more} (missing keys)",
            hint="the file is incomplete or a key is misnamed; save or copy the adapter again",
        )
    pairs = {module: _pair(module, parts, config) for module, parts in found.factors.items()}
    tokens = pair_tokens(found.tokens, config)
    whole, originals = found.wholes.all(), found.wholes.untrained(config.modules_to_save)
    adapter = Adapter(path, weights, path / CONFIG, config, pairs, whole, originals, tokens)
    check(adapter)
    return adapter


def plain_name(name: str) -> str:
    """The name without PEFT's `base_model.model.` and without the wrappers of trainers."""
    return WRAPPED.sub("", name).removeprefix("module.").removeprefix("base_model.model.")


@dataclass(frozen=True)
class _Sorted:
    """The tensors of a file: factors by module and part, whole tensors, trained rows by module."""

    factors: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    wholes: WholeTensors = field(default_factory=WholeTensors)
    tokens: dict[str, LazyTensor] = field(default_factory=dict)

    def place(self, plain: str) -> tuple[dict[str, LazyTensor], str] | None:
        """The dictionary and the key for a tensor of this name; None for an unknown name."""
        if match := FACTOR.fullmatch(plain):
            key = (match["kind"] or "") + match["part"]
            key = "bias" if (key, match["leaf"]) == ("B", "bias") else key
            return self.factors.setdefault(match["module"], {}), key
        if match := MAGNITUDE.fullmatch(plain):
            return self.factors.setdefault(match["module"], {}), "magnitude"
        if match := TOKENS.fullmatch(plain):
            return self.tokens, match["module"]
        return None if "lora_" in plain else self.wholes.place(plain)


def _sort(tensors: Mapping[str, LazyTensor], file: str) -> _Sorted:
    result = _Sorted()
    for name, tensor in tensors.items():
        plain = plain_name(name)
        if TRAINING_ONLY.search(plain):
            continue
        if (home := result.place(plain)) is None:
            raise UnsupportedInput(
                f"`{file}` contains the unexpected key `{name}`, which plain LoRA does not have",
                hint="the adapter is of another kind; merge it with PEFT's `merge_and_unload`",
            )
        place_once(*home, tensor, f"`{file}` contains `{name}`", may_repeat=home[0] is result.wholes.trained)
    return result


def _absent(parts: Mapping[str, LazyTensor]) -> str:
    """The missing factor of a module, or `half of a second pair`; empty if the pair is complete."""
    kinds = {"embedding_" if key.startswith("embedding_") else "" for key in parts if key.endswith(("A", "B"))}
    if len(kinds) > 1:
        return "half of a second pair"
    prefix = next(iter(kinds), "")
    return next((part for part in ("A", "B") if prefix + part not in parts), "")


def _pair(module: str, parts: dict[str, LazyTensor], config: LoraConfig) -> Pair:
    embedding = any(key.startswith("embedding_") for key in parts)
    prefix = "embedding_" if embedding else ""
    a, b, bias = parts.pop(f"{prefix}A", None), parts.pop(f"{prefix}B", None), parts.pop("bias", None)
    magnitude = parts.pop("magnitude", None)
    assert a is not None and b is not None and not parts
    if (magnitude is not None) != config.dora:
        raise UnsupportedInput(
            f"the adapter {'has' if magnitude else 'lacks'} `lora_magnitude_vector` of `{module}`, and its config has "
            f"`use_dora` {str(config.dora).lower()}",
            hint="config and tensors belong to different adapters; copy the adapter again",
        )
    a, b = dense(a, b, module, config.blocks)
    if config.enabled:
        b = _of_merged_linear(a, b, module, config.enabled)
    if len(a.shape) < 2 or len(b.shape) < 2 or 0 in (*a.shape, *b.shape):
        raise MalformedInput(
            f"A of `{module}` has shape {list(a.shape)}, B {list(b.shape)}: they were saved before they were gathered",
            hint="gather the parameters (ZeRO-3, FSDP) before saving the adapter",
        )
    if len(a.shape) != len(b.shape) or set(b.shape[2:]) - {1}:
        raise UnsupportedInput(
            f"A of `{module}` has shape {list(a.shape)}, B {list(b.shape)}: unsupported kind of layer",
            hint="the adapter is of another kind; merge it with PEFT's `merge_and_unload`",
        )
    if len(a.shape) > 2 and a.shape[0] % b.shape[1] == 0 and a.shape[0] > b.shape[1]:
        raise grouped_convolution(module, a.shape, b.shape)
    if a.shape[0] != b.shape[1]:
        raise MalformedInput(
            f"A of `{module}` has rank {a.shape[0]}, B has rank {b.shape[1]}", hint="copy the adapter again"
        )
    # the kernel of a convolution counts as columns
    a_matrix, b_matrix = (reshaped(one, (one.shape[0], prod(one.shape[1:]))) for one in (a, b))
    return Pair(a_matrix, b_matrix, bias, embedding, magnitude, a.shape[2:])


def is_blocked(parts: tuple[str, ...], module: str) -> bool:
    """Whether one of `parts` occurs in the last component of the module's path (PEFT `BdLoraLinearVariant.init`)."""
    return any(part in module.rpartition(".")[2] for part in parts)


def unblocked(factor: LazyTensor, count: int) -> LazyTensor:
    """The block-diagonal matrix of `count` blocks stacked by rows (PEFT `BlockDiagonalLinear`), else MalformedInput."""
    rows, width = factor.shape
    if rows % count:
        raise MalformedInput(
            f"a factor of {rows} rows cannot have {count} blocks", hint="`nblocks` is of another adapter; copy it again"
        )
    height = rows // count

    def load(start: int, stop: int) -> Array:
        stored = factor.rows(start, stop)
        whole = np.zeros((stop - start, count * width), stored.dtype)
        for row in range(start, stop):
            first = row // height * width
            whole[row - start, first : first + width] = stored[row - start]
        return whole

    return LazyTensor(factor.dtype, (rows, count * width), load)


def dense(a: LazyTensor, b: LazyTensor, module: str, blocks: BlockDiagonal | None) -> tuple[LazyTensor, LazyTensor]:
    """A (r×in) and B (out×r) of a module, expanded where they are stored as blocks (`use_bdlora`)."""
    if blocks and len(a.shape) == len(b.shape) == 2:
        a = unblocked(a, blocks.count) if is_blocked(blocks.a, module) else a
        b = unblocked(b, blocks.count) if is_blocked(blocks.b, module) else b
    return a, b


def _of_merged_linear(a: LazyTensor, b: LazyTensor, module: str, enabled: tuple[bool, ...]) -> LazyTensor:
    """B (out×r) of a MergedLinear of loralib and PEFT before 0.3 (`tuners/lora.py`), MalformedInput for other shapes.

    Stored is the kernel of a convolution with groups, the rows of the enabled parts of the weight × the rank of each.
    """
    parts, used = len(enabled), sum(enabled)
    if len(a.shape) != 2 or b.shape[2:] not in ((), (1,)) or not b.shape[1] or a.shape[0] % b.shape[1]:
        raise MalformedInput(
            f"A of `{module}` has shape {list(a.shape)}, B {list(b.shape)}: not as `enable_lora`, {used} of {parts}",
            hint="config and tensors belong to different adapters; copy the adapter again",
        )
    whole = unblocked(reshaped(b, b.shape[:2]), a.shape[0] // b.shape[1])
    if whole.num_rows % used:
        raise MalformedInput(
            f"B of `{module}` has {whole.num_rows} rows for {used} parts", hint="copy the adapter again"
        )
    height = whole.num_rows // used
    at = np.cumsum([0, *enabled])[:-1] * height  # the first row of each part in `whole`

    def load(start: int, stop: int) -> Array:
        rows = np.zeros((stop - start, whole.shape[1]), whole.dtype.numpy)
        for row in range(start, stop):
            part, line = divmod(row, height)
            if enabled[part]:
                rows[row - start] = whole.rows(at[part] + line, at[part] + line + 1)[0]
        return rows

    return LazyTensor(whole.dtype, (height * parts, whole.shape[1]), load)


GROUPED = re.compile(r"(?P<experts>.+\.experts)\.lora_(?P<of>gate_and_up|down)_(?P<part>[AB])(?:\.weight)?")
MODULES = {"gate_and_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def _of_experts(name: str, tensor: LazyTensor, match: re.Match[str]) -> dict[str, LazyTensor]:
    modules = MODULES[match["of"]]
    parts = len(modules) if match["part"] == "B" else 1
    if len(tensor.shape) != 3 or tensor.shape[2] % parts:
        raise MalformedInput(
            f"`{name}` has shape {list(tensor.shape)}; grouped experts have three dimensions, gate as many rows as up",
            hint="gather the parameters before saving the adapter",
        )
    size = tensor.shape[2] // parts
    return {
        f"{match['experts']}.{expert}.{module}.lora_{match['part']}.weight": _matrix(tensor, expert, at % parts, size)
        for expert in range(tensor.shape[0])
        for at, module in enumerate(modules)
    }


UNEMBED = "model.unembed_tokens."
TINKER = re.compile(r"(?P<experts>.+\.experts)\.(?P<of>w[123])\.lora_(?P<part>[AB])(?P<end>(?:\.weight)?)")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _of_tinker(tensor: LazyTensor, match: re.Match[str], tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The matrices of each expert; one that all experts share is that of each."""
    experts, of, part, end = match.groups()
    factors = [f"{experts}.{one}.lora_{letter}{end}" for one in PROJECTIONS for letter in "AB"]
    count = max(tensors[name].shape[0] for name in factors if name in tensors and tensors[name].shape)
    other = tensors.get(f"{experts}.{of}.lora_{'B' if part == 'A' else 'A'}{end}")
    if 0 in tensor.shape and other and 0 in other.shape:
        return {}
    if tensor.shape[0] not in (1, count):
        raise MalformedInput(
            f"`{match[0]}` has {tensor.shape[0]} experts, another factor of the layer {count}",
            hint="copy the adapter again",
        )
    matrices = split(reshaped(tensor, (prod(tensor.shape[:2]), tensor.shape[2])), 0, tensor.num_rows)
    names = [f"{experts}.{expert}.{PROJECTIONS[of]}.lora_{part}.weight" for expert in range(count)]
    return dict(zip(names, matrices if len(matrices) == count else matrices * count, strict=True))


def _matrix(tensor: LazyTensor, expert: int, part: int, size: int) -> LazyTensor:
    """Columns `part·size` to `(part + 1)·size` of one expert's matrix, transposed."""

    def load(start: int, stop: int) -> Array:
        columns = slice(part * size + start, part * size + stop)
        return np.ascontiguousarray(tensor.rows(expert, expert + 1)[0][:, columns].T)

    return LazyTensor(tensor.dtype, (size, tensor.shape[1]), load)


WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
OF_MODELS = ("model.safetensors", "pytorch_model.bin")


def open_adapter(path: Path, alpha: float | None = None, *, initial: bool = False) -> Adapter:
    """Opens an adapter folder (or the file in one); `alpha`: if the config lacks it; `initial`: one of such a pair.

    Raises InputRefused for missing files, MalformedInput for incomplete pairs or values that are not finite,
    UnsupportedInput for a variant of LoRA that cannot be merged.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise _not_an_adapter(path)
    fields = read_json(folder / CONFIG)
    if (folder / AUTOMODEL).is_file():
        fields["moe_rank_scaling"] = read_json(folder / AUTOMODEL).get("moe_rank_scaling")
    if fields.get("peft_type") == TOKENS_ALONE:
        fields = _as_lora(fields, alpha)
        alpha = None
    config = parse_config(fields, alpha, initial=initial)
    weights = _weights(folder)
    return to_adapter(folder, (weights,), config, read_tensors(weights))


def _weights(folder: Path) -> Path:
    if (found := weights_of(folder)) is None:
        raise InputRefused(f"`{folder}` contains no adapter weights", hint=f"it needs `{WEIGHTS[0]}`")
    return found


def weights_of(folder: Path) -> Path | None:
    """The file of an adapter's weights: PEFT's own, or a model's file with the factors of an adapter alone."""
    if found := next((folder / name for name in WEIGHTS if (folder / name).is_file()), None):
        return found
    return next((file for file in (folder / name for name in OF_MODELS) if file.is_file() and _has_factors(file)), None)


def _has_factors(file: Path) -> bool:
    try:
        names = [plain_name(name) for name in read_tensors(file)]
    except LlmconvError:
        return False
    return bool(names) and all(FACTOR.fullmatch(name) or MAGNITUDE.fullmatch(name) for name in names)


LYCORIS = "lycoris_"  # before the name of a module, with `_` for `.` (LyCORIS `wrapper.py`)


def _of_lycoris(file: Path) -> str | None:
    """The name of a tensor in a file that LyCORIS wrote; None for other files."""
    try:
        return next((name for name in read_header(file).tensors if name.startswith(LYCORIS)), None)
    except LlmconvError:
        return None


GRAPH_ADAPTER = ".onnx_adapter"  # suffix of the files that `llmconv onnx-adapter` writes


def _not_an_adapter(path: Path) -> InputRefused:
    hint = "give the folder that PEFT's `save_pretrained` wrote, or another program's adapter, see docs/merging.md"
    if path.is_file():
        if path.suffix == GRAPH_ADAPTER:
            return InputRefused(
                f"`{path}` has the factors of an adapter for graphs", hint="give the adapter that it was made from"
            )
        refuse_git_lfs(path.read_bytes()[:64] if path.stat().st_size < 1024 else b"", path.name)
        if name := _of_lycoris(path):
            return InputRefused(
                f"`{path}` is an adapter of LyCORIS (`{name}`), which is not supported",
                hint="merge it with LyCORIS (`merge_to`), and save the model; LoKr, LoHa and IA3 of PEFT are merged",
            )
        return InputRefused(f"`{path}` is not an adapter: it has no `{CONFIG}` next to it", hint=hint)
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return InputRefused(f"`{path}` is a model, not an adapter: it has no `{CONFIG}`", hint=hint)
    if (path / "delta.json").is_file():
        return InputRefused(
            f"`{path}` is a delta, not an adapter", hint=f"run `llmconv delta apply BASE {word(path)} -o OUT`"
        )
    if inner := sorted(path.glob(f"*/{CONFIG}"), key=lambda file: (len(file.parent.name), file.parent.name)):
        hint = f"give one of its folders: {', '.join(file.parent.name for file in inner)}"
    elif not any(path.iterdir()):
        return InputRefused(f"`{path}` is an empty folder", hint="is the copy or the download complete?")
    return InputRefused(f"`{path}` is not a PEFT adapter: it has no `{CONFIG}`", hint=hint)


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a `.safetensors` file, or of a torch file with one state dict (else MalformedInput)."""
    if path.suffix == ".safetensors":
        return dict(read_header(path).tensors)
    from llmconv.files.pickle_reader import TensorRef  # noqa: PLC0415 - most adapters are safetensors
    from llmconv.files.torch_reader import open_torch_file  # noqa: PLC0415 - as above

    torch_file = open_torch_file(path)
    content = torch_file.content
    if not isinstance(content, dict) or not all(isinstance(value, TensorRef) for value in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="save the adapter again with PEFT")
    return {str(name): torch_file.tensor(str(name), ref) for name, ref in content.items()}


KNOWN = {  # fields that most tuners have: read, or irrelevant to the merged weight
    *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path"),
    *("revision", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("bias", "fan_in_fan_out", "init_weights", "init_ia3_weights"),
}

LORA_ONLY = (  # fields without a known meaning for other tuners
    *("use_dora", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora", "kasa_config", "megatron_config"),
)


TOKENS_ALONE = "TRAINABLE_TOKENS"  # rows of embeddings as of a LoRA that trains no factors


def _as_lora(fields: dict[str, Any], alpha: float | None) -> dict[str, Any]:
    """The fields of a LoRA with the same trained rows (PEFT `tuners/trainable_tokens`); UsageProblem for an `alpha`."""
    if alpha is not None:
        raise _no_alpha(TOKENS_ALONE)
    own = {name: value for name, value in fields.items() if name not in ("token_indices", "init_weights")}
    return own | {"peft_type": "LORA", "lora_alpha": 1, "trainable_token_indices": fields.get("token_indices")}


def is_tuned(path: Path) -> bool:
    """Whether the folder's config has another `peft_type` than LORA and trained tokens."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    kind = read_json(config).get("peft_type") if config.is_file() else None
    return isinstance(kind, str) and kind not in ("LORA", TOKENS_ALONE)


def open_tuned(path: Path, alpha: float | None = None) -> Adapter:
    """Opens an adapter folder (or the file in one) of another kind than LoRA; errors as in `open_adapter`.

    Raises UsageProblem for an `alpha`: these kinds store their scale in the config.
    """
    folder = path if path.is_dir() else path.parent
    fields = read_json(folder / CONFIG)
    from llmconv.convert.adapters.tuner_kinds import by_peft_type  # noqa: PLC0415 - LoRA needs none of them

    tuner = by_peft_type(fields["peft_type"], fields.get("init_weights"))
    if alpha is not None:
        raise _no_alpha(tuner.peft_type)
    weights, settings = _weights(folder), AdapterFields(fields)
    learned, wholes = _sort_entries(read_tensors(weights), weights.name, tuner, settings)
    config = _config(settings, tuner)
    whole, originals = wholes.all(), wholes.untrained(config.modules_to_save)
    adapter = Adapter(folder, (weights,), folder / CONFIG, config, {}, whole, originals, learned=learned, tuner=tuner)
    check(adapter)
    return adapter


def _no_alpha(kind: str) -> UsageProblem:
    return UsageProblem(
        f"`--alpha` is for LoRA, the adapter is of `peft_type` {kind!r}",
        hint="leave out `--alpha`; to merge more or less of an adapter give `--weight`",
    )


def _config(settings: AdapterFields, tuner: Tuner) -> LoraConfig:
    if alien := [name for name in LORA_ONLY if settings.values.get(name) and name not in tuner.fields]:
        raise UnsupportedInput(
            f"the adapter is of `peft_type` {tuner.peft_type!r} and sets `{alien[0]}`, which only LoRA has",
            hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
        )
    unknown = sorted(name for name, value in settings.values.items() if value and name not in {*KNOWN, *tuner.fields})
    if not isinstance(bias := settings.values.get("bias") or "none", str):
        raise settings.invalid("bias", bias)
    return LoraConfig(
        rank=None,
        alpha=1,
        use_rslora=False,
        rank_pattern={},
        alpha_pattern={},
        task=task_of(settings.values),
        modules_to_save=settings.names("modules_to_save"),
        bias=bias,
        warnings=tuple(f"the adapter config sets `{name}`, an unknown field, which is ignored" for name in unknown),
    )


def _sort_entries(
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
        if version := tuner.former.get(plain.rpartition(".")[2]):
            raise UnsupportedInput(
                f"`{file}` contains `{name}`, of an {tuner.peft_type} that newer releases of PEFT do not compute",
                hint=f"merge it with {version} (`merge_and_unload`), or train it again",
            )
        if match := common.fullmatch(plain):
            place, key = shared, match["part"]
        elif match := part.fullmatch(plain):
            place, key = modules.setdefault(match["module"], {}), match["part"]
        else:
            place, key = wholes.place(plain)
        place_once(place, key, tensor, f"`{file}` contains `{name}`", may_repeat=place is wholes.trained)
    return {module: ModuleTensors(module, {**shared, **parts}, settings) for module, parts in modules.items()}, wholes


LEAVES = ("weight", "bias")
WHOLE = "modules_to_save"


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
