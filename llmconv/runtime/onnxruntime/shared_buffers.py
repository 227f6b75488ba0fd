"""Sessions whose inputs and outputs keep their memory from run to run, so that a step does not copy the past.

Such a graph declares the same length for past and present. With both bound to the same memory, its `TensorScatter` or
`GroupQueryAttention` nodes append new keys and values. Calls are adapted to the fixed sizes of a graph: the batch is
padded, and prompts run in pieces, the last of them padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.errors import InputRefused
from llmconv.runtime.extra_inputs import (
    BATCH,
    HIDDEN,
    INPUTS_EMBEDS,
    LOGITS_FROM,
    SEQUENCE,
    TOTAL,
    WRITE_INDICES,
    ExtraInput,
    ExtraValues,
    ModelCall,
    copied_rows,
    grown,
)
from llmconv.runtime.onnxruntime.session_settings import HOST, INPUT_DTYPES, TENSOR_DTYPES, Device, as_array, host_value
from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.runtime.runner import Cache, PlacedEmbeddings
from llmconv.tensors import Array


class BoundSession:
    """A session bound to memory of `device` that later runs reuse; `results` are outputs other than the cache."""

    def __init__(self, session: LimitedSession, results: Sequence[str], device: Device) -> None:
        self._session, self._results, self._binding = session, results, session.io_binding()
        self._device = device
        self._inputs: dict[str, Array] = {}
        self._cache: dict[str, ort.OrtValue] = {}
        self._factors: Mapping[str, ort.OrtValue] = {}
        self._bind_results()  # before the cache: outputs have the order of their binding

    def bind_cache(self, past: Sequence[str], present: Sequence[str], values: Sequence[ort.OrtValue]) -> None:
        """Binds every past input and its present output, given in the same order, to one value."""
        for past_name, present_name, value in zip(past, present, values, strict=True):
            self._cache[past_name] = value
            self._binding.bind_ortvalue_input(past_name, value)
            self._binding.bind_ortvalue_output(present_name, value)

    def bind_factors(self, factors: Mapping[str, ort.OrtValue]) -> None:
        """Binds LoRA factors by input name; they stay the same in all runs."""
        self._factors = factors
        for name, value in factors.items():
            self._binding.bind_ortvalue_input(name, value)

    def feed(self, name: str, array: Array, dtype: Any = None) -> None:
        """Sets an input as `dtype` (None: `input_dtype`); reuses the memory of the previous value of the same shape."""
        if (held := self._inputs.get(name)) is not None and held.shape == array.shape:
            held[...] = array
        else:
            self._inputs[name] = np.array(array, dtype=dtype or input_dtype(array), order="C")
            self._binding.bind_ortvalue_input(name, host_value(self._inputs[name]))

    def run(self) -> list[Array]:
        """Runs the session and returns the results, which later runs do not change."""
        if self._device.copies:
            # passes on what the host has changed; a cache that lies where its nodes read it is not copied
            for name, array in self._inputs.items():
                self._binding.bind_ortvalue_input(name, host_value(array))
            for name, value in self._cache.items():
                self._binding.bind_ortvalue_input(name, value)
        self._session.run_with_iobinding(self._binding, [array.shape for array in self._inputs.values()])
        values = self._binding.get_outputs_as_ortvaluevector()
        results = [as_array(ort.OrtValue(values[at])) for at in range(len(self._results))]
        self._bind_results()  # the next results may have other shapes
        return results

    def _bind_results(self) -> None:
        for name in self._results:
            self._binding.bind_output(name)


def as_input(array: Array, dtype: Any = None) -> ort.OrtValue:
    """A graph input: tokens, mask and positions as int64, embeddings unchanged; anything else with its `dtype`."""
    return host_value(np.ascontiguousarray(array, dtype=dtype or input_dtype(array)))


def input_dtype(array: Array) -> Any:
    """int64 for integers and booleans, else the dtype of the array."""
    return np.int64 if array.dtype.kind in "iub" else array.dtype


GARBAGE, GARBAGE_CODE = 1e4, 127
ROUNDING = 64
"""Buffer lengths are multiples of this, at least twice the length of the replaced buffer. They have room for one more
token: a decode graph counts one token too many for an empty cache."""

Embed = Callable[[Array, PlacedEmbeddings | None], dict[str, Array]]  # see `OrtGraph.embed`
DeclaredShapes = Mapping[str, Sequence[int | str]]


class CacheBuffers:
    """The memory of a batch's cache: copies of `arrays` [batch, kv_heads, capacity, head_dim]; `filled` tokens.

    `starts` [batch] are the numbers of leading tokens of each row that are in no slot: its others begin in slot 0;
    `before` has these tokens, [batch, kv_heads, at most the tokens, head_dim].
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        capacity: int,
        filled: int,
        starts: Array,
        before: Sequence[Array],
        device: Device | None = None,
    ) -> None:
        self._device = device or Device()
        self.values = [self._device.place(array) for array in arrays]
        self.capacity, self.filled, self.starts, self.before, self.runs = capacity, filled, starts, before, 0
        self._bound: dict[tuple[LimitedSession, int], BoundSession] = {}
        self._held: Sequence[Array] = ()  # memory of the values that is not their own

    @classmethod
    def over(cls, arrays: Sequence[Array]) -> CacheBuffers:
        """Buffers in the memory of contiguous arrays on the host."""
        made = cls([], arrays[0].shape[2], 0, np.zeros(len(arrays[0]), np.int64), [])
        made.values, made._held = [host_value(array) for array in arrays], arrays
        return made

    @property
    def is_on_host(self) -> bool:
        """Whether a node may read what the host has changed."""
        return self._device.memory == HOST and not self._device.copies

    def bound(
        self,
        session: LimitedSession,
        past: Sequence[str],
        results: Sequence[str],
        present: Sequence[str],
        factors: Mapping[str, ort.OrtValue],
    ) -> BoundSession:
        """The session with this cache bound to it; kept, because binding takes longer than the rest of a call.

        `results` are the names of the outputs other than the cache; `factors`, LoRA's by input name, must be one
        mapping per adapter, which the graph keeps.
        """
        key = session, id(factors)
        if key not in self._bound:
            self._bound[key] = BoundSession(session, results, self._device)
            self._bound[key].bind_cache(past, present, self.values)
            self._bound[key].bind_factors(factors)
        return self._bound[key]

    def arrays(self) -> list[Array]:
        """Numpy arrays of the full capacity."""
        return [as_array(value) for value in self.values]


@dataclass(frozen=True)
class BufferCache:
    """The first `length` tokens, padding included, of the first `rows` sequences; later calls do not change them."""

    names: Sequence[str]
    buffers: CacheBuffers
    rows: int
    length: int

    def arrays(self) -> dict[str, Array]:
        named = zip(self.names, self.buffers.arrays(), strict=True)
        arrays = {name: array[: self.rows, :, : self.length] for name, array in named}
        if not self.buffers.starts.any():
            return arrays
        starts = self.buffers.starts[: self.rows]
        arrays = {name: shifted(array, starts, axis=2) for name, array in arrays.items()}
        for array, before in zip(arrays.values(), self.buffers.before, strict=True):
            for row, start in enumerate(starts.tolist()):
                array[row, :, :start] = before[row, :, :start]
        return arrays

    def taken_back(self, length: int) -> BufferCache:
        """The first `length` tokens, after which later calls write in the same memory."""
        self.buffers.filled = length
        return replace(self, length=length)


@dataclass(frozen=True)
class FixedSizes:
    """Sizes of a graph with shared cache buffers; None for a dynamic axis."""

    rows: int | None  # batch size
    capacity: int | None  # length of the buffers in tokens
    tokens: int | None  # new tokens per call
    indexed: bool  # it has the input `write_indices`, and its mask covers the whole buffer
    single: bool = False  # several new tokens after a past require a batch of 1 (a limit of `GroupQueryAttention`)
    steps: bool = False  # `single` holds without a past, too

    @classmethod
    def of(
        cls, inputs: DeclaredShapes, outputs: DeclaredShapes, single: bool = False, steps: bool = False
    ) -> FixedSizes | None:
        """Reads the sizes from the declared shapes by name; None for a cache that grows."""
        past, present = inputs.get("past_key_values.0.key"), outputs.get("present.0.key")
        tokens = inputs.get("input_ids") or inputs.get(INPUTS_EMBEDS)
        if past is None or present is None or tokens is None or past[2] != present[2]:
            return None
        rows, capacity, new = (axis if isinstance(axis, int) else None for axis in (past[0], past[2], tokens[1]))
        return cls(rows, capacity, new, WRITE_INDICES in inputs, single, steps)

    def refusal(self, rows: int, past: int, new: int) -> str:
        """Why the sizes do not allow a call with this batch size, tokens in the cache and new tokens; else empty."""
        if self.rows is not None and rows > self.rows:
            return f"the graph has a batch size of {self.rows}, not {rows}"
        width = self.width(rows, past, new)
        needed = past + -(-new // width) * width
        if self.capacity is not None and needed > self.capacity:
            return f"the graph's cache has room for {self.capacity} tokens, not {needed}"
        return ""

    def width(self, rows: int, past: int, new: int) -> int:
        """New tokens per run; arguments as for `refusal`."""
        if self.tokens is not None:
            return self.tokens
        return 1 if self.single and rows > 1 and (past or self.steps) else new


class BufferedSession:
    """Runs a graph with shared cache buffers.

    `embed` returns the token input by name for `input_ids` and placed embeddings. With `garbage`, for verification,
    unwritten parts of the buffers contain large numbers, which reveals a graph that reads them; rows that begin with
    padding are written from different slots on, where the graph can; and if the graph's batch is larger, the results of
    a row are those of its copy that differs most.
    """

    def __init__(
        self,
        session: LimitedSession,
        sizes: FixedSizes,
        results: Sequence[str],
        embed: Embed,
        garbage: bool = False,
        device: Device | None = None,
        factors: Mapping[str, ort.OrtValue] | None = None,
        *,
        takes_start: bool = False,  # it has the optional input `logits_from`
    ) -> None:
        self._takes_start = takes_start
        self._factors = {} if factors is None else factors
        self._session, self.sizes, self._embed, self._fill = session, sizes, embed, GARBAGE if garbage else 0.0
        self._results, self._device = results, device
        self._shapes = {arg.name: arg.shape for arg in session.get_inputs()}
        self._dtypes = {arg.name: TENSOR_DTYPES.get(arg.type, np.float32) for arg in session.get_inputs()}
        self._inputs = {arg.name: INPUT_DTYPES.get(arg.type) for arg in session.get_inputs()}
        self._past = [name for name in self._shapes if name.startswith("past_key_values.")]
        declared = {arg.name: arg.shape for arg in session.get_outputs()}
        self._present = [name for name in declared if name.startswith("present.")]
        # a piece may be one token, so the declaration decides
        self._last_only = sizes.tokens != 1 and declared[results[0]][1] == 1

    def run(
        self, call: ModelCall, values: ExtraValues, past: Cache | None = None, placed: PlacedEmbeddings | None = None
    ) -> tuple[list[Array], Cache]:
        """Continues `past` (None: empty); an array per result, and the cache; InputRefused for wrong sizes."""
        rows, new = call.input_ids.shape
        filled = past.length if past else 0
        if reason := self.sizes.refusal(rows, filled, new):
            raise InputRefused(reason, hint="export again with a larger --batch-size or --max-seq-len")
        width = self.sizes.width(rows, filled, new)
        if width < new:
            values.require_whole(width)
        elif self.sizes.tokens is None and (rows == 1 or not self.sizes.single):
            width = call.width(values)  # a run of a fixed number of tokens would write its padding behind the buffer
        buffers = self._buffers(past, rows, filled + new, self._starts(call, past, values))
        pieces = []
        for start in range(0, new, width):
            at = slice(start, min(start + width, new))
            mask = call.attention_mask[:, : filled + at.stop]
            piece = ModelCall(call.input_ids[:, at], mask, call.position_ids[:, at], call.last_only)
            embedded = placed.columns(at.start, at.stop) if placed else None
            pieces.append(self._run(buffers, piece, values.of(piece, call, start), values.inputs, embedded))
            buffers.filled, buffers.runs = filled + at.stop, buffers.runs + 1
        results = joined(self._results, pieces, last=self._last_only or call.last_only)
        return results, BufferCache(self._present, buffers, rows, filled + new)

    def _starts(self, call: ModelCall, past: Cache | None, values: ExtraValues) -> Array:
        """Leading tokens of each row of the batch that are not written, see `garbage`; none in the first two runs."""
        rows, new = call.input_ids.shape
        batch = self.sizes.rows or rows
        early = past is None or (isinstance(past, BufferCache) and past.buffers.runs < 2)
        if early or not (self._fill and self.sizes.indexed) or values.inputs:
            return np.zeros(batch, np.int64)
        mask = call.attention_mask[:, : call.attention_mask.shape[1] - new]
        return copied_rows(np.where(mask.any(axis=1), mask.argmax(axis=1), 0), batch)

    def _buffers(self, past: Cache | None, rows: int, needed: int, starts: Array) -> CacheBuffers:
        """The buffers of the past if they end with it and have room; else larger ones with a copy of it."""
        least = needed + 1
        if isinstance(past, BufferCache):
            held, capacity = past.buffers, past.buffers.capacity
            fits = (
                needed <= capacity and self.sizes.capacity in (None, capacity) and np.array_equal(held.starts, starts)
            )
            if past.rows == rows and past.length == held.filled and fits:
                return held
            least = max(least, 2 * capacity)
        capacity = self.sizes.capacity or -(-least // ROUNDING) * ROUNDING
        content = list(past.arrays().values()) if past else []
        arrays = []
        for index, name in enumerate(self._past):
            _, heads, _, size = self._shapes[name]
            shape = self.sizes.rows or rows, int(heads), capacity, int(size)
            dtype = np.dtype(self._dtypes[name])
            array = np.full(shape, min(self._fill, GARBAGE_CODE) if dtype == np.int8 else self._fill, dtype=dtype)
            if content:
                stored = content[index].dtype
                if (stored == np.int8) is not (dtype == np.int8):  # only the graph of codes knows their scales
                    hint = "start without a past, or continue the cache of a graph of the same `--kv-cache`"
                    problem = f"`{name}` has the dtype {dtype}, and the cache to continue has {stored}"
                    raise InputRefused(problem, hint=hint)
                for row, start in enumerate(starts.tolist()):
                    written = content[index][row % rows, :, start:]
                    array[row, :, : written.shape[1]] = written
            arrays.append(array)
        before = [array[:, :, : starts.max()].copy() for array in content] if starts.any() else []
        return CacheBuffers(arrays, capacity, past.length if past else 0, starts, before, self._device)

    def _run(
        self,
        buffers: CacheBuffers,
        call: ModelCall,
        extras: Mapping[str, Array],
        inputs: Mapping[str, ExtraInput],
        placed: PlacedEmbeddings | None,
    ) -> list[Array]:
        """One run of the graph; results without padding."""
        rows, new = call.input_ids.shape
        batch, width = self.sizes.rows or rows, self.sizes.tokens or new
        total = buffers.capacity if self.sizes.indexed else call.attention_mask.shape[1]
        sizes = {BATCH: batch, SEQUENCE: width, TOTAL: total}
        feeds = {
            **self._embed(padded(call.input_ids, batch, width), placed),
            "attention_mask": shifted(padded(call.attention_mask, batch, total), -buffers.starts, axis=1),
            "position_ids": padded(call.position_ids, batch, width),
            **{name: grown(inputs[name], array, sizes) for name, array in extras.items()},
        }
        if self.sizes.indexed:
            feeds[WRITE_INDICES] = buffers.filled - buffers.starts
        if self._takes_start:  # in every call, since the memory of inputs keeps their values
            feeds[LOGITS_FROM] = np.array([-1 if call.last_only else 0])
        bound = buffers.bound(self._session, self._past, self._results, self._present, self._factors)
        for name, array in feeds.items():
            if name in self._shapes or name == LOGITS_FROM:
                bound.feed(name, array, self._inputs.get(name))
        results = bound.run()
        if self._fill and batch > rows:
            results = [_most_different(result, rows) for result in results]
        return [result[:rows, :new] for result in results]


def joined(names: Sequence[str], pieces: Sequence[Sequence[Array]], *, last: bool) -> list[Array]:
    """The results of a call that ran in pieces; with `last` the logits are those of the last one, without a copy."""
    return [
        parts[-1] if len(parts) == 1 or (last and name != HIDDEN) else np.concatenate(parts, axis=1)
        for name, parts in zip(names, zip(*pieces, strict=True), strict=True)
    ]


def padded(array: Array, rows: int, columns: int) -> Array:
    """`array` padded to [rows, columns]: columns with 0, rows with copies of all rows in turn."""
    if array.shape == (rows, columns):
        return array
    result = np.zeros((rows, columns), dtype=np.int64)
    result[:, : array.shape[1]] = copied_rows(array, rows)
    return result


def shifted(array: Array, by: Array, axis: int) -> Array:
    """The array with row i moved by `by[i]` places along `axis`; what moves in is 0."""
    if not by.any():
        return array
    result = np.zeros_like(array)
    for row, places in enumerate(by.tolist()):
        length = array.shape[axis] - abs(places)
        target, source = (np.moveaxis(one[row], axis - 1, 0) for one in (result, array))
        target[max(places, 0) :][:length] = source[max(-places, 0) :][:length]
    return result


def _most_different(result: Array, rows: int) -> Array:
    """For each of the first `rows` the row among its copies, every `rows` further on, that differs most from it."""
    found = result[:rows].copy()
    for row in range(rows):
        copies = result[row::rows]
        distances = np.abs(copies.astype(np.float64) - copies[0]).reshape(len(copies), -1).max(axis=1)
        found[row] = copies[int(np.argmax(np.where(np.isnan(distances), np.inf, distances)))]
    return found
