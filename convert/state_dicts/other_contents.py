"""What a checkpoint holds that is not part of the model, in a few phrases for `inspect`."""

from __future__ import annotations

from collections.abc import Mapping

LISTED = 8
"""Parts that are named, the largest first, before the rest is counted."""

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def phrases(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The largest of some parts with their bytes, one phrase each, and how many more there are.

    Args:
        sizes: what the parts are, and the bytes of their tensors; 0 where they have none.
    """
    large = sorted(sizes, key=lambda name: -sizes[name])
    more = (f"{len(large) - LISTED} smaller parts",) if len(large) > LISTED else ()
    return tuple(f"{name} ({size_text(sizes[name])})" if sizes[name] else name for name in large[:LISTED]) + more


def size_text(count: int) -> str:
    """Bytes for people, such as `536 kB`."""
    unit = min(len(UNITS) - 1, (len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.3g} {UNITS[unit]}"
