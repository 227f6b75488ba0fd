"""Validates the inputs of `verify`: a folder with graphs, and a model to compare them with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmconv.causal_lm import require_causal_folder, require_sizes
from llmconv.checkpoint import Checkpoint, has_weights, read_json, write_small
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, word
from llmconv.files.gguf_file import holds_gguf, is_gguf
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder
from llmconv.files.safetensors_file import RANGES
from llmconv.files.sources import is_remote, local_path
from llmconv.files.weight_ranges import Mapped, encode_ranges
from llmconv.not_a_model_folder import refused_model
from llmconv.output.manifest import MANIFEST, GraphEntry
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint

CODES = "quantized*.safetensors"  # weight files of `llmconv export --quant`
PATH_LIMIT = 4096  # maximum length of a path in characters (`PATH_MAX`)


def require_folder(name: str | Path) -> Path:
    """The folder at a path, or a local copy of a URI or of a model of the hub; InputRefused if it is not a folder."""
    folder = local_path(name) if is_remote(name) else Path(name)
    if folder.is_dir():
        return folder
    if folder.suffix == ".onnx" and folder.is_file():
        raise InputRefused(
            f"`{folder}` is a graph, not a folder", hint=f"pass it as `--graph {folder} --reference HF_FOLDER`"
        )
    if is_gguf(folder):
        raise InputRefused(
            f"`{folder}` is a GGUF file, which has no graphs",
            hint=f"compare it in llama.cpp: `llmconv verify {word(folder)} --client llamacpp --reference HF_FOLDER`",
        )
    if folder.is_file():
        raise refused_model(folder)
    problem = "is not a folder" if os.path.lexists(folder) else "does not exist"
    raise InputRefused(f"`{folder}` {problem}", hint="give the folder that `llmconv export` wrote to")


def require_model(folder: Path) -> Path:
    """A model folder without graphs of llmconv; refuses other folders with InputRefused."""
    if others := sorted(graph for pattern in ("*.onnx", "onnx/*.onnx") for graph in folder.glob(pattern)):
        raise InputRefused(
            f"`{folder}` contains graphs that llmconv did not export (`{others[0].relative_to(folder)}`)",
            hint=f"compare them with their model: `llmconv verify --graph {word(others[0])} --reference HF_FOLDER`",
        )
    require_causal_folder(folder)
    if not has_weights(folder) or not (folder / "config.json").is_file():  # deltas and adapters have a manifest, too
        raise refused_model(folder)
    return folder


def require_weights(folder: Path, entry: GraphEntry, reference: str | Path) -> Path:
    """The folder of the model (a folder, a URI or a hub id) that the graphs in `folder` are compared with.

    Raises InputRefused: it has no weights; MalformedInput: its `config.json` has invalid sizes.
    """
    reference = local_path(reference)
    if (reference / "config.json").is_file():
        require_sizes(read_json(reference / "config.json"), reference)
    if has_weights(reference):
        return reference
    if (folder / MANIFEST).is_file() or reference != folder:
        raise refused_model(reference)
    graph = folder / entry.files[0]
    raise InputRefused(
        f"`{folder}` contains graphs that llmconv did not export (no `{MANIFEST}`), and no weights of their model",
        hint=f"compare them with their model: `llmconv verify --graph {word(graph)} --reference HF_FOLDER`",
    )


@contextmanager
def model_of(reference: str | Path | None) -> Iterator[str | Path | None]:
    """The reference; of a GGUF file a temporary folder with its model, whose codes are those of the file."""
    if reference is None or is_remote(reference) or not holds_gguf(Path(reference)):
        yield reference
        return
    from llmconv.convert.opening import open_training  # noqa: PLC0415 - most references are folders

    opened = open_training(Path(reference), "gguf", options={"quant": "graphs"})
    home = make_temporary_folder()
    try:
        folder = home / Path(reference).resolve().name  # which reports name
        _write_model(opened, folder)
        yield folder
    finally:
        remove_temporary_folder(home)


def _write_model(opened: Checkpoint, folder: Path) -> None:
    """Writes a model folder; a file of floats is hard-linked where the file system can."""
    plan = plan_checkpoint(opened)
    mapped = {name: tensor for name, tensor in opened.items() if isinstance(tensor, Mapped)}
    if len(mapped) == len(opened):
        folder.mkdir()
        try:
            for path in {tensor.path for tensor in mapped.values()}:
                os.link(path.resolve(), folder / path.name)
        except OSError:
            shutil.rmtree(folder)
        else:
            write_small(folder, plan.small_files)
            (folder / RANGES).write_bytes(encode_ranges(mapped))
            return
    write_checkpoint(plan, folder, steps=(), sources=())


def recorded_reference(folder: Path) -> Path:
    """The model folder that the manifest records, else `folder`.

    Raises InputRefused: the recorded folder does not exist; UsageProblem: none is recorded, and the weights in `folder`
    are quantized.
    """
    name = read_json(folder / MANIFEST).get("reference") if (folder / MANIFEST).is_file() else None
    if name is not None and (not isinstance(name, str) or "\0" in name or len(name) > PATH_LIMIT):
        raise MalformedInput(f"`reference` in `{MANIFEST}` is not a path", hint="give `--reference HF_FOLDER`")
    if name is None and any(folder.glob(CODES)):
        raise UsageProblem(
            f"the weights in `{folder}` are quantized, so they are compared with the model they were made from",
            hint="give `--reference MODEL`, the folder that was exported",
        )
    path = folder / name if name else folder
    if not (path / "config.json").is_file():
        raise InputRefused(f"the model folder `{path}` has no config.json", hint="give `--reference HF_FOLDER`")
    return path
