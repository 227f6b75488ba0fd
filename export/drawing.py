"""One bound decoder -> the ONNX files that were asked for, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from llmconv.export.graph_options import GraphOptions
from llmconv.export.passes.choice import choose
from llmconv.export.passes.last_logits import keep_last_logits

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}


@dataclass(frozen=True)
class Drawn:
    """Files by name, and the entries of the manifest's `graphs` by role."""

    files: dict[str, bytes]
    entries: dict[str, dict[str, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(len(content) for content in self.files.values())


@dataclass(frozen=True)
class Drawing:
    """Which graphs to make of a decoder, and how.

    Attributes:
        roles: `prefill`, `decode`, `unified`, in the order they are written.
        options: what changes them.
    """

    roles: tuple[str, ...]
    options: GraphOptions = field(default_factory=GraphOptions)

    def names(self, role: str) -> list[str]:
        """The files of a role."""
        return [GRAPH_FILES[role]]

    def check(self, model: ir.Model) -> None:
        """Raises what `draw` would, before anything is written; `model` need not be bound yet."""
        if self.options != GraphOptions():
            self._change(model.clone())

    def draw(self, model: ir.Model) -> Drawn:
        """The files; `model` is named, bound to its weights, and changed."""
        self._change(model)
        content = encode(model)
        drawn = Drawn({}, {})
        for role in self.roles:
            drawn.files[GRAPH_FILES[role]] = content
            drawn.entries[role] = {"file": GRAPH_FILES[role], **signature(model), **self.options.recorded()}
        return drawn

    def _change(self, model: ir.Model) -> None:
        if self.options.last_logits:
            keep_last_logits(model)
        if self.options.choice:
            choose(model, self.options.choice)


def signature(model: ir.Model) -> dict[str, Any]:
    """The opset and the names of a graph's ports."""
    return {
        "opset": model.opset_imports[""],
        "inputs": _names(model.graph.inputs),
        "outputs": _names(model.graph.outputs),
    }


def encode(model: ir.Model) -> bytes:
    """The bytes of an ONNX file; the same model gives the same bytes."""
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _names(values: Iterable[ir.Value]) -> list[str | None]:
    return [value.name for value in values]
