"""`--lora-inputs`: linear layers also read the factors of a LoRA adapter, which are optional inputs of the graph.

    Gemm(x, W, b)  ->  Gemm(Gemm(x, A), B, Gemm(x, W, b))

An initializer that is also an input is a default (ONNX IR specification, "Graphs": an input value overrides it). The
defaults have rank 0, so that the product is zero, whatever the ranks of an adapter are, which may differ by module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmconv.errors import InputRefused, UsageProblem
from llmconv.export.traced_graph import MICROSOFT, NodeEditor, TracedGraph, replace_uses, static_shape
from llmconv.export.weights import StoredRows, WeightSource
from llmconv.runtime.extra_inputs import factor_names

ALL = "all-linear"  # every linear layer of the decoder, without the output head (PEFT's word for it)
PRODUCTS = {("", "Gemm"), (MICROSOFT, "FusedMatMul")}


def lora_targets(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of an option `lora_inputs`: several, or one text with commas; UsageProblem if one is empty."""
    parts = (given,) if given and isinstance(given, str) else tuple(given or ())
    names = tuple(name.strip() for part in parts for name in part.split(","))
    if not all(names):
        raise UsageProblem("`--lora-inputs` has an empty name", hint=f"give `{ALL}`, or `q_proj,v_proj`")
    return names


def add_lora_inputs(traced: TracedGraph, matches: Mapping[str, WeightSource], targets: Sequence[str]) -> list[str]:
    """Adds the inputs to a graph whose weights are not bound yet, in place; returns the modules that have them.

    `targets` are names of modules as in PEFT's `target_modules`: the last part of a path, or more of it. Raises
    InputRefused: a target is not the name of a linear layer.
    """
    products = _products(traced, matches)
    wanted = {
        name: [module for module in products if name == ALL or f".{module}".endswith(f".{name}")] for name in targets
    }
    if absent := next((name for name, modules in wanted.items() if not modules), None):
        last = sorted({module.rpartition(".")[2] for module in products})
        raise InputRefused(
            f"`--lora-inputs {absent}`: the graphs have no linear layer of that name",
            hint=f"give `{ALL}`, or some of: {', '.join(last) or 'none'}",
        )
    chosen = {module for modules in wanted.values() for module in modules}
    for module in (module for module in products if module in chosen):
        _adapt(traced.model, module, products[module])
    traced.model.graph.sort()
    return [module for module in products if module in chosen]


def _products(traced: TracedGraph, matches: Mapping[str, WeightSource]) -> dict[str, ir.Node]:
    """The products of the layers with a whole stored matrix, by module in the order of layers."""
    found: dict[str, ir.Node] = {}
    for name, weight in traced.weights.items():
        source, uses = matches[name], list(weight.uses())
        if not name.startswith(f"{traced.layers_name}.") or not isinstance(source, StoredRows) or not source.is_whole:
            continue
        is_product = len(uses) == 1 and (uses[0].node.domain, uses[0].node.op_type) in PRODUCTS and uses[0].idx == 1
        if is_product and len(source.shape) == 2 and source.name.endswith(".weight"):
            found[source.name.removesuffix(".weight")] = uses[0].node
    return found


def _adapt(model: ir.Model, module: str, product: ir.Node) -> None:
    graph, weight = model.graph, product.inputs[1]
    sizes = static_shape(weight)
    out, inner = sizes if product.attributes.get_int("transB", 0) else sizes[::-1]
    first, second = factor_names(module)
    rank = f"{module}.rank"
    a = _default(graph, first, (rank, inner))
    b = _default(graph, second, (out, rank))
    editor = NodeEditor(graph, scope=f"lora/{module}")
    left, result = product.inputs[0], product.outputs[0]
    uses = list(result.uses())
    if product.op_type == "Gemm":
        small = editor.one("Gemm", [left, a], {"transB": 1})
        total = editor.one("Gemm", [small, b, result], {"transB": 1})
    else:
        attributes = {"transA": 0, "transB": 1, "alpha": 1.0}
        small = editor.one("FusedMatMul", [left, a], attributes, domain=MICROSOFT)
        total = editor.one("Add", [result, editor.one("FusedMatMul", [small, b], attributes, domain=MICROSOFT)])
    replace_uses(uses, total)


def _default(graph: ir.Graph, name: str, axes: tuple[int | str, int | str]) -> ir.Value:
    """An input of the given axes, whose default has rank 0."""
    sizes = [axis if isinstance(axis, int) else 0 for axis in axes]
    tensor = ir.tensor(np.zeros(sizes, dtype=np.float32), name=name)
    value = ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value
