"""Compares the scales of a cache of codes with the range of the eager model's keys and values on a text.

A scale is 1.1 * the largest magnitude of its channel on the text / 127. Channels of keys that a rotary embedding
mixes share the largest magnitude of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmconv.runtime.cache_names import past_of
from llmconv.runtime.runner import Runner, default_positions
from llmconv.tensors import Array
from llmconv.verify.results.report import Check

NAME = "cache scales"
"""Name of the checks in reports."""

RANGE = 127.0 / 1.1
"""Steps of the largest magnitude."""
TOLERANCE = 1e-3
"""Largest relative difference of a range, of which rounding noise is a hundredth."""
SHIFT, SHIFTED = 7, 64
"""Positions by which, and tokens of which a text is moved, to see which keys depend on positions."""


def ranges(model: Runner, texts: Sequence[Array]) -> dict[str, Array]:
    """The largest magnitude of every channel on texts, [kv_heads, head_dim] by name of the cache input.

    Args:
        model: the eager model.
        texts: token ids int64 [1, tokens].
    """
    found: dict[str, Array] = {}
    for text in texts:
        for name, array in _cache(model, text, 0).items():
            largest = np.abs(array).max(axis=(0, 2))
            found[name] = np.maximum(found[name], largest) if name in found else largest
    return found


def rotated(model: Runner, text: Array) -> set[str]:
    """Names of the cache inputs of keys that change if all positions are moved, by the same number.

    Args:
        model: the eager model, whose hidden states depend on differences of positions alone.
        text: token ids int64 [1, tokens].
    """
    here, there = (_cache(model, text[:, :SHIFTED], shift) for shift in (0, SHIFT))
    moved = {name for name in here if np.abs(here[name] - there[name]).max() > 0.01 * np.abs(here[name]).max()}
    return {name for name in moved if name.endswith(".key")}


def _cache(model: Runner, text: Array, shift: int) -> dict[str, Array]:
    mask = np.ones_like(text)
    step = model.prefill(text, mask, default_positions(mask, text.shape[1]) + shift)
    return {past_of(name): array for name, array in step.present.arrays().items()}


def check_scales(graph: str, scales: Mapping[str, Array], wanted: Mapping[str, Array], turned: set[str]) -> list[Check]:
    """One check of all scales of a graph.

    Args:
        graph: its name.
        scales: float32 [1, kv_heads, 1, head_dim], by name of the cache input.
        wanted: ranges by name of the cache input.
        turned: names of the cache inputs whose channels are rotated.
    """
    wrong = [name for name in wanted if not _fits(name, scales.get(name), wanted[name], rotates=name in turned)]
    wrong += sorted(scales.keys() - wanted.keys())
    if wrong:
        detail = f"`{wrong[0]}`: a scale is not 1.1 * the range of its channel on the text / 127"
        return [
            Check(NAME, graph, wrong[0], verdict="fail", detail=f"{len(wrong)} of {len(wanted)} wrong, first {detail}")
        ]
    return [Check(NAME, graph, "", detail=f"{len(wanted)} ranges as on the text")]


def _fits(name: str, scale: Array | None, wanted: Array, *, rotates: bool) -> bool:
    if scale is None or scale.shape != (1, wanted.shape[0], 1, wanted.shape[1]):
        return False
    found = scale[0, :, 0].astype(np.float64) * RANGE
    forms = [] if rotates else [wanted]
    forms += _shared(wanted) if name.endswith(".key") else []
    return any(bool((np.abs(found - form) <= TOLERANCE * form + (form == 0)).all()) for form in forms)


def _shared(wanted: Array) -> list[Array]:
    """Ranges of which both halves of a head, both of neighbors, or all channels of a head share the largest."""
    heads, size = wanted.shape
    whole = np.repeat(wanted.max(axis=1, keepdims=True), size, axis=1)
    if size % 2:
        return [whole]
    halves = np.tile(wanted.reshape(heads, 2, size // 2).max(axis=1), (1, 2))
    neighbors = np.repeat(wanted.reshape(heads, size // 2, 2).max(axis=2), 2, axis=1)
    return [halves, neighbors, whole]
