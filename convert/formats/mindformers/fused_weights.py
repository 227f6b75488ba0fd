"""Fused matrices of MindFormers (queries, keys and values; gate and up): split for reading, fused for writing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llmconv.convert.algebra.operations import concat
from llmconv.convert.algebra.row_groups import interleave_rows, pick_rows
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.formats.mindformers.converted_model import Heads
from llmconv.errors import InputRefused, MalformedInput
from llmconv.tensors import LazyTensor

LAYOUTS = ("plain", "interleaved")


FUSED = (
    (re.compile(r"(.+\.attention)\.(?:w_qkv|w)\.(weight|bias)"), ("wq", "wk", "wv")),
    (re.compile(r"(.+\.feed_forward)\.w_gate_hidden\.(weight|bias)"), ("w1", "w3")),
    (re.compile(r"(.+\.self_attention)\.linear_qkv\.(weight|bias)"), ("linear_q", "linear_k", "linear_v")),
    (re.compile(r"(.+\.mlp)\.linear_fc1\.(weight|bias)"), ("gating", "hidden")),
)
"""Names of the fused matrices, with those of their parts: queries, keys and values, or gate and up."""


def unfuse(run: RunConfig, tensors: Mapping[str, LazyTensor], heads: Heads) -> dict[str, LazyTensor]:
    """Splits the `FUSED` tensors, such as `w_qkv` (in 1.0 `w`) into `wq`, `wk` and `wv`; the others stay.

    Until 1.4 the parts follow each other; since 1.5 each key/value head follows its queries, and gate and up rows
    alternate (mindformers `utils/convert_utils.py`, `qkv_concat_hf2mg`, `ffn_concat_hf2mg`), under the same names.

    Args:
        run: its `qkv_layout` decides the order of the rows where the names do not.
        tensors: MindFormers' name to tensor.
        heads: the sizes of the attention.

    Raises:
        InputRefused: there are fused matrices, and `qkv_layout` is not given.
        MalformedInput: their number of rows contradicts the heads.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        found = next(((match, parts) for sign, parts in FUSED if (match := sign.fullmatch(name))), None)
        if found is None:
            result[name] = tensor
            continue
        match, parts = found
        layout = layout_of(run, name)
        try:
            rows = split_qkv(tensor, heads, layout) if len(parts) == 3 else split_gate(tensor, layout)
        except ValueError as error:
            raise MalformedInput(
                f"`{name}` of `{run.source}` cannot be split: {error}",
                hint="the configuration belongs to another model",
            ) from error
        result |= {f"{match[1]}.{part}.{match[2]}": tensor for part, tensor in zip(parts, rows, strict=True)}
    return result


def layout_of(run: RunConfig, name: str) -> str:
    """`plain` or `interleaved`, from the names, the class of the model, or the user's `qkv_layout`.

    Raises:
        InputRefused: none of the three decides it.
    """
    if ".linear_" in name:  # Megatron's names exist since 1.6 only
        return "interleaved"
    if ".attention.w." in name and run.arch:  # Llama's in 1.0 only; InternLM2 has its own order, which never changed
        return "interleaved" if run.arch.startswith("InternLM2") else "plain"
    asked = run.fields.get("qkv_layout")
    if asked in LAYOUTS:
        return str(asked)
    raise InputRefused(
        f"`{run.source}` holds fused matrices (`{name}`), and the file does not contain the order of their rows",
        hint="give `--qkv-layout plain` if MindFormers up to 1.4 wrote it, `--qkv-layout interleaved` since 1.5",
    )


def split_qkv(tensor: LazyTensor, heads: Heads, layout: str) -> list[LazyTensor]:
    """The queries, keys and values of a fused matrix or bias.

    Args:
        tensor: fused, [(queries + 2 keys) * dim, ...].
        heads: the sizes of the attention.
        layout: one of `LAYOUTS`.

    Raises:
        ValueError: it has another number of rows.
    """
    rows = [heads.queries * heads.dim, heads.keys * heads.dim, heads.keys * heads.dim]
    if tensor.num_rows != sum(rows):
        raise ValueError(f"expected {sum(rows)} rows, got {tensor.num_rows}")
    counts = rows if layout == "plain" else [count // heads.keys for count in rows]
    return [pick_rows(tensor, sum(counts), sum(counts[:part]), counts[part]) for part in range(3)]


def split_gate(tensor: LazyTensor, layout: str) -> list[LazyTensor]:
    """The gate and up rows of a fused matrix.

    Raises:
        ValueError: the number of rows is odd.
    """
    count = tensor.num_rows // 2 if layout == "plain" else 1
    return [pick_rows(tensor, 2 * count, part * count, count) for part in range(2)]


def fuse(
    tensors: dict[str, LazyTensor], parts: Sequence[str], whole: str, counts: Sequence[int] | None = None
) -> dict[str, LazyTensor]:
    """Joins the modules `parts` of each layer into one module `whole`; the reverse of `unfuse`.

    Args:
        tensors: name to tensor.
        parts: last words of the modules' names, before `.weight` or `.bias`.
        whole: the last words of the joined module's name.
        counts: rows taken in turn from each part; None joins whole parts one after the other.

    Raises:
        ValueError: a part is missing, or the numbers of rows do not match.
    """
    ends = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    fused = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for name in tensors:
        root, _, kind = name.rpartition(f".{parts[0]}.")
        if root and kind in ("weight", "bias"):
            found = [tensors.get(f"{root}.{part}.{kind}") for part in parts]
            present = [tensor for tensor in found if tensor is not None]
            if len(present) < len(parts):
                raise ValueError(f"`{name}` is present without one of {', '.join(parts[1:])}")
            fused[f"{root}.{whole}.{kind}"] = interleave_rows(present, counts) if counts else concat(present, 0)
    return fused
