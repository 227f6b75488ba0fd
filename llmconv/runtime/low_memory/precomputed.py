"""PrecomputedRunner: runs many planned calls together and keeps their results in a temporary file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir, mkstemp
from typing import Any, Protocol, runtime_checkable
from weakref import finalize

import numpy as np

from llmconv.errors import LlmconvError, OutputFailed, UnsupportedInput, first_line
from llmconv.files.safetensors_file import read_exactly
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Cache, Choices, Extras, Runner, Step, refuse_placed
from llmconv.tensors import Array

MAX_TOKENS = 2048
"""Maximum number of tokens, past ones included, of the calls that run together; their results are held in memory."""


class RunnerCall(Protocol):
    """The arguments of `Runner.prefill` without the past."""

    @property
    def input_ids(self) -> Array: ...

    @property
    def attention_mask(self) -> Array: ...

    @property
    def position_ids(self) -> Array: ...

    @property
    def extras(self) -> Extras | None: ...


class SpillFile:
    """An unlinked temporary file of arrays, which is freed with this object."""

    def __init__(self) -> None:
        self._fd, name = mkstemp(prefix="llmconv-")
        os.unlink(name)
        self._end = 0
        finalize(self, os.close, self._fd)

    def put(self, array: Array) -> SpilledArray:
        """Appends an array; raises OutputFailed if the disk is full."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        spilled = SpilledArray(self, self._end, array.shape, array.dtype)
        try:
            while content:
                count = os.pwrite(self._fd, content, self._end)
                content, self._end = content[count:], self._end + count
        except OSError as error:
            raise OutputFailed(
                f"cannot write results to `{gettempdir()}`: {first_line(error)}",
                hint="set TMPDIR to a folder with more room",
            ) from error
        return spilled

    def get(self, spilled: SpilledArray) -> Array:
        """Reads an array."""
        array: Array = np.empty(spilled.shape, spilled.dtype)
        read_exactly(self._fd, array.reshape(-1).view(np.uint8).data, spilled.offset, Path(gettempdir()))
        return array


@dataclass(frozen=True)
class SpilledArray:
    """An array in a `SpillFile`: its byte offset, shape and dtype."""

    file: SpillFile
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self) -> Array:
        """The array, read from the file."""
        return self.file.get(self)


@runtime_checkable
class KeyedCache(Cache, Protocol):
    """A cache that a key describes completely: equal keys, equal content."""

    @property
    def key(self) -> bytes:
        """Digest of how it came about."""


@dataclass(frozen=True)
class SpilledCache:
    """The cache after precomputed calls, kept in a file; `length` counts tokens, padding included.

    `key` is the hash of the calls and edits that produced it; `spilled` are the arrays by name.
    """

    key: bytes
    length: int
    spilled: Mapping[str, SpilledArray]

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`."""
        return {name: array.read() for name, array in self.spilled.items()}

    def edited(self, edit: ArrayEdit, mask: Array) -> EditedSpilledCache:
        """The cache with an edit; `mask` [batch, tokens] is that of the remaining tokens."""
        return EditedSpilledCache(self, edit, mask)


class ArrayEdit(Protocol):
    """A change of a cache; its text describes it completely."""

    @property
    def drop(self) -> int:
        """Number of tokens that it removes."""

    def of_array(self, name: str, array: Array, mask: Array) -> Array:
        """One changed array of a cache, given the mask of the remaining tokens."""


@dataclass(frozen=True)
class EditedSpilledCache:
    """A cache in a file with an edit made when it is read; `mask` [batch, tokens] is of the remaining tokens."""

    cache: SpilledCache
    edit: ArrayEdit
    mask: Array

    @property
    def key(self) -> bytes:
        """Digest of the cache, the edit and the mask."""
        content = hashlib.sha256(self.cache.key + f"{self.edit!r} {self.mask.shape}".encode())
        content.update(self.mask.tobytes())
        return content.digest()

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        return self.cache.length - self.edit.drop

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`."""
        return {name: self.edit.of_array(name, array, self.mask) for name, array in self.cache.arrays().items()}


@dataclass(frozen=True)
class _Kept:
    logits: SpilledArray
    present: SpilledCache
    choices: Choices | None

    def step(self) -> Step:
        return Step(self.logits.read(), self.present, self.choices)


CallChain = tuple[KeyedCache | None, Sequence[RunnerCall]]
"""The past of the first call, and calls that each continue the previous one."""


class PrecomputedRunner(Runner):
    """A runner that computes planned calls in advance.

    Args:
        name: of the model or graph; part of the keys of its calls.
        run_all: runs calls, each of which comes after the call that it continues.
        limit: maximum number of tokens, past ones included, of the calls that run together.
    """

    def __init__(
        self,
        name: str,
        run_all: Callable[[Sequence[PlannedCall]], list[Step]],
        file: SpillFile,
        limit: int = MAX_TOKENS,
    ) -> None:
        self._name, self._run_all, self._file, self._limit = name, run_all, file, limit
        self._kept: dict[bytes, _Kept | LlmconvError] = {}

    def precompute(self, chains: Sequence[CallChain]) -> None:
        """Runs the calls of all chains; raises UnsupportedInput if they cannot run together.

        An error of a call is raised when its result is requested.
        """
        batch: list[CallChain] = []
        tokens = 0
        for chain in chains:
            more = sum(call.attention_mask.size for call in chain[1])
            if batch and tokens + more > self._limit:
                self._run(batch)
                batch, tokens = [], 0
            batch, tokens = [*batch, chain], tokens + more
        self._run(batch)

    def _run(self, chains: Sequence[CallChain]) -> None:
        planned: dict[bytes, PlannedCall] = {}
        for past, calls in chains:
            key: bytes = past.key if past else b""
            before: KeyedCache | None = past
            for call in calls:
                parent = list(planned).index(key) if key in planned else None
                key = self._key(key, call)
                if key in self._kept:
                    kept = self._kept[key]
                    before = kept.present if isinstance(kept, _Kept) else before
                elif key not in planned:
                    given = None if parent is not None else before
                    ids, mask, positions = call.input_ids, call.attention_mask, call.position_ids
                    planned[key] = PlannedCall(ids, mask, positions, given, parent, call.extras or {})
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
        spilled = {name: self._file.put(array) for name, array in step.present.arrays().items()}
        return _Kept(self._file.put(step.logits), SpilledCache(key, step.present.length, spilled), step.choices)

    def _key(self, past: bytes, call: RunnerCall) -> bytes:
        content = hashlib.sha256(past + self._name.encode())
        for array in (call.input_ids, call.attention_mask, call.position_ids):
            content.update(f"{array.shape}".encode() + array.astype(np.int64).tobytes())
        for name, array in sorted((call.extras or {}).items()):
            content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return content.digest()

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """As `Runner.prefill`; a call that was not precomputed runs now. Raises the LlmconvError of the call."""
        refuse_placed(placed)
        call = PlannedCall(input_ids, attention_mask, position_ids, extras=extras or {})
        if past is not None and not isinstance(past, KeyedCache):
            return self._run_all([replace(call, past=past)])[0]
        return self._kept_call(past, call).step()

    def present(self, past: KeyedCache | None, call: RunnerCall) -> SpilledCache:
        """The cache after a call; raises the LlmconvError of the call."""
        return self._kept_call(past, call).present

    def _kept_call(self, past: KeyedCache | None, call: RunnerCall) -> _Kept:
        key = self._key(past.key if past else b"", call)
        if key not in self._kept:
            self._run([(past, [call])])
        kept = self._kept[key]
        if isinstance(kept, LlmconvError):
            raise kept
        return kept


@dataclass(frozen=True)
class PlannedCall:
    """One of several calls of a runner; arguments as in `Runner.prefill`.

    Attributes:
        past: the cache to continue, if it exists already.
        parent: index of the earlier call whose cache this call continues; None if it continues `past`.
        extras: values of extra inputs that do not have their defaults.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    past: Cache | None = None
    parent: int | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)

    @property
    def tokens(self) -> ModelCall:
        """The tokens of the call."""
        return ModelCall(self.input_ids, self.attention_mask, self.position_ids)

    @property
    def past_length(self) -> int:
        """Number of tokens before this call, padding included."""
        return int(self.attention_mask.shape[1] - self.input_ids.shape[1])
