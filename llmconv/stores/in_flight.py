"""Calls of stores that have not returned: Python raises nothing in them, so a signal could wait for minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_began: dict[object, float] = {}
"""When each began, by `time.monotonic`; the calls of all threads."""


@contextmanager
def call() -> Iterator[None]:
    """The body is a call of a store."""
    mark = object()
    _began[mark] = time.monotonic()
    try:
        yield
    finally:
        del _began[mark]


def is_hanging(since: float, seconds: float) -> bool:
    """Whether a call has not returned for some time.

    Args:
        since: only the time after this moment of `time.monotonic` counts.
        seconds: how long.
    """
    now = time.monotonic()
    return any(now - max(began, since) > seconds for began in [*_began.values()])
