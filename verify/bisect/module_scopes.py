"""ModuleScopes: which module of the model a node of a graph belongs to, by the node's name.

`model.layers.7.self_attn.q_proj/Gemm` is llmconv's form; `/model/layers.7/self_attn/q_proj/MatMul` is that of
torch.onnx, optimum and the ORT-GenAI builder, which also has names of its own for some modules. Others note the module
in the node's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx

ANYWHERE = "?"
"""The scope of a node whose name says nothing."""

OTHER_NAMES = {
    "attn": ("self_attn", "self_attention", "attention"),
    "self_attn": ("attn", "self_attention", "attention"),
    "layernorm": ("norm", "ln_f", "final_layer_norm"),
    "final_norm_layernorm": ("norm", "ln_f"),
}
"""What exporters call a module, to what models call it."""

METADATA = ("pkg.torch.onnx.name_scopes", "pkg.onnxscript.name_scopes")
"""Keys under which torch's and onnxscript's exporters note the modules of a node, outermost first."""

LAYER = re.compile(r"^(?:.*?\.)??(\d+)(?:\.|$)")
"""The first number of a dotted name."""


class ModuleScopes:
    """The modules of a model, found by what a graph's nodes are called.

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
        """The deepest module that the scope names; the model's own prefix may be missing or longer."""
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
        """The module of that name, or of another name for the same."""
        if name in self._modules:
            return name
        parent, _, last = name.rpartition(".")
        others = (f"{parent}.{other}" if parent else other for other in OTHER_NAMES.get(last, ()))
        return next((other for other in others if other in self._modules), "")


def dotted_scope(node_name: str) -> str:
    """`model.layers.7.mlp` of `model.layers.7.mlp/Mul` and of `/model/layers.7/mlp/Mul`; empty where there is none."""
    return node_name.strip("/").rpartition("/")[0].replace("/", ".")


def recorded_scope(names: str) -> str:
    """`model.layers.1.mlp` of `['', 'model', 'model.layers.1', 'mlp']`; a part may be told with all those before it."""
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
