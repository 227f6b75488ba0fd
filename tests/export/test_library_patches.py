"""The patched libraries: every patched attribute exists, every patch has its effect and ends with its context."""

from __future__ import annotations

import importlib
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import Cache

from llmconv.export import library_patches
from llmconv.export.library_patches import ComplexPair
from llmconv.export.tracing.trace import quiet_libraries

PATCHED = [
    ("onnxscript.rewriter._matcher", "math"),
    ("torch", "polar"),
    ("torch", "view_as_complex"),
    ("torch", "view_as_real"),
    ("torch", "erfinv"),
    ("torch.nn", "Module.register_parameter"),
    ("torch.onnx._internal.exporter._fx_passes", "decompose_with_registry"),
    ("transformers.exporters.exporter_onnx", "_ONNX_TRANSLATION_TABLE"),
    ("transformers.exporters.utils", "apply_patches"),
    ("transformers.exporters.utils", "apply_fx_node_fixes"),
]


def lookup(module: str, path: str) -> Any:
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("module", "path"), PATCHED, ids=str)
def test_the_library_still_has_what_is_patched_or_used(module: str, path: str) -> None:
    assert lookup(module, path) is not None


@pytest.mark.parametrize(
    "patch",
    [
        "exact_constants",
        "complex_as_pairs",
        "constant_erfinv",
        "decomposed_once",
        "fake_parameters",
        "transformers_fixes",
    ],
)
def test_a_patch_ends_with_its_context(patch: str) -> None:
    before = [lookup(module, path) for module, path in PATCHED] + [torch.Tensor.expand, torch.where]
    with getattr(library_patches, patch)():
        pass
    after = [lookup(module, path) for module, path in PATCHED] + [torch.Tensor.expand, torch.where]
    assert all(left is right for left, right in zip(before, after, strict=True))


def small_sum() -> ir.Model:
    """A graph that adds 1e-9 to its input."""
    tensor = ir.tensor(1e-9, dtype=ir.DataType.FLOAT, name="epsilon")
    epsilon = ir.val("epsilon", ir.DataType.FLOAT, [], const_value=tensor)
    x = ir.val("x", ir.DataType.FLOAT, [1])
    node = ir.node("Add", [x, epsilon])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[epsilon], opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def test_the_optimizer_keeps_an_epsilon_only_with_the_patch() -> None:
    kept, lost = small_sum(), small_sum()
    onnxscript.optimizer.optimize(lost)
    with library_patches.exact_constants():
        onnxscript.optimizer.optimize(kept)
    assert [node.op_type for node in kept.graph] == ["Add"]
    assert [node.op_type for node in lost.graph] != ["Add"], "onnxscript compares exactly now: remove the patch"


def test_complex_numbers_are_pairs_only_with_the_patch() -> None:
    with library_patches.complex_as_pairs():
        assert isinstance(torch.polar(torch.ones(2), torch.ones(2)), ComplexPair)
    assert torch.polar(torch.ones(2), torch.ones(2)).is_complex()


def test_erfinv_of_a_constant_is_a_constant_only_with_the_patch() -> None:
    class Quantile(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            deviations: torch.Tensor = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95))  # type: ignore[no-untyped-call]
            return x * deviations

    def operations() -> set[str]:
        program = torch.export.export(Quantile(), (torch.ones(2),), strict=False)
        assert torch.equal(program.module()(torch.ones(2)), Quantile()(torch.ones(2)))
        return {str(node.target) for node in program.graph.nodes}

    with library_patches.constant_erfinv():
        assert "aten.erfinv.default" not in operations()
    assert "aten.erfinv.default" in operations()


def test_parameters_are_fake_only_with_the_patch() -> None:
    with library_patches.fake_parameters():
        fake = nn.Linear(1 << 20, 1 << 20)
    assert isinstance(fake.weight, FakeTensor) and isinstance(fake.bias, FakeTensor)
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)


def test_transformers_fixes_change_torch() -> None:
    patched = importlib.import_module("transformers.exporters.utils")._PATCHES["onnx"]
    owner, name, _ = patched[0]  # the owner is a path in newer versions, an object in older ones
    holder, _, attribute = owner.partition(".") if isinstance(owner, str) else ("", "", "")

    def current() -> Any:
        if not holder:
            return getattr(owner, name)
        return getattr(lookup(holder, attribute) if attribute else importlib.import_module(holder), name)

    before = current()
    with library_patches.transformers_fixes():
        inside = current()
    assert inside is not before


def test_the_translations_are_functions_by_operation() -> None:
    assert library_patches.TRANSLATIONS
    assert all(callable(key) and callable(value) for key, value in library_patches.TRANSLATIONS.items())


def test_the_empty_layer_is_a_cache_layer() -> None:
    assert len(Cache(layers=[library_patches.EMPTY_LAYER()]).layers) == 1


PROGRAMS: dict[str, tuple[int, Any]] = {
    "a cast to the same dtype that is the output": (0, lambda x: (x * 2).to(torch.float32)),
    "a cast to another dtype": (0, lambda x: x.to(torch.int64) + 1),
    "reshape": (0, lambda x: x.transpose(0, 1).reshape(-1)),
    "and": (0, lambda x: (x > 1) & (x < 2)),
    "detach": (0, lambda x: (x + 1).detach() * 2),
    "contiguous": (0, lambda x: x.transpose(0, 1).contiguous().view(-1)),
    "chunk": (1, lambda x: x.chunk(2, dim=-1)[1]),
    "repeat": (1, lambda x: x.repeat_interleave(2, dim=-1)),
    "in place": (1, lambda x: (x + 1).mul_(x)),
    "decomposed": (1, lambda x: torch.square(x)),
}
"""What is computed, and how often a program of it is traced again."""

SHORT_WAY = [compute for second, compute in PROGRAMS.values() if not second]
PROGRAMS["all that need no second trace"] = (0, lambda x: tuple(compute(x) for compute in SHORT_WAY))


@pytest.mark.one_row_in(3)
@pytest.mark.quick_rows("all that need no second trace", "in place")
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_trace_gives_the_graph_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second, compute = PROGRAMS[name]
    again, traces = torch.export.ExportedProgram.run_decompositions, []

    class Program(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return compute(x)

    def counted(program: Any, *args: Any, **kwargs: Any) -> Any:
        traces.append(program)
        return again(program, *args, **kwargs)

    def graph() -> list[Any]:
        dynamic = {0: torch.export.Dim.DYNAMIC}
        program = torch.export.export(Program(), (torch.ones(4, 6),), dynamic_shapes=(dynamic,), strict=False)
        made = torch.onnx.export(program, optimize=False, verbose=False)
        assert made is not None
        onnxscript.optimizer.optimize(made.model)
        return [
            (node.op_type, {key: str(value.value) for key, value in node.attributes.items()})
            for node in made.model.graph
        ]

    with quiet_libraries():
        twice = graph()
        monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
        with library_patches.decomposed_once():
            assert graph() == twice
    assert len(traces) == second
