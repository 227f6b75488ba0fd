"""HeldCaches: the caches that a stage keeps for one client, and the runs that continue them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from llmconv.errors import InputRefused
from llmconv.runtime.array_cache import EDITS, CacheEdit, can_be_cut
from llmconv.runtime.onnxruntime.device import TENSOR_DTYPES
from llmconv.runtime.runner import Cache
from llmconv.runtime.stages.local_stage import LocalStage, StageGraph, StageStep, is_cuttable
from llmconv.runtime.stages.message import DTYPES, BadMessage, Message, as_number
from llmconv.tensors import Array

MAX_CACHES = 1024
"""Caches of one client."""
MAX_EDITS, MAX_ROWS = 64, 1 << 16
MAX_LENGTH = 1 << 40


class HeldCaches:
    """The caches of one client by their numbers.

    Args:
        stage: continues them.
    """

    def __init__(self, stage: LocalStage) -> None:
        self._stage, self._numbers = stage, count(1)
        self._held: dict[int, Cache] = {}

    def __len__(self) -> int:
        return len(self._held)

    def run(self, asked: Message) -> Message:
        """Frees the caches that the client no longer needs, runs the stage, and keeps its new cache.

        Args:
            asked: `use`, the number of the cache to continue (0 for none), its `edits`, the numbers to `free`; tensors.

        Raises:
            BadMessage: it is not a request of this stage.
            LlmconvError: the stage cannot run it.
        """
        self._free(asked.fields.get("free"))
        use = asked.text("use")
        if asked.kind != "run" or use not in self._stage.graphs:
            raise BadMessage("the request is not a run of the stage")
        graph, past = self._stage.graphs[use], self._past(asked)
        _require_inputs(graph, asked.tensors)
        if len(self._held) >= MAX_CACHES:
            raise InputRefused(f"the client keeps {MAX_CACHES} caches", hint="keep fewer conversations")
        return self._answer(self._stage.run(use, asked.tensors, past))

    def _free(self, numbers: Any) -> None:
        if not isinstance(numbers, list):
            raise BadMessage("`free` is not a list")
        for number in numbers:
            self._held.pop(as_number(number, "a cache"), None)

    def _past(self, asked: Message) -> Cache | None:
        """The cache that a request continues, after its edits."""
        number, edits = asked.number("past"), asked.fields.get("edits")
        if not isinstance(edits, list) or len(edits) > MAX_EDITS:
            raise BadMessage("`edits` is not a list of a few changes")
        if number == 0:
            return None
        if (cache := self._held.get(number)) is None:
            raise BadMessage(f"unknown cache {number}")
        for fields in edits:
            cache = _edit(fields, cache).applied(cache)
        return cache

    def _answer(self, step: StageStep) -> Message:
        number = next(self._numbers)
        self._held[number] = step.present
        fields = {"cache": number, "length": step.present.length, "cuttable": is_cuttable(step.present)}
        return Message("result", fields, {name: _last(name, array) for name, array in step.results.items()})


def _last(name: str, array: Array) -> Array:
    """Only the last logits are sent: nothing reads those of earlier tokens while text is generated."""
    return array[:, -1:] if name == "logits" else array


def _edit(fields: Any, cache: Cache) -> CacheEdit:
    """A change of a cache, checked against it."""
    if not isinstance(fields, list) or len(fields) != 3:
        raise BadMessage("a change of a cache is not a list of three")
    kind, numbers, virtual = fields
    if (
        not isinstance(kind, str)
        or kind not in EDITS
        or not isinstance(numbers, list)
        or not 1 <= len(numbers) <= MAX_ROWS
    ):
        raise BadMessage("a change of a cache is of no known kind")
    rows = min((len(array) for array in cache.arrays().values()), default=1)
    most = rows - 1 if kind == "rows" else cache.length if kind == "cut" else MAX_LENGTH
    found = tuple(as_number(number, "a number in a change of a cache", most) for number in numbers)
    if kind != "rows" and not can_be_cut(cache):
        raise BadMessage("the cache cannot be cut")
    if (kind == "cut" and len(found) > 1) or (kind == "moved" and rows != 1):
        raise BadMessage("the change does not fit the cache")
    return CacheEdit(kind, found, as_number(virtual, "a number in a change of a cache", cache.length))


def _require_inputs(graph: StageGraph, tensors: Mapping[str, Array]) -> None:
    """Checks names, dtypes and fixed axes of what a client sends."""
    if tensors.keys() != graph.taken.keys():
        raise BadMessage(f"the inputs are not {', '.join(graph.taken)}")
    for name, array in tensors.items():
        shape, kind = graph.taken[name], graph.types.get(name, "tensor(int64)")
        dtype = DTYPES["int64"] if kind == "tensor(int64)" else TENSOR_DTYPES.get(kind)
        shape = shape or list(array.shape)  # quantized graphs do not declare that of a hidden state
        if array.dtype != dtype or array.ndim != len(shape):
            raise BadMessage(f"`{name}` has another dtype, or another number of axes")
        if any(isinstance(axis, int) and axis != size for axis, size in zip(shape, array.shape, strict=True)):
            raise BadMessage(f"`{name}` has the shape {list(array.shape)} instead of {shape}")
        if not array.ndim or not array.size or len(array) != len(next(iter(tensors.values()))):
            raise BadMessage("the batch is empty, or not of one size")
