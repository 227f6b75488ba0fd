"""LocalStage: one stage of a model in this process, of which only its own graphs and weights are opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.output.manifest import MANIFEST, Manifest, read_manifest
from llmconv.runtime.cache_names import is_past, is_present, is_state
from llmconv.runtime.onnxruntime.graph import LENGTH_AXIS, OrtCache, OrtGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, graph_entries
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, WidenedWeights, for_concurrent_use
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array


@dataclass(frozen=True)
class StageStep:
    """What one run of a stage returns: outputs other than the cache by name, and its part of the cache."""

    results: Mapping[str, Array]
    present: Cache


class StageGraph(OrtGraph):
    """A graph with some of the layers (`entry` has its file only): takes and returns hidden states.

    `taken` are declared shapes of its inputs other than the cache by name, the mask always among them.
    """

    def __init__(self, path: Path, settings: SessionSettings, entry: GraphEntry) -> None:
        super().__init__(path, settings, entry=entry)
        self.result_names = [name for name in self.outputs if not is_present(name)]
        declared = {name: shape for name, shape in self.inputs.items() if not is_past(name)}
        self.taken: dict[str, list[int | str]] = {**declared, MASK: self.inputs.get(MASK, ["batch", "total"])}

    def run_stage(self, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs the layers on `values`, arrays by name, the inputs of the graph among them; None is an empty past.

        Raises MalformedInput if onnxruntime cannot run the graph on them.
        """
        with self._refusing():
            results, present = self._run_growing({name: values[name] for name in self.taken}, past)
        return StageStep(dict(zip(self.result_names, results, strict=True)), present)


class LocalStage:
    """One stage, numbered from 1, opened; its graphs are by use, `prefill` and `decode`.

    `settings` are those of the whole model. Raises MalformedInput if a graph was changed since the export, or
    onnxruntime cannot open it; UsageProblem if the stage, or one in the settings, does not exist.
    """

    def __init__(self, export: StagedExport, number: int, settings: SessionSettings | None = None) -> None:
        settings = settings or SessionSettings()
        settings.require_stages(export.count)
        export.require(number)
        self.number = number
        self.graphs = _open(export, number, for_concurrent_use(settings.of_stage(number)))

    def run(self, use: str, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs a graph of the stage, `prefill` or `decode`, as `StageGraph.run_stage`."""
        return self.graphs[use].run_stage(values, past)

    def close(self) -> None:
        """Does nothing: the sessions end with the process."""


def _open(export: StagedExport, number: int, settings: SessionSettings) -> dict[str, StageGraph]:
    """The graphs of a stage; one session for both uses if they have the same content."""
    first, second = (export.stage(use, number) for use in ("prefill", "decode"))
    if first.content_key(export.folder) == second.content_key(export.folder):
        graph = StageGraph(export.folder / second.files[0], settings, second)
        return {"prefill": graph, "decode": graph}
    settings = replace(settings, widened=WidenedWeights())
    entries = {"prefill": first, "decode": second}
    return {use: StageGraph(export.folder / entry.files[0], settings, entry) for use, entry in entries.items()}


def is_cuttable(cache: Cache) -> bool:
    """As `can_be_cut`, by the shapes alone: arrays on a device are not copied."""
    if not isinstance(cache, OrtCache):
        return False
    named = zip(cache.names, cache.values, strict=True)
    return all(not is_state(name) and value.shape()[LENGTH_AXIS] == cache.length for name, value in named)


MASK = "attention_mask"
"""An input of every stage, even if its graph does not read it: the mask has the length of the cache."""

Ports = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of inputs and of outputs."""

AGAIN = "export the graphs again, and copy llmconv.json and the files of each stage to its host"


@dataclass(frozen=True)
class StagedExport:
    """The stages of an exported folder; files of stages that are on other hosts may be missing.

    Attributes:
        folder: has llmconv.json.
        entries: entries of the graphs in it, by use: `prefill` and `decode`.
        fingerprints: hash of everything that identifies a stage, for each stage in order: its graphs, all weights, and
            the entries of the graphs.
        knows_weights: whether llmconv.json has checksums of the weights, which `export -o OUT` writes.
        ports: names of inputs and outputs of each stage in order, by use.
    """

    folder: Path
    entries: Mapping[str, GraphEntry]
    count: int
    fingerprints: tuple[str, ...]
    knows_weights: bool
    ports: Mapping[str, Sequence[Ports]]

    @classmethod
    def read(cls, folder: Path) -> StagedExport:
        """The stages of a folder; raises InputRefused unless llmconv.json has checksums of graphs in stages."""
        if not folder.is_dir():
            raise InputRefused(f"`{folder}` is not a folder", hint="give the OUT of `llmconv export --stages K -o OUT`")
        manifest, found = read_manifest(folder), {entry.role: entry for entry in graph_entries(folder)}
        if not found or len(next(iter(found.values())).files) == 1:
            raise InputRefused(
                f"`{folder}` has no graphs in stages", hint="run `llmconv export MODEL --stages K -o OUT`, and give OUT"
            )
        both = {"prefill", "decode"} <= found.keys()
        single = found.get("unified") or next(iter(found.values()))
        entries = {use: found[use] if both else single for use in ("prefill", "decode")}
        counts = {len(entry.files) for entry in entries.values()}
        if len(counts) > 1:
            raise MalformedInput(f"the graphs in `{MANIFEST}` have different numbers of stages", hint=AGAIN)
        weights = {name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")}
        count, ports = counts.pop(), {use: _ports(manifest.graphs[entry.role]) for use, entry in entries.items()}
        prints = tuple(_fingerprint(manifest, entries, at, weights) for at in range(count))
        return cls(folder, entries, count, prints, any("sha256" in entry for entry in weights.values()), ports)

    def stage(self, use: str, number: int) -> GraphEntry:
        """The entry of one stage of a graph."""
        return replace(self.entries[use], files=(self.entries[use].files[number - 1],))

    def inputs(self, use: str, number: int) -> list[str]:
        """The inputs of a stage other than its cache, and the attention mask."""
        return list(dict.fromkeys(name for name in (*self.ports[use][number - 1][0], MASK) if not is_past(name)))

    def outputs(self, use: str, number: int) -> list[str]:
        """The outputs of a stage other than its cache."""
        return [name for name in self.ports[use][number - 1][1] if not is_present(name)]

    def require(self, number: int) -> None:
        """Checks that a stage exists, and that its graphs in the folder are those that were exported.

        Raises UsageProblem if there is none, MalformedInput if a graph is missing, or was changed since.
        """
        if not 1 <= number <= self.count:
            raise UsageProblem(
                f"`{self.folder}` has no stage {number}", hint=f"its stages are numbered from 1 to {self.count}"
            )
        files = read_manifest(self.folder).files
        for name in {self.stage(use, number).files[0] for use in self.entries}:
            path = self.folder / name
            if not path.is_file():
                raise MalformedInput(f"`{name}` is missing from `{self.folder}`", hint=AGAIN)
            if hashlib.sha256(path.read_bytes()).hexdigest() != files[name].get("sha256"):
                raise MalformedInput(f"`{name}` is not the graph that `{MANIFEST}` lists", hint=AGAIN)


def _ports(entry: Mapping[str, Any]) -> list[Ports]:
    """Names of inputs and outputs of each stage in a graph's entry."""
    found = [(stage.get("inputs"), stage.get("outputs")) for stage in entry["stages"]]
    names = [name for ports in found for one in ports for name in (one if isinstance(one, list) else [None])]
    if not all(isinstance(name, str) for name in names):
        raise MalformedInput(f"`{MANIFEST}` does not list the inputs and outputs of the stages", hint=AGAIN)
    return [(tuple(inputs), tuple(outputs)) for inputs, outputs in found]


def _fingerprint(manifest: Manifest, entries: Mapping[str, GraphEntry], at: int, weights: Mapping[str, Any]) -> str:
    """A hash of everything that identifies stage `at` (from 0)."""
    graphs = {}
    for use, entry in entries.items():
        name = entry.files[at]
        if not (digest := manifest.files.get(name, {}).get("sha256")):
            raise MalformedInput(f"`{MANIFEST}` has no checksum of `{name}`", hint=AGAIN)
        graphs[use] = [digest, manifest.graphs[entry.role]]
    content = json.dumps({"stage": at + 1, "graphs": graphs, "weights": weights}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
