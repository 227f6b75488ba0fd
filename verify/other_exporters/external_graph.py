"""ExternalGraph: a graph of any exporter in onnxruntime, with the names of its input map.

A call that a graph does not support in one run is split, as its own clients do: into single tokens if it takes one, and
into runs of the whole sequence if it has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.cache_names import cache_order
from llmconv.runtime.extra_values import ExtraValues
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG
from llmconv.runtime.runner import Cache, Extras, Step
from llmconv.tensors import Array
from llmconv.verify.other_exporters.graph_cache import ExternalCache, unroll_ring
from llmconv.verify.other_exporters.graph_limits import GraphLimits
from llmconv.verify.other_exporters.port_map import AXES, Binding
from llmconv.verify.scenarios.synthetic_past import SyntheticPast

DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}
CacheShapesByName = Mapping[str, tuple[int, ...]]
RING_MARGIN = 512
"""New tokens for which a ring buffer has room in addition to its window."""

STATUS = "Status Message: "
"""Precedes the relevant part of onnxruntime's errors."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the eager model, for graphs with dynamic axes.

    Attributes:
        cache_shapes: shapes of keys and values of one token, `[1, heads, 1, head_dim]`, by names as in reports.
        window: size of the sliding window in tokens; None without one.
    """

    cache_shapes: CacheShapesByName
    window: int | None = None


class ExternalGraph:
    """One graph in one session.

    Attributes:
        name: name in reports.
        path: path of the file.
        binding: its inputs and outputs.
        limits: the calls that it does not support.
        shapes: declared shapes by name.
        dtype: element type of its logits.
        outputs: names of its cache outputs, as in reports.

    Args:
        path: path of the file.
        model: the graph without its weights.
        binding: its inputs and outputs.
        sizes: sizes of the eager model.
        settings: session settings.
        name: name in reports; default: the file name.

    Raises:
        MalformedInput: onnxruntime cannot open it.
    """

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        binding: Binding,
        sizes: ModelSizes,
        settings: SessionSettings,
        name: str = "",
    ) -> None:
        self.name, self.path, self.binding, self._sizes = name or path.name, path, binding, sizes
        self.limits = GraphLimits.of(model, binding)
        self._session = SessionChain([path], settings, joins=False)
        declared = [*self._session.get_inputs(), *self._session.get_outputs()]
        self.shapes = {arg.name: arg.shape for arg in declared}
        self._dtypes = {arg.name: _dtype(self.name, arg.name, arg.type) for arg in declared}
        self.dtype = self._dtypes[binding.port_map.logits]
        self.outputs = sorted(binding.present, key=cache_order)

    @property
    def keeps_cache(self) -> bool:
        """Whether it continues a past."""
        return bool(self.binding.past)

    def run(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
    ) -> Step:
        """Continues `past` by `input_ids`; arguments as in `Runner.prefill`.

        Raises:
            UsageProblem: values of extra inputs are given.
            InputRefused: the past belongs to another kind of runner.
            MalformedInput: onnxruntime cannot run the graph on them.
        """
        ExtraValues(given=extras or {})
        past = ExternalCache.made_up(past) if isinstance(past, SyntheticPast) else past
        if past is not None and not isinstance(past, ExternalCache):
            raise InputRefused(
                f"`{self.name}` cannot continue the cache of another runner", hint="start without a past"
            )
        batch, new = input_ids.shape
        before = past or ExternalCache({}, {}, input_ids[:, :0], position_ids[:, :0])
        ids = np.concatenate([before.input_ids, input_ids], axis=1)
        positions = np.concatenate([before.position_ids, position_ids], axis=1)
        if not self.keeps_cache:
            logits, given = self._call(ids, attention_mask, positions, {})
            return Step(logits[:, -new:], ExternalCache(given, given, ids, positions))
        width, given = self.limits.width(batch, before.length, new), dict(before.given)
        pieces = []
        for start in range(before.length, before.length + new, width):
            end = min(start + width, before.length + new)
            logits, given = self._call(ids[:, start:end], attention_mask[:, :end], positions[:, start:end], given)
            pieces.append(logits)
        rings, length = self.limits.rings, ids.shape[1]
        kept = {name: unroll_ring(array, length) if name in rings else array for name, array in given.items()}
        return Step(np.concatenate(pieces, axis=1), ExternalCache(kept, given, ids, positions))

    def _call(
        self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """One run: logits `[batch, tokens, vocabulary]`, and the cache by names as in reports."""
        row = self.binding.port_map
        wanted = [row.logits, *(self.binding.present[name] for name in self.outputs)]
        feeds = self.feeds(ids, mask, positions, past)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        try:
            logits, *present = [value.numpy() for value in self._session.run_with_ort_values(wanted, values)]
        except LlmconvError:
            raise
        except TimeoutError as error:
            raise MalformedInput(f"`{self.name}` cannot be run: {error}", hint=TOO_LONG) from error
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise_if_out_of_memory(error, f"in `{self.name}`")
            reason = str(error).rpartition(STATUS)[2].partition("\n")[0].strip() or first_line(error)
            raise MalformedInput(
                f"`{self.name}` fails in onnxruntime: {reason}", hint="check whether the graph's own client can run it"
            ) from error
        given = {name: _transpose(array, row.axes, AXES) for name, array in zip(self.outputs, present, strict=True)}
        return (logits[:, None] if logits.ndim == 2 else logits), given

    def feeds(self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs of one run, by the graph's names and in its dtypes.

        Args:
            ids, positions: `[batch, new tokens]`.
            mask: `[batch, past and new tokens]`.
            past: `[batch, heads, tokens, head_dim]` by names as in reports; empty without a past.
        """
        row = self.binding.port_map
        given = {row.tokens: ids, row.mask: mask, row.positions: positions, row.branch: np.array([bool(past)])}
        given = {name: given.get(name, np.array(self._sizes.window or 0)) for name in self.binding.inputs}
        for name, port in self.binding.past.items():
            given[port] = _transpose(past[name] if past else self._empty(name, len(ids)), AXES, row.axes)
        return {name: np.ascontiguousarray(array, dtype=self._dtypes[name]) for name, array in given.items()}

    def _empty(self, name: str, batch: int) -> Array:
        """Keys or values of no tokens, or an empty ring buffer, with the model's sizes."""
        length = (self._sizes.window or 0) + RING_MARGIN if name in self.limits.rings else 0
        heads, size = self._sizes.cache_shapes[name][1], self._sizes.cache_shapes[name][3]
        return np.zeros((batch, heads, length, size))


def _transpose(array: Array, given: str, wanted: str) -> Array:
    return array if given == wanted else array.transpose([given.index(axis) for axis in wanted])


def _dtype(graph: str, port: str, declared: str) -> str:
    if declared not in DTYPES:
        raise InputRefused(
            f"`{graph}` has `{port}` of the unsupported type {declared}",
            hint="verify runs graphs of float32, float16 or float64",
        )
    return DTYPES[declared]
