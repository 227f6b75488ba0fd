"""Writes LLaMA2-Accessory's folder: `consolidated.NN-of-MM.model.pth`, configuration, tokenizer.

Layout: Accessory `util/misc.py`, `save_checkpoint`; each rank of a Mixtral holds whole experts (`LLM/mixtral.py`, MoE).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import (
    inverse_order,
    inverted,
    permute_rows,
    pick_rows,
    rename,
    require,
    rope_order,
    split,
)
from llmconv.convert.formats.accessory.config import AccessoryArgs, AccessoryParams, NameTable, args_of, table_of
from llmconv.convert.formats.accessory.read import EXPERT, check_shapes
from llmconv.convert.formats.meta.read import split_dim
from llmconv.convert.models.model_config import refuse_shards
from llmconv.convert.models.tied_head import with_head
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor

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
        for number, part in _parts(name, tensor, args.params, shards).items():
            ranks[number][f"llma.{name}"] = part
    return ranks


def small_files(checkpoint: Checkpoint, args: AccessoryArgs) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Tokenizer, `config.json` and `meta.json`, and warnings."""
    tokenizer, warnings = _tokenizer(checkpoint)
    small = {"config.json": json_bytes(args.params.fields), "meta.json": json_bytes({"llama_type": args.plugin})}
    return {**tokenizer, **small}, warnings


def whole_tensors(checkpoint: Checkpoint, args: AccessoryArgs) -> dict[str, LazyTensor]:
    """Whole tensors in Accessory's names and row order, with a tied head; MalformedInput for wrong keys or shapes."""
    params, source = args.params, checkpoint.path.name
    table = _with_biases(table_of(params), args.biases)
    embedding = next(to for name, to in table.items() if to and name.endswith("_embeddings.weight"))
    tensors = with_head(checkpoint, embedding, tied=params.family == "falcon")
    expected = [target.format(layer) for target in table.values() if target for layer in range(params.layers)]
    require(dict.fromkeys(expected), tensors, source)
    renamed = rename(tensors, inverted(table), source)
    check_shapes(tensors, params, args.settings, source)
    whole: dict[str, LazyTensor] = {}
    for name, target in renamed.items():
        whole |= _converted(name, tensors[target], params)
    return whole


def _with_biases(table: NameTable, layers: Sequence[str]) -> NameTable:
    """The table with the biases of `layers`, given by the last word of their Hugging Face names."""
    biased = {
        source.removesuffix("weight") + "bias": target.removesuffix("weight") + "bias"
        for source, target in table.items()
        if target and target.split(".")[-2] in layers
    }
    return {**table, **biased}


def _converted(name: str, tensor: LazyTensor, params: AccessoryParams) -> dict[str, LazyTensor]:
    """One tensor as Accessory stores it: rows in Meta's order; a fused matrix of Falcon's becomes three."""
    if params.family == "falcon" and (fused := QKV.fullmatch(name)):
        size, heads = params.head_dim, 1 if params.fields["multi_query"] else params.heads
        counts = (params.heads // heads * size, size, size)
        return {
            f"{fused[1]}.w{letter}.{fused[2]}": pick_rows(tensor, sum(counts), sum(counts[:index]), counts[index])
            for index, letter in enumerate("qkv")
        }
    if params.family != "falcon" and ROTATED.search(name):
        return {name: permute_rows(tensor, inverse_order(rope_order(params.head_dim)))}
    return {name: tensor}


def _parts(name: str, tensor: LazyTensor, params: AccessoryParams, shards: int) -> Mapping[int, LazyTensor]:
    """The part of a tensor for each rank that has one, by rank."""
    if EXPERT.search(name):
        number = int(name.split(".experts.")[1].partition(".")[0])
        return {number // (params.experts // shards): tensor}
    one_head = params.family == "falcon" and params.fields["multi_query"]
    dim = split_dim(name, ("wk", "wv") if one_head else ())
    return dict(enumerate([tensor] * shards if dim is None else split(tensor, dim, shards)))


def _tokenizer(checkpoint: Checkpoint) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files that upstream reads (`tokenizer.model`, or a Hugging Face tokenizer), `EXTRA_FILES`, and warnings."""
    files = checkpoint.side_files
    extra_files = {name: files[name] for name in EXTRA_FILES if name in files}
    for names in (("tokenizer.model",), ("tokenizer.json", "tokenizer_config.json")):
        if all(name in files for name in names):
            return {name: files[name] for name in names} | extra_files, ()
    return extra_files, (f"`{checkpoint.path.name}` has no tokenizer that LLaMA2-Accessory reads",)
