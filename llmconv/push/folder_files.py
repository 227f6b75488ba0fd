"""The files of a folder to upload: those of its manifest, checked byte by byte, and README, LICENSE and reports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import own_file
from llmconv.errors import InputRefused, MalformedInput, listing
from llmconv.hub.state import FileDigest, file_digest
from llmconv.output.hub_folder import PAGES
from llmconv.output.manifest import MANIFEST, Manifest, read_manifest
from llmconv.progress import bytes_bar, warn

REPORT = {"report.json", "junit.xml", "summary.md", "report.html", "run.json", "run.md"}
"""Files that `verify --report` and `run --report` write, into this folder or one in it."""


@dataclass(frozen=True)
class FolderFiles:
    """What is uploaded of a folder.

    Attributes:
        folder: that llmconv made.
        manifest: its manifest.
        files: path in the folder to the file; for a link the file that it leads to.
        left_out: hidden files, which are not uploaded.
    """

    folder: Path
    manifest: Manifest
    files: Mapping[str, Path]
    left_out: tuple[str, ...]

    def digests(self) -> dict[str, FileDigest]:
        """The digests of all files, read in full.

        Raises:
            MalformedInput: one has another sha256 than the manifest records.
        """
        found: dict[str, FileDigest] = {}
        with bytes_bar(f"checking {self.folder.name}", sum(path.stat().st_size for path in self.files.values())) as bar:
            for name, path in self.files.items():
                found[name] = file_digest(path)
                bar(found[name].size)
        for name, entry in self.manifest.files.items():
            if entry.get("sha256", found[name].sha256) != found[name].sha256:
                raise _damaged(name, f"its sha256 is not the one in `{MANIFEST}`")
        return found

    def report(self) -> Path | None:
        """The newest report of `llmconv verify`, None if the folder has been changed since."""
        reports = [path for name, path in self.files.items() if name.rpartition("/")[2] == "report.json"]
        newest = max(reports, key=_changed, default=None)
        if newest and _changed(newest) < _changed(self.files[MANIFEST]):
            warn(f"`{newest.name}` is older than `{MANIFEST}`, so the model card does not mention it")
            return None
        return newest


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def files_of(folder: Path) -> FolderFiles:
    """The files of `folder`, whose presence and sizes are as its manifest says.

    Raises:
        InputRefused: llmconv did not make it, or it contains other files than those about the model.
        MalformedInput: a file of the manifest is missing, or has another size.
    """
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is not a folder", hint="give a folder that llmconv made")
    if not (folder / MANIFEST).is_file():
        raise InputRefused(
            f"`{folder}` has no `{MANIFEST}`, so llmconv did not make it and cannot check it",
            hint=f"make one with `llmconv to-hf {folder} -o OUT`, or upload it with `hf upload`",
        )
    manifest = read_manifest(folder)
    files = {MANIFEST: own_file(folder, MANIFEST)}
    files |= {name: _recorded(folder, name, entry) for name, entry in manifest.files.items()}
    others = [name for name in _all_files(folder) if name not in files]
    hidden = {name for name in others if any(part.startswith(".") for part in name.split("/"))}
    pages = [name for name in others if name not in hidden and _is_about(name)]
    if foreign := sorted({*others} - hidden - {*pages}):
        raise InputRefused(
            f"`{folder}` also contains {listing(foreign)}, which llmconv did not make",
            hint="if the model was exported in place, push a copy: `llmconv export MODEL -o OUT`; or move them out "
            "of the folder: only README, LICENSE and reports of `llmconv verify` go with a model",
        )
    files |= {name: own_file(folder, name) for name in pages}
    return FolderFiles(folder, manifest, dict(sorted(files.items())), tuple(sorted(hidden)))


def _all_files(folder: Path) -> Iterator[str]:
    for home, _, names in os.walk(folder):
        yield from (str((Path(home) / name).relative_to(folder)) for name in names)


def _is_about(name: str) -> bool:
    """Whether a file is about the model: its page, its license, a report."""
    outer, _, last = name.rpartition("/")
    return "/" not in outer and last in REPORT or not outer and bool(PAGES.fullmatch(name))


def _recorded(folder: Path, name: str, entry: Mapping[str, Any]) -> Path:
    """A file of the manifest.

    Raises:
        MalformedInput: it is missing, has another size, or leads elsewhere.
    """
    path = folder / name
    if "link" in entry:
        return _link(folder, name, entry["link"])
    if not own_file(folder, name).is_file():
        raise _damaged(name, "it is missing")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise _damaged(name, f"it has {size:,} bytes, and {entry.get('bytes', 0):,} in `{MANIFEST}`")
    return path


def _link(folder: Path, name: str, target: str) -> Path:
    """The file in the folder that a link leads to: the Hub has no links, but stores equal files once."""
    path = folder / name
    if not path.is_symlink() or os.readlink(path) != target:
        raise _damaged(name, f"it is not the link to `{target}` that `{MANIFEST}` records")
    if not own_file(folder, name).is_file():
        raise _damaged(name, f"it is a link to `{target}`, which is missing")
    return path.resolve()


def _damaged(name: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{name}` is damaged or was edited: {problem}",
        hint="copy the folder again, or make it again; `hf upload` uploads a folder unchecked",
    )
