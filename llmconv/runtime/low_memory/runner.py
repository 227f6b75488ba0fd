"""StreamedRunner: the eager model for machines that cannot hold it; one layer's weights are there at a time.

Calls are given all at once, and go through the layers side by side (see `lockstep`): each weight is read once for all
of them. A call that continues another needs the other's keys and values of the same layer alone, which are there by
then; only their number must be known from the start, and the masks tell it. Where layers keep states instead, calls
that continue others come after them, in another run through the layers.

Results are those of `EagerRunner` to the bit: the same code of transformers on the same tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.eager.cache import EagerCache, keeps_states, to_numpy
from llmconv.runtime.eager.runner import EagerRunner, layers_of, one_thread
from llmconv.runtime.eager.scale_factors import Factors
from llmconv.runtime.eager.stored_tensors import StoredTensor, stored_tensors
from llmconv.runtime.low_memory.lazy_matrices import LazyMatrices, product_by_rows
from llmconv.runtime.low_memory.lockstep import HINT, Arrival, Lockstep
from llmconv.runtime.low_memory.planned_calls import PlannedCall
from llmconv.runtime.low_memory.weights import HollowTensor, StreamedWeights
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array

RESIDENT = 1 << 24
"""Elements of an embedding or a head above which it is read by rows."""


class StreamedRunner(EagerRunner):
    """`EagerRunner`, layer by layer.

    Args:
        factors: scale the weights as they are read.
        resident: elements of an embedding or a head above which it is read by rows.

    Raises:
        InputRefused: transformers cannot load the folder.
        UnsupportedInput: the model is not made of layers that can be loaded one by one.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        *,
        code: Path | None = None,
        factors: Factors | None = None,
        resident: int = RESIDENT,
    ) -> None:
        load = torch.float32 if dtype == "float64" else getattr(torch, dtype)
        self._stored = stored_tensors(folder, load, factors)
        super().__init__(folder, dtype, code=code)
        self._weights = StreamedWeights(self.model, self._stored, load)
        self._layers = layers_of(self.model)
        if not self._layers:
            raise UnsupportedInput(f"`{folder.name}` has no list of layers to stream", hint=HINT)
        self._matrices, self._lazy = self._large_matrices(resident)
        self._keep_the_rest()
        for name, layer in self._layers.items():
            layer.forward = partial(self._forward_layer, name, layer.forward)
        self._lockstep: Lockstep[Step] = Lockstep(self._serve, self._leave)
        self._caches: dict[int, Any] = {}
        self._written: dict[int, list[int]] = {}
        self._parents: list[int | None] = []

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        """The model on the meta device, with all but its weights."""
        hollow = {name: HollowTensor(tensor.shape) for name, tensor in self._stored.items()}
        return self._built(folder, fields, dtype, hollow)

    def release(self) -> None:
        """It is never all there."""

    def _large_matrices(self, resident: int) -> tuple[dict[int, torch.Tensor], dict[int, StoredTensor]]:
        """Embeddings and heads outside of layers that are read by rows: parameter and content by the parameter's id."""
        head = self.model.get_output_embeddings()
        modules = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Embedding) or m is head]
        outside = [m.weight for n, m in modules if not any(n.startswith(f"{layer}.") for layer in self._layers)]
        large = {id(weight): weight for weight in outside if weight.numel() > resident}
        found = {key: self._weights.plain_source(weight) for key, weight in large.items()}
        lazy = {key: stored for key, stored in found.items() if stored}
        return {key: large[key] for key in lazy}, lazy

    def _keep_the_rest(self) -> None:
        streamed = {name for layer in self._layers for name in self._weights.names(layer)}
        tensors = self.model.state_dict(keep_vars=True).items()
        self._weights.keep(
            name for name, t in tensors if t.is_meta and name not in streamed and id(t) not in self._lazy
        )

    # --- one call at a time, for those who ask so ---------------------------------------------------------------------

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `Runner.prefill`; every call reads all weights, so better plan several (`run_all`)."""
        return self.run_all([PlannedCall(input_ids, attention_mask, position_ids, past)])[0]

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `prefill`."""
        return self.prefill(input_ids, attention_mask, position_ids, past)

    def embed(self, input_ids: Array) -> Array:
        """As `EagerRunner.embed`."""
        with self._computing():
            return to_numpy(self.model.get_input_embeddings()(torch.from_numpy(input_ids)))

    # --- all calls side by side ---------------------------------------------------------------------------------------

    def run_all(self, calls: Sequence[PlannedCall]) -> list[Step]:
        """Makes many calls, in as few runs through the weights as possible.

        Raises:
            UnsupportedInput: the model's code does not go through its layers as it must.
        """
        if not keeps_states(self.config) and self._cache_name == "past_key_values":
            return self._run_together(calls)
        steps: dict[int, Step] = {}
        while len(steps) < len(calls):
            ready = [i for i, c in enumerate(calls) if i not in steps and (c.parent is None or c.parent in steps)]
            found = self._run_together([_after(calls[number], steps) for number in ready])
            steps.update(zip(ready, found, strict=True))
        return [steps[number] for number in range(len(calls))]

    def _run_together(self, calls: Sequence[PlannedCall]) -> list[Step]:
        self._caches, self._written = {}, {number: [] for number in range(len(calls))}
        self._parents = [call.parent for call in calls]
        pasts = [self._expected_past(calls, number) for number in range(len(calls))]
        runs: list[Callable[[], Step]] = [
            partial(self._run, call.input_ids, call.attention_mask, call.position_ids, past)
            for call, past in zip(calls, pasts, strict=True)
        ]
        try:
            with one_thread() if self._is_small else nullcontext():
                steps = self._lockstep.run(runs)
        except LlmconvError:
            raise
        except (RuntimeError, NotImplementedError, AttributeError) as error:  # a tensor without content was used
            raise_if_out_of_memory(error, "in the model")
            raise UnsupportedInput(
                f"the model cannot run layer by layer: {type(error).__name__}: {first_line(error)}", hint=HINT
            ) from error
        for number, step in enumerate(steps):
            if calls[number].parent is not None and isinstance(step.present, EagerCache):
                filled = max(self._written[number], default=-1) + 1
                del step.present.cache.layers[filled:]
        return steps

    def _expected_past(self, calls: Sequence[PlannedCall], number: int) -> Cache | None:
        """The past of a call; where another one will make it, its length and nothing else."""
        call = calls[number]
        if call.parent is None:
            return call.past
        line = [number]
        while (parent := calls[line[0]].parent) is not None:
            line.insert(0, parent)
        first = calls[line[0]].past
        before = [first] if isinstance(first, EagerCache) else []
        earlier = [calls[one] for one in line[:-1]]
        ids = np.concatenate([*(cache.input_ids for cache in before), *(one.input_ids for one in earlier)], axis=1)
        places = [*(cache.position_ids for cache in before), *(one.position_ids for one in earlier)]
        cache = DynamicCache()
        length = call.past_length
        cache.layers = [self._blank(len(ids), length) for _ in range(self.config.num_hidden_layers)]
        return EagerCache(cache, ids, np.concatenate(places, axis=1))

    def _blank(self, batch: int, length: int) -> DynamicLayer:
        layer = DynamicLayer()
        nothing = torch.zeros(1, dtype=self.model.dtype).expand(batch, 1, length, 1)
        layer.lazy_initialization(nothing, nothing)
        layer.keys = layer.values = nothing
        return layer

    def _cache(self, past: Cache | None) -> Any:
        cache = super()._cache(past)
        number = self._lockstep.number
        if number is not None:
            self._caches[number] = cache
        return cache

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with super()._computing(), LazyMatrices(self._lazy, self._multiply):
            yield

    def _multiply(self, matrix: int, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = self._lockstep.arrive(f"matrix {matrix}", lambda: (value, bias))
        return product

    def _forward_layer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._lockstep.arrive(name, partial(forward, *args, **kwargs))

    def _serve(self, station: str, arrivals: Sequence[tuple[int, Arrival]]) -> None:
        with self._computing():
            if station.startswith("matrix "):
                matrix = int(station.removeprefix("matrix "))
                dtype = self._matrices[matrix].dtype
                products = product_by_rows(self._lazy[matrix], dtype, [arrival.work() for _, arrival in arrivals])
                for (_, arrival), product in zip(arrivals, products, strict=True):
                    arrival.result = product
                return
            with self._weights.held(station):
                written: dict[int, list[int]] = {}
                for number, arrival in arrivals:
                    self._take_over(number, written)
                    before = _contents(self._caches[number])
                    self.reach.begin(station)
                    arrival.result = arrival.work()
                    after = _contents(self._caches[number])
                    written[number] = [i for i, now in enumerate(after) if i >= len(before) or now is not before[i]]
                    self._note(station, number, written[number])

    def _leave(self, station: str) -> None:
        """Limits are counted anew for each call; matrices by their order, which twins have in common."""
        if station.startswith("matrix "):
            station = f"matrix {[*self._matrices].index(int(station.removeprefix('matrix ')))}"
        self.reach.begin(f"after {station}")

    def _take_over(self, number: int, written: dict[int, list[int]]) -> None:
        """Keys and values that the call before has of this layer by now."""
        parent = self._parents[number]
        if parent is not None:
            for layer in written[parent]:
                self._caches[number].layers[layer] = copy.copy(self._caches[parent].layers[layer])

    def _note(self, station: str, number: int, layers: list[int]) -> None:
        if set(layers) & set(self._written[number]):
            raise UnsupportedInput(f"`{station}` writes keys and values that another layer has written", hint=HINT)
        self._written[number] += layers


def _after(call: PlannedCall, steps: dict[int, Step]) -> PlannedCall:
    """A call whose past has been made."""
    past = call.past if call.parent is None else steps[call.parent].present
    return PlannedCall(call.input_ids, call.attention_mask, call.position_ids, past)


def _contents(cache: Any) -> list[Any]:
    return [getattr(layer, "keys", None) for layer in cache.layers]
