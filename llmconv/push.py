"""push: uploads a folder that llmconv made to the Hugging Face Hub, as one commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.addresses import HUB_NAME, HubAddress, hub_address
from llmconv.argument_checks import checked
from llmconv.checkpoint import is_model_folder, own_file, read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, listing, word
from llmconv.files.paths import is_address
from llmconv.files.sources import reading_safely
from llmconv.hub.repository import Commit, FileDigest, HubRepository, digest_of, file_digest
from llmconv.output.hub_folder import (
    CARD,
    CONFIG,
    PAGES,
    foreign_files,
    is_unedited,
    model_card,
    replaced_files,
    require_own_weights,
)
from llmconv.output.manifest import MANIFEST, Manifest, read_manifest
from llmconv.progress import bytes_bar, say, warn

__all__ = ["Push", "push"]

Contents = Mapping[str, Path | bytes]  # files to upload, by path in the repository


@dataclass(frozen=True)
class Push:
    """What was uploaded, or would be.

    Attributes:
        address: of the repository and the branch.
        files: the digests of all files of the model on the Hub, by path.
        changed: those that the branch did not have before.
        deleted: files of an earlier output that this one does not have.
        left_out: hidden files of the folder.
        card: a model card was written, since there was none, or an older one that nobody had edited.
        is_new_branch: the repository exists without the branch.
        commit: the commit; None in a dry run, and if there was nothing to do.
        differing: files of which the Hub has other bytes; None unless `verify_upload` was given.
    """

    address: HubAddress
    files: Mapping[str, FileDigest]
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    left_out: tuple[str, ...]
    card: bool
    is_new_branch: bool = False
    commit: Commit | None = None
    differing: tuple[str, ...] | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.files[name].size for name in self.changed)

    @property
    def is_needed(self) -> bool:
        return bool(self.changed or self.deleted or self.is_new_branch)


@checked
def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    pr: bool = False,
    message: str | None = None,
    verify_upload: bool = False,
    dry_run: bool = False,
) -> Push:
    """Uploads `folder`, whose files are compared with its manifest first, as one commit; returns what was uploaded.

    Args:
        folder: that llmconv made.
        repository: `org/name` on the Hub; it is made if it does not exist.
        private: a new repository is private; one that exists must be.
        revision: the branch, which is made if it does not exist (default: `main`).
        pr: open a pull request instead of changing the branch.
        message: of the commit.
        verify_upload: compare the hashes that the Hub has after the commit.
        dry_run: check the folder and compare it with the Hub, but write nothing.

    Raises:
        InputRefused: the folder is damaged, or the repository contains a model that llmconv did not make; no access.
        OutputFailed: the Hub is busy or cannot be reached, or the branch got another commit in the meantime.
        UsageProblem: an option has an impossible value.
    """
    if is_address(folder):
        raise InputRefused(f"`{folder}` is not on this machine", hint="copy it to a local folder, and push that")
    target = HubRepository(_address(repository, revision, pr=pr), pull_request=pr, show_progress=True)
    with reading_safely(folder):
        found = files_of(Path(folder))
        digests = found.digests()
    contents, plan = _planned(found, digests, target)
    if plan.left_out:
        say(f"left out: {listing(plan.left_out)}")
    if not dry_run and plan.is_needed:
        target.create(private=private or None)
        commands = ", ".join(dict.fromkeys(str(done.get("command")) for done in found.manifest.steps))
        usual = f"llmconv push: a model made by {commands}" if commands else "llmconv push"
        with reading_safely(folder):
            commit = _committed(target, plan, contents, message or usual)
        plan = replace(plan, commit=commit)
    if verify_upload and not dry_run:
        state = target.at(plan.commit.commit) if plan.commit else target.state
        plan = replace(plan, differing=tuple(state.differing(plan.files)))
    return plan


def _address(repository: str, revision: str | None, *, pr: bool) -> HubAddress:
    """The repository and branch that the user gave; raises UsageProblem unless `org/name` with at most one branch."""
    if not HUB_NAME.fullmatch(repository) and not repository.lower().startswith("hf://"):
        raise UsageProblem(f"`{repository}` is not a repository on the Hub", hint="give `org/name`")
    address = hub_address(repository)
    if revision and address.revision not in ("", revision):
        raise UsageProblem(f"`{repository}` names another branch than `--revision {revision}`", hint="give one of them")
    address = replace(address, revision=revision or address.revision)
    if pr and address.revision not in ("", "main"):
        raise UsageProblem("a pull request begins at `main`", hint="leave out `--revision` or `--pr`")
    return address


def _planned(found: FolderFiles, digests: Mapping[str, FileDigest], target: HubRepository) -> tuple[Contents, Push]:
    """All contents, what to upload and to delete; InputRefused if the branch has a model not made by llmconv."""
    require_own_weights(target)
    contents: dict[str, Path | bytes] = dict(found.files)
    files = dict(digests)
    card = CARD not in files and is_unedited(target.read(CARD))
    if card:
        config = read_json(found.files[CONFIG]) if CONFIG in found.files else {}
        text = model_card(found.manifest, config, target.address.repository, found.report())
        contents[CARD], files[CARD] = text, digest_of(text)
    changed = target.state.differing(files)
    if target.state.has_branch and (others := sorted(foreign_files(target) & {*changed})):
        raise InputRefused(
            f"`{target.address}` contains another {listing(others)}, which llmconv did not make",
            hint="choose another repository or a new branch (`--revision`), or delete it there yourself",
        )
    deleted = replaced_files(target, files)
    written = card and CARD in changed
    new = target.state.exists and not target.state.has_branch
    return contents, Push(target.address, files, tuple(changed), tuple(deleted), found.left_out, written, new)


def _committed(target: HubRepository, plan: Push, contents: Contents, message: str) -> Commit:
    """Sends the changed files and makes the commit, if none of them changed on the disk in the meantime."""
    additions = {name: target.addition(name, contents[name]) for name in plan.changed}
    once = {plan.files[name].sha256: addition for name, addition in additions.items()}
    target.preupload(once.values())  # files with equal content are sent once
    target.preupload(additions.values())
    for name, addition in additions.items():
        if addition.path_or_fileobj:  # not sent: the commit itself contains it
            content = contents[name]
            addition.path_or_fileobj = held = content if isinstance(content, bytes) else content.read_bytes()
            same = digest_of(held) == plan.files[name]
        else:
            same = addition.upload_info.sha256.hex() == plan.files[name].sha256
        if not same:
            problem = f"`{name}` changed while it was uploaded, so nothing was committed"
            raise MalformedInput(problem, hint="make sure that nothing writes to the folder, and run again")
    return target.commit(additions.values(), plan.deleted, message)


# files that `verify --report` and `run --report` write, into this folder or one in it
REPORT = {"report.json", "junit.xml", "summary.md", "report.html", "run.json", "run.md"}


@dataclass(frozen=True)
class FolderFiles:
    """What is uploaded of a folder: file (of a link, its target) by path; `left_out` are its hidden files."""

    folder: Path
    manifest: Manifest
    files: Mapping[str, Path]
    left_out: tuple[str, ...]

    def digests(self) -> dict[str, FileDigest]:
        """The digests of all files, read in full; raises MalformedInput if a sha256 differs from the manifest."""
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
    """The files of a `folder` as its manifest says; InputRefused for another folder or file, else MalformedInput."""
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is not a folder", hint="give a folder that llmconv made")
    if not (folder / MANIFEST).is_file():
        anew = " --max-shard-size 5GB" if is_model_folder(folder) else ""
        hint = f"make one with `llmconv to-hf {word(folder)}{anew} -o OUT`, or upload it with `hf upload`"
        raise InputRefused(f"`{folder}` has no `{MANIFEST}`, so llmconv did not make it and cannot check it", hint=hint)
    manifest = read_manifest(folder)
    files = {MANIFEST: own_file(folder, MANIFEST)}
    files |= {name: _recorded(folder, name, entry) for name, entry in manifest.files.items()}
    there = {str((Path(home) / name).relative_to(folder)) for home, _, names in os.walk(folder) for name in names}
    others = sorted(there - files.keys())
    hidden = {name for name in others if any(part.startswith(".") for part in name.split("/"))}
    pages = []  # of the model: its page, its license, a report
    for name in (name for name in others if name not in hidden):
        outer, _, last = name.rpartition("/")
        if ("/" not in outer and last in REPORT) or (not outer and PAGES.fullmatch(name)):
            pages.append(name)
    if foreign := sorted({*others} - hidden - {*pages}):
        raise InputRefused(
            f"`{folder}` also contains {listing(foreign)}, which llmconv did not make",
            hint="if the model was exported in place, push a copy: `llmconv export MODEL -o OUT`; or move them out "
            "of the folder: only README, LICENSE and reports of `llmconv verify` go with a model",
        )
    files |= {name: own_file(folder, name) for name in pages}
    return FolderFiles(folder, manifest, dict(sorted(files.items())), tuple(sorted(hidden)))


def _recorded(folder: Path, name: str, entry: Mapping[str, Any]) -> Path:
    """A file of the manifest; raises MalformedInput if it is missing, has another size, or leads elsewhere."""
    path = folder / name
    if "link" in entry:
        # the file in the folder that a link leads to: the Hub has no links, but stores equal files once
        target = entry["link"]
        if not path.is_symlink() or os.readlink(path) != target:
            raise _damaged(name, f"it is not the link to `{target}` that `{MANIFEST}` records")
        if not own_file(folder, name).is_file():
            raise _damaged(name, f"it is a link to `{target}`, which is missing")
        return path.resolve()
    if not own_file(folder, name).is_file():
        raise _damaged(name, "it is missing")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise _damaged(name, f"it has {size:,} bytes, and {entry.get('bytes', 0):,} in `{MANIFEST}`")
    return path


def _damaged(name: str, problem: str) -> MalformedInput:
    hint = "copy the folder again, or make it again; `hf upload` uploads a folder unchecked"
    return MalformedInput(f"`{name}` is damaged or was edited: {problem}", hint=hint)


def __dir__() -> list[str]:
    return __all__
