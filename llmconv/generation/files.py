"""ModelFiles: where the parts of a model lie, and the four ways to say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.storage import HUB_ID, local_path


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
        path = Path(model)
        if not path.exists():
            path = cached(str(model)) or local_path(model)
        if path.is_dir():
            return cls(path)
        return cls._of_graphs([path])

    @classmethod
    def _of_graphs(cls, paths: list[Any]) -> ModelFiles:
        """Graphs by their paths; everything else lies beside the first of them."""
        graphs = [Path(path) for path in paths]
        if not 1 <= len(graphs) <= 2:
            raise UsageProblem(
                f"{len(graphs)} graphs are no model", hint="give the graph of prompts and the graph of steps"
            )
        for path in graphs:
            if path.suffix != ".onnx" or not path.is_file():
                raise InputRefused(f"`{path}` is not a graph", hint="give a model folder, or the path of an .onnx file")
        return cls(graphs[0].parent, *graphs)


def cached(name: str) -> Path | None:
    """The folder of a hub name (`org/name[@revision]`) in the hub's cache; None where it is not there."""
    if not HUB_ID.fullmatch(name) and not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        return None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - 0.3 s that a local path does not pay
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
