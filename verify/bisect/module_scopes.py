"""ModuleScopes: finds the module of the model that a graph node belongs to, by the node's name.

llmconv writes `model.layers.7.self_attn.q_proj/Gemm`; torch.onnx, optimum and the ORT-GenAI builder write
`/model/layers.7/self_attn/q_proj/MatMul`, the builder with different names for some modules. Other exporters record the
module in the node's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx

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
    """The modules of a model, found by the names of graph nodes.

    Args:
        modules: dotted names of all modules of the model.
    """

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
