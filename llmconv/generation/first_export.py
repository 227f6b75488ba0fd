"""Graphs for a plain model folder: exported once into the user's cache, where its weights are hard links.

Nothing is written into the model's folder. The cache is keyed by the folder's path, the names, sizes, times and inodes
of its files, and llmconv's version, so a changed model is exported anew, and its earlier graphs are removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, own_file, read_json
from llmconv.errors import InputRefused, LlmconvError, first_line
from llmconv.files.user_cache import UNFINISHED, unfinished_folder, user_cache
from llmconv.output.manifest import MANIFEST
from llmconv.progress import say
from llmconv.runtime.onnxruntime.graph_entry import graph_entries, single_pass_entries
from llmconv.version import __version__

CONFIG, WEIGHTS = "config.json", ".safetensors"
COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Suffixes of the files beside the weights that a model needs to run."""


def graphs_in_cache(folder: Path) -> Path | None:
    """The folder in the cache with the graphs of a model folder, made if it is missing.

    Args:
        folder: the model's.

    Returns:
        None if `folder` is not a plain model folder: it has graphs, code of its own, or no weights in safetensors.

    Raises:
        InputRefused: there is no cache, or it cannot have links to the weights.
        LlmconvError: as `export`, with a hint at the other ways.
    """
    if not _is_plain(folder):
        return None
    instead = f"`llmconv export {folder}` writes them next to the weights; or give `--backend torch`"
    try:
        cache = user_cache("exported")
    except InputRefused as error:
        error.hint = f"{error.hint}; or {instead}"
        raise
    entries = cache / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    entry = entries / _identity(folder)
    made = entry / (folder.resolve().name or "model")
    if made.is_dir():
        say(f"`{folder}` has no graphs; those of an earlier run are in `{made}`")
        return made
    say(f"`{folder}` has no graphs: they are exported once into `{made}`, which links the weights and copies none")
    try:
        entries.mkdir(parents=True, exist_ok=True, mode=0o700)
        with unfinished_folder(entries) as unfinished:
            _export(folder, unfinished / made.name)
            for old in entries.iterdir():
                if old != entry and not old.name.startswith(UNFINISHED):
                    shutil.rmtree(old, ignore_errors=True)
            try:
                unfinished.rename(entry)
            except OSError:
                if not made.is_dir():  # another process was faster
                    raise
    except OSError as error:
        raise InputRefused(
            f"`{folder}` has no graphs, and none can be made in `{entries}`: {first_line(error)}",
            hint=instead,
        ) from error
    return made


def _is_plain(folder: Path) -> bool:
    if not folder.is_dir() or not (folder / CONFIG).is_file() or graph_entries(folder) or single_pass_entries(folder):
        return False
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")) or "auto_map" in read_json(folder / CONFIG):
        return False
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def _identity(folder: Path) -> str:
    """A digest of llmconv's version and of all files that the export depends on; of weights no content is read."""
    known = [__version__]
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (WEIGHTS, *COPIED):
            found = path.stat()
            known.append(repr((path.name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


def _export(folder: Path, made: Path) -> None:
    """Exports into a new folder that has links to the weights, and copies of the small files."""
    from llmconv.export import export  # noqa: PLC0415 - a run with graphs needs none of it

    made.mkdir()
    for path in sorted(folder.iterdir()):
        if path.suffix == WEIGHTS and path.is_file():
            os.link(path.resolve(), made / path.name)  # runtimes refuse symbolic links
        elif path.suffix in COPIED and path.name != MANIFEST and path.is_file():
            shutil.copyfile(own_file(folder, path.name), made / path.name)
    try:
        export(made)
    except LlmconvError as error:
        error.message = error.message.replace(str(made), str(folder))
        error.hint = f"{error.hint.replace(str(made), str(folder))}; or give `--backend torch`"
        error.args = (error.message,)
        raise
