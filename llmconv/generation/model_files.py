"""ModelFiles: where the parts of a model lie, and the four ways to say it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.checkpoint import INDEX, SINGLE
from llmconv.errors import UsageProblem
from llmconv.files.hub import cached
from llmconv.files.paths import path_of
from llmconv.files.sources import is_hub_id, local_path
from llmconv.model_kinds import require_causal_folder
from llmconv.not_a_model_folder import refused_model


@dataclass(frozen=True)
class ModelFiles:
    """The parts of a model.

    Attributes:
        folder: has the configuration, and for the eager model the weights.
        prefill: the graph of prompts; None for the graphs that the folder's manifest names.
        decode: the graph of steps; None for `prefill` itself.
        tokenizer: a folder; None for `folder`.
        generation_config: a folder whose `generation_config.json` counts; None for `folder`.
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
        """The files of a folder, a graph, a pair of graphs, or a name that the hub's cache knows.

        Raises:
            InputRefused: there is no such file, folder or name.
            UsageProblem: it is none of these.
        """
        if isinstance(model, ModelFiles):
            return model
        if isinstance(model, tuple | list):
            return cls._of_graphs(list(model))
        path = path_of(model, "model")
        if is_hub_id(model):
            kept = cached(str(model))
            path = kept if kept and (kept / "config.json").is_file() else local_path(model)
        elif not path.exists():
            path = local_path(model)
        if path.is_dir():
            _require_runnable(path)
            return cls(path)
        return cls._of_graphs([path])

    @classmethod
    def _of_graphs(cls, paths: list[Any]) -> ModelFiles:
        """Graphs by their paths; everything else lies beside the first of them."""
        graphs = [path_of(path, "model") for path in paths]
        if not 1 <= len(graphs) <= 2:
            raise UsageProblem(
                f"{len(graphs)} graphs are no model", hint="give the graph of prompts and the graph of steps"
            )
        for path in graphs:
            if path.suffix != ".onnx" or not path.is_file():
                raise refused_model(path)
        return cls(graphs[0].parent, *graphs)


def _require_runnable(folder: Path) -> None:
    """Refuses a folder that has neither graphs nor a model, and one of a model that does not continue texts."""
    require_causal_folder(folder)
    if not any(folder.glob("*.onnx")) and not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        raise refused_model(folder)
