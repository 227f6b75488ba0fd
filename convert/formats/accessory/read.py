"""Reads the shards of a LLaMA2-Accessory (or Meta) folder and joins them, in Accessory's own names.

Split (Accessory `util/tensor_parallel.py`, `model/peft.py`): column-parallel layers along dim 0 with their bias and
`lora_b`; row-parallel layers and their `lora_a` along dim 1; embeddings along dim 1; all others are copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.algebra.operations import concat, first_missing, slice_rows
from llmconv.convert.formats.accessory.config import AccessoryParams
from llmconv.convert.formats.meta.read import open_shard, split_dim
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed

SHARD = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model\.pth")
DELTA_FILE = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model-diff\.pth")
META_SHARD = re.compile(r"consolidated\.(\d+)\.pth")

EXPERT = re.compile(r"\.feed_forward\.experts\.\d+\.")
FUSED_EXPERTS = re.compile(r"(.*\.feed_forward)\.(w[123])")
"""mixtral_sparse: all experts in one matrix, whose name does not end with `.weight`."""


def open_shards(folder: Path, kind: re.Pattern[str] = SHARD) -> list[dict[str, LazyTensor]]:
    """The shards of a model (Accessory's or Meta's) or a delta in order: name, without the prefix `llma.`, to tensor.

    `kind` is `SHARD`, or `DELTA_FILE` for those of a delta. Raises InputRefused if there are none, or they are a delta,
    MalformedInput if one is missing or superfluous, or two sets are mixed.
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    own = [name for name in names if kind.fullmatch(name)]
    if kind is SHARD and any(DELTA_FILE.fullmatch(name) for name in names):
        raise UnsupportedInput(
            f"`{folder.name}` is a delta, not a model",
            hint=f"add it to its base, such as Meta's folder: `llmconv delta apply BASE {folder.name} -o OUT`",
        )
    numbers = _numbered(folder, own, kind) if own else _numbered_meta(folder, names)
    if not numbers:
        raise InputRefused(
            f"`{folder}` contains no `consolidated.…` shards",
            hint="give the folder that training started from, or that it saved",
        )
    shards = [_without_prefix(open_shard(folder / numbers[number], "model")) for number in sorted(numbers)]
    _check_same(folder, shards)
    return shards


def _numbered(folder: Path, names: Iterable[str], kind: re.Pattern[str]) -> dict[int, str]:
    found = {name: tuple(map(int, match.groups())) for name in names if (match := kind.fullmatch(name))}
    counts = {count for _, count in found.values()}
    others = [META_SHARD, SHARD] if kind is DELTA_FILE else [META_SHARD]
    if (
        len(counts) != 1
        or len(set(found.values())) != len(found)
        or any(other.fullmatch(entry.name) for entry in folder.iterdir() for other in others)
    ):
        raise MalformedInput(
            f"`{folder.name}` mixes shards of different checkpoints", hint="keep one set of shards in a folder"
        )
    (count,) = counts
    numbers = {number: name for name, (number, _) in found.items()}
    _check_numbers(folder, numbers, count)
    return numbers


def _numbered_meta(folder: Path, names: Iterable[str]) -> dict[int, str]:
    numbers = {int(match[1]): name for name in names if (match := META_SHARD.fullmatch(name))}
    _check_numbers(folder, numbers, max(numbers, default=-1) + 1)
    return numbers


def _check_numbers(folder: Path, numbers: Mapping[int, str], count: int) -> None:
    missing = first_missing(numbers, count)
    extra = min((number for number in numbers if number >= count), default=None)
    if missing is not None or extra is not None:
        raise MalformedInput(
            f"`{folder.name}` should have {count} shards, but number {extra if missing is None else missing} "
            + ("is missing" if missing is not None else f"(`{numbers[extra or 0]}`) is superfluous"),
            hint="copy the folder again; it must contain all shards of one checkpoint, and no others",
        )


def _without_prefix(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {name.removeprefix("llma."): tensor for name, tensor in tensors.items()}


def _check_same(folder: Path, shards: Sequence[dict[str, LazyTensor]]) -> None:
    """Refuses shards that differ in names, shapes or dtypes; each whole expert must lie in one shard only."""
    layouts = [
        {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items() if not EXPERT.search(name)}
        for shard in shards
    ]
    different = sorted({name for layout in layouts for name, _ in layout.items() ^ layouts[0].items()})
    if different:
        raise MalformedInput(
            f"the shards of `{folder.name}` differ in {len(different)} tensors: {listing(different)}",
            hint="the shards belong to different checkpoints; copy the folder again",
        )
    experts = [name for shard in shards for name in shard if EXPERT.search(name)]
    if len(set(experts)) != len(experts):
        raise MalformedInput(
            f"two shards of `{folder.name}` contain the same expert",
            hint="a shard was copied twice; copy the folder again",
        )


def join(
    shards: Sequence[dict[str, LazyTensor]], repeated: Iterable[str], experts: int, source: str
) -> dict[str, LazyTensor]:
    """Accessory's name to joined tensor (MalformedInput if not joinable); a matrix of all `experts` is split by expert.

    `repeated` are last components of layers that every shard holds whole, in addition to the usual ones.
    """
    whole: dict[str, LazyTensor] = {}
    copies = set(repeated)
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        try:
            if fused := FUSED_EXPERTS.fullmatch(name):
                whole |= _split_experts(fused[1], fused[2], parts, experts)
            else:
                dim = None if EXPERT.search(name) else split_dim(name, copies)
                whole[name] = parts[0] if dim is None else concat(parts, dim)
        except ValueError as error:
            raise MalformedInput(
                f"the parts of `{name}` in `{source}` cannot be joined: {error}",
                hint="the configuration belongs to another model",
            ) from error
    return whole


def peek(folder: Path) -> dict[str, LazyTensor]:
    """The tensors in Accessory's own names, joined as far as their names alone allow; InputRefused as `open_shards`."""
    shards = open_shards(folder)
    whole: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        dim = 0 if FUSED_EXPERTS.fullmatch(name) else None if EXPERT.search(name) else split_dim(name)
        whole[name] = parts[0] if dim is None or len(parts[0].shape) <= dim else concat(parts, dim)
    return whole


def _split_experts(prefix: str, layer: str, parts: Sequence[LazyTensor], experts: int) -> dict[str, LazyTensor]:
    """Joins a part of every expert from each shard (`mixtral_sparse.py`, `_sparse_expert_merge`); w2 is transposed."""
    rows = parts[0].num_rows
    if not experts or rows % experts:
        raise ValueError(f"{rows} rows cannot be divided among {experts} experts")
    step = rows // experts
    whole_experts = {
        number: concat([slice_rows(part, number * step, (number + 1) * step) for part in parts], 0)
        for number in range(experts)
    }
    return {
        f"{prefix}.experts.{number}.{layer}.weight": transposed(expert) if layer == "w2" else expert
        for number, expert in whole_experts.items()
    }


def differing_copies(shards: Sequence[dict[str, LazyTensor]], names: Iterable[str]) -> list[str]:
    """Which of the (small) tensors `names`, copied in every shard, differ between shards."""
    return [name for name in names if name in shards[0] and len({shard[name].read().tobytes() for shard in shards}) > 1]


LLAMAS = (
    *("llama", "llama_peft", "llama_adapter", "llama_qformerv2", "llama_qformerv2_peft", "llama_ens_peft"),
    *("llama_ens", "llama_ens_light", "llama_ens5", "llama_ens5_light", "llama_ens5p2", "llama_ens10"),
)
MIXTRALS = ("mixtral", "mixtral_peft", "mixtral_sparse", "mixtral_sparse_ens", "mixtral_sparse_ens5")
FAMILIES = {
    **dict.fromkeys(LLAMAS, "llama"),
    **dict.fromkeys(MIXTRALS, "mixtral"),
    "internlm": "internlm",
    "falcon": "falcon",
}
"""Upstream's plugins (`accessory/model/LLM/`) to the family of their language model."""

VISION = re.compile(
    r"(?:clip|clip_proj|clip_proj_norm|openclip_convnext_xxl|dinov2_vitg14|qformer|qformer_proj"
    r"|visual_\w+|start_img|end_img)(?:\.|$)"
)
TRAINED_PREFIX = re.compile(r"prefix(?:_gate|_new_gate)?$")
"""Tensors that `llama_adapter` trains; unlike those for images, they change every answer."""


def plugin_family(folder: Path, names: Iterable[str]) -> str:
    """`llama`, `mixtral`, `internlm` or `falcon` (else UnsupportedInput), from `meta.json` or the tensors' names."""
    if not (folder / "meta.json").is_file():
        return _family_of(set(names))
    plugin = read_json(folder / "meta.json").get("llama_type")
    if not isinstance(plugin, str) or plugin not in FAMILIES:
        raise UnsupportedInput(
            f"`{folder.name}` was trained with the unknown plugin `{plugin}`",
            hint="if its language model is one of upstream's, give that one as `llama_type` in `meta.json`",
        )
    return FAMILIES[plugin]


def _family_of(names: set[str]) -> str:
    """The family from tensor names, for runs from before November 2023, which have no `meta.json`."""
    marks = {"internlm": ".mixer.", "falcon": ".self_attention.", "mixtral": r".feed_forward.gate."}
    return next((family for family, mark in marks.items() if any(mark in name for name in names)), "llama")


def leave_out(whole: dict[str, LazyTensor], family: str, source: str, *, drop: bool) -> list[str]:
    """Removes, in place, tensors that no transformers model has (UnsupportedInput unless `drop`); returns warnings."""
    vision = [name for name in whole if VISION.match(name)]
    trained = [name for name in whole if TRAINED_PREFIX.match(name)]
    if family == "mixtral":
        biases = {name: whole.pop(name) for name in list(whole) if re.fullmatch(r"layers\..*\.bias", name)}
        trained += [name for name, bias in biases.items() if not is_zero(bias)]
    lost = [*vision, *trained]
    if lost and not drop:
        effect = ", which then answers differently" if trained else ""
        raise UnsupportedInput(
            f"`{source}` has {len(lost)} tensors that no language model of transformers has: {kinds(lost)}",
            hint=f"`--drop` converts the language model without them{effect}",
        )
    for name in lost:
        whole.pop(name, None)
    warnings = []
    if vision:
        warnings.append(f"dropped {len(vision)} tensors for images: {kinds(vision)}; text alone does not need them")
    if trained:
        warnings.append(f"dropped {len(trained)} trained tensors: {kinds(trained)}; the model answers differently")
    return warnings


def kinds(names: Iterable[str]) -> str:
    """A short list of names: without layer numbers, and only the first part of other models' names."""
    shown = (
        re.sub(r"\.\d+(?=\.)", "", name) if name.startswith("layers.") else name.partition(".")[0] for name in names
    )
    return listing(list(dict.fromkeys(shown)))


def is_zero(tensor: LazyTensor) -> bool:
    """Whether all elements are zero; reads the tensor block by block."""
    return not any(tensor.rows(*block).any() for block in tensor.blocks())


def check_shapes(
    tensors: Mapping[str, LazyTensor], params: AccessoryParams, settings: Mapping[str, Any], source: str
) -> None:
    """Raises MalformedInput, which lists the tensors whose shape is not the one that transformers expects."""
    dim, hidden, kv = params.dim, params.intermediate, params.kv_heads * params.head_dim
    fused = dim + 2 * settings.get("num_kv_heads", 0) * params.head_dim
    rows = {"k_proj": kv, "v_proj": kv, "query_key_value": fused, "gate": params.experts}
    rows |= dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "dense_h_to_4h"), hidden)
    rows |= dict.fromkeys(("lm_head", "embed_tokens", "word_embeddings"), settings["vocab_size"])
    columns = dict.fromkeys(("down_proj", "w2", "dense_4h_to_h"), hidden)
    wrong = []
    for name, tensor in tensors.items():
        layer = name.split(".")[-2]
        expected = (rows.get(layer, dim), columns.get(layer, dim))
        is_vector = name.endswith(".bias") or "norm" in layer or layer.startswith("ln_")
        if tensor.shape != (expected[:1] if is_vector else expected):
            wrong.append(f"{name} {list(tensor.shape)}")
    if wrong:
        raise MalformedInput(
            f"shape mismatch with the configuration for {len(wrong)} tensors of `{source}`: {listing(wrong)}",
            hint="the configuration belongs to another model, or a shard is missing",
        )
