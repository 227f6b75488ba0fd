"""Every patch of torch, transformers and onnxscript that an export needs, with the versions that each is for.

Each patch holds only while a context is open. `tests/export/test_library_patches.py` fails when a library moves the
patched attribute or when a patch loses its effect. ONNX has no complex type: where a family rotates positions by
complex multiplication (`torch.polar`, `view_as_complex`, `view_as_real`), pairs of real tensors stand for them in a
trace.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

aten: Any = torch.ops.aten
_fx_passes: Any = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
_matcher: Any = importlib.import_module("onnxscript.rewriter._matcher")
_cache_utils: Any = importlib.import_module("transformers.cache_utils")
try:
    _exporter: Any = importlib.import_module("transformers.exporters.exporter_onnx")
    _exporter_utils: Any = importlib.import_module("transformers.exporters.utils")
except ImportError:  # transformers before its exporters
    _exporter = _exporter_utils = None

EMPTY_LAYER: Callable[[], Any] = getattr(_cache_utils, "DummyLayer", _cache_utils.LinearAttentionLayer)
"""The cache of a layer that keeps nothing: `DummyLayer` since transformers 5.23, else a layer without states."""

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = getattr(_exporter, "_ONNX_TRANSLATION_TABLE", {})
"""Operation of torch to a function of onnxscript: transformers' corrections of torch.onnx (5.23)."""


@contextmanager
def replaced_attributes(owner: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Replaces attributes of a module or class while the context is open; AttributeError if one does not exist."""
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def transformers_fixes() -> AbstractContextManager[None]:
    """transformers' own patches of torch for its ONNX exporter (5.23), such as floor division of sizes."""
    return _exporter_utils.apply_patches("onnx") if _exporter_utils else nullcontext()


def constant_erfinv() -> AbstractContextManager[None]:
    """`torch.erfinv` of a constant is a constant: ONNX has no such function (torch 2.10 to 2.13).

    Gemma 3n computes how many deviations above the mean an activation must be.
    """
    erfinv = torch.erfinv

    def folded(values: Tensor) -> Tensor:
        known = getattr(values, "constant", None)
        if known is None:
            return erfinv(values)
        with _disable_current_modes():
            numbers = erfinv(known).tolist()
        return torch.tensor(numbers, dtype=values.dtype)

    return replaced_attributes(torch, {"erfinv": folded})


def fix_program(graph_module: Any) -> None:
    """transformers' own corrections of a traced program (5.23), in place."""
    if _exporter_utils:
        _exporter_utils.apply_fx_node_fixes("onnx", graph_module)


def exact_constants() -> AbstractContextManager[None]:
    """The patterns of onnxscript's optimizer (0.7) match constants exactly.

    Otherwise they match within 1e-8 or a relative 1e-5: `x + 1e-8` is taken for `x`, and an epsilon is lost.
    """
    exact = SimpleNamespace(isclose=lambda a, b, **tolerances: a == b)
    return replaced_attributes(_matcher, {"math": exact})


def decomposed_once() -> AbstractContextManager[None]:
    """`torch.onnx.export` does not trace a program again that has nothing left to decompose (torch 2.10 to 2.13).

    The second trace takes as long as the first.
    """
    again: Callable[..., torch.export.ExportedProgram] = _fx_passes.decompose_with_registry

    def decompose(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        translated = {found[0].fx_target for found in registry.functions.values()}
        if not _only_translated(program.graph_module, translated):
            return again(program, registry)
        outputs = program.graph.output_node().args[0]
        for specification, output in zip(program.graph_signature.output_specs, outputs, strict=True):
            specification.arg.name = output.name  # a removed cast may have been an output
        return program

    return replaced_attributes(_fx_passes, {"decompose_with_registry": decompose})


CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout}
UNCHANGED = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
RENAMED = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.reshape.default: aten.view.default,  # of a contiguous copy, as a second trace makes it
}
ASSERTED = aten._assert_tensor_metadata.default  # the exporter removes it
TAKEN_APART = {aten.chunk.default, aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor}
"""Operations with a translation that a second trace takes apart, to another graph."""


def _only_translated(module: torch.fx.GraphModule, translated: set[Any]) -> bool:
    """Whether every operation has a translation after the changes that a second trace would make.

    If so, they are made, in place; otherwise the program stays as it is.
    """
    known = (translated - TAKEN_APART) | CASTS | UNCHANGED | RENAMED.keys() | {ASSERTED}
    called = {node.target for node in module.graph.nodes if node.op == "call_function"}
    has_parts = any(isinstance(part, torch.fx.GraphModule) for part in module.children())
    changes_inputs = any(getattr(getattr(target, "_schema", None), "is_mutable", False) for target in called)
    if has_parts or not called <= known or changes_inputs:
        return False
    for node in list(module.graph.nodes):
        if node.target in CASTS:
            _cast(node)
        elif node.target in UNCHANGED:
            _remove(node)
        elif node.target in RENAMED:
            if node.target is aten.reshape.default:
                _copy_input(node)
            node.target = RENAMED[node.target]
    module.recompile()
    return True


def _cast(node: Any) -> None:
    """Removes a cast to the dtype that its input has; any other becomes `_to_copy`, as a second trace makes it."""
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if before == after:
        _remove(node)
    else:
        node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": after}


def _copy_input(node: Any) -> None:
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format})
    copy.meta.update(node.args[0].meta)
    node.args = (copy, *node.args[1:])


def _remove(node: Any) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def complex_as_pairs() -> AbstractContextManager[None]:
    """`torch.polar`, `view_as_complex` and `view_as_real` work on pairs of real tensors (torch 2.10 to 2.13)."""
    functions = {"polar": polar, "view_as_complex": view_as_complex, "view_as_real": view_as_real}
    return replaced_attributes(torch, functions)


class _FakeEmpty(TorchFunctionMode):
    """`torch.empty` returns fake tensors: modules allocate large parameters with it, but no buffer with content."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.empty:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


@contextmanager
def fake_parameters() -> Iterator[FakeTensorMode]:
    """Every parameter that a module registers becomes a fake tensor, so that initialization needs no memory.

    Replaces `nn.Module.register_parameter` (torch 2.10 to 2.13).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            with mode:
                parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined] # some initializers read what they wrote
        register(module, name, parameter)

    with replaced_attributes(nn.Module, {"register_parameter": register_fake}), _FakeEmpty(mode):
        yield mode


@dataclass(frozen=True)
class ComplexPair:
    """Real and imaginary part, two tensors of one shape."""

    real: Tensor
    imag: Tensor

    def __mul__(self, other: Any) -> ComplexPair:
        if isinstance(other, ComplexPair):
            return ComplexPair(
                self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real
            )
        return ComplexPair(self.real * other, self.imag * other)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> ComplexPair:
        """The pair of the same index of both parts."""
        return ComplexPair(self.real[index], self.imag[index])

    def __getattr__(self, name: str) -> Any:
        """Attributes of the real part; methods are applied to both parts."""
        attribute = getattr(self.real, name)
        if not callable(attribute):
            return attribute
        return lambda *args, **kwargs: ComplexPair(
            attribute(*args, **kwargs), getattr(self.imag, name)(*args, **kwargs)
        )


def polar(magnitude: Tensor, angle: Tensor) -> ComplexPair:
    """`torch.polar` as a pair; both tensors of one shape."""
    return ComplexPair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def view_as_complex(pairs: Tensor) -> ComplexPair:
    """`torch.view_as_complex` as a pair: the last axis `[..., 2]` has real and imaginary part."""
    return ComplexPair(pairs[..., 0], pairs[..., 1])


def view_as_real(number: ComplexPair) -> Tensor:
    """`torch.view_as_real` of a pair, `[..., 2]`."""
    return torch.stack([number.real, number.imag], dim=-1)
