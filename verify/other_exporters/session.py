"""ForeignGraph: a graph of any exporter in onnxruntime, called by the names of its input map.

What a graph cannot take at once it is given piece by piece, as its own clients do: one token after another where it
takes one, and the whole sequence again where it keeps no cache.
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
from llmconv.runtime.onnxruntime.runner import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array
from llmconv.verify.other_exporters.graph_cache import ForeignCache, unrolled
from llmconv.verify.other_exporters.graph_limits import Limits
from llmconv.verify.other_exporters.port_map import AXES, Binding
from llmconv.verify.scenarios.synthetic_past import MadeUp

DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}
CacheShapes = Mapping[str, tuple[int, ...]]
MOST_NEW = 512
"""New tokens that a ring has room for beside its window."""

STATUS = "Status Message: "
"""What onnxruntime writes before the part of an error that tells."""


@dataclass(frozen=True)
class Model:
    """What a graph may leave open, as the eager model has it.

    Attributes:
        cache_shapes: keys and values of one token, `[1, heads, 1, head_dim]`, by the names of reports.
        window: tokens that a sliding layer sees; None without one.
    """

    cache_shapes: CacheShapes
    window: int | None = None


class ForeignGraph:
    """One graph in one session.

    Attributes:
        name: in reports.
        path: of the file.
        binding: its ports.
        limits: what it cannot do by design.
        dtype: element type of its logits.
        outputs: names of its cache's outputs, as in reports.

    Args:
        model: the graph without its weights.
        eager: what the graph leaves open.

    Raises:
        MalformedInput: onnxruntime cannot open it.
    """

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        binding: Binding,
        eager: Model,
        settings: SessionSettings,
        name: str = "",
    ) -> None:
        self.name, self.path, self.binding, self._eager = name or path.name, path, binding, eager
        self.limits = Limits.of(model, binding)
        self._session = SessionChain([path], settings.options(), change=settings.change, seconds=settings.timeout)
        declared, given = self._session.get_inputs(), self._session.get_outputs()
        self.shapes = {port.name: port.shape for port in [*declared, *given]}
        self._dtypes = {port.name: _dtype(self.name, port.name, port.type) for port in [*declared, *given]}
        self.dtype = self._dtypes[binding.port_map.logits]
        self.outputs = sorted(binding.present, key=cache_order)

    @property
    def keeps_cache(self) -> bool:
        """Whether it continues a past."""
        return bool(self.binding.past)

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Continues `past` by `input_ids`; arguments as in `Runner.prefill`.

        Raises:
            InputRefused: what came before cannot be handed on.
            MalformedInput: onnxruntime cannot run the graph on them.
        """
        past = ForeignCache.made_up(past) if isinstance(past, MadeUp) else past
        if past is not None and not isinstance(past, ForeignCache):
            raise InputRefused(f"`{self.name}` continues its own kind of cache only", hint="start with no past")
        rows, new = input_ids.shape
        before = past or ForeignCache({}, {}, input_ids[:, :0], position_ids[:, :0])
        ids = np.concatenate([before.input_ids, input_ids], axis=1)
        positions = np.concatenate([before.position_ids, position_ids], axis=1)
        if not self.keeps_cache:
            logits, given = self._call(ids, attention_mask, positions, {})
            return Step(logits[:, -new:], ForeignCache(given, given, ids, positions))
        width, given = self.limits.width(rows, before.length, new), dict(before.given)
        pieces = []
        for start in range(before.length, before.length + new, width):
            end = min(start + width, before.length + new)
            logits, given = self._call(ids[:, start:end], attention_mask[:, :end], positions[:, start:end], given)
            pieces.append(logits)
        rings, length = self.limits.rings, ids.shape[1]
        kept = {name: unrolled(array, length) if name in rings else array for name, array in given.items()}
        return Step(np.concatenate(pieces, axis=1), ForeignCache(kept, given, ids, positions))

    def _call(
        self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """One run: logits `[batch, tokens, vocabulary]` and the cache by the names of reports."""
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
            said = str(error).rpartition(STATUS)[2].partition("\n")[0].strip() or first_line(error)
            raise MalformedInput(
                f"`{self.name}` fails in onnxruntime: {said}", hint="see whether the graph's own client can run it"
            ) from error
        given = {name: _moved(array, row.axes, AXES) for name, array in zip(self.outputs, present, strict=True)}
        return (logits[:, None] if logits.ndim == 2 else logits), given

    def feeds(self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]) -> dict[str, Array]:
        """What one run takes, by the graph's own names and in its own dtypes.

        Args:
            ids, positions: `[batch, new tokens]`.
            mask: `[batch, past and new tokens]`.
            past: `[batch, heads, tokens, head_dim]` by the names of reports; nothing for an empty one.
        """
        row = self.binding.port_map
        given = {row.tokens: ids, row.mask: mask, row.positions: positions, row.branch: np.array([bool(past)])}
        given = {name: given.get(name, np.array(self._eager.window or 0)) for name in self.binding.inputs}
        for name, port in self.binding.past.items():
            given[port] = _moved(past[name] if past else self._empty(name, len(ids)), AXES, row.axes)
        return {name: np.ascontiguousarray(array, dtype=self._dtypes[name]) for name, array in given.items()}

    def _empty(self, name: str, rows: int) -> Array:
        """No keys or values, or an empty ring; sizes that the graph leaves open are the model's."""
        slots = (self._eager.window or 0) + MOST_NEW if name in self.limits.rings else 0
        heads, size = self._eager.cache_shapes[name][1], self._eager.cache_shapes[name][3]
        return np.zeros((rows, heads, slots, size))


def _moved(array: Array, given: str, wanted: str) -> Array:
    return array if given == wanted else array.transpose([given.index(axis) for axis in wanted])


def _dtype(graph: str, port: str, declared: str) -> str:
    if declared not in DTYPES:
        raise InputRefused(
            f"`{graph}` has the port `{port}` of type {declared}",
            hint="verify runs graphs of float32, float16 or float64",
        )
    return DTYPES[declared]
