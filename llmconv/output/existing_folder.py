"""What lies at the path of a local output before a run: nothing, a complete output, or another folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused
from llmconv.files.output_parents import require_parents
from llmconv.files.sources import PARTIAL
from llmconv.output.manifest import MANIFEST, read_manifest


def require_free(output: Path, overwrite: bool, inputs: Sequence[Path] = (), *, resume: bool = False) -> None:
    """Requires that `output` can be made: `--overwrite` replaces only folders that llmconv made.

    Args:
        output: the folder to make.
        overwrite: it may be replaced.
        inputs: paths that the run reads; neither may be inside the other.
        resume: a complete folder may exist; `write_checkpoint` compares it with the plan.

    Raises:
        InputRefused: it exists and may not be replaced, it is inside an input or below a file, or its name is too long.
    """
    require_parents(output)
    _require_short(output)
    around = [path for path in inputs if path.resolve() in output.resolve().parents]
    if around:
        raise InputRefused(
            f"`{output}` is inside the input `{around[0]}`", hint="choose an `-o` that is not inside an input"
        )
    if not os.path.lexists(output):
        return
    if not overwrite and is_complete(output):
        if resume:
            return
        raise InputRefused(
            f"`{output}` already exists and is complete",
            hint="choose another `-o`, or give `--overwrite` to make it again",
        )
    sources = [path.resolve() for path in inputs]
    if not overwrite:
        ways = ", or give `--overwrite`" if _may_replace(output, sources) else ""
        raise InputRefused(f"`{output}` already exists", hint=f"choose another `-o`{ways}")
    problem = _why_kept(output, sources)
    if problem:
        raise InputRefused(
            f"`{output}` {problem}, so it is not overwritten", hint="choose another `-o`, or remove it yourself"
        )


def _require_short(output: Path) -> None:
    """Refuses a name that the file system cannot hold, with what the partial folder adds to it."""
    above = next(path for path in output.absolute().parents if os.path.isdir(path))
    longest = os.pathconf(above, "PC_NAME_MAX")
    partial, home = partial_folder(output), output.absolute().parent
    names = [os.fsencode(name) for name in (partial.name, *home.parts)]
    if 0 < longest < max(map(len, names)):
        raise InputRefused(
            f"the name of `{output}` is too long: {max(map(len, names))} bytes with what is added while it is made, "
            f"{longest} are possible",
            hint="choose a shorter `-o`",
        )


def is_complete(output: Path) -> bool:
    """Whether llmconv made the folder, all sizes are as recorded, and no unfinished run was to replace it."""
    try:
        files = read_manifest(output).files
        same = all(isinstance(entry, dict) and _is_as_recorded(output / name, entry) for name, entry in files.items())
    except (OSError, InputRefused):
        return False
    return bool(files) and same and not partial_folder(output).exists()


def _is_as_recorded(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file has the size, or a link the target, of its entry in the manifest."""
    if "link" in entry:
        return path.is_symlink() and os.readlink(path) == entry["link"]
    return bool(entry.get("bytes") == path.stat().st_size)


def bytes_held(output: Path) -> int:
    """Bytes on the disk that an interrupted run of `output` left, which the next one keeps or frees."""
    return sum(map(_bytes_on_disk, partial_folder(output).glob("*")))


def _bytes_on_disk(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except FileNotFoundError:  # another process of the same run has just renamed it
        return 0


def partial_folder(output: Path) -> Path:
    """The partial folder of `output`."""
    return output.absolute().parent / f".{output.absolute().name}{PARTIAL}"


def _may_replace(output: Path, inputs: Sequence[Path]) -> bool:
    try:
        return not _why_kept(output, inputs)
    except InputRefused:  # its manifest is invalid
        return False


def _why_kept(output: Path, inputs: Sequence[Path]) -> str:
    """The reason not to replace a folder, empty if there is none."""
    if output.is_symlink():
        return "is a symbolic link"
    if not output.is_dir():
        return "is not a folder"
    if any(path.is_relative_to(output.resolve()) for path in inputs):
        return "contains an input"
    entries = [path for path in output.rglob("*") if not path.is_dir()]
    if entries and not (output / MANIFEST).is_file():
        return "was not made by llmconv"
    known = {MANIFEST, *read_manifest(output).files}
    foreign = sorted(str(path.relative_to(output)) for path in entries if str(path.relative_to(output)) not in known)
    return f"also contains `{foreign[0]}`, which llmconv did not make" if foreign else ""
