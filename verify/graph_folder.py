"""GraphFolder: a folder whose graphs are verified, with and without a cache, and the model they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from llmconv.causal_lm import require_causal_folder
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.sources import export_command, source_name
from llmconv.output.manifest import EMBEDDINGS, VISION, GraphEntry, graph_entries, mtp_entry, single_pass_entries
from llmconv.runtime.onnxruntime.graph import has_vision
from llmconv.runtime.onnxruntime.guard import is_external, load_guarded, refill, rename
from llmconv.verify.arguments import recorded_reference, require_model, require_weights
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.run import takes_embeddings
from llmconv.verify.results import Report
from llmconv.verify.single_pass import SinglePassFolder
from llmconv.verify.verification import Session

if TYPE_CHECKING:
    from llmconv.verify.mtp import MtpFolder


@dataclass(frozen=True)
class GraphFolder:
    """A folder of graphs, and the model they are compared with."""

    path: Path
    entries: list[GraphEntry]  # those with a cache
    single: list[GraphEntry]  # those without
    reference: Path
    report: Report
    session: Session
    allow_changed: bool  # a graph that was changed after its export is a note instead of a failure
    code: Path | None  # the reference's folder where its own code is trusted

    @classmethod
    def open(
        cls,
        path: Path,
        reference: str | Path | None,
        report: Report,
        session: Session,
        *,
        allow_changed: bool,
        trusted: bool,
    ) -> GraphFolder:
        """The graphs in a folder.

        `reference` is the model, None for the one in the manifest, or the folder; `report` gets its name. `trusted`
        runs code in the reference's folder. Raises InputRefused: there are no graphs, or no such model.
        """
        from llmconv.export.families import extra_inputs_of, image_inputs_of  # noqa: PLC0415 - the table alone

        entries, single = graph_entries(path), single_pass_entries(path)
        if not entries and not single:
            raise InputRefused(f"no graphs in `{require_model(path)}`", hint=f"make them: `{export_command(path)}`")
        model = require_weights(path, [*entries, *single][0], reference or recorded_reference(path))
        if entries:
            require_causal_folder(model)
        report.reference = source_name(model)
        unseeing = () if has_vision(path) else image_inputs_of(model)
        entries = [replace(entry, fixed_inputs=(*entry.fixed_inputs, *unseeing)) for entry in entries]
        session = replace(session, settings=replace(session.settings, extra_inputs=partial(extra_inputs_of, model)))
        return cls(path, entries, single, model, report, session, allow_changed, model if trusted else None)

    def with_cache(self) -> VerifiedFolder:
        return self._verified(self.entries)

    def without_cache(self) -> SinglePassFolder | None:
        """The graphs without a cache; None if there are none, or if scenarios are selected, which they do not have."""
        if not self.single or self.session.selection.only:
            return None
        verified = self._verified(self.single)
        return SinglePassFolder(verified, self.reference, self.report, self.session, self.allow_changed)

    def mtp_head(self) -> MtpFolder | None:
        """The graph of the MTP head; None if there is none, or if scenarios are selected, which it does not have."""
        if (entry := mtp_entry(self.path)) is None:
            return None
        if self.session.selection.only:
            self.report.unseen.append("faults of the MTP head (`--scenario` leaves it out)")
            return None
        from llmconv.verify.mtp import MtpFolder  # noqa: PLC0415 - few folders have one

        return MtpFolder(self._verified([entry]), self.with_cache(), self.reference, self.report, self.allow_changed)

    def _verified(self, entries: list[GraphEntry]) -> VerifiedFolder:
        return VerifiedFolder(self.path, entries, _models(self.path, entries), self.session.settings)


def _models(folder: Path, entries: Sequence[GraphEntry]) -> dict[str, onnx.ModelProto]:
    files = {entry.name: entry.files for entry in entries}
    if twice := next((one.name for one in entries if files[one.name] != one.files), ""):
        raise MalformedInput(f"two graphs of the manifest are named `{twice[:100]}`", hint="export them again")
    models = {entry.name: load_whole(folder, entry) for entry in entries}
    if takes_embeddings(models.values()):
        models[EMBEDDINGS] = load_guarded(folder / EMBEDDINGS)
        if has_vision(folder):
            models[VISION] = load_guarded(folder / VISION)
    return models


def load_whole(folder: Path, entry: GraphEntry) -> onnx.ModelProto:
    """The graph of an entry without its weights, stages joined; MalformedInput for data outside the folder."""
    parts = [load_guarded(path) for path in entry.paths(folder)]
    return parts[0] if len(parts) == 1 else joined_stages(parts)


def joined_stages(parts: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Nodes and tensors of all parts, with the inputs and outputs that are not passed between parts."""
    whole = onnx.ModelProto()
    whole.CopyFrom(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        graph = _distinct(part.graph, whole.graph, f":{number}")
        whole.graph.node.extend(graph.node)
        whole.graph.initializer.extend(graph.initializer)
        whole.graph.input.extend(graph.input)
        whole.graph.output.extend(graph.output)
        _add_definitions(part, whole)
    taken = {port.name for part in parts for port in part.graph.input}
    made = {port.name for part in parts for port in part.graph.output}
    for ports, handed_on in ((whole.graph.input, made), (whole.graph.output, taken)):
        refill(ports, {port.name: port for port in ports if port.name not in handed_on}.values())
    return whole


def _add_definitions(part: onnx.ModelProto, whole: onnx.ModelProto) -> None:
    """The functions and versions of operators of a part; MalformedInput if the parts define one of them differently."""
    known = {(one.domain, one.name, one.overload): one for one in whole.functions}
    versions = {one.domain: one for one in whole.opset_import}
    new = [one for one in part.functions if known.get((one.domain, one.name, one.overload)) != one]
    imported = [one for one in part.opset_import if versions.get(one.domain) != one]
    twice = [one.name for one in new if (one.domain, one.name, one.overload) in known]
    twice += [f"opset {one.domain}" for one in imported if one.domain in versions]
    if twice:
        raise MalformedInput(f"the stages of a graph define `{twice[0][:100]}` differently", hint="export them again")
    whole.functions.extend(new)
    whole.opset_import.extend(imported)


def _distinct(part: onnx.GraphProto, before: onnx.GraphProto, mark: str) -> onnx.GraphProto:
    """A copy of a part without tensors of those before, and `mark` after the other names that are taken there."""
    graph = onnx.GraphProto()
    graph.CopyFrom(part)
    stored, named = {tensor.name: tensor for tensor in before.initializer}, {node.name for node in before.node}
    refill(graph.initializer, [tensor for tensor in graph.initializer if stored.get(tensor.name) != tensor])
    made = {name for node in graph.node for name in node.output}
    made |= {tensor.name for tensor in graph.initializer if not is_external(tensor)}
    taken = {*stored, *(name for node in before.node for name in node.output)} - {""}
    every = made | taken | {tensor.name for tensor in graph.initializer} | {port.name for port in graph.input}
    while any(f"{name}{mark}" in every for name in made & taken):
        mark += "+"
    rename(graph, {name: f"{name}{mark}" for name in (made & taken) - {port.name for port in graph.output}})
    for node in graph.node:
        node.name += mark if node.name in named else ""
    return graph
