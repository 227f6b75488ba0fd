"""LocalStage: one stage of a model in this process, of which only its own graphs and weights are opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.runtime.cache_names import is_past, is_present, is_state
from llmconv.runtime.onnxruntime.graph import LENGTH_AXIS, OrtCache, OrtGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, for_concurrent_use
from llmconv.runtime.onnxruntime.widened_weights import WidenedWeights
from llmconv.runtime.runner import Cache
from llmconv.runtime.stages.staged_export import MASK, StagedExport
from llmconv.tensors import Array


@dataclass(frozen=True)
class StageStep:
    """What one run of a stage returns.

    Attributes:
        results: its outputs other than the cache, by name.
        present: its part of the cache.
    """

    results: Mapping[str, Array]
    present: Cache


class StageGraph(OrtGraph):
    """A graph with some of the layers: takes and returns hidden states.

    Attributes:
        taken: declared shapes of its inputs other than the cache by name, the mask always among them.

    Args:
        path: its file.
        settings: session settings.
        entry: its entry in the manifest, with this file only.
    """

    def __init__(self, path: Path, settings: SessionSettings, entry: GraphEntry) -> None:
        super().__init__(path, settings, entry=entry)
        self.result_names = [name for name in self.outputs if not is_present(name)]
        declared = {name: shape for name, shape in self.inputs.items() if not is_past(name)}
        self.taken: dict[str, list[int | str]] = {**declared, MASK: self.inputs.get(MASK, ["batch", "total"])}

    def run_stage(self, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs the layers.

        Args:
            values: arrays by name, the inputs of the graph among them.
            past: this stage's part of the cache; None for an empty one.

        Raises:
            MalformedInput: onnxruntime cannot run the graph on them.
        """
        with self._refusing():
            results, present = self._run_growing({name: values[name] for name in self.taken}, past)
        return StageStep(dict(zip(self.result_names, results, strict=True)), present)


class LocalStage:
    """One stage, opened.

    Attributes:
        number: from 1.
        graphs: by use: `prefill` and `decode`.

    Args:
        export: the folder's stages.
        number: which of them.
        settings: session settings of the whole model; those of the stage are taken from them.

    Raises:
        MalformedInput: a graph was changed since the export, or onnxruntime cannot open it.
        UsageProblem: the stage does not exist, or the settings name one that does not exist.
    """

    def __init__(self, export: StagedExport, number: int, settings: SessionSettings | None = None) -> None:
        settings = settings or SessionSettings()
        settings.require_stages(export.count)
        export.require(number)
        self.number = number
        self.graphs = _open(export, number, for_concurrent_use(settings.of_stage(number)))

    def run(self, use: str, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs a graph of the stage, see `StageGraph.run_stage`.

        Args:
            use: `prefill` or `decode`.
            values: arrays by name.
            past: this stage's part of the cache.
        """
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
