"""push: uploads a folder that llmconv made to the Hugging Face Hub, as one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmconv.argument_checks import checked
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, listing
from llmconv.files.paths import is_address
from llmconv.files.sources import reading_safely
from llmconv.hub.address import HUB_NAME, HubAddress, hub_address
from llmconv.hub.repository import HubRepository
from llmconv.hub.state import Commit, FileDigest, digest_of
from llmconv.output.hub_folder import foreign_files, replaced_files, require_own_weights
from llmconv.output.model_card import CARD, is_unedited, model_card
from llmconv.progress import say
from llmconv.push.folder_files import FolderFiles, files_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

Contents = Mapping[str, Path | bytes]
"""Files to upload, by path in the repository."""


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
        """Bytes of the changed files."""
        return sum(self.files[name].size for name in self.changed)

    @property
    def is_needed(self) -> bool:
        """Whether the branch is to be changed."""
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
        with reading_safely(folder):
            commit = _committed(target, plan, contents, message or _message(found))
        plan = replace(plan, commit=commit)
    if verify_upload and not dry_run:
        state = target.at(plan.commit.commit) if plan.commit else target.state
        plan = replace(plan, differing=tuple(state.differing(plan.files)))
    return plan


def _address(repository: str, revision: str | None, *, pr: bool) -> HubAddress:
    """The repository and branch that the user named.

    Raises:
        UsageProblem: it is not `org/name`, or two branches are named.
    """
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
    """All contents, and what is to be uploaded and deleted.

    Raises:
        InputRefused: the branch contains files of a model that llmconv did not make.
    """
    require_own_weights(target)
    contents: dict[str, Path | bytes] = dict(found.files)
    files = dict(digests)
    card = CARD not in files and is_unedited(target.read(CARD))
    if card:
        text = model_card(found.manifest, _config(found), target.address.repository, found.report())
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


def _config(found: FolderFiles) -> dict[str, object]:
    path = found.files.get("config.json")
    return read_json(path) if path else {}


def _message(found: FolderFiles) -> str:
    commands = [str(done.get("command")) for done in found.manifest.steps]
    return f"llmconv push: a model made by {', '.join(dict.fromkeys(commands))}" if commands else "llmconv push"


def _committed(target: HubRepository, plan: Push, contents: Contents, message: str) -> Commit:
    """Sends the changed files and makes the commit, if none of them changed on the disk in the meantime."""
    additions = {name: target.addition(name, contents[name]) for name in plan.changed}
    once = {plan.files[name].sha256: addition for name, addition in additions.items()}
    target.preupload(once.values())  # files with equal content are sent once
    target.preupload(additions.values())
    for name, addition in additions.items():
        _require_unchanged(name, addition, contents[name], plan.files[name])
    return target.commit(additions.values(), plan.deleted, message)


def _require_unchanged(name: str, addition: CommitOperationAdd, content: Path | bytes, checked: FileDigest) -> None:
    """Requires what was sent, or what the commit will contain, to be what was checked."""
    if addition.path_or_fileobj:  # not sent: the commit itself contains it
        held = content if isinstance(content, bytes) else content.read_bytes()
        addition.path_or_fileobj = held
        same = digest_of(held) == checked
    else:
        same = addition.upload_info.sha256.hex() == checked.sha256
    if not same:
        raise MalformedInput(
            f"`{name}` changed while it was uploaded, so nothing was committed",
            hint="make sure that nothing writes to the folder, and run again",
        )
