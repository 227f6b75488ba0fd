"""Finds wrong positions: rotary frequencies, ALiBi slopes, position ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.bisect.findings.suspect import Finding, Suspect, difference

CLOSE = 1e-6
FEW = 4
"""Number of positions in a text."""


def rotary_table(suspect: Suspect) -> Finding | None:
    """Constants that differ from a rotary module's frequencies."""
    tables = {
        name.rpartition(".")[0]: buffer.detach().double().numpy().ravel()
        for name, buffer in suspect.replay.model.named_buffers()
        if name.rpartition(".")[2].endswith("inv_freq") and "original" not in name
    }
    for node in suspect.nodes:
        for name in node.input:
            found = suspect.constant(name)
            near = [table for table in tables.values() if found is not None and table.size == found.size > 1]
            if found is not None and near and not any(_same(found, table) for table in near):
                return Finding(_table_text(found.ravel().astype(np.float64), near[0]), node)
    return None


def _same(found: Array, table: Array) -> bool:
    return bool(np.allclose(found.ravel(), table, rtol=CLOSE, atol=0))


def _table_text(found: Array, wanted: Array) -> str:
    for name, dtype in (("float16", np.float16), ("bfloat16", None)):
        if np.array_equal(found, _through(wanted, dtype)):
            return f"rotary frequencies rounded to {name} in the graph"
    bases = [_base(table) for table in (found, wanted)]
    if bases[0] and bases[1]:
        return f"rotary base {bases[0]:.6g} in the graph, {bases[1]:.6g} in the model"
    at = int(np.argmax(np.abs(found / wanted - 1)))
    return f"rotary frequency {at} is {found[at]:.6g} in the graph, {wanted[at]:.6g} in the model"


def _through(table: Array, dtype: Any) -> Array:
    narrow = table.astype(np.float32)
    if dtype is not None:
        return narrow.astype(dtype).astype(np.float64)
    return (narrow.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _base(table: Array) -> float | None:
    """The base of frequencies base^(-2i/d); None if they have another form."""
    if table.size < 3 or (table <= 0).any():
        return None
    exponents = np.arange(table.size) / table.size
    base = float(np.exp(-np.log(table[1:]) @ exponents[1:] / (exponents[1:] @ exponents[1:])))
    return base if np.allclose(table, base**-exponents, rtol=1e-4) else None


def alibi_slopes(suspect: Suspect) -> Finding | None:
    """Constants that differ from the ALiBi slopes, one for each head."""
    heads = getattr(suspect.config, "num_attention_heads", None) or getattr(suspect.config, "n_head", 0)
    for node in suspect.nodes:
        for name in node.input if node.op_type == "Mul" else ():
            found = suspect.constant(name)
            if found is None or found.size != heads or found.dtype.kind != "f":
                continue
            wanted = [r.exact.ravel() for r in suspect.trace.by_place[suspect.scope(node), heads] if r.exact.ndim <= 2]
            wanted = [table for table in wanted if table.dtype.kind == "f" and table[0] > table[-1]]
            if wanted and not any(np.allclose(found.ravel(), table, rtol=CLOSE) for table in wanted):
                near = min(wanted, key=lambda table: float(np.abs(found.ravel() - table).sum()))
                at = int(np.argmax(np.abs(found.ravel() / near - 1)))
                return Finding(difference(f"ALiBi slope of head {at}", found.ravel()[at], near[at]), node)
    return None


def positions(suspect: Suspect) -> Finding | None:
    """Integers for each token that are not the call's positions."""
    wanted = suspect.replay.call.position_ids
    given = suspect.replay.feeds.get("position_ids", wanted)
    for node in suspect.nodes:
        reads = {"position_ids"} & set(node.input) or any(
            value is not None and value.dtype.kind == "i" and value.size == wanted.size
            for value in (suspect.trace.values.get(name) for name in node.input)
        )
        found = suspect.trace.values.get(node.output[0])
        if not reads or found is None or found.dtype.kind != "i" or found.size != wanted.size:
            continue
        numbers = found.reshape(wanted.shape)
        if not np.array_equal(numbers, given):
            row, first = (int(axis[0]) for axis in np.nonzero(numbers != given))
            few = [", ".join(map(str, table[row, first : first + FEW].tolist())) for table in (numbers, given)]
            text = f"positions {few[0]} in the graph, {few[1]} in the model, from token {first} of sequence {row}"
            return Finding(text, node)
    return None
