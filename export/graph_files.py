"""One bound decoder -> the ONNX files that were asked for, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from llmconv.errors import UsageProblem
from llmconv.export.clients import DEFAULT, Content, Dressing, Graphs
from llmconv.export.graph_options import GraphOptions
from llmconv.export.graph_spec import GROWING, Form
from llmconv.export.prefix.file import PrefixFile, require_fit
from llmconv.export.rewrite.passes.last_logits import keep_last_logits
from llmconv.export.rewrite.passes.opset import to_opset
from llmconv.export.rewrite.passes.postprocess import choose
from llmconv.export.rewrite.pipeline_stages import require_stages, split
from llmconv.export.traced_graph import TracedGraph
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE, GRAPH_FILES

FILES = {**GRAPH_FILES, EMBEDDINGS_ROLE: EMBEDDINGS}
PROMPT_ROLES = {"prefill", "unified"}
"""The graphs that a prompt may be given to; the prefix is in the cache afterwards."""


@dataclass(frozen=True)
class Drawn:
    """What an export writes.

    Attributes:
        files: content by path in the folder, of the clients' files too.
        entries: of the manifest's `graphs`, by role.
        config: fields that clients want in the `config.json` of a new folder.
    """

    files: dict[str, Content] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs and prefixes; links have none."""
        files = [content for name, content in self.files.items() if name.endswith((".onnx", ".graph", ".safetensors"))]
        return sum(len(content) for content in files if isinstance(content, bytes))


@dataclass(frozen=True)
class Drawing:
    """Which graphs to make of a decoder, and how.

    Attributes:
        forms: by role (`prefill`, `decode`, `unified`), in the order they are written.
        dressing: what clients want beside them.
        options: what changes them.

    Raises:
        UsageProblem: options that do not fit each other, or that clients cannot work with.
        InputRefused: a client cannot run this model.
    """

    forms: Mapping[str, Form]
    dressing: Dressing
    options: GraphOptions = field(default_factory=GraphOptions)

    def __post_init__(self) -> None:
        form, options = next(iter(self.forms.values())), self.options
        if options.prefix and not PROMPT_ROLES & self.forms.keys():
            raise UsageProblem(
                "`--prefix` is for the graph of a prompt, and none is made",
                hint="give `--prefill` or `--unified` too; the decode graph finds the prefix in its cache",
            )
        if form.cache != GROWING.cache and options.opset and options.opset < form.opset:
            raise UsageProblem(
                f"opset {options.opset} has no operator that writes into a buffer of fixed length",
                hint=f"leave out `--opset {options.opset}`: such graphs have opset {form.opset}",
            )
        odd = "--prefix" if options.prefix else "--stages" if options.stages > 1 else ""
        if odd and (form.cache != GROWING.cache or form.embeddings):
            raise UsageProblem(
                f"`{odd}` is for graphs that take tokens and whose cache grows", hint=f"leave out `{odd}`"
            )
        self.dressing.check(options.for_own_runner(), form.cache, takes_embeddings=bool(form.embeddings))

    def names(self, role: str) -> list[str]:
        """The files of a role: one, or one per stage."""
        whole, count = FILES[role], self.options.stages
        if count == 1:
            return [whole]
        return [f"{whole.removesuffix('.onnx')}-{number}-of-{count}.onnx" for number in range(1, count + 1)]

    def replaced(self, complete: Mapping[str, Any]) -> list[str]:
        """The files that would be written over, by the manifest's `graphs` of the folder."""
        return [name for role in self.forms if role in complete for name in self.names(role)] + [*self.dressing.names]

    def recorded(self) -> dict[str, Any]:
        """What the manifest says of this step."""
        options, form = self.options, next(iter(self.forms.values()))
        return {
            "graphs": list(self.forms),
            "layouts": tuple(layout.name for layout in self.dressing.chosen if layout.name != DEFAULT),
            **options.recorded(),
            "stages": options.stages if options.stages > 1 else None,
            "prefix": options.prefix.kind if options.prefix else None,
            "opset": options.opset,
            **form.recorded(),
        }

    def check(self, graphs: Mapping[str, TracedGraph]) -> None:
        """Raises what `draw` would, before anything is written; the graphs need not be bound yet."""
        traced = next(iter(graphs.values()))
        require_stages(self.options.stages, traced.num_layers)
        if self.options.prefix:
            require_fit(self.options.prefix, traced.model)
        if self.options != GraphOptions():
            for role, graph in graphs.items():
                self._change(graph.model.clone(), role)

    def draw(self, graphs: Mapping[str, TracedGraph], folder: Path, weights: tuple[str, ...]) -> Drawn:
        """The files.

        Args:
            graphs: by role, named, and bound to the weights; are changed.
            folder: of the weights.
            weights: names of the files that they lie in.
        """
        drawn = Drawn()
        for traced in {id(traced): traced for traced in graphs.values()}.values():
            self._draw(traced, [role for role, graph in graphs.items() if graph is traced], drawn, folder)
        self._dress(drawn, weights)
        return drawn

    def _draw(self, traced: TracedGraph, roles: Sequence[str], drawn: Drawn, folder: Path) -> None:
        """Files and entries of one graph, which serves some roles; that of a prompt may begin with a prefix."""
        prompts = [role for role in roles if role in PROMPT_ROLES]
        if self.options.prefix and prompts:
            prefix = PrefixFile.make(self.options.prefix, traced.model, folder)
            prompt = traced.model.clone()
            prefix.prepend(prompt)
            drawn.files[prefix.name] = prefix.content
            self._enter(prompt, traced, prompts, drawn, prefix.recorded())
            roles = [role for role in roles if role not in prompts]
        if roles:
            self._enter(traced.model, traced, roles, drawn, {})

    def _enter(
        self, model: ir.Model, traced: TracedGraph, roles: Sequence[str], drawn: Drawn, more: dict[str, Any]
    ) -> None:
        self._change(model, roles[0])
        whole = ir.to_proto(model)
        parts = [whole]
        if self.options.stages > 1:
            parts = split(whole, self.options.stages, traced.layers_name, traced.num_layers)
        contents = [encode(part) for part in parts]
        for role in roles:
            names = self.names(role)
            drawn.files.update(zip(names, contents, strict=True))
            entry = {**_places(names, parts), "opset": opset_of(whole), **_ports(whole)}
            options = self.options.recorded() if role in self.forms else {}
            drawn.entries[role] = {**entry, **options, **traced.form.recorded(), **more}

    def _dress(self, drawn: Drawn, weights: tuple[str, ...]) -> None:
        """What clients want beside the graphs, or in their place; none wants stages."""
        if self.options.stages > 1:
            return
        files = {role: FILES[role] for role in self.forms}
        contents = {role: drawn.files[name] for role, name in files.items()}
        graphs = Graphs({role: c for role, c in contents.items() if isinstance(c, bytes)}, files, weights)
        drawn.files.update(self.dressing.files(graphs))
        drawn.config.update(self.dressing.config(graphs))

    def _change(self, model: ir.Model, role: str) -> None:
        options = self.options
        if options.last_logits and role in self.forms:
            keep_last_logits(model)
        if options.choice and role in self.forms:
            choose(model, options.choice)
        if options.opset and options.opset != model.opset_imports[""]:
            to_opset(model, options.opset)


def files_of(entry: dict[str, Any]) -> list[str]:
    """The files that an entry of the manifest names."""
    parts = [*entry.get("stages", [entry]), entry.get("prefix", {})]
    return [part["file"] for part in parts if "file" in part]


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators."""
    return int(next(opset.version for opset in model.opset_import if not opset.domain))


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
