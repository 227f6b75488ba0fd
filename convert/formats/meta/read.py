"""Reads Meta's shards and joins the parts of all ranks, with rows in Hugging Face's order.

The table of names has the axis along which ranks split each tensor (LLaMA2-Accessory has the same). Source:
meta-llama/llama `model.py` with fairscale's parallel layers; Accessory `util/tensor_parallel.py`, `model/peft.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.convert.algebra.operations import concat, first_missing, permute_rows, replicated, rope_order
from llmconv.convert.formats.meta.config import kv_heads_of
from llmconv.errors import MalformedInput, listing
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import LazyTensor

SHARD = re.compile(r"consolidated\.(\d+)\.pth")


def open_shards(path: Path) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each rank, in order; MalformedInput if one is missing, or names, shapes or dtypes differ."""
    found = {int(match[1]): entry for entry in path.iterdir() if (match := SHARD.fullmatch(entry.name))}
    missing = first_missing(found, max(found) + 1)
    if missing is not None:
        raise MalformedInput(
            f"`{path.name}` has {len(found)} shards, but `consolidated.{missing:02}.pth` is missing",
            hint="copy the missing shard; all shards are needed",
        )
    shards = [open_shard(found[number]) for number in sorted(found)]
    layout = _layout(shards[0])
    for number, shard in enumerate(shards):
        if _layout(shard) != layout:
            names = sorted({name for name, _ in _layout(shard).items() ^ layout.items()})
            raise MalformedInput(
                f"`{found[number].name}` differs from the first shard in {len(names)} tensors: {listing(names)}",
                hint="the shards are of different models or splits; copy the folder again",
            )
    return shards


def _layout(shard: Mapping[str, LazyTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items()}


def open_shard(path: Path, inside: str = "") -> Mapping[str, LazyTensor]:
    """The tensors of one torch file, under the key `inside` if given; MalformedInput for anything but tensors."""
    file = open_torch_file(path)
    content = file.content
    if inside and isinstance(content, dict) and isinstance(content.get(inside), dict):
        content = content[inside]
    if not isinstance(content, dict) or not all(isinstance(ref, TensorRef) for ref in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="it should hold tensors and nothing else")
    return {str(name): file.tensor(str(name), ref) for name, ref in content.items()}


def file_order(target: str) -> tuple[int, int]:
    """Sort key of a Hugging Face name: embedding, layers by number, final norm, head, as a loader needs them."""
    number = re.search(r"\.(\d+)\.", target)
    group = 0 if "embed" in target else 1 if number else 2 if "norm" in target or "ln_f" in target else 3
    return group, int(number[1]) if number else 0


def check_shapes(path: Path, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any]) -> int:
    """The number of key/value heads, without copies, from the first layer's shapes.

    Raises MalformedInput if it or the number of shards contradicts `params.json`.
    """
    dim, count = int(params["dim"]), len(shards)
    head_dim = dim // int(params["n_heads"])
    queries = shards[0]["layers.0.attention.wq.weight"].shape
    if len(queries) != 2 or queries[1] != dim or queries[0] * count != dim:
        need = f"expected {dim // queries[0]} shards" if queries[0] and not dim % queries[0] else "which is impossible"
        raise MalformedInput(
            f"`{path.name}` has {count} shards with query rows {list(queries)} for `dim` {dim}; {need}",
            hint="a shard is missing or superfluous, or `params.json` belongs to another model",
        )
    keys = shards[0]["layers.0.attention.wk.weight"].shape[0]
    stored, declared = keys * count // head_dim, kv_heads_of(params)
    if stored == declared:
        return declared // _copies(shards, keys, head_dim)
    if keys != head_dim or stored % declared:
        raise MalformedInput(
            f"`{path.name}` has {stored} key/value heads, `params.json` declares {declared}",
            hint="the heads in the shards must be a multiple of `n_kv_heads`; is `params.json` of another model?",
        )
    return declared


def _copies(shards: Sequence[Mapping[str, LazyTensor]], keys: int, head_dim: int) -> int:
    """Number of neighboring ranks with the same head: with more ranks than heads, Meta copies and counts them."""
    if keys != head_dim or len(shards) == 1:
        return 1
    names = ("layers.0.attention.wk.weight", "layers.0.attention.wv.weight")
    heads = [b"".join(shard[name].read().tobytes() for name in names) for shard in shards]
    run = next((number for number, head in enumerate(heads) if head != heads[0]), len(heads))
    repeats = len(heads) % run == 0 and all(head == heads[number // run * run] for number, head in enumerate(heads))
    return run if repeats else 1


def join(
    path: Path, name: str, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any], kv_heads: int
) -> LazyTensor:
    """The tensor `name` (Meta's) from all shards, in Hugging Face's row order; MalformedInput if not joinable."""
    parts = [shard[name] for shard in shards]
    head_dim = int(params["dim"]) // int(params["n_heads"])
    dim = split_dim(name)
    if dim is None:
        return parts[0]
    if name.endswith((".wk.weight", ".wv.weight")):
        repeat = max(1, parts[0].shape[0] * len(parts) // (kv_heads * head_dim))
        groups = [parts[start : start + repeat] for start in range(0, len(parts), repeat)]
        parts = [replicated(group, _different_copies(path)) for group in groups]
    if name.startswith("tok_") and parts[0].shape[1] == params["dim"]:
        dim = 0  # Llama 3 splits the embedding by rows
    try:
        whole = concat(parts, dim)
        return permute_rows(whole, rope_order(head_dim)) if name.endswith((".wq.weight", ".wk.weight")) else whole
    except ValueError as error:
        raise MalformedInput(
            f"the parts of `{name}` in `{path.name}` cannot be joined: {error}",
            hint="`params.json` belongs to another model",
        ) from error


def differing_norms(shards: Sequence[Mapping[str, LazyTensor]]) -> list[str]:
    """A warning if the final norm differs between shards; shard 0's is used, as by rank 0 of Meta's code."""
    norms = [shard["norm.weight"].read().tobytes() for shard in shards]
    if len(set(norms)) == 1:
        return []
    return ["the norms differ between shards (as in Llama 3 70B); those of shard 0 are used"]


def _different_copies(path: Path) -> MalformedInput:
    return MalformedInput(
        f"the shards of `{path.name}` contain different copies of one key/value head",
        hint="`n_kv_heads` of `params.json` does not match the shards; does it belong to another model?",
    )


FREQUENCIES: dict[str, str | None] = {
    "rope.freqs": None,
    "layers.{}.attention.inner_attention.rope.freqs": None,
}
"""Buffers that models compute."""

LLAMA: dict[str, str | None] = FREQUENCIES | {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""To Hugging Face's names, in the order in which a loader needs them."""

COLUMN = {"wq", "wk", "wv", "w1", "w3", "output", "dense_h_to_4h"}
ROW = {"wo", "w2", "dense", "dense_4h_to_h"}
EMBEDDING = {"tok_embeddings", "word_embeddings"}
SUFFIX = re.compile(r"\.(weight|bias|lora_a\.weight|lora_b\.weight)$")


def split_dim(name: str, repeated: Iterable[str] = ()) -> int | None:
    """The dimension along which ranks split a tensor; None if every shard holds a copy (shard 0's is used).

    `repeated` are last components of layers that every shard holds whole, in addition to the usual ones.
    """
    suffix = SUFFIX.search(name)
    block, _, layer = name[: suffix.start()].rpartition(".") if suffix else ("", "", "")
    if not suffix or layer in repeated or (block and not block.startswith("layers.")):
        return None
    if layer in COLUMN:
        return None if suffix[1] == "lora_a.weight" else 0
    if layer in ROW:
        return 1 if suffix[1] in ("weight", "lora_a.weight") else None
    return 1 if layer in EMBEDDING else None
