"""Records every value that the eager model computes in one call, by module, and finds the modules of graph nodes.

The model runs in float64 and in the graph's dtype, with hooks that track the running module and a dispatch mode that
sees the result of every operator. The model is not changed.

llmconv names nodes `model.layers.7.self_attn.q_proj/Gemm`; torch.onnx, optimum and the ORT-GenAI builder
`/model/layers.7/self_attn/q_proj/MatMul`, the builder with different names for some modules. Other exporters record the
module in the node's metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.runtime.eager.cache import to_numpy
from llmconv.tensors import Array
from llmconv.verify.library_patches import TorchDispatchMode, without_dispatch_modes

SIZE_LIMIT = 1 << 26
"""Maximum number of elements of a recorded value."""

IN, OUT = "input", "output"
"""`op` of recorded inputs and outputs of modules."""

MASK = "attention_mask"
"""`op` of recorded attention masks of modules."""

RecordKey = tuple[str, str, tuple[int, ...], int]
"""Scope, operator, shape, and number of the value among equal ones."""

ScopeFilter = Callable[[str], bool]
"""Returns whether the values of a scope are recorded."""


@dataclass(frozen=True)
class RecordedValue:
    """One value of the eager model.

    Attributes:
        scope: dotted name of the running module.
        op: the operator, or `IN`, `OUT`, `MASK` for inputs and outputs of modules.
        exact: from the float64 run; integers and booleans unchanged.
        rounded: from the run in the graph's dtype.
        order: position among the values of the call.
    """

    scope: str
    op: str
    exact: Array
    rounded: Array
    order: int

    @property
    def is_port(self) -> bool:
        """Whether it is an input or output of a module, not the result of an operator."""
        return self.op in (IN, OUT, MASK)


class Recorder(TorchDispatchMode):
    """Keeps the results of operators by scope; `wanted` selects the scopes."""

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
                # casts to float64 have no counterpart in the other run
                if not (func is torch.ops.aten._to_copy.default and tensor.is_floating_point()):
                    self.keep(scope, f"{func}:{index}", tensor)
        return result

    def keep(self, scope: str, op: str, tensor: torch.Tensor) -> None:
        """Records one value, unless it is empty, too large or complex."""
        if 0 < tensor.numel() <= SIZE_LIMIT and not tensor.is_complex():
            key = (scope, op, tuple(tensor.shape))
            self._counts[key] += 1
            with without_dispatch_modes():  # the copy must not be recorded
                self.values[*key, self._counts[key]] = to_numpy(tensor).copy()

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Records all runs of the model inside the context."""
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
    """Whether the result is a view of a weight, such as its transpose."""
    return bool(args) and isinstance(args[0], torch.nn.Parameter) and func.is_view


def paired(exact: Mapping[RecordKey, Array], rounded: Mapping[RecordKey, Array]) -> list[RecordedValue]:
    """The values of both runs, in the order of the float64 run."""
    return [
        RecordedValue(key[0], key[1], array, rounded[key], order)
        for order, (key, array) in enumerate(exact.items())
        if key in rounded
    ]


def rounded_to(record: RecordedValue, dtype: np.dtype[Any]) -> Array:
    """The exact value in a dtype; numbers out of range are clipped to its largest number."""
    if record.exact.dtype.kind != "f":
        return record.exact
    largest = float(np.finfo(dtype).max)
    result: Array = np.clip(record.exact, -largest, largest).astype(dtype)
    return result


ANYWHERE = "?"
"""The scope of a node whose name contains no module."""

OTHER_NAMES = {
    "attn": ("self_attn", "self_attention", "attention"),
    "self_attn": ("attn", "self_attention", "attention"),
    "layernorm": ("norm", "ln_f", "final_layer_norm"),
    "final_norm_layernorm": ("norm", "ln_f"),
}
"""Names of modules in models, by their names in exporters."""

METADATA = ("pkg.torch.onnx.name_scopes", "pkg.onnxscript.name_scopes")
"""Metadata keys of torch's and onnxscript's exporters for the modules of a node, outermost first."""

LAYER = re.compile(r"^(?:.*?\.)??(\d+)(?:\.|$)")
"""Matches the first number in a dotted name."""


class ModuleScopes:
    """The modules of a model by dotted name, found by the names of graph nodes."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = set(modules) - {""}
        self._found: dict[str, str] = {}

    def of(self, node: onnx.NodeProto) -> str:
        """The module's dotted name, or `ANYWHERE`."""
        recorded = next((entry.value for entry in node.metadata_props if entry.key in METADATA), "")
        key = f"{recorded}\n{node.name}"
        if key not in self._found:
            self._found[key] = self._resolve(recorded_scope(recorded) if recorded else dotted_scope(node.name))
        return self._found[key]

    def _resolve(self, scope: str) -> str:
        """The deepest module in the scope; the model's prefix may be missing or longer."""
        parts = scope.split(".") if scope else []
        for start in range(len(parts)):
            found = self._descend(parts[start:])
            if found:
                return found
        return ANYWHERE

    def _descend(self, parts: list[str]) -> str:
        for prefix in ("", "model.", "transformer.", "model.language_model."):
            found, deeper = "", prefix + parts[0]
            for part in [*parts[1:], ""]:
                match = self._known(deeper)
                if not match:
                    break
                found, deeper = match, f"{match}.{part}"
            if found:
                return found
        return ""

    def _known(self, name: str) -> str:
        """The module of that name, or of an equivalent name; else empty."""
        if name in self._modules:
            return name
        parent, _, last = name.rpartition(".")
        others = (f"{parent}.{other}" if parent else other for other in OTHER_NAMES.get(last, ()))
        return next((other for other in others if other in self._modules), "")


def dotted_scope(node_name: str) -> str:
    """`model.layers.7.mlp` of `model.layers.7.mlp/Mul` and of `/model/layers.7/mlp/Mul`; empty if there is none."""
    return node_name.strip("/").rpartition("/")[0].replace("/", ".")


def recorded_scope(names: str) -> str:
    """`model.layers.1.mlp` of `['', 'model', 'model.layers.1', 'mlp']`; a part may include its parents."""
    scope = ""
    for name in re.findall(r"'([^']*)'", names):
        scope = name if not scope or name.startswith(f"{scope}.") else f"{scope}.{name}"
    return scope


def layer_of_scope(scope: str) -> int | None:
    """7 of `model.layers.7.mlp`; None outside the layers."""
    match = LAYER.match(scope)
    return int(match[1]) if match else None


def inside(scope: str, module: str) -> bool:
    """Whether a scope is that module or lies within it."""
    return module == "" or scope == module or scope.startswith(f"{module}.")
