"""StreamedRunner: the eager model with the weights of one layer in memory at a time.

All calls run together, layer by layer, so that each weight is read once (PassScheduler): each runs the model's
unchanged code in its own thread and waits at barriers, before every layer and before every product with a matrix that
is read by rows. When all have reached the same barrier, the weights are loaded and the calling thread does the work of
all, one after another. Only one thread runs at any time.

A call that continues another one needs only the keys and values of the same layer, which exist by then; the attention
masks contain their number in advance. If layers keep states instead, calls that continue others run after them, in
another pass. Results are bit-identical to those of `EagerRunner`: the same code of transformers runs on the same
tensors.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmconv.checkpoint import open_weights
from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.eager.cache import EagerCache, keeps_states, to_numpy
from llmconv.runtime.eager.runner import EagerRunner, layer_modules, single_torch_thread
from llmconv.runtime.eager.stored_tensors import ScaleFactors, StoredTensor, stored_tensors
from llmconv.runtime.extra_inputs import SEQUENCE, ExtraInput, ExtraValues, ModelCall
from llmconv.runtime.low_memory.weights import (
    LOW_MEMORY_HINT,
    LazyMatrices,
    MatrixMemory,
    MetaTensor,
    PlannedCall,
    StreamedWeights,
    product_by_rows,
)
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Step, refuse_placed
from llmconv.tensors import Array, LazyTensor

T = TypeVar("T")


class _Ended(BaseException):
    """Ends the thread of a pass whose result is no longer needed."""


@dataclass
class BarrierWork:
    """The work of one pass at a barrier, named after the layer or matrix; `work` runs once its weights are loaded."""

    barrier: str
    work: Callable[[], Any]
    result: Any = None


@dataclass
class ForwardPass(Generic[T]):
    """One forward pass in its own thread; `waiting` is the barrier of its `PassScheduler.wait`, None at the end."""

    run: Callable[[], T]
    waiting: BarrierWork | None = None
    result: T | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    ended: bool = False
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class PassScheduler(Generic[T]):
    """Runs several forward passes from barrier to barrier.

    `serve` is called with a barrier, and with the index and work of every pass, and sets the result of each; `leave`
    with the barrier before each pass continues.
    """

    def __init__(
        self,
        serve: Callable[[str, Sequence[tuple[int, BarrierWork]]], None],
        leave: Callable[[str], None] = lambda barrier: None,
    ) -> None:
        self._serve, self._leave = serve, leave
        self._thread_local = threading.local()

    def wait(self, barrier: str, work: Callable[[], Any]) -> Any:
        """Waits, inside a pass, until all passes have reached the barrier; returns the result of the work."""
        this: ForwardPass[T] | None = getattr(self._thread_local, "current", None)
        if this is None:
            raise UnsupportedInput(f"`{barrier}` runs in a planned call only", hint=LOW_MEMORY_HINT)
        this.waiting = BarrierWork(barrier, work)
        this.paused.release()
        this.resume.acquire()
        if this.ended:
            raise _Ended
        result, this.waiting.result = this.waiting.result, None
        return result

    @property
    def number(self) -> int | None:
        """Index of the pass that runs in this thread; None outside of all passes."""
        return getattr(self._thread_local, "number", None)

    def run(self, runs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all passes; raises UnsupportedInput if they reach different barriers."""
        passes: list[ForwardPass[T]] = [ForwardPass(run) for run in runs]
        try:
            for number, this in enumerate(passes):
                self._start(number, this)
            while waiting := [(number, this) for number, this in enumerate(passes) if this.waiting]:
                self._step(waiting, len(passes))
        finally:
            for this in passes:
                if this.thread and this.thread.is_alive():
                    this.ended = True
                    this.resume.release()
                    this.thread.join()
        return [this.result for this in passes]  # type: ignore[misc]

    def _step(self, waiting: Sequence[tuple[int, ForwardPass[T]]], count: int) -> None:
        works = [(number, this.waiting) for number, this in waiting if this.waiting]
        barriers = {work.barrier for _, work in works}
        if len(barriers) > 1 or len(waiting) < count:
            raise UnsupportedInput(f"not every call runs `{min(barriers)}` in the same order", hint=LOW_MEMORY_HINT)
        barrier = barriers.pop()
        self._serve(barrier, works)
        for _, this in waiting:
            self._leave(barrier)
            _advance(this)

    def _start(self, number: int, this: ForwardPass[T]) -> None:
        threads = torch.get_num_threads()

        def body() -> None:
            this.resume.acquire()
            try:
                if not this.ended:
                    torch.set_num_threads(threads)  # the setting is per thread
                    self._thread_local.current, self._thread_local.number = this, number
                    this.result = this.run()
            except BaseException as error:  # raised again in the calling thread
                this.error = error
            this.waiting = None
            this.paused.release()

        this.thread = threading.Thread(target=body, daemon=True)
        this.thread.start()
        _advance(this)


def _advance(this: ForwardPass[Any]) -> None:
    """Lets a pass run to its next barrier, or to its end."""
    this.resume.release()
    this.paused.acquire()
    if this.error and not this.ended:
        raise this.error


# maximum number of elements of an embedding or a head that stays in memory; larger ones are read by rows
RESIDENT = 1 << 24


class EmptyRunner(EagerRunner):
    """The model without its weights, on the meta device: its modules, and which of them share weights."""

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        stored = open_weights(folder) if self._given is None else self._given
        tensors = {name: MetaTensor(tensor.shape) for name, tensor in stored.items()}
        return self._built(folder, fields, dtype, tensors, stored)


class StreamedRunner(EmptyRunner):
    """`EagerRunner`, layer by layer; arguments as there.

    At most `resident` elements of an embedding or a head stay in memory; `memory` is that of large matrices, which
    runners of the same weights may share. Raises UnsupportedInput for a model without layers that can be loaded one by
    one.
    """

    def __init__(  # noqa: PLR0913 - one parameter per property of the model
        self,
        folder: Path,
        dtype: str = "float32",
        *,
        code: Path | None = None,
        factors: ScaleFactors | None = None,
        resident: int = RESIDENT,
        skipped: Collection[str] = (),
        memory: MatrixMemory | None = None,
        extra_inputs: Sequence[ExtraInput] = (),
        weights: Mapping[str, LazyTensor] | None = None,
    ) -> None:
        load = torch.float32 if dtype == "float64" else getattr(torch, dtype)
        self._stored = stored_tensors(open_weights(folder) if weights is None else weights, load, factors)
        super().__init__(folder, dtype, code=code, skipped=skipped, extra_inputs=extra_inputs, weights=weights)
        self._weights = StreamedWeights(self.model, self._stored, load, memory)
        every = layer_modules(self.model)
        self._layers = {name: layer for name, layer in every.items() if name not in self._skipped}
        if not self._layers:
            raise UnsupportedInput(f"`{folder.name}` has no `ModuleList` of layers to stream", hint=LOW_MEMORY_HINT)
        self._matrices, self._lazy = self._large_matrices(resident)
        # the weights outside all layers, those that are skipped included
        streamed = {name for layer in every for name in self._weights.names(layer)}
        absent = {name: one for name, one in self.model.state_dict(keep_vars=True).items() if one.is_meta}
        self._weights.keep(name for name in absent if name not in streamed and id(absent[name]) not in self._lazy)
        for name, layer in self._layers.items():
            layer.forward = partial(self._forward_layer, name, layer.forward)
        self._scheduler: PassScheduler[Step] = PassScheduler(self._serve, self._leave)
        self._caches: dict[int, Any] = {}
        self._written: dict[int, list[int]] = {}
        self._parents: list[int | None] = []

    def release(self) -> None:
        """Does nothing: the whole model is never in memory."""

    def _large_matrices(self, resident: int) -> tuple[dict[int, torch.Tensor], dict[int, StoredTensor]]:
        """Embeddings and heads that are read by rows: parameter and stored tensor by the parameter's id."""
        head = self.model.get_output_embeddings()
        modules = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Embedding) or m is head]
        outside = [m.weight for n, m in modules if not any(n.startswith(f"{layer}.") for layer in self._layers)]
        large = {id(weight): weight for weight in outside if weight.numel() > resident}
        found = {key: self._weights.stored_parameter(weight) for key, weight in large.items()}
        lazy = {key: stored for key, stored in found.items() if stored}
        return {key: large[key] for key in lazy}, lazy

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        """Every call reads all weights; `run_all` reads them once for several calls."""
        refuse_placed(placed)
        return self.run_all([PlannedCall(*call.arrays, past, extras=extras or {})])[0]

    def embed(self, input_ids: Array) -> Array:
        with self.compute_mode():
            return to_numpy(self.model.get_input_embeddings()(torch.from_numpy(input_ids)))

    def run_all(self, calls: Sequence[PlannedCall]) -> list[Step]:
        """The results of all calls, with as few passes over the weights as possible; raises as `PassScheduler.run`."""
        if not keeps_states(self.config) and not self._masks_new:
            return self._run_together(calls)
        steps: dict[int, Step] = {}
        while len(steps) < len(calls):
            ready = [i for i, c in enumerate(calls) if i not in steps and (c.parent is None or c.parent in steps)]
            found = self._run_together([_with_past(calls[number], steps) for number in ready])
            steps.update(zip(ready, found, strict=True))
        return [steps[number] for number in range(len(calls))]

    def _run_together(self, calls: Sequence[PlannedCall]) -> list[Step]:
        self._caches, self._written = {}, {number: [] for number in range(len(calls))}
        self._parents = [call.parent for call in calls]
        pasts = [self._expected_past(calls, number) for number in range(len(calls))]
        run = super()._run_prompt
        runs: list[Callable[[], Step]] = [
            partial(run, call.tokens, past, call.extras) for call, past in zip(calls, pasts, strict=True)
        ]
        try:
            with single_torch_thread() if self._is_small else nullcontext():
                steps = self._scheduler.run(runs)
        except LlmconvError:
            raise
        except (RuntimeError, NotImplementedError, AttributeError) as error:  # a tensor on the meta device was used
            raise_if_out_of_memory(error, "in the model")
            problem = f"the model cannot run layer by layer: {type(error).__name__}: {first_line(error)}"
            raise UnsupportedInput(problem, hint=LOW_MEMORY_HINT) from error
        for number, step in enumerate(steps):
            if calls[number].parent is not None and isinstance(step.present, EagerCache):
                del step.present.cache.layers[max(self._written[number], default=-1) + 1 :]
        return steps

    def _expected_past(self, calls: Sequence[PlannedCall], number: int) -> Cache | None:
        """The past of a call; of a past that another call will compute, only the length."""
        call = calls[number]
        if call.parent is None:
            return call.past
        chain = [number]
        while (parent := calls[chain[0]].parent) is not None:
            chain.insert(0, parent)
        first = calls[chain[0]].past
        before = [first] if isinstance(first, EagerCache) else []
        earlier = [calls[index] for index in chain[:-1]]
        ids = np.concatenate([*(cache.input_ids for cache in before), *(each.input_ids for each in earlier)], axis=1)
        positions = [*(cache.position_ids for cache in before), *(each.position_ids for each in earlier)]
        cache = DynamicCache()
        length = call.past_length
        left_out = {int(name.rpartition(".")[2]) for name in self._skipped}
        numbers = range(self.config.num_hidden_layers)
        cache.layers = [DynamicLayer() if at in left_out else self._empty_layer(len(ids), length) for at in numbers]
        return EagerCache(cache, ids, np.concatenate(positions, axis=1), self._joined_extras(before, earlier))

    def _joined_extras(self, before: Sequence[EagerCache], earlier: Sequence[PlannedCall]) -> dict[str, Array]:
        """The values of extra inputs that have one for each token, of a cache's tokens and those of earlier calls."""
        values = [ExtraValues(self._extra_inputs, call.extras).of(call.tokens) for call in earlier]
        several = [*(cache.extras for cache in before), *values]
        axes = {name: one.axes.index(SEQUENCE) for name, one in self._extra_inputs.items() if SEQUENCE in one.axes}
        return {name: np.concatenate([one[name] for one in several], axis=axis) for name, axis in axes.items()}

    def _empty_layer(self, batch: int, length: int) -> DynamicLayer:
        layer = DynamicLayer()
        zero = torch.zeros(1, dtype=self.model.dtype).expand(batch, 1, length, 1)
        layer.lazy_initialization(zero, zero)
        layer.keys = layer.values = zero
        return layer

    def deepstacked(self, features: torch.Tensor | None) -> AbstractContextManager[None]:
        """Raises UnsupportedInput for features: a layer runs for all calls, and only knows the features of one."""
        if features is not None:
            problem = "the features of images that this family adds to its first layers do not run layer by layer"
            raise UnsupportedInput(problem, hint=LOW_MEMORY_HINT)
        return nullcontext()

    def cache_of(self, past: Cache | None) -> Any:
        """See `EagerRunner.cache_of`; the cache of each planned call is kept."""
        cache = super().cache_of(past)
        if (number := self._scheduler.number) is not None:
            self._caches[number] = cache
        return cache

    @contextmanager
    def compute_mode(self) -> Iterator[None]:
        """As `EagerRunner.compute_mode`, with matrices that are read when they are needed."""
        with super().compute_mode(), LazyMatrices(self._lazy, self._multiply):
            yield

    def _multiply(self, matrix: int, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = self._scheduler.wait(f"matrix {matrix}", lambda: (value, bias))
        return product

    def _forward_layer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._scheduler.wait(name, partial(forward, *args, **kwargs))

    def _serve(self, barrier: str, works: Sequence[tuple[int, BarrierWork]]) -> None:
        with self.compute_mode():
            if barrier.startswith("matrix "):
                matrix = int(barrier.removeprefix("matrix "))
                dtype = self._matrices[matrix].dtype
                products = product_by_rows(self._lazy[matrix], dtype, [work.work() for _, work in works])
                for (_, work), product in zip(works, products, strict=True):
                    work.result = product
                return
            with self._weights.loaded(barrier):
                written: dict[int, list[int]] = {}
                for number, work in works:
                    # takes over the keys and values of this layer from the call that this one continues
                    if (parent := self._parents[number]) is not None:
                        for layer in written[parent]:
                            self._caches[number].layers[layer] = copy.copy(self._caches[parent].layers[layer])
                    before = _keys(self._caches[number])
                    self.limit_margins.begin(barrier)
                    work.result = work.work()
                    after = _keys(self._caches[number])
                    written[number] = [i for i, now in enumerate(after) if i >= len(before) or now is not before[i]]
                    self._note(barrier, number, written[number])

    def _leave(self, barrier: str) -> None:
        """Numbers the limits anew for each call; matrices by their order, which models with scaled weights share."""
        if barrier.startswith("matrix "):
            barrier = f"matrix {[*self._matrices].index(int(barrier.removeprefix('matrix ')))}"
        self.limit_margins.begin(f"after {barrier}")

    def _note(self, barrier: str, number: int, layers: list[int]) -> None:
        if set(layers) & set(self._written[number]):
            problem = f"`{barrier}` writes keys and values that another layer has written"
            raise UnsupportedInput(problem, hint=LOW_MEMORY_HINT)
        self._written[number] += layers


def _with_past(call: PlannedCall, steps: dict[int, Step]) -> PlannedCall:
    return call if call.parent is None else replace(call, past=steps[call.parent].present, parent=None)


def _keys(cache: Any) -> list[Any]:
    return [getattr(layer, "keys", None) for layer in cache.layers]
