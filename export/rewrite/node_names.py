"""Stable, readable names: a node is named after its module, such as `model.layers.7.self_attn.q_proj/Gemm`.

The exporter numbers names over the whole trace, and its metadata contain stack traces with local paths, which would
make the file differ between machines.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from llmconv.export.traced_graph import scopes


def name_everything(model: ir.Model) -> None:
    """Names nodes, inner values and constants in graph order, and removes all metadata, in place."""
    graph = model.graph
    counts: Counter[str] = Counter()
    outputs = set(graph.outputs)
    for node in graph:
        scope = next(reversed([name for name in scopes(node) if name and not name.startswith("_")]), "graph")
        node.name = _unique(f"{scope}/{node.op_type}", counts)
        for index, value in enumerate(node.outputs):
            if value not in outputs:
                value.name = f"{node.name}:{index}"
            value.metadata_props.clear()
        node.metadata_props.clear()
        node.doc_string = None
    for name, value in list(graph.initializers.items()):
        graph.initializers.pop(name)
        value.name = _unique("constant", counts)
        graph.initializers[value.name] = value
    _describe(model)


def _unique(name: str, counts: Counter[str]) -> str:
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}_{counts[name]}"


def _describe(model: ir.Model) -> None:
    model.producer_name, model.producer_version, model.domain, model.doc_string = "llmconv", None, None, None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name, model.graph.doc_string = "decoder", None
