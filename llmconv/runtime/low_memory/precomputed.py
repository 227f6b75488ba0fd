"""Foreseen: a runner whose calls are made before they are asked for, many at once, and kept in a file until then."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir, mkstemp
from typing import Any, Protocol
from weakref import finalize

import numpy as np

from llmconv.errors import LlmconvError, OutputFailed, UnsupportedInput, first_line
from llmconv.files.safetensors_file import read_exactly
from llmconv.runtime.low_memory.planned_calls import PlannedCall
from llmconv.runtime.runner import Cache, Choices, Runner, Step
from llmconv.tensors import Array

ROWS = 2048
"""Tokens, past ones counted with every call, that are run at once: what they leave is held in memory meanwhile."""


class Given(Protocol):
    """A call that will be asked for; see `Runner.prefill`."""

    @property
    def input_ids(self) -> Array: ...

    @property
    def attention_mask(self) -> Array: ...

    @property
    def position_ids(self) -> Array: ...


class Drawer:
    """A temporary file of arrays, without a name; it is gone with the drawer."""

    def __init__(self) -> None:
        self._fd, name = mkstemp(prefix="llmconv-")
        os.unlink(name)
        self._end = 0
        finalize(self, os.close, self._fd)

    def put(self, array: Array) -> Drawn:
        """Writes an array behind the others.

        Raises:
            OutputFailed: the disk is full.
        """
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        drawn = Drawn(self, self._end, array.shape, array.dtype)
        try:
            while content:
                count = os.pwrite(self._fd, content, self._end)
                content, self._end = content[count:], self._end + count
        except OSError as error:
            raise OutputFailed(
                f"results cannot be kept in `{gettempdir()}`: {first_line(error)}",
                hint="set TMPDIR to a folder with more room",
            ) from error
        return drawn

    def get(self, drawn: Drawn) -> Array:
        """Reads one."""
        array: Array = np.empty(drawn.shape, drawn.dtype)
        read_exactly(self._fd, array.reshape(-1).view(np.uint8).data, drawn.offset, Path(gettempdir()))
        return array


@dataclass(frozen=True)
class Drawn:
    """An array in a drawer."""

    drawer: Drawer
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self) -> Array:
        """The array."""
        return self.drawer.get(self)


@dataclass(frozen=True)
class KnownCache:
    """The cache after calls that were foreseen.

    Attributes:
        key: of the calls that led to it.
        length: tokens in it, padding included.
    """

    key: bytes
    length: int
    drawn: Mapping[str, Drawn]

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`."""
        return {name: drawn.read() for name, drawn in self.drawn.items()}


@dataclass(frozen=True)
class _Kept:
    logits: Drawn
    present: KnownCache
    choices: Choices | None

    def step(self) -> Step:
        return Step(self.logits.read(), self.present, self.choices)


Line = tuple[KnownCache | None, Sequence[Given]]
"""Calls that continue each other, and the cache that the first one continues."""


class Foreseen(Runner):
    """A runner that knows its calls.

    Args:
        name: of what runs; keys of two of them differ.
        run_all: makes calls; each comes after the one that it continues.
        drawer: where results are kept.
    """

    def __init__(self, name: str, run_all: Callable[[Sequence[PlannedCall]], list[Step]], drawer: Drawer) -> None:
        self._name, self._run_all, self._drawer = name, run_all, drawer
        self._kept: dict[bytes, _Kept | LlmconvError] = {}

    def foresee(self, lines: Sequence[Line]) -> None:
        """Makes the calls of all lines; an error is raised when the call is asked for.

        Raises:
            UnsupportedInput: what runs the calls cannot do so at all.
        """
        batch: list[Line] = []
        rows = 0
        for line in lines:
            more = sum(call.attention_mask.size for call in line[1])
            if batch and rows + more > ROWS:
                self._run(batch)
                batch, rows = [], 0
            batch, rows = [*batch, line], rows + more
        self._run(batch)

    def _run(self, lines: Sequence[Line]) -> None:
        planned: dict[bytes, PlannedCall] = {}
        for past, calls in lines:
            key, before = past.key if past else b"", past
            for call in calls:
                parent = list(planned).index(key) if key in planned else None
                key = self._key(key, call)
                if key in self._kept:
                    kept = self._kept[key]
                    before = kept.present if isinstance(kept, _Kept) else before
                elif key not in planned:
                    given = None if parent is not None else before
                    ids, mask, positions = call.input_ids, call.attention_mask, call.position_ids
                    planned[key] = PlannedCall(ids, mask, positions, given, parent)
        try:
            steps = self._run_all(list(planned.values())) if planned else []
        except UnsupportedInput:
            raise
        except LlmconvError as error:
            self._kept |= dict.fromkeys(planned, error)
            return
        for key, step in zip(planned, steps, strict=True):
            self._kept[key] = self._keep(key, step)

    def _keep(self, key: bytes, step: Step) -> _Kept:
        drawn = {name: self._drawer.put(array) for name, array in step.present.arrays().items()}
        return _Kept(self._drawer.put(step.logits), KnownCache(key, step.present.length, drawn), step.choices)

    def _key(self, past: bytes, call: Given) -> bytes:
        content = hashlib.sha256(past + self._name.encode())
        for array in (call.input_ids, call.attention_mask, call.position_ids):
            content.update(f"{array.shape}".encode() + array.astype(np.int64).tobytes())
        return content.digest()

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `Runner.prefill`; what was not foreseen is run now.

        Raises:
            LlmconvError: that the call ended with.
        """
        call = PlannedCall(input_ids, attention_mask, position_ids)
        known = past if isinstance(past, KnownCache) else None
        if past is not None and known is None:
            return self._run_all([replace(call, past=past)])[0]
        key = self._key(known.key if known else b"", call)
        if key not in self._kept:
            self._run([(known, [call])])
        kept = self._kept[key]
        if isinstance(kept, LlmconvError):
            raise kept
        return kept.step()

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `run`."""
        return self.run(input_ids, attention_mask, position_ids, past)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `run`."""
        return self.run(input_ids, attention_mask, position_ids, past)
