"""Graphs for a plain model folder: exported once into the user's cache, where its weights are hard links.

A training checkpoint is converted there before. Nothing is written into the model's folder. The cache is keyed by its
path, the names, sizes, times and inodes of its files, and llmconv's version, so a changed model is exported anew, and
its earlier graphs are removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE, own_file, read_json
from llmconv.errors import InputRefused, LlmconvError, first_line
from llmconv.files.safe_folder import UNFINISHED, unfinished_folder, user_cache
from llmconv.files.sources import files_under
from llmconv.output.manifest import MANIFEST, graph_entries, single_pass_entries
from llmconv.progress import say
from llmconv.version import __version__

CONFIG, WEIGHTS = "config.json", ".safetensors"
COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Suffixes of the files beside the weights that a model needs to run."""


def graphs_in_cache(folder: Path) -> Path | None:
    """The folder in the cache with the graphs of a model folder or a training checkpoint, made if it is missing.

    None if `folder` is neither: it has graphs, or code of its own. Raises InputRefused if there is no cache, or it
    cannot have links to the weights; and as `export` and `to_hf`, with a hint at the other ways.
    """
    kind = "" if _is_plain(folder) else _training_format(folder)
    if not kind and not _is_plain(folder):
        return None
    instead = f"`llmconv export {folder}` writes them next to the weights; or give `--backend torch`"
    instead = f"`llmconv to-hf {folder} -o OUT` converts it, `llmconv export OUT` makes graphs" if kind else instead
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
    if kind:
        say(f"`{folder}` is a training checkpoint (`{kind}`): converting and exporting it once, into `{made}`")
    else:
        say(f"`{folder}` has no graphs: exporting them once, into `{made}`, which links the weights and copies none")
    try:
        entries.mkdir(parents=True, exist_ok=True, mode=0o700)
        with unfinished_folder(entries) as unfinished:
            (_convert if kind else _export)(folder, unfinished / made.name)
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
            f"`{folder}` has no graphs, and none can be made in `{entries}`: {first_line(error)}", hint=instead
        ) from error
    return made


def _is_plain(folder: Path) -> bool:
    if not folder.is_dir() or not (folder / CONFIG).is_file() or graph_entries(folder) or single_pass_entries(folder):
        return False
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")) or "auto_map" in read_json(folder / CONFIG):
        return False
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def _training_format(path: Path) -> str:
    """The training format of a checkpoint; empty for graphs, an adapter, or what llmconv does not know."""
    has_config = (path.parent / CONFIG).is_file() and path.suffix == WEIGHTS  # a file of a model folder
    if path.suffix == ".onnx" or has_config or graph_entries(path) or single_pass_entries(path):
        return ""
    from llmconv.convert.opening import recognized  # noqa: PLC0415 - as in `_export`

    found = recognized(path)[1]
    return found.name if found else ""


def _identity(folder: Path) -> str:
    """A digest of llmconv's version and of all files that the export depends on; of weights no content is read."""
    known = [__version__]
    near = (
        folder if _is_plain(folder) else folder.parent if folder.is_file() else None
    )  # a configuration may lie beside
    files = [path for path in sorted(near.iterdir()) if path.suffix in (WEIGHTS, *COPIED)] if near else []
    for path in [*files, *([] if near == folder else files_under(folder))]:
        if path.is_file():
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


def _convert(path: Path, made: Path) -> None:
    from llmconv.convert import to_hf  # noqa: PLC0415 - as in `_export`
    from llmconv.export import export  # noqa: PLC0415

    way = f"the command that has options for it is `llmconv to-hf {path} -o OUT`; then give OUT"
    try:
        to_hf(path, made)
        way = "or give `--backend torch` with the folder that `llmconv to-hf` makes"
        export(made)
    except LlmconvError as error:
        error.message = error.message.replace(str(made), str(path))
        error.hint = f"{error.hint.replace(str(made), str(path))}; {way}"
        error.args = (error.message,)
        raise
