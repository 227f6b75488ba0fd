"""Converts LitGPT's tensors to Hugging Face's: checks names and shapes, and splits fused matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmconv.convert.algebra.operations import concat, rename, require, slice_rows
from llmconv.convert.algebra.row_groups import interleave_rows, pick_rows
from llmconv.convert.formats.litgpt.names import table_of
from llmconv.convert.formats.litgpt.read_config import LitConfig
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor

FUSED = ("gpt_neox", "falcon")
"""Families that fuse queries, keys and values group by group, as LitGPT did until the end of 2024."""


def to_hugging_face(
    stored: Mapping[str, LazyTensor], lit: LitConfig, family: str, source: str
) -> dict[str, LazyTensor]:
    """The model's tensors in Hugging Face's names, split and joined lazily.

    Args:
        stored: LitGPT's name to tensor.
        lit: LitGPT's configuration.
        family: the `model_type`, from `family_of`.
        source: name of the checkpoint, for error messages.

    Raises:
        MalformedInput: missing keys, unexpected keys, or a shape mismatch with the configuration.
    """
    if lit.n_layer * max(1, lit.n_expert) > len(stored):
        raise MalformedInput(
            f"`{source}` holds {len(stored)} tensors, too few for {lit.n_layer} layers",
            hint="`model_config.yaml` belongs to another model, or the checkpoint is partial",
        )
    expected = _shapes(lit)
    current = {_new_name(name): tensor for name, tensor in stored.items()}
    if len(current) != len(stored):
        raise MalformedInput(
            f"duplicate key in `{source}`: a fused matrix has both its old and its new name",
            hint="two checkpoints are mixed in one file",
        )
    require(expected, current, source)
    wrong = [f"{name} {list(tensor.shape)}" for name, tensor in current.items() if expected.get(name) != tensor.shape]
    if wrong:
        raise MalformedInput(
            f"`{source}` has {len(wrong)} unexpected keys or shapes for its `model_config.yaml`: {listing(wrong)}",
            hint="the configuration belongs to another model, or the weights contain adapters that are not merged",
        )
    by_group = any(_new_name(name) != name for name in stored)
    parts: dict[str, LazyTensor] = {}
    for name, tensor in current.items():
        stem, dot, kind = name.rpartition(".")
        if not stem.endswith(".attn.qkv"):
            parts[name] = tensor
        elif family in FUSED:
            parts[name] = tensor if by_group else _grouped(tensor, lit)
        elif family == "phi3":
            parts[name] = concat(_split_qkv(tensor, lit, by_group=by_group), 0)
        else:
            for one, part in zip("qkv", _split_qkv(tensor, lit, by_group=by_group), strict=True):
                parts[f"{stem.removesuffix('qkv')}{one}{dot}{kind}"] = part
    if family == "phi3":
        _join_feed_forward(parts, lit)
    return {target: parts[name] for target, name in rename(parts, table_of(lit, family), source).items()}


def _new_name(name: str) -> str:
    return name.replace(".attn.attn.", ".attn.qkv.")


def _shapes(lit: LitConfig) -> dict[str, tuple[int, ...]]:
    """Current name to shape of every tensor of the model."""
    width, rows = lit.n_embd, lit.n_head * lit.head_size
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (lit.padded_vocab_size, width)}
    for layer in (f"transformer.h.{number}" for number in range(lit.n_layer)):
        for name, is_there in (
            ("norm_1", True),
            ("norm_2", not lit.shared_attention_norm),
            ("post_attention_norm", lit.post_attention_norm),
            ("post_mlp_norm", lit.post_mlp_norm),
        ):
            shapes |= _norm(f"{layer}.{name}", lit, width) if is_there else {}
        if lit.norm_qk:
            shapes |= _norm(f"{layer}.attn.norm_q", lit, lit.head_size) | _norm(
                f"{layer}.attn.norm_k", lit, lit.head_size
            )
        shapes |= _linear(f"{layer}.attn.qkv", lit.qkv_rows, width, lit.bias or lit.attn_bias)
        shapes |= _linear(f"{layer}.attn.proj", width, rows, lit.bias)
        shapes |= _feed_forward(layer, lit)
    head = _linear("lm_head", lit.padded_vocab_size, width, lit.lm_head_bias)
    return shapes | _norm("transformer.ln_f", lit, width) | head


def _feed_forward(layer: str, lit: LitConfig) -> dict[str, tuple[int, ...]]:
    if lit.mlp_class_name != "LLaMAMoE":
        return _mlp(f"{layer}.mlp", lit, lit.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.mlp.gate.weight": (lit.n_expert, lit.n_embd)}
    inner = replace(lit, mlp_class_name="LLaMAMLP")
    for number in range(lit.n_expert):
        shapes |= _mlp(f"{layer}.mlp.experts.{number}", inner, lit.moe_intermediate_size or lit.intermediate_size)
    return shapes


def _mlp(module: str, lit: LitConfig, inner: int) -> dict[str, tuple[int, ...]]:
    names = ("fc",) if lit.mlp_class_name == "GptNeoxMLP" else ("fc_1", "fc_2")
    shapes = _linear(f"{module}.proj", lit.n_embd, inner, lit.bias)
    for name in names:
        shapes |= _linear(f"{module}.{name}", inner, lit.n_embd, lit.bias)
    return shapes


def _linear(module: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": (rows, columns), **({f"{module}.bias": (rows,)} if bias else {})}


def _norm(module: str, lit: LitConfig, size: int) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if lit.norm_class_name == "LayerNorm" else ("weight",)
    return {f"{module}.{kind}": (size,) for kind in kinds}


def group_counts(lit: LitConfig) -> tuple[int, int, int]:
    """Number of rows of queries, key and value in one group."""
    return lit.n_head // lit.n_query_groups * lit.head_size, lit.head_size, lit.head_size


def _split_qkv(tensor: LazyTensor, lit: LitConfig, *, by_group: bool) -> list[LazyTensor]:
    """Queries, keys and values of a fused matrix or bias."""
    counts, first = group_counts(lit), 0
    parts = []
    for count in counts:
        rows = count if by_group else count * lit.n_query_groups
        parts.append(
            pick_rows(tensor, sum(counts), first, count) if by_group else slice_rows(tensor, first, first + rows)
        )
        first += rows
    return parts


def _grouped(tensor: LazyTensor, lit: LitConfig) -> LazyTensor:
    return interleave_rows(_split_qkv(tensor, lit, by_group=False), group_counts(lit))


def _join_feed_forward(parts: dict[str, LazyTensor], lit: LitConfig) -> None:
    """Stacks gate and up projections, as Phi-3 has them, in place."""
    for number in range(lit.n_layer):
        module = f"transformer.h.{number}.mlp"
        parts[f"{module}.fc.weight"] = concat([parts.pop(f"{module}.fc_{one}.weight") for one in (1, 2)], 0)
