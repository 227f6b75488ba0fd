"""Reads Meta's shards: joins the parts of all ranks and reorders rows as Hugging Face has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.convert.algebra.operations import (
    concat,
    first_missing,
    listing,
    permute_rows,
    replicated,
    rope_order,
)
from llmconv.convert.formats.meta.config import kv_heads_of
from llmconv.convert.formats.meta.names import split_dim
from llmconv.errors import MalformedInput
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

SHARD = re.compile(r"consolidated\.(\d+)\.pth")


def _open_shards(path: Path) -> list[Mapping[str, LazyTensor]]:
    """The shards in order, which must be numbered 0 … n-1 and hold the same names, shapes and dtypes.

    Raises:
        MalformedInput: a gap, or a shard that differs.
    """
    found = {int(match[1]): entry for entry in path.iterdir() if (match := SHARD.fullmatch(entry.name))}
    missing = first_missing(found, max(found) + 1)
    if missing is not None:
        raise MalformedInput(
            f"`{path.name}` has {len(found)} shards, but `consolidated.{missing:02}.pth` is missing",
            hint="copy the missing shard; all of them are needed",
        )
    shards = [_open_shard(found[number]) for number in sorted(found)]
    layout = _layout(shards[0])
    for number, shard in enumerate(shards):
        if _layout(shard) != layout:
            odd = sorted({name for name, _ in _layout(shard).items() ^ layout.items()})
            raise MalformedInput(
                f"`{found[number].name}` differs from the first shard in {len(odd)} tensors: {listing(odd)}",
                hint="the shards belong to different models or of different splits; copy the folder again",
            )
    return shards


def _layout(shard: Mapping[str, LazyTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items()}


def _open_shard(path: Path) -> Mapping[str, LazyTensor]:
    file = open_torch_file(path)
    refs = file.content
    if not isinstance(refs, dict) or not all(isinstance(ref, TensorRef) for ref in refs.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="it should hold tensors and nothing else")
    return {str(name): file.tensor(str(name), ref) for name, ref in refs.items()}


def _file_order(target: str) -> tuple[int, int, str]:
    """Embedding, layers by number, final norm, head: the order in which a loader meets them."""
    number = re.search(r"\.(\d+)\.", target)
    place = 0 if "embed" in target else 1 if number else 2 if "norm" in target else 3
    return place, int(number[1]) if number else 0, target


def _check_shapes(path: Path, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any]) -> int:
    """Compares the first layer with `params.json`; returns the number of key/value heads of the model.

    Raises:
        MalformedInput: the number of shards does not fit `dim`, or the key/value heads do not add up.
    """
    dim, count = int(params["dim"]), len(shards)
    head_dim = dim // int(params["n_heads"])
    queries = shards[0]["layers.0.attention.wq.weight"].shape
    if len(queries) != 2 or queries[1] != dim or queries[0] * count != dim:
        need = f"{dim // queries[0]} shards are needed" if queries[0] and not dim % queries[0] else "they do not fit"
        raise MalformedInput(
            f"`{path.name}` has {count} shards with query rows {list(queries)} for `dim` {dim}; {need}",
            hint="a shard is missing or there is one too many, or `params.json` belongs to another model",
        )
    keys = shards[0]["layers.0.attention.wk.weight"].shape[0]
    stored, wanted = keys * count // head_dim, kv_heads_of(params)
    if stored == wanted:
        return wanted // _copies(shards, keys, head_dim)
    if keys != head_dim or stored % wanted:
        raise MalformedInput(
            f"`{path.name}` has {stored} key/value heads, `params.json` says {wanted}",
            hint="`n_kv_heads` must divide what the shards hold; is `params.json` of another model?",
        )
    return wanted


def _copies(shards: Sequence[Mapping[str, LazyTensor]], keys: int, head_dim: int) -> int:
    """How many neighbours hold the same head: with more ranks than heads Meta repeats them, and counts the copies."""
    if keys != head_dim or len(shards) == 1:
        return 1
    names = ("layers.0.attention.wk.weight", "layers.0.attention.wv.weight")
    heads = [b"".join(shard[name].read().tobytes() for name in names) for shard in shards]
    run = next((number for number, head in enumerate(heads) if head != heads[0]), len(heads))
    repeats = len(heads) % run == 0 and all(head == heads[number // run * run] for number, head in enumerate(heads))
    return run if repeats else 1


def _join(
    path: Path, name: str, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any], kv_heads: int
) -> LazyTensor:
    """One whole tensor in Hugging Face's row order."""
    parts = [shard[name] for shard in shards]
    head_dim = int(params["dim"]) // int(params["n_heads"])
    dim = split_dim(name)
    if dim is None:
        return parts[0]
    if name.endswith((".wk.weight", ".wv.weight")):
        repeat = max(1, parts[0].shape[0] * len(parts) // (kv_heads * head_dim))
        groups = [parts[start : start + repeat] for start in range(0, len(parts), repeat)]
        parts = [replicated(group, path.name) for group in groups]
    if name.startswith("tok_") and parts[0].shape[1] == params["dim"]:
        dim = 0  # of Llama 3, whose ranks hold words
    try:
        whole = concat(parts, dim)
        return permute_rows(whole, rope_order(head_dim)) if name.endswith((".wq.weight", ".wk.weight")) else whole
    except ValueError as error:
        raise MalformedInput(
            f"`{name}` of `{path.name}` does not join: {error}", hint="`params.json` belongs to another model"
        ) from error


def _differing_norms(shards: Sequence[Mapping[str, LazyTensor]]) -> list[str]:
    """A warning where the last norm is not the same in all shards; shard 0's is used, as upstream's rank 0 does."""
    norms = [shard["norm.weight"].read().tobytes() for shard in shards]
    if len(set(norms)) == 1:
        return []
    return ["the norms differ between shards (as in Llama 3 70B); those of shard 0 are used"]
