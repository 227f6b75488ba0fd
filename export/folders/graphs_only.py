"""A new folder with graphs but without weights: those of the model are put next to them, by the names of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import INDEX, own_file, read_small
from llmconv.errors import InputRefused
from llmconv.export.folders.in_place import InPlace
from llmconv.export.folders.new_folder import sources_of
from llmconv.export.graph_files import GraphFiles, GraphPlan
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.files.paths import local_only
from llmconv.files.safetensors_file import FileTensor
from llmconv.output.manifest import steps_of_weights
from llmconv.output.plan import Plan, json_bytes, plan_checkpoint
from llmconv.output.writer import Place, destination_of, write_checkpoint
from llmconv.tensors import Array


@contextmanager
def _without_weights() -> Iterator[None]:
    """Changes the hint of errors about weights that graphs cannot map as they are."""
    try:
        yield
    except InputRefused as error:
        hint = "leave out `--graphs-only`: the weights are converted into OUT once"
        raise InputRefused(error.message, hint=hint) from error


@dataclass(frozen=True)
class GraphsOnly:
    """An `OutputFolder` for graphs that map the model's own files, which the user puts next to them.

    Attributes:
        place: the folder to make.
        model: the folder of the model, of which only headers are read.
        overwrite: replace an existing folder.
        resume: accept a complete folder that is equal.
    """

    place: Place
    model: InPlace
    overwrite: bool
    resume: bool

    def check(self, plan: GraphPlan) -> None:
        """Refuses an existing folder without `overwrite`, and weights that the graphs could not map."""
        with _without_weights():
            self.model.require_mappable(plan)
        destination_of(self.place).require_free(self.overwrite, [self.model.place], resume=self.resume)

    def weights(self) -> Mapping[str, FileTensor]:
        """The tensors in the model's own files, as if those were in the new folder."""
        home = local_only(self.place) or Path(self.place.name)  # of an address only the names of files are used
        return {
            name: FileTensor(
                home / tensor.location, tensor.offset, tensor.dtype, tensor.shape, location=tensor.location
            )
            for name, tensor in self.model.weights().items()
        }

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> GraphsOnly:
        """See `OutputFolder`; only codes that the model's files contain as graphs read them can be mapped."""
        with _without_weights():
            return replace(self, model=self.model.quantized(weights, importance, smoothing))

    def divided(self, parts: Mapping[str, int]) -> GraphsOnly:
        """See `OutputFolder`: the files are the model's own."""
        return self

    def planned(self) -> dict[str, int]:
        """See `OutputFolder`."""
        return {name: len(content) for name, content in self._small_files().items()}

    def missing(self) -> dict[str, int]:
        """Bytes of the files that have to be put next to the graphs, by name."""
        paths = {tensor.location: tensor.path for tensor in self.model.weights().values()}
        return {name: path.stat().st_size for name, path in sorted(paths.items())}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        """Writes configuration, tokenizer, graphs and manifest, which become visible together."""
        checkpoint = self.model.checkpoint
        contents = dict(files.files)
        if files.config:
            contents["config.json"] = json_bytes({**checkpoint.config, **files.config})
        made = {**step, "options": {**step["options"], "weights": self.missing()}}
        write_checkpoint(
            Plan(checkpoint, (), self._small_files()),
            self.place,
            steps=[*steps_of_weights(checkpoint.path), made],
            sources=sources_of(checkpoint),
            overwrite=self.overwrite,
            resume=self.resume,
            more_files=contents,
            graphs=files.entries,
        )
        return 0

    def _small_files(self) -> dict[str, bytes]:
        """The files of a model except its weights; the index is the model's own, which names its own files."""
        checkpoint = self.model.checkpoint
        planned = {name: text for name, text in plan_checkpoint(checkpoint).small_files.items() if name != INDEX}
        has_index = (checkpoint.path / INDEX).is_file()
        return planned | ({INDEX: read_small(own_file(checkpoint.path, INDEX))} if has_index else {})
