"""Graphs whose cache lies in buffers of fixed length, which they fill in place: a step copies no past.

Such a graph declares the same length for past and present. BoundSession to the same memory, its `TensorScatter` or
`GroupQueryAttention` nodes write new keys and values behind those that are there. What the sizes of a graph leave no
room for, the caller gets all the same: rows are added, prompts are cut into pieces and the last piece is filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from llmconv.errors import InputRefused
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.io_binding import BoundSession
from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array

WRITE_INDICES = "write_indices"
"""The input that tells where a graph writes its new tokens, int64 [batch]; the name that `TensorScatter` gives it."""

MAX_LENGTH = "max_sequence_length"
"""The symbol of a shared buffer's length: its owner chooses it, and both past and present have it."""

GARBAGE = 1e4
ROUNDING = 64
"""Shared buffers have a multiple of so many slots, at least twice as many as those they replace, and one is free: a
graph for steps counts one token too many where nothing is cached."""

DeclaredShapes = Mapping[str, Sequence[int | str]]


class CacheBuffers:
    """The memory of one growing sequence.

    Attributes:
        values: key and value of layer 0, of layer 1, …, each [rows, kv_heads, slots, head_dim].
        filled: slots that the latest call left filled.
        slots: tokens that there is room for.
    """

    def __init__(self, arrays: Sequence[Array], filled: int = 0) -> None:
        self.values = [ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C")) for array in arrays]
        self.filled = filled
        self.slots = int(self.values[0].shape()[2])
        self._bound: dict[LimitedSession, BoundSession] = {}

    def bound(
        self, session: LimitedSession, past: Sequence[str], results: Sequence[str], present: Sequence[str]
    ) -> BoundSession:
        """A session whose cache they are, bound once: to name every key and value takes longer than the rest."""
        if session not in self._bound:
            self._bound[session] = BoundSession(session, results)
            self._bound[session].bind_cache(past, present, self.values)
        return self._bound[session]

    def arrays(self) -> list[Array]:
        """As numpy arrays, every slot."""
        return [value.numpy() for value in self.values]


@dataclass(frozen=True)
class BufferCache:
    """The first `length` slots of the first `rows` rows of buffers; later calls leave them as they are.

    Attributes:
        names: of the graph's outputs.
    """

    names: Sequence[str]
    buffers: CacheBuffers
    rows: int
    length: int

    def arrays(self) -> dict[str, Array]:
        """By name, see `Cache.arrays`."""
        named = zip(self.names, self.buffers.arrays(), strict=True)
        return {name: array[: self.rows, :, : self.length] for name, array in named}


@dataclass(frozen=True)
class FixedSizes:
    """What a graph with buffers leaves open; None for an axis of any size.

    Attributes:
        rows: sequences of every call.
        slots: tokens that the buffers hold.
        tokens: new tokens of every call.
        indexed: the graph is told where to write, and its mask covers every slot.
        single: several new tokens after a past are for one row only (a limit of `GroupQueryAttention`).
        steps: so they are without a past.
    """

    rows: int | None
    slots: int | None
    tokens: int | None
    indexed: bool
    single: bool = False
    steps: bool = False

    @classmethod
    def of(
        cls, inputs: DeclaredShapes, outputs: DeclaredShapes, single: bool = False, steps: bool = False
    ) -> FixedSizes | None:
        """As the graph's inputs and outputs say; None for a cache that grows."""
        past, present = inputs.get("past_key_values.0.key"), outputs.get("present.0.key")
        tokens = inputs.get("input_ids") or inputs.get(INPUTS_EMBEDS)
        if past is None or present is None or tokens is None or past[2] != present[2]:
            return None
        axes = past[0], past[2], tokens[1]
        rows, slots, new = (axis if isinstance(axis, int) else None for axis in axes)
        return cls(rows, slots, new, WRITE_INDICES in inputs, single, steps)

    def refusal(self, rows: int, past: int, new: int) -> str:
        """Why a call cannot be run; empty when it can.

        Args:
            rows: sequences of the call.
            past: tokens in the cache.
            new: tokens to come.
        """
        if self.rows is not None and rows > self.rows:
            return f"the graph takes {self.rows} sequences at once, not {rows}"
        width = self.width(rows, past, new)
        needed = past + -(-new // width) * width
        if self.slots is not None and needed > self.slots:
            return f"the graph's cache holds {self.slots} tokens, not {needed}"
        return ""

    def width(self, rows: int, past: int, new: int) -> int:
        """New tokens of one run."""
        if self.tokens is not None:
            return self.tokens
        return 1 if self.single and rows > 1 and (past or self.steps) else new


class BufferedSession:
    """Runs a graph over buffers that it fills in place.

    Args:
        session: onnxruntime's.
        sizes: of the graph.
        results: names of the outputs before the cache.
        embed: what the graph takes in the place of `input_ids`, by name.
        garbage: slots that were never written hold large numbers, so that a graph that reads them shows.
    """

    def __init__(
        self,
        session: LimitedSession,
        sizes: FixedSizes,
        results: Sequence[str],
        embed: Callable[[Array], dict[str, Array]],
        garbage: bool = False,
    ) -> None:
        self._session, self.sizes, self._embed, self._fill = session, sizes, embed, GARBAGE if garbage else 0.0
        self._results = results
        self._ports = {port.name: port.shape for port in session.get_inputs()}
        self._past = [name for name in self._ports if name.startswith("past_key_values.")]
        self._present = [port.name for port in session.get_outputs() if port.name.startswith("present.")]

    def run(
        self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None
    ) -> tuple[list[Array], Cache]:
        """Continues `past` by `input_ids`, arguments as in `Runner.prefill`; gives the results and the cache.

        Raises:
            InputRefused: the graph has no room for the call.
        """
        rows, new = input_ids.shape
        filled = past.length if past else 0
        reason = self.sizes.refusal(rows, filled, new)
        if reason:
            raise InputRefused(reason, hint="export again with a larger --batch-size or --max-seq-len")
        buffers = self._buffers(past, rows, filled + new)
        pieces = []
        width = self.sizes.width(rows, filled, new)
        for start in range(0, new, width):
            piece = slice(start, min(start + width, new))
            mask = attention_mask[:, : filled + piece.stop]
            pieces.append(self._run(buffers, input_ids[:, piece], mask, position_ids[:, piece]))
            buffers.filled = filled + piece.stop
        last_only = pieces[-1][0].shape[1] < min(width, new - (len(pieces) - 1) * width)
        is_whole = last_only or len(pieces) == 1  # the logits of a long prompt are not copied once more
        results = pieces[-1] if is_whole else [np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True)]
        return results, BufferCache(self._present, buffers, rows, filled + new)

    def _buffers(self, past: Cache | None, rows: int, needed: int) -> CacheBuffers:
        """The past's own buffers where they end with it and have room, else larger ones with its content."""
        if isinstance(past, BufferCache) and past.rows == rows and self._continues(past, needed):
            return past.buffers
        slots = self.sizes.slots or self._more(past, needed)
        content = list(past.arrays().values()) if past else []
        arrays = []
        for index, name in enumerate(self._past):
            _, heads, _, size = self._ports[name]
            array = np.full((self.sizes.rows or rows, int(heads), slots, int(size)), self._fill, dtype=np.float32)
            if content:
                array[:rows, :, : content[index].shape[2]] = content[index]
                array[rows:] = array[:1]
            arrays.append(array)
        return CacheBuffers(arrays, past.length if past else 0)

    def _continues(self, past: BufferCache, needed: int) -> bool:
        """Whether the graph can go on in the past's own memory."""
        is_end, slots = past.length == past.buffers.filled, past.buffers.slots
        return is_end and needed <= slots and self.sizes.slots in (None, slots)

    def _more(self, past: Cache | None, needed: int) -> int:
        slots = 2 * past.buffers.slots if isinstance(past, BufferCache) else 0
        return -(-max(needed + 1, slots) // ROUNDING) * ROUNDING

    def _run(self, buffers: CacheBuffers, input_ids: Array, attention_mask: Array, position_ids: Array) -> list[Array]:
        """One run of the graph; results without what was filled up."""
        rows, new = input_ids.shape
        batch, width = self.sizes.rows or rows, self.sizes.tokens or new
        total = buffers.slots if self.sizes.indexed else attention_mask.shape[1]
        feeds = {
            **self._embed(filled_up(input_ids, batch, width)),
            "attention_mask": filled_up(attention_mask, batch, total),
            "position_ids": filled_up(position_ids, batch, width),
        }
        if self.sizes.indexed:
            feeds[WRITE_INDICES] = np.full(batch, buffers.filled)
        bound = buffers.bound(self._session, self._past, self._results, self._present)
        for name, array in feeds.items():
            if name in self._ports:
                bound.feed(name, array)
        return [result[:rows, :new] for result in bound.run()]


def filled_up(array: Array, rows: int, columns: int) -> Array:
    """`array` in the corner of one of [rows, columns]: more columns are 0, more rows are like the first."""
    if array.shape == (rows, columns):
        return array
    result = np.zeros((rows, columns), dtype=np.int64)
    result[: array.shape[0], : array.shape[1]] = array
    result[array.shape[0] :] = result[:1]
    return result
