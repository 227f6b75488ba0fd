"""Recording: every value that the eager model computes in one call, exact and with its noise, under its module's name.

The model runs twice as it always does, in float64 and in the graph's dtype, with hooks that say which module is running
and a dispatch mode that sees the result of every operator. Nothing of the model is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from llmconv.runtime.eager.cache import to_numpy
from llmconv.tensors import Array

SIZE_LIMIT = 1 << 26
"""Elements of a value that is still recorded."""

IN, OUT = "input", "output"
"""Operators of the records of what a module takes and gives."""

MASK = "attention_mask"
"""Operator of the record of the mask that a module is given."""

RecordKey = tuple[str, str, tuple[int, ...], int]
"""Scope, operator, shape, and which one of these."""

ScopeFilter = Callable[[str], bool]
"""Whether the values of a scope are recorded."""


@dataclass(frozen=True)
class RecordedValue:
    """One value of the eager model.

    Attributes:
        scope: the module that was running, as a dotted name.
        op: the operator, or `IN`, `OUT`, `MASK` for what a module takes and gives.
        exact: from the float64 run; integers and booleans as they are.
        rounded: from the run in the graph's dtype.
        order: counts the values of a call.
    """

    scope: str
    op: str
    exact: Array
    rounded: Array
    order: int

    @property
    def is_port(self) -> bool:
        """What a module takes or gives, not what an operator made."""
        return self.op in (IN, OUT, MASK)


class Recorder(TorchDispatchMode):
    """Keeps the results of operators by scope.

    Args:
        wanted: which scopes.
    """

    def __init__(self, wanted: ScopeFilter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[RecordKey, Array] = {}
        self._scopes, self._wanted = [""], wanted
        self._counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        scope = self._scopes[-1]
        if self._wanted(scope) and not _is_weight_view(func, args):
            for index, tensor in enumerate(_tensors(result)):
                # A cast to float64 is none in the other run, which has nothing to cast.
                if not (func is torch.ops.aten._to_copy.default and tensor.is_floating_point()):
                    self.keep(scope, f"{func}:{index}", tensor)
        return result

    def keep(self, scope: str, op: str, tensor: torch.Tensor) -> None:
        """Notes one value."""
        if 0 < tensor.numel() <= SIZE_LIMIT and not tensor.is_complex():
            key = (scope, op, tuple(tensor.shape))
            self._counts[key] += 1
            with _disable_current_modes():  # copying is nothing that the model computes
                self.values[*key, self._counts[key]] = to_numpy(tensor).copy()

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Records what the model computes inside."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name:
                    handles = (
                        module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                        module.register_forward_hook(partial(self._leave, name)),
                    )
                    for handle in handles:
                        stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def _enter(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._wanted(name):
            first = [*_tensors(args), *_tensors(kwargs.get("hidden_states"))][:1]
            for op, tensors in ((IN, first), (MASK, _tensors(kwargs.get(MASK)))):
                for tensor in tensors:
                    self.keep(name, op, tensor)
        self._scopes.append(name)

    def _leave(self, name: str, module: Any, args: Any, result: Any) -> None:
        self._scopes.pop()
        if self._wanted(name):
            for tensor in _tensors(result)[:1]:
                self.keep(name, OUT, tensor)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for item in result if isinstance(item, torch.Tensor)] if isinstance(result, tuple | list) else []


def _is_weight_view(func: Any, args: Sequence[Any]) -> bool:
    """A weight seen otherwise, such as transposed, is no value of the call."""
    return bool(args) and isinstance(args[0], torch.nn.Parameter) and func.is_view


def paired(exact: Mapping[RecordKey, Array], rounded: Mapping[RecordKey, Array]) -> list[RecordedValue]:
    """The values that both runs have, in the order of the float64 run."""
    return [
        RecordedValue(key[0], key[1], array, rounded[key], order)
        for order, (key, array) in enumerate(exact.items())
        if key in rounded
    ]


def rounded_to(record: RecordedValue, dtype: np.dtype[Any]) -> Array:
    """The exact value as a graph of that dtype could hold it; what does not fit becomes its largest number."""
    if record.exact.dtype.kind != "f":
        return record.exact
    largest = float(np.finfo(dtype).max)
    result: Array = np.clip(record.exact, -largest, largest).astype(dtype)
    return result
