"""ModelFiles: the files and folders of a model, found from a folder, graphs, or a name in the Hub's cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.causal_lm import require_causal_folder
from llmconv.checkpoint import INDEX, SINGLE
from llmconv.errors import UsageProblem
from llmconv.files.hub import cached
from llmconv.files.paths import path_of
from llmconv.files.sources import is_hub_id, local_path
from llmconv.hub.address import hub_address
from llmconv.not_a_model_folder import refused_model
from llmconv.output.manifest import MANIFEST, read_manifest


@dataclass(frozen=True)
class ModelFiles:
    """The files and folders of a model.

    Attributes:
        folder: has the configuration and, for the eager model, the weights.
        prefill: the prefill graph; None for the graphs in the folder's manifest.
        decode: the decode graph; None for `prefill` itself.
        tokenizer: folder of the tokenizer; None for `folder`.
        generation_config: folder of `generation_config.json`; None for `folder`.
    """

    folder: Path
    prefill: Path | None = None
    decode: Path | None = None
    tokenizer: Path | None = None
    generation_config: Path | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "folder":
                object.__setattr__(self, field.name, path_of(value, field.name))

    @classmethod
    def find(cls, model: Any) -> ModelFiles:
        """The files of a folder, a graph, a pair of graphs, or a name in the Hub's cache.

        Raises:
            InputRefused: there is no such file, folder or name.
            UsageProblem: `model` is something else.
        """
        if isinstance(model, ModelFiles):
            return model
        if isinstance(model, tuple | list):
            return cls._of_graphs(list(model))
        path = path_of(model, "model")
        if is_hub_id(model):
            kept = cached(hub_address(str(model)))
            path = kept if kept and (kept / "config.json").is_file() else local_path(model)
        elif not path.exists():
            path = local_path(model)
        if path.is_dir():
            _require_runnable(path)
            return cls(path)
        return cls._of_graphs([path])

    @classmethod
    def _of_graphs(cls, paths: list[Any]) -> ModelFiles:
        """Graphs by their paths; all other files are next to the first graph."""
        graphs = [path_of(path, "model") for path in paths]
        if len(graphs) == 2 and graphs[0].is_dir():
            raise UsageProblem(
                f"`{graphs[0]}` is a folder, which has its own decode graph",
                hint="give the folder alone, or the paths of two .onnx files",
            )
        if not 1 <= len(graphs) <= 2:
            raise UsageProblem(
                f"{len(graphs)} graphs are not a model", hint="give the prefill graph and the decode graph"
            )
        for path in graphs:
            if path.suffix != ".onnx" or not path.is_file():
                raise refused_model(path)
        return cls(graphs[0].parent, *graphs)


def _require_runnable(folder: Path) -> None:
    """Refuses a folder without graphs and weights, and models that are not causal language models."""
    require_causal_folder(folder)
    if (folder / MANIFEST).is_file() and read_manifest(folder).graphs:
        return  # whose graphs may be on other hosts
    if not any(folder.glob("*.onnx")) and not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        raise refused_model(folder)
