"""HubRepository: one branch of a model repository on the Hugging Face Hub: what it contains, uploads, one commit.

preupload     large files, one by one; nobody sees them until a commit names them
commit        all files at once, on top of the head that was seen: a branch that moved is refused by the Hub

HubState is what the branch contained when it was looked at, with the hashes that identify files.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llmconv.addresses import COMMIT, HubAddress
from llmconv.errors import InputRefused, LlmconvError, OutputFailed, listing
from llmconv.progress import is_quiet

# size in bytes up to which git's own hash is computed, too: the Hub keeps larger files as LFS objects only
SMALL_FILE = 20 << 20
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class FileDigest:
    """A file as the Hub identifies it."""

    size: int  # in bytes
    sha256: str  # of its content, by which LFS objects are named
    blob: str = ""  # git's sha1 of it, by which small files are named; empty for large ones


def digest_of(content: bytes) -> FileDigest:
    return _digest(len(content), [content])


def file_digest(path: Path) -> FileDigest:
    with open(path, "rb", buffering=0) as file:
        return _digest(path.stat().st_size, iter(lambda: file.read(READ_BYTES), b""))


def _digest(size: int, blocks: Iterable[bytes]) -> FileDigest:
    """See git-scm.com/book, Git Objects: a blob is the sha1 of a header and the content."""
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    found, small = 0, size <= SMALL_FILE
    for block in blocks:
        found += len(block)
        sha256.update(block)
        if small:
            blob.update(block)
    return FileDigest(found, sha256.hexdigest(), blob.hexdigest() if small else "")


@dataclass(frozen=True)
class HubFile:
    """A file on the Hub."""

    size: int  # in bytes
    blob: str  # git's sha1 of it, or of its LFS pointer
    sha256: str = ""  # of its content if it is an LFS object, else empty

    def is_same(self, file: FileDigest) -> bool:
        return self.size == file.size and (self.sha256 == file.sha256 if self.sha256 else self.blob == file.blob)


@dataclass(frozen=True)
class HubState:
    """What a branch contained when it was looked at."""

    exists: bool = False  # the repository exists
    head: str = ""  # its commit, which the next one must follow; of `main` if there is no such branch; empty if unknown
    has_branch: bool = False  # the branch exists
    private: bool = False  # who has no access does not see the repository
    files: Mapping[str, HubFile] = field(default_factory=dict)  # by path

    def differing(self, files: Mapping[str, FileDigest]) -> list[str]:
        """The names among `files` that the branch does not have, or with other content."""
        return [name for name, file in files.items() if name not in self.files or not self.files[name].is_same(file)]


@dataclass(frozen=True)
class Commit:
    """A commit that was made: its hash, its page, and the page of the pull request, empty without one."""

    commit: str
    url: str
    pull_request: str = ""


if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

MAIN = "main"


class HubRepository:
    """A branch of a model repository.

    With `pull_request`, the commit becomes one, which needs no write access. Raises InputRefused if the address is of a
    folder, a commit, or not of the form `org/name`.
    """

    def __init__(self, address: HubAddress, *, pull_request: bool = False, show_progress: bool = False) -> None:
        if "/" not in address.repository or address.folder:
            hint = "an output is a whole repository: `hf://org/name` or `hf://org/name@branch`"
            raise InputRefused(f"`{address}` is not a repository that can be written", hint=hint)
        if COMMIT.fullmatch(address.revision):
            raise InputRefused(f"`{address.revision}` is a commit, which does not change", hint="give a branch")
        self.address, self.pull_request = address, pull_request
        self._show_progress = show_progress and not is_quiet() and sys.stderr is not None and sys.stderr.isatty()
        self.branch = address.revision or MAIN

    @cached_property
    def api(self) -> HfApi:
        """The client; it takes its token from HF_TOKEN or the login (InputRefused for one that cannot be)."""
        from huggingface_hub import HfApi, get_token  # noqa: PLC0415 - 0.3 s that other commands do not pay
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

        if not TOKEN.fullmatch(get_token() or "none"):  # the library's own error would quote it
            problem = "the token of the Hugging Face Hub contains characters that no token has"
            raise InputRefused(problem, hint="set HF_TOKEN again, or log in again with `hf auth login`")
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings contain signed URLs
        if not self._show_progress:
            disable_progress_bars()
        return HfApi()

    @cached_property
    def state(self) -> HubState:
        """What the branch contains now; it is asked once."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError  # noqa: PLC0415

        with writing_to(self.address):
            try:
                return self._look(self.branch, has_branch=True)
            except RevisionNotFoundError:
                return self._look(MAIN, has_branch=False)
            except RepositoryNotFoundError as error:
                if isinstance(error, GatedRepoError) or getattr(error.response, "status_code", 0) == 403:
                    raise
                return HubState()

    def _look(self, revision: str, *, has_branch: bool) -> HubState:
        from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

        info = self.api.model_info(self.address.repository, revision=revision)
        head = info.sha or ""
        files = {
            entry.path: HubFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else "")
            for entry in self.api.list_repo_tree(self.address.repository, revision=head or revision, recursive=True)
            if isinstance(entry, RepoFile)
        }
        return HubState(True, head, has_branch, bool(info.private), files)

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""
        if name not in self.state.files:
            return None
        from huggingface_hub import hf_hub_download  # noqa: PLC0415

        with TemporaryDirectory() as folder, writing_to(self.address):
            revision = self.state.head or self.branch
            path = hf_hub_download(self.address.repository, name, revision=revision, cache_dir=folder)
            return Path(path).read_bytes()

    def create(self, *, private: bool | None) -> None:
        """Makes the repository unless it exists; InputRefused without access, or if it is public and may not be."""
        from huggingface_hub import get_token  # noqa: PLC0415 - as above

        if not get_token():
            hint = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
            raise InputRefused("not logged in to the Hugging Face Hub, which writing requires", hint=hint)
        if self.state.exists:
            if private and not self.state.private:
                problem = f"`{self.address.repository}` exists and is public"
                raise InputRefused(problem, hint="make it private in its settings, or leave out `--private`")
            return
        if self.pull_request:
            problem = f"`{self.address.repository}` does not exist, or the token does not see it"
            raise InputRefused(problem, hint="a pull request needs a repository; leave out `--pr` to make one")
        with writing_to(self.address):
            self.api.create_repo(self.address.repository, private=private, exist_ok=True)
        self.__dict__.pop("state")
        if not self.state.exists:
            message = f"the Hub made `{self.address.repository}`, but does not find it"
            raise OutputFailed(message, hint="run the same command again")

    def addition(self, name: str, content: Path | bytes) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd  # noqa: PLC0415

        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)

    def preupload(self, additions: Iterable[CommitOperationAdd]) -> None:
        """Sends what the Hub keeps as LFS objects, unseen until a commit; InputRefused if `.gitignore` has one."""
        additions = list(additions)
        with writing_to(self.address):
            self.api.preupload_lfs_files(
                self.address.repository,
                additions,
                revision=self.branch if self.state.has_branch else MAIN,
                create_pr=self.pull_request,
                gitignore_content="",
            )
        if ignored := [addition.path_in_repo for addition in additions if getattr(addition, "_should_ignore", False)]:
            problem = f"the `.gitignore` of `{self.address.repository}` leaves out {listing(ignored)}"
            raise InputRefused(problem, hint="remove that line there")

    def has_objects(self, objects: Mapping[str, int]) -> set[str]:
        """The LFS objects among `objects`, sha256 to size, that the Hub has already."""
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info  # noqa: PLC0415

        if not objects:
            return set()
        infos = [UploadInfo(size=size, sample=b"", sha256=bytes.fromhex(name)) for name, size in objects.items()]
        with writing_to(self.address):
            found = post_lfs_batch_info(
                upload_infos=infos, token=None, repo_type="model", repo_id=self.address.repository
            )[0]
        return {answer["oid"] for answer in found if answer.get("actions") is None}

    def commit(self, additions: Iterable[CommitOperationAdd], deleted: Iterable[str], message: str) -> Commit:
        """Makes one commit on top of the head that was seen; the branch is made just before, if there is none.

        For files in `additions`, `preupload` was called; the first line of `message` is the title. Raises OutputFailed
        if the branch got another commit in the meantime.
        """
        from huggingface_hub import CommitOperationDelete  # noqa: PLC0415

        operations: list[Any] = [*additions, *(CommitOperationDelete(name, is_folder=False) for name in deleted)]
        title, _, description = message.partition("\n")
        with writing_to(self.address):
            if not self.state.has_branch:
                self.api.create_branch(self.address.repository, branch=self.branch, revision=self.state.head or None)
            if not operations:  # a new branch with the files of `main`: the Hub has no empty commits
                head = self.state.head
                return Commit(head, f"{self.api.endpoint}/{self.address.repository}/commit/{head}", "")
            done = self.api.create_commit(
                self.address.repository,
                operations,
                commit_message=title,
                commit_description=description.strip(),
                revision=None if self.pull_request else self.branch,
                create_pr=self.pull_request,
                parent_commit=self.state.head or None,
            )
        return Commit(done.oid, done.commit_url, done.pr_url or "")

    def at(self, commit: str) -> HubState:
        with writing_to(self.address):
            return self._look(commit, has_branch=True)


def sent(addition: CommitOperationAdd, size: int, sha256: str) -> bool:
    """Marks an LFS object of the Hub as sent; returns False if this version of huggingface_hub does not support it."""
    from huggingface_hub.lfs import UploadInfo  # noqa: PLC0415

    state: dict[str, Any] = {"_upload_mode": "lfs", "_should_ignore": False, "_is_uploaded": True}
    if not all(hasattr(addition, name) for name in state):
        return False
    addition.upload_info = UploadInfo(size=size, sample=b"", sha256=bytes.fromhex(sha256))
    for name, value in state.items():
        setattr(addition, name, value)
    return True


MOVED = (409, 412)  # statuses of a commit whose parent is no longer the latest commit of its branch
TOKEN = re.compile(r"[!-~]+")  # characters that a header can contain
CLIENTS = ("httpx", "httpcore", "requests", "urllib3")  # libraries whose errors mean that there was no answer
NO_ANSWER = (ConnectionError, TimeoutError)
AGAIN = "run the same command again; files that the Hub has already are not sent again"


def hub_refusal(error: BaseException, address: HubAddress) -> InputRefused | None:
    """The error for an answer that will not change: no such model, no access; None if there was no clear answer."""
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        problem = f"`{address.repository}` is a gated repository, and access was not granted"
        return InputRefused(problem, hint="request access on its page, and log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        problem = f"`{address.repository}` on the hub has no revision `{address.revision}`"
        return InputRefused(problem, hint="give a branch, a tag or a commit")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        problem = f"`{address.short}` does not exist, neither on this machine nor on the hub"
        return InputRefused(problem, hint="check the spelling; for a private model log in with `hf auth login`")
    return None


@contextmanager
def writing_to(address: HubAddress) -> Iterator[None]:
    """Turns errors of huggingface_hub into InputRefused (access, repository) or OutputFailed (moved, busy)."""
    try:
        yield
    except (LlmconvError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # the class for "no connection" differs between versions
        cause: BaseException = error  # an answer, or the absence of one: uploads wrap it in a RuntimeError
        while type(cause) is RuntimeError and cause.__cause__ is not None:
            cause = cause.__cause__
        problem = _problem(cause, address)
        if problem is None:
            raise
        raise problem from (None if _shows_token(error) else cause)


def _problem(error: BaseException, address: HubAddress) -> LlmconvError | None:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputRefused(f"`{address}` cannot be reached: HF_HUB_OFFLINE is set", hint="unset it, and run again")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status:
        return _denied(status, error, address) or hub_refusal(error, address) or _failed(status, error, address)
    if isinstance(error, errors.HFValidationError):
        hint = "use letters, digits, `-`, `_` and `.`, at most 96 of them, without `--` and `..`"
        return InputRefused(f"`{address.repository}` is not a name that the Hub accepts for a repository", hint=hint)
    if isinstance(error, (*NO_ANSWER, errors.LocalEntryNotFoundError)) or type(error).__module__.startswith(CLIENTS):
        return OutputFailed(f"the Hub cannot be reached or broke off ({type(error).__name__})", hint=AGAIN)
    if isinstance(error, ValueError | RuntimeError):
        return OutputFailed(f"the upload failed: {_without_token(' '.join(str(error).split()))[:300]}", hint=AGAIN)
    return None


def _denied(status: int, error: BaseException, address: HubAddress) -> InputRefused | None:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError) or status not in (401, 403):
        return None
    if status == 401:
        problem = f"the Hub does not accept the token for `{address.repository}`{_said(error)}"
        return InputRefused(problem, hint="log in again with `hf auth login`, or set HF_TOKEN to a valid token")
    hint = "use a token with write access, or a repository of your own; `llmconv push --pr` proposes a change"
    return InputRefused(f"the token may not write to `{address.repository}`{_said(error)}", hint=hint)


def _failed(status: int, error: BaseException, address: HubAddress) -> OutputFailed:
    if status in MOVED:
        problem = f"`{address.short}` got another commit in the meantime, so nothing was committed"
        return OutputFailed(problem, hint="look at that commit, and run again; files that were sent are not sent again")
    return OutputFailed(f"the Hub answered {status} for `{address.repository}`{_said(error)}", hint=AGAIN)


def _said(error: BaseException) -> str:
    """The Hub's own words in parentheses; its URLs may be signed, so the rest is not shown."""
    words = " ".join(str(getattr(error, "server_message", "") or "").split())
    return f" ({_without_token(words)[:200]})" if words else ""


def _shows_token(error: BaseException | None) -> bool:
    """Whether the message of an error, or of one that led to it, contains the token."""
    shown = False
    while error is not None and not shown:
        shown = str(error) != _without_token(str(error))
        error = error.__cause__ or error.__context__
    return shown


def _without_token(text: str) -> str:
    from huggingface_hub import get_token  # noqa: PLC0415

    token = get_token()
    return text.replace(token, "***") if token else text
