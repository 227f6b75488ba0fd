"""Converts whole tensors in Megatron core's names to Hugging Face's: splits fused matrices, and checks every name.

Layout of fused rows (Megatron core `transformer/attention.py`, `get_query_key_value_tensors`): for each group of
queries, its queries, its key and its value; gate rows before up rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmconv.convert.algebra.operations import concat, permute_rows, replicated, rope_order, slice_rows, split
from llmconv.convert.algebra.row_groups import interleave_rows, pick_rows
from llmconv.convert.formats.megatron.names import EMBEDDING, FC1, HEAD, QKV, hugging_face_name
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, cast, rounded
from llmconv.transpose import transposed

NORM = re.compile(r"(?:layernorm|layer_norm)\.weight$")
HEAD_NORM = re.compile(r"\.[qk]_layernorm\.(?:weight|bias)$")
WHOLE_QKV = ("gpt_neox", "gpt2")
"""Families that keep queries, keys and values in one matrix."""


@dataclass(frozen=True)
class Layout:
    """How the tensors of a run are laid out, and what becomes of them.

    Attributes:
        source: name of the checkpoint, for messages.
        model_type: of transformers.
        heads, groups, head_dim: of the attention.
        gated: the first feed-forward matrix has gate and up rows.
        interleaved: rotary positions turn neighboring rows (2i, 2i + 1) of a head, not its halves.
        rotary_dim: rows of a head that are turned.
        zero_centered: norms multiply with 1 + weight.
        tied: the output head is the embedding.
        vocabulary: rows of the embedding that are kept.
    """

    source: str
    model_type: str
    heads: int
    groups: int
    head_dim: int
    gated: bool
    interleaved: bool
    rotary_dim: int
    zero_centered: bool
    tied: bool
    vocabulary: int


def to_hugging_face(tensors: Mapping[str, LazyTensor], layout: Layout) -> dict[str, LazyTensor]:
    """The model's tensors in Hugging Face's names.

    Args:
        tensors: Megatron core's name to whole tensor.
        layout: of the run.

    Raises:
        MalformedInput: unexpected keys, or a shape that contradicts the layout.
    """
    converted: dict[str, LazyTensor] = {}
    unknown = []
    for name, tensor in _one_embedding(tensors, layout).items():
        try:
            parts = dict(_parts(name, tensor, layout))
        except ValueError as error:
            raise MalformedInput(
                f"`{name}` {list(tensor.shape)} of `{layout.source}` does not match the arguments: {error}",
                hint="the arguments are of another model",
            ) from error
        for own, part in parts.items():
            target = hugging_face_name(own, layout.model_type)
            if target is None:
                unknown.append(name)
            else:
                converted[target] = part
    if unknown:
        raise MalformedInput(
            f"`{layout.source}` contains {len(unknown)} tensors that a {layout.model_type} does not have; unexpected "
            f"keys: {listing(unknown)}",
            hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
        )
    return converted


def _one_embedding(tensors: Mapping[str, LazyTensor], layout: Layout) -> dict[str, LazyTensor]:
    """The tensors without the copy of a tied embedding that the last pipeline stage keeps."""
    kept = dict(tensors)
    if not layout.tied or HEAD not in kept:
        return kept
    copy, embedding = kept.pop(HEAD), kept.get(EMBEDDING)
    if embedding is None or (copy.shape, copy.dtype) != (embedding.shape, embedding.dtype):
        raise MalformedInput(
            f"the embedding of `{layout.source}` is missing, or its copy in the last pipeline stage has another shape",
            hint="copy the files of all ranks of one save again",
        )
    difference = UnsupportedInput(
        f"the first and last pipeline stage of `{layout.source}` hold different embeddings, which the run tied",
        hint="ranks of different saves are mixed; copy all ranks of one save again",
    )
    return {**kept, EMBEDDING: replicated([embedding, copy], difference)}


def _parts(name: str, tensor: LazyTensor, layout: Layout) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors that become of one, by the names that `hugging_face_name` knows.

    Raises:
        ValueError: the number of rows does not match.
    """
    module, _, kind = name.rpartition(".")
    if module.endswith(f".{QKV}"):
        yield from _attention(name.removesuffix(f"linear_qkv.{kind}"), kind, tensor, layout)
    elif layout.gated and FC1.search(name):
        stem = module.removesuffix("linear_fc1")
        for part, rows in zip(("gate", "up"), split(tensor, 0, 2), strict=True):
            yield f"{stem}{part}.{kind}", rows
    elif name in (EMBEDDING, HEAD):
        yield name, slice_rows(tensor, 0, layout.vocabulary)
    elif layout.model_type == "gpt2" and kind == "weight" and len(tensor.shape) == 2 and ".layers." in name:
        yield name, transposed(tensor)
    else:
        own = _by_halves(tensor, layout) if HEAD_NORM.search(name) else tensor
        yield name, plus_one(own) if layout.zero_centered and NORM.search(name) else own


def _attention(stem: str, kind: str, tensor: LazyTensor, layout: Layout) -> Iterator[tuple[str, LazyTensor]]:
    counts = [layout.heads // layout.groups * layout.head_dim, layout.head_dim, layout.head_dim]
    rows = sum(counts) * layout.groups
    if tensor.num_rows != rows:
        raise ValueError(f"expected {rows} rows, got {tensor.num_rows}")
    parts = [pick_rows(tensor, sum(counts), sum(counts[:part]), counts[part]) for part in range(3)]
    parts = [*(_by_halves(part, layout) for part in parts[:2]), parts[2]]
    if layout.model_type not in WHOLE_QKV:
        for word, part in zip("qkv", parts, strict=True):
            yield f"{stem}{word}.{kind}", part
    elif layout.model_type == "gpt_neox":
        yield f"{stem}qkv.{kind}", interleave_rows(parts, counts)
    else:
        yield f"{stem}qkv.{kind}", transposed(concat(parts, 0)) if kind == "weight" else concat(parts, 0)


def _by_halves(tensor: LazyTensor, layout: Layout) -> LazyTensor:
    """Rows of heads in the order in which transformers turns them."""
    if not layout.interleaved:
        return tensor
    rest = range(layout.rotary_dim, layout.head_dim)
    return permute_rows(tensor, [*rope_order(layout.rotary_dim), *rest])


def plus_one(tensor: LazyTensor) -> LazyTensor:
    """1 + weight, summed in float32 and rounded once to the dtype of the result."""
    wide = cast(tensor, BY_NAME["float32"])

    def into(dtype: DType) -> LazyTensor:
        def load(start: int, stop: int) -> Array:
            return rounded(wide.rows(start, stop) + np.float32(1), dtype, "a norm")

        return LazyTensor(dtype, tensor.shape, load, into)

    return into(tensor.dtype)


def norm_dtypes(tensors: Mapping[str, LazyTensor]) -> set[str]:
    """The names of the dtypes of the norms' weights."""
    return {tensor.dtype.name for name, tensor in tensors.items() if NORM.search(name)}
