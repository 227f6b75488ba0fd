"""ModelFiles: where the parts of a model lie, and the four ways to say it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.paths import is_address, path_of
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
        if is_address(model):
            path = local_path(model)
        elif not path.exists():
            path = cached(str(model)) or local_path(model)
        if path.is_dir():
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
                raise InputRefused(f"`{path}` is not a graph", hint=_way_out(path))
        return cls(graphs[0].parent, *graphs)


CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".pdparams", ".distcp")


def _way_out(path: Path) -> str:
    """From a file that is not a graph to one that is."""
    packed = path.suffix in (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".tar")
    if path.suffix in CHECKPOINTS or (packed and Path(path.stem).suffix in CHECKPOINTS):
        return f"convert it first: `llmconv to-hf {path} -o OUT`, then `llmconv export OUT`"
    if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
        return f"give the folder that it lies in: `{path.parent}`"
    return "give a model folder, or the path of an .onnx file"


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
