"""One bound decoder -> the ONNX files that were asked for, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from llmconv.errors import UsageProblem
from llmconv.export.graph_options import GraphOptions
from llmconv.export.passes.choice import choose
from llmconv.export.passes.last_logits import keep_last_logits
from llmconv.export.passes.opset import to_opset
from llmconv.export.prefix_file import PrefixFile, require_fit
from llmconv.export.stages import require_stages, split
from llmconv.export.trace import TracedGraph

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}
PROMPT_ROLES = {"prefill", "unified"}
"""The graphs that a prompt may be given to; the prefix is in the cache afterwards."""


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
        """The files of a role: one, or one per stage."""
        whole, count = GRAPH_FILES[role], self.options.stages
        if count == 1:
            return [whole]
        return [f"{whole.removesuffix('.onnx')}-{number}-of-{count}.onnx" for number in range(1, count + 1)]

    def check(self, traced: TracedGraph) -> None:
        """Raises what `draw` would, before anything is written; the graph need not be bound yet."""
        require_stages(self.options.stages, traced.num_layers)
        if self.options.prefix and not PROMPT_ROLES.intersection(self.roles):
            raise UsageProblem(
                "`--prefix` is for the graph of a prompt, and none is made",
                hint="give `--prefill` or `--unified` too; the decode graph finds the prefix in its cache",
            )
        if self.options.prefix:
            require_fit(self.options.prefix, traced.model)
        if self.options != GraphOptions():
            self._change(traced.model.clone())

    def draw(self, traced: TracedGraph, folder: Path) -> Drawn:
        """The files; the graph is named, bound to the weights in `folder`, and changed."""
        drawn = Drawn({}, {})
        if self.options.prefix:
            prefix = PrefixFile.make(self.options.prefix, traced.model, folder)
            prompt = traced.model.clone()
            prefix.prepend(prompt)
            drawn.files[prefix.name] = prefix.content
            self._draw(prompt, traced, drawn, PROMPT_ROLES, prefix.recorded())
        self._draw(traced.model, traced, drawn, set(GRAPH_FILES) - drawn.entries.keys(), {})
        return drawn

    def _draw(
        self, model: ir.Model, traced: TracedGraph, drawn: Drawn, roles: Collection[str], more: dict[str, Any]
    ) -> None:
        """Files and entries of those of some roles that were asked for; their graphs are all alike."""
        roles = [role for role in self.roles if role in roles]
        if not roles:
            return
        self._change(model)
        whole = ir.to_proto(model)
        parts = [whole]
        if self.options.stages > 1:
            parts = split(whole, self.options.stages, traced.layers_name, traced.num_layers)
        contents = [encode(part) for part in parts]
        for role in roles:
            names = self.names(role)
            drawn.files.update(zip(names, contents, strict=True))
            entry = {**_places(names, parts), "opset": opset_of(whole), **_ports(whole)}
            drawn.entries[role] = {**entry, **self.options.recorded(), **more}

    def _change(self, model: ir.Model) -> None:
        if self.options.last_logits:
            keep_last_logits(model)
        if self.options.choice:
            choose(model, self.options.choice)
        if self.options.opset != model.opset_imports[""]:
            to_opset(model, self.options.opset)


def files_of(entry: dict[str, Any]) -> list[str]:
    """The files that an entry of the manifest names."""
    parts = [*entry.get("stages", [entry]), entry.get("prefix", {})]
    return [part["file"] for part in parts if "file" in part]


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators."""
    return next(opset.version for opset in model.opset_import if not opset.domain)


def encode(model: onnx.ModelProto) -> bytes:
    """The bytes of an ONNX file; the same model gives the same bytes."""
    return bytes(model.SerializeToString(deterministic=True))


def _places(names: list[str], parts: list[onnx.ModelProto]) -> dict[str, Any]:
    """`file`, or the `stages` with the ports of each."""
    if len(names) == 1:
        return {"file": names[0]}
    return {"stages": [{"file": name, **_ports(part)} for name, part in zip(names, parts, strict=True)]}


def _ports(model: onnx.ModelProto) -> dict[str, list[str]]:
    return {
        "inputs": [port.name for port in model.graph.input],
        "outputs": [port.name for port in model.graph.output],
    }
