"""LLaMA2-Accessory's (or Meta's) shards, joined and written, in Accessory's own names.

Split (Accessory `util/tensor_parallel.py`, `model/peft.py`): column-parallel layers along dim 0 with their bias and
`lora_b`; row-parallel layers and their `lora_a` along dim 1; embeddings along dim 1; all others are copied. Each rank
of a Mixtral holds whole experts (`LLM/mixtral.py`, MoE). Files: `util/misc.py`, `save_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmconv.checkpoint import Checkpoint, read_json, transposed
from llmconv.convert import algebra
from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.formats.accessory.config import (
    ATTENTION,
    INTERNLM,
    LINEAR,
    MLP,
    AccessoryArgs,
    AccessoryParams,
    args_of,
    has_biases,
    table_of,
)
from llmconv.convert.formats.meta import SHARD as META_SHARD
from llmconv.convert.formats.meta import SUFFIX, file_order, open_shard, require_alike, split_dim
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.models.head_and_dtype import with_head
from llmconv.convert.models.model_config import refuse_shards
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, word
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor

SHARD = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model\.pth")
DELTA_FILE = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model-diff\.pth")

EXPERT = re.compile(r"\.feed_forward\.experts\.\d+\.")
FUSED_EXPERTS = re.compile(r"(.*\.feed_forward)\.(w[123])")
"""mixtral_sparse: all experts in one matrix, whose name does not end with `.weight`."""


def holds_shards(path: Path) -> bool:
    """Whether `path` is a folder of Accessory's shards, whole or not, or of its deltas'."""
    kinds = (SHARD, DELTA_FILE)
    return path.is_dir() and any(kind.fullmatch(entry.name) for entry in path.iterdir() for kind in kinds)


def open_shards(folder: Path, kind: re.Pattern[str] = SHARD) -> list[dict[str, LazyTensor]]:
    """The shards of a model (Accessory's or Meta's) or a delta in order: name, without the prefix `llma.`, to tensor.

    `kind` is `SHARD`, or `DELTA_FILE` for those of a delta. Raises InputRefused if there are none, or they are a delta,
    MalformedInput if one is missing or superfluous, or two sets are mixed.
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if kind is SHARD and any(DELTA_FILE.fullmatch(name) for name in names):
        raise UnsupportedInput(
            f"`{folder.name}` is a delta, not a model",
            hint=f"add it to its base, such as Meta's folder: `llmconv delta apply BASE {word(folder)} -o OUT`",
        )
    if not (numbers := _numbers(folder, kind, names)):
        raise InputRefused(
            f"`{folder}` contains no `consolidated.…` shards",
            hint="give the folder that training started from, or that it saved",
        )
    opened = {numbers[number]: open_shard(folder / numbers[number], "model") for number in sorted(numbers)}
    shards = {file: {name.removeprefix("llma."): one for name, one in shard.items()} for file, shard in opened.items()}
    require_alike(shards, but=EXPERT)  # each whole expert must lie in one shard only
    experts = [name for shard in shards.values() for name in shard if EXPERT.search(name)]
    if len(set(experts)) != len(experts):
        raise MalformedInput(
            f"two shards of `{folder.name}` contain the same expert",
            hint="a shard was copied twice; copy the folder again",
        )
    return [*shards.values()]


def _numbers(folder: Path, kind: re.Pattern[str], names: Sequence[str]) -> dict[int, str]:
    """File names by rank, Meta's if there are none of this kind; MalformedInput for a mixed or incomplete set."""
    found = [(match, name) for name in names if (match := kind.fullmatch(name))]
    counts = {int(match[2]) for match, _ in found}
    others: tuple[re.Pattern[str], ...] = (META_SHARD, SHARD) if kind is DELTA_FILE else (META_SHARD,)
    if not found:
        found = [(match, name) for name in names if (match := META_SHARD.fullmatch(name))]
        counts, others = {max((int(match[1]) for match, _ in found), default=-1) + 1}, ()
    numbers = {int(match[1]): name for match, name in found}
    mixed = any(other.fullmatch(name) for name in names for other in others)
    if mixed or len(counts) != 1 or len(numbers) != len(found):
        raise MalformedInput(
            f"`{folder.name}` mixes shards of different checkpoints", hint="keep one set of shards in a folder"
        )
    (count,) = counts
    missing = algebra.first_missing(numbers, count)
    extra = min((number for number in numbers if number >= count), default=None)
    if missing is not None or extra is not None:
        raise MalformedInput(
            f"`{folder.name}` should have {count} shards, but number {extra if missing is None else missing} "
            + ("is missing" if missing is not None else f"(`{numbers[extra or 0]}`) is superfluous"),
            hint="copy the folder again; it must contain all shards of one checkpoint, and no others",
        )
    return numbers


def join(
    shards: Sequence[dict[str, LazyTensor]], repeated: Iterable[str], experts: int, source: str
) -> dict[str, LazyTensor]:
    """Name to joined tensor, experts split (else MalformedInput); `repeated`: more layers that shards have whole."""
    whole: dict[str, LazyTensor] = {}
    copies = set(repeated)
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        with algebra.fitting(f"the parts of `{name}` in `{source}` cannot be joined"):
            if fused := FUSED_EXPERTS.fullmatch(name):
                whole |= _split_experts(fused[1], fused[2], parts, experts)
            else:
                dim = None if EXPERT.search(name) else split_dim(name, copies)
                whole[name] = parts[0] if dim is None else algebra.concat(parts, dim)
    return whole


def peek(folder: Path) -> dict[str, LazyTensor]:
    """The tensors in Accessory's own names, joined as far as their names alone allow; InputRefused as `open_shards`."""
    shards = open_shards(folder)
    whole: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        dim = 0 if FUSED_EXPERTS.fullmatch(name) else None if EXPERT.search(name) else split_dim(name)
        whole[name] = parts[0] if dim is None or len(parts[0].shape) <= dim else algebra.concat(parts, dim)
    return whole


def _split_experts(prefix: str, layer: str, parts: Sequence[LazyTensor], experts: int) -> dict[str, LazyTensor]:
    """Joins a part of every expert from each shard (`mixtral_sparse.py`, `_sparse_expert_merge`); w2 is transposed."""
    rows = parts[0].num_rows
    if not experts or rows % experts:
        raise ValueError(f"{rows} rows cannot be divided among {experts} experts")
    step = rows // experts
    whole_experts = {
        number: algebra.concat([algebra.slice_rows(part, number * step, (number + 1) * step) for part in parts], 0)
        for number in range(experts)
    }
    return {
        f"{prefix}.experts.{number}.{layer}.weight": transposed(expert) if layer == "w2" else expert
        for number, expert in whole_experts.items()
    }


LLAMAS = (
    *("llama", "llama_peft", "llama_adapter", "llama_qformerv2", "llama_qformerv2_peft", "llama_ens_peft"),
    *("llama_ens", "llama_ens_light", "llama_ens5", "llama_ens5_light", "llama_ens5p2", "llama_ens10"),
)
MIXTRALS = ("mixtral", "mixtral_peft", "mixtral_sparse", "mixtral_sparse_ens", "mixtral_sparse_ens5")
FAMILIES = {  # Upstream's plugins (`accessory/model/LLM/`) to the family of their language model
    **dict.fromkeys(LLAMAS, "llama"),
    **dict.fromkeys(MIXTRALS, "mixtral"),
    "internlm": "internlm",
    "falcon": "falcon",
}

VISION = re.compile(
    r"(?:clip|clip_proj|clip_proj_norm|openclip_convnext_xxl|dinov2_vitg14|qformer|qformer_proj"
    r"|visual_\w+|start_img|end_img)(?:\.|$)"
)
TRAINED_PREFIX = re.compile(r"prefix(?:_gate|_new_gate)?$")
"""Tensors that `llama_adapter` trains; unlike those for images, they change every answer."""


def plugin_family(folder: Path, names: Iterable[str]) -> str:
    """`llama`, `mixtral`, `internlm` or `falcon` (else UnsupportedInput), from `meta.json` or the tensors' names."""
    if not (folder / "meta.json").is_file():
        # from tensor names, for runs from before November 2023
        marks = {".mixer.": "internlm", ".self_attention.": "falcon", ".feed_forward.gate.": "mixtral"}
        found = set(names)
        return next((family for mark, family in marks.items() if any(mark in name for name in found)), "llama")
    plugin = read_json(folder / "meta.json").get("llama_type")
    if not isinstance(plugin, str) or plugin not in FAMILIES:
        raise UnsupportedInput(
            f"`{folder.name}` was trained with the unknown plugin `{plugin}`",
            hint="if its language model is one of upstream's, give that one as `llama_type` in `meta.json`",
        )
    return FAMILIES[plugin]


def leave_out(whole: dict[str, LazyTensor], family: str, source: str, *, drop: bool) -> list[str]:
    """Removes, in place, tensors that no transformers model has (UnsupportedInput unless `drop`); returns warnings."""
    vision = [name for name in whole if VISION.match(name)]
    trained = [name for name in whole if TRAINED_PREFIX.match(name)]
    if family == "mixtral":
        biases = {name: whole.pop(name) for name in list(whole) if re.fullmatch(r"layers\..*\.bias", name)}
        trained += [name for name, bias in biases.items() if not algebra.all_zero(bias)]
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


def to_hugging_face(whole: dict[str, LazyTensor], params: AccessoryParams, source: str) -> dict[str, LazyTensor]:
    """The joined tensors in Hugging Face's names and order, with LoRA and zero biases; MalformedInput: keys, shapes."""
    with algebra.fitting(f"the heads of `{source}` do not match its configuration"):
        # adds zero biases to layers without one: `attention_bias` and `mlp_bias` of transformers apply to all layers
        tensors = _renamed(whole, params, source)
        complete: dict[str, LazyTensor] = {}
        wanted = {layer for layers in (ATTENTION, MLP) for layer in layers if has_biases(tensors, layers)}
        for name, tensor in tensors.items():
            complete[name] = tensor
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and layer.rpartition(".")[2] in wanted and f"{layer}.bias" not in tensors:
                complete[f"{layer}.bias"] = algebra.zeros(tensor.dtype, tensor.shape[:1])
        return complete


def _renamed(whole: dict[str, LazyTensor], params: AccessoryParams, source: str) -> dict[str, LazyTensor]:
    if params.family == "internlm":
        whole = _internlm_as_llama(whole, params)
    if params.family == "falcon":
        size, groups = params.head_dim, 1 if params.fields.get("multi_query", True) else params.heads
        rows = (params.heads // groups * size, size, size)  # query heads, key, value of each group (`_split_heads`)
        whole = algebra.fuse(
            whole,
            [f"self_attention.w{letter}" for letter in "qkv"],
            "self_attention.query_key_value",
            lambda parts: algebra.interleave_rows(parts, rows),
            counts=(params.heads, groups, groups),
        )
    _check_layers(whole, params.layers, source)
    renamed = algebra.rename(dict.fromkeys(map(_owner, whole)), table_of(params), source)
    order = algebra.rope_order(params.head_dim) if params.family in ("llama", "mixtral") else ()
    tensors: dict[str, LazyTensor] = {}
    for target, owner in sorted(renamed.items(), key=lambda pair: file_order(pair[0])):
        parts = _parts(owner, whole, source)
        if order and target.endswith((".q_proj.weight", ".k_proj.weight")):
            parts = {kind: one if kind == "lora_a" else algebra.permute_rows(one, order) for kind, one in parts.items()}
        tensors[target] = _with_lora(parts, owner, source)
        if "bias" in parts:
            tensors[target.removesuffix("weight") + "bias"] = parts["bias"]
    return tensors


def _owner(name: str) -> str:
    """The name of the weight that a Llama's bias or LoRA matrix belongs to; any other name unchanged."""
    suffix = SUFFIX.search(name)
    layer = name[: suffix.start()] if suffix else ""
    return f"{layer}.weight" if LINEAR.search(layer) else name


def _check_layers(whole: dict[str, LazyTensor], layers: int, source: str) -> None:
    """Refuses missing biases or LoRA matrices: upstream adds them to a linear layer of every block or of none."""
    counts: dict[str, int] = {}
    for name in whole:
        if _owner(name) != name:
            kind = re.sub(r"\.\d+\.", ".{}.", name, count=1)
            counts[kind] = counts.get(kind, 0) + 1
    if partial := [kind for kind, count in counts.items() if count != layers]:
        raise MalformedInput(
            f"missing keys: `{source}` has these only in some of its {layers} layers: {listing(partial)}",
            hint="the checkpoint is incomplete; copy the folder again",
        )


def _parts(owner: str, whole: dict[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """`weight`, and if present `bias`, `lora_a` and `lora_b`, of one layer."""
    if owner not in whole:
        raise MalformedInput(
            f"missing key `{owner}`: `{source}` holds a bias or LoRA of this weight, but not the weight itself",
            hint="give the folder that training started from with `--base`",
        )
    layer = owner.removesuffix(".weight")
    if not LINEAR.search(layer):
        return {"weight": whole[owner]}
    names = {"weight": owner, "bias": f"{layer}.bias"}
    names |= {kind: f"{layer}.{kind}.weight" for kind in ("lora_a", "lora_b")}
    return {kind: whole[name] for kind, name in names.items() if name in whole}


def _with_lora(parts: dict[str, LazyTensor], owner: str, source: str) -> LazyTensor:
    """W + B·A, rounded once; Accessory's LoRA has no alpha (`peft.py`, LoraColumnParallelLinear)."""
    weight = parts["weight"]
    if "lora_a" not in parts and "lora_b" not in parts:
        return weight
    a, b = (parts[kind].shape if kind in parts else () for kind in ("lora_a", "lora_b"))
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != weight.shape:
        raise MalformedInput(
            f"shape mismatch for the LoRA of `{owner}` in `{source}`: {list(b)} times {list(a)} for "
            f"{list(weight.shape)}",
            hint="the base belongs to another model, or a matrix is missing; copy the folder again",
        )
    changes = [LoraProduct(parts["lora_a"], parts["lora_b"], 1.0)]
    merged = add_products(weight, changes, weight.dtype)
    return replace(merged, recast=lambda dtype: add_products(weight, changes, dtype))


def _internlm_as_llama(whole: dict[str, LazyTensor], params: AccessoryParams) -> dict[str, LazyTensor]:
    """Renames InternLM's tensors to a Llama's with half-split rope; `Wqkv` holds all rows of q, then k, then v."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in whole.items():
        match = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name)
        block, layer, kind = match.groups("") if match else ("", "", "")
        if layer == "mixer.Wqkv" and tensor.num_rows == 3 * params.dim:
            for number, part in enumerate(("wq", "wk", "wv")):
                rows = algebra.slice_rows(tensor, number * params.dim, (number + 1) * params.dim)
                tensors[f"{block}attention.{part}.{kind}"] = rows
        else:
            tensors[f"{block}{INTERNLM[layer]}.{kind}" if layer in INTERNLM else name] = tensor
    return tensors


QKV = re.compile(r"(.*\.self_attention)\.query_key_value\.(weight|bias)")
ROTATED = re.compile(r"\.(?:wq|wk)\.(?:weight|bias)$")

EXTRA_FILES = ("chat_template.jinja", "generation_config.json", "special_tokens_map.json")
"""Files that upstream ignores, and that `to-hf` reads back."""


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of an Accessory checkpoint; see `Format.save`."""
    args = args_of(checkpoint)
    ranks = split_ranks(checkpoint, args, shards)
    container = partial(torch_pieces, inside=("model",))
    files = [
        Shard(f"consolidated.{number:02}-of-{shards:02}.model.pth", rank, container)
        for number, rank in enumerate(ranks)
    ]
    return Plan(checkpoint, tuple(files), *small_files(checkpoint, args))


def split_ranks(checkpoint: Checkpoint, args: AccessoryArgs, shards: int) -> list[dict[str, LazyTensor]]:
    """The tensors of each rank in Accessory's names; UsageProblem if not divisible among `shards` ranks."""
    refuse_shards(checkpoint.path.name, shards, args.shared)
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(shards)]
    for name, tensor in whole_tensors(checkpoint, args).items():
        if EXPERT.search(name):
            number = int(name.split(".experts.")[1].partition(".")[0])
            ranks[number // (args.params.experts // shards)][f"llma.{name}"] = tensor
            continue
        dim = split_dim(name, args.params.copied)
        parts = [tensor] * shards if dim is None else algebra.split(tensor, dim, shards)
        for rank, part in zip(ranks, parts, strict=True):
            rank[f"llma.{name}"] = part
    return ranks


def small_files(checkpoint: Checkpoint, args: AccessoryArgs) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Tokenizer, `config.json` and `meta.json`, and warnings."""
    files = checkpoint.side_files
    forms = (("tokenizer.model",), ("tokenizer.json", "tokenizer_config.json"))  # those that upstream reads
    names = next((names for names in forms if all(name in files for name in names)), ())
    small = {name: files[name] for name in (*names, *EXTRA_FILES) if name in files}
    small |= {"config.json": json_bytes(args.params.fields), "meta.json": json_bytes({"llama_type": args.plugin})}
    note = f"`{checkpoint.path.name}` has no tokenizer that LLaMA2-Accessory reads"
    return small, () if names else (note,)


def whole_tensors(checkpoint: Checkpoint, args: AccessoryArgs) -> dict[str, LazyTensor]:
    """Whole tensors in Accessory's names and row order, with a tied head; MalformedInput for wrong keys or shapes."""
    params, source = args.params, checkpoint.path.name
    table = dict(table_of(params))
    for name, target in list(table.items()):
        if target and target.split(".")[-2] in args.biases:
            table[name.removesuffix("weight") + "bias"] = target.removesuffix("weight") + "bias"
    embedding = next(to for name, to in table.items() if to and name.endswith("_embeddings.weight"))
    tensors = with_head(checkpoint, embedding, tied=params.family == "falcon")
    check_complete(tensors, checkpoint.config, source)  # a delta's base may not have been compared yet
    renamed = algebra.rename(tensors, algebra.inverted(table), source)
    whole: dict[str, LazyTensor] = {}
    for name, target in renamed.items():
        whole |= _converted(name, tensors[target], params)
    return whole


def _converted(name: str, tensor: LazyTensor, params: AccessoryParams) -> dict[str, LazyTensor]:
    """One tensor as Accessory stores it: rows in Meta's order; a fused matrix of Falcon's becomes three."""
    if params.family == "falcon" and (fused := QKV.fullmatch(name)):
        size, heads = params.head_dim, 1 if params.fields["multi_query"] else params.heads
        parts = zip("qkv", algebra.deal_rows(tensor, (params.heads // heads * size, size, size)), strict=True)
        return {f"{fused[1]}.w{letter}.{fused[2]}": part for letter, part in parts}
    if params.family != "falcon" and ROTATED.search(name):
        return {name: algebra.permute_rows(tensor, algebra.inverse_order(algebra.rope_order(params.head_dim)))}
    return {name: tensor}
