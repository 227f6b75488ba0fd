"""Phrases for `inspect` about the parts of a checkpoint that do not belong to the model."""

from __future__ import annotations

from collections.abc import Mapping

LISTED = 8
"""Number of parts that are listed, the largest first; the rest is counted."""

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def phrases(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """One phrase for each of the largest parts, with its size, and one with the number of smaller parts.

    `sizes` are in bytes; 0 if a part has no tensors.
    """
    large = sorted(sizes, key=lambda name: -sizes[name])
    more = (f"{len(large) - LISTED} smaller parts",) if len(large) > LISTED else ()
    return tuple(f"{name} ({size_text(sizes[name])})" if sizes[name] else name for name in large[:LISTED]) + more


def size_text(count: int) -> str:
    """A readable size, such as `536 kB`."""
    unit = min(len(UNITS) - 1, (len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.3g} {UNITS[unit]}"
