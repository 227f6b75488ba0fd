"""HubFolder: a model repository on the Hugging Face Hub as a Destination; its commits are atomic.

Each shard is made in a temporary file and sent, and the file is deleted: the disk has to hold one shard. Nobody sees
what was sent until a single commit names it, together with the small files and the manifest. `--resume` reads in the
journal which shards were sent and asks the Hub whether it still has them; these are not computed again.

The journal, in `~/.cache/llmconv/uploads/`, contains neither tensors nor credentials:

    KEY.jsonl            one line per file that the Hub has: name, size, sha256; locked while a run is at work
    .llmconv-….part      the shard that is being made or sent
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from llmconv.checkpoint import parse_object
from llmconv.errors import InputRefused, OutputFailed, UnsupportedInput
from llmconv.files import source_file
from llmconv.files.safe_folder import Folder, Link, NewFile, is_inner
from llmconv.files.temporary_folder import user_cache
from llmconv.hub.address import HubAddress
from llmconv.hub.repository import FileDigest, HubRepository, digest_of, file_digest, sent
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, parse_manifest
from llmconv.output.model_card import CARD, is_unedited, model_card
from llmconv.output.plan import Plan, Shard
from llmconv.output.streaming import check_copy, failing_safely, require_unchanged, stream_shard
from llmconv.progress import say

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

CONFIG = "config.json"


@dataclass(frozen=True)
class HubFolder:
    """A `Destination`: a repository and its branch."""

    address: HubAddress

    def __str__(self) -> str:
        return str(self.address)

    @property
    def name(self) -> str:
        """See `Destination`."""
        return self.address.name

    @cached_property
    def repository(self) -> HubRepository:
        """The branch to write."""
        return HubRepository(self.address)

    def is_complete(self) -> bool:
        """See `Destination`."""
        state, files = self.repository.state, self.manifest().files
        return (
            bool(files)
            and state.has_branch
            and all(
                name in state.files
                and state.files[name].size == entry.get("bytes")
                and state.files[name].sha256 in ("", entry.get("sha256"))
                for name, entry in files.items()
            )
        )

    def tidy(self) -> None:
        """See `Destination`; a commit leaves nothing."""

    def require_free(self, overwrite: bool, inputs: Sequence[Path], *, resume: bool) -> None:
        """See `Destination`; files about the repository, such as README.md, are not in the way."""
        state = self.repository.state
        if not state.has_branch:
            return
        if not overwrite and MANIFEST in state.files and not (resume and self.is_complete()):
            raise InputRefused(
                f"`{self.address}` already contains a model of llmconv",
                hint="choose another `-o`, or give `--overwrite` to replace it by a new commit",
            )
        if MANIFEST not in state.files and CONFIG in state.files and not foreign_weights(self.repository):
            raise InputRefused(
                f"`{self.address}` contains `{CONFIG}`, which llmconv did not make",
                hint="choose another repository or a new branch (`org/name@branch`), or delete it there yourself",
            )
        require_own_weights(self.repository)

    def require_space(self, plan: Plan) -> None:
        """See `Destination`."""
        require_space(uploads_folder(), self.space_needed(plan))

    def space_needed(self, plan: Plan) -> int:
        """See `Destination`: on this machine, one shard at a time; copies are sent from where they are."""
        return max((shard.nbytes for shard in plan.shards if not shard.copy_of), default=0)

    def manifest(self) -> Manifest:
        """See `Destination`."""
        return manifest_of(self.repository)

    def read(self, name: str) -> bytes | None:
        """See `Destination`."""
        return self.repository.read(name)

    def made_at(self) -> int:
        """See `Destination`: when the last commit was made."""
        return self.repository.state.changed

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> UnfinishedCommit:
        """See `Destination`."""
        return UnfinishedCommit(self, key=f"{key} {self.address}", resume=resume)

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> UnfinishedCommit:
        """Not possible, see `require_shared`."""
        self.require_shared()

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> UnfinishedCommit:
        """Not possible, see `require_shared`."""
        self.require_shared()

    def require_shared(self) -> NoReturn:
        """See `Destination`; what was sent is known only to the process that makes the commit."""
        raise UnsupportedInput(
            f"`{self.address}` cannot be written by several processes",
            hint="let them write a folder or a bucket, then `llmconv push` it",
        )


class UnfinishedCommit:
    """An `UnfinishedOutput`; `resume` uses what an interrupted run with the same `key` has sent.

    `key` is the fingerprint of sources, options and address.
    """

    def __init__(self, target: HubFolder, *, key: str, resume: bool) -> None:
        self.target, self._key, self._resume = target, key, resume
        self.finished: dict[str, dict[str, Any]] = {}
        self._contents: dict[str, bytes] = {}
        self._additions: dict[str, CommitOperationAdd] = {}

    @property
    def repository(self) -> HubRepository:
        """The branch to write."""
        return self.target.repository

    def __enter__(self) -> UnfinishedCommit:
        """Makes the repository, a private one, unless it exists, and opens the journal."""
        existed = self.repository.state.exists
        self.repository.create(private=None if existed else True)
        if not existed:
            say(f"made the private repository `{self.target.address.repository}`")
        with failing_safely():
            self._journal = UploadJournal(self._key, resume=self._resume)
        try:
            self._take_up(self._journal.entries)
        except BaseException:
            self._journal.close(keep=True)
            raise
        return self

    def _take_up(self, entries: dict[str, dict[str, Any]]) -> None:
        """Takes the shards of an interrupted run that the Hub still has."""
        known = self.repository.has_objects({entry["sha256"]: entry["bytes"] for entry in entries.values()})
        for name, entry in entries.items():
            addition = self.repository.addition(name, b"")
            if entry["sha256"] in known and sent(addition, entry["bytes"], entry["sha256"]):
                self.finished[name], self._additions[name] = entry, addition

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keeps the journal after a failure of the Hub or an interrupt, deletes it after anything else."""
        resumable = isinstance(error, OSError | OutputFailed | KeyboardInterrupt)
        self._journal.close(keep=resumable and bool(self.finished))

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Makes one file and sends it; see `UnfinishedOutput`."""
        if shard.copy_of:
            return self._copy_shard(shard, shard.copy_of, advance)
        with failing_safely(), self._journal.new_file() as new:
            entry = stream_shard(new.file, shard, advance)
            self._send(shard.name, new.path, entry)
        return entry

    def _copy_shard(self, shard: Shard, source: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        with failing_safely():
            digest = file_digest(source)
            entry = {"bytes": digest.size, "sha256": digest.sha256}
            self._send(shard.name, source, entry)
        require_unchanged(source, shard)
        check_copy(source, shard)
        advance(shard.nbytes)
        return entry

    def _send(self, name: str, path: Path, entry: dict[str, Any]) -> None:
        """Sends a file, or keeps it if the Hub wants it in the commit itself, as it does with small ones."""
        addition = self.repository.addition(name, path)
        addition.upload_info.sha256 = bytes.fromhex(entry["sha256"])
        self.repository.preupload([addition])
        if addition.path_or_fileobj:  # a file that was sent is let go
            self._contents[name] = path.read_bytes()
            return
        self._additions[name] = addition

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """See `UnfinishedOutput`."""
        self.finished[name] = entry
        with failing_safely():
            self._journal.add(name, entry)

    def release(self, name: str, sources: Sequence[Path]) -> None:
        """See `UnfinishedOutput`."""
        source_file.forget(sources)

    def write_file(self, name: str, content: bytes | Link) -> None:
        """Keeps a small file for `commit`; see `UnfinishedOutput`."""
        if isinstance(content, Link):
            raise UnsupportedInput(
                f"`{name}` would be a symbolic link, which the Hub does not have",
                hint="write to a local folder, then `llmconv push` it",
            )
        self._contents[name], self.finished[name] = content, file_entry(content)

    def leave(self) -> None:
        """Nothing: no other process goes on with a commit."""

    def commit(self, manifest: Manifest) -> None:
        """Makes the one commit, and compares what the Hub has then; see `UnfinishedOutput`."""
        manifest.files = dict(self.finished)
        small = {**self._contents, **self._card(manifest), MANIFEST: manifest.encode()}
        additions = [self.repository.addition(name, content) for name, content in small.items()]
        self.repository.preupload(additions)
        deleted = replaced_files(self.repository, {*self.finished, MANIFEST})
        made = f"{manifest.steps[-1]['command']} of {manifest.steps[-1]['source']}" if manifest.steps else "a model"
        done = self.repository.commit([*self._additions.values(), *additions], deleted, f"llmconv: {made}")
        digests = {name: FileDigest(entry["bytes"], entry["sha256"]) for name, entry in manifest.files.items()}
        digests |= {name: digest_of(content) for name, content in small.items()}
        if differing := self.repository.at(done.commit).differing(digests):
            raise OutputFailed(
                f"commit {done.commit[:12]} on the Hub has other bytes in `{differing[0]}` than were sent",
                hint="run again with `--overwrite`, and report it to the Hub",
            )

    def _card(self, manifest: Manifest) -> dict[str, bytes]:
        """The model card, unless the output or someone else has written one."""
        if CARD in self.finished or not is_unedited(self.repository.read(CARD)):
            return {}
        config = parse_object(self._contents.get(CONFIG, b"{}"), CONFIG)
        return {CARD: model_card(manifest, config, self.target.address.repository)}


PAGES = re.compile(r"(?:README|LICEN[CS]E|NOTICE|USE_POLICY|CITATION)[^/]*|\.git(?:attributes|ignore)", re.IGNORECASE)
"""Files about a repository, not of its model: they are kept, or replaced by those that the user wrote."""

WEIGHTS = re.compile(
    r".*\.(?:safetensors|bin|pth?|ckpt|onnx|onnx[._]data|gguf|h5|msgpack|npz|distcp|pdparams)(?:\.index\.json)?"
)


def manifest_of(repository: HubRepository) -> Manifest:
    """The manifest at the head of a branch, an empty one without."""
    content = repository.read(MANIFEST)
    return Manifest() if content is None else parse_manifest(content)


def foreign_files(repository: HubRepository) -> set[str]:
    """Files that llmconv did not make, without those about the repository."""
    made = {MANIFEST, *manifest_of(repository).files}
    return {name for name in repository.state.files if name not in made and not PAGES.fullmatch(name)}


def foreign_weights(repository: HubRepository) -> list[str]:
    """Weights that llmconv did not make, sorted."""
    return sorted(name for name in foreign_files(repository) if WEIGHTS.fullmatch(name))


def require_own_weights(repository: HubRepository) -> None:
    """Raises InputRefused for a branch with weights of others, which would be one model with those of the output.

    A branch that does not exist yet begins as a copy of `main`, and its first commit may delete them.
    """
    if repository.state.has_branch and (weights := foreign_weights(repository)):
        raise InputRefused(
            f"`{repository.address}` contains `{weights[0]}`, which llmconv did not make",
            hint="choose another repository or a new branch (`org/name@branch`), or delete it there yourself",
        )


def replaced_files(repository: HubRepository, names: Collection[str]) -> list[str]:
    """Files to delete, since the output with the files `names` replaces the one that they belong to."""
    old = [name for name in manifest_of(repository).files if name in repository.state.files]
    inherited = [] if repository.state.has_branch else foreign_weights(repository)
    return sorted({*old, *inherited} - {*names})


JOURNAL_BYTES = 64 << 20
"""Largest size, in bytes, of a journal that is read."""


def uploads_folder() -> Path:
    """The folder of journals and shards to send, `$XDG_CACHE_HOME/llmconv/uploads`; raises as `user_cache`."""
    return user_cache("uploads")


class UploadJournal:
    """The journal of one upload, which it locks; raises OutputFailed if another run has locked it.

    `resume` keeps the entries of an interrupted run; `key` is the fingerprint of inputs, options and place.
    """

    def __init__(self, key: str, *, resume: bool) -> None:
        home = uploads_folder()
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
        self._folder = Folder.open_own(home)
        self._folder.sweep()
        self._file = self._locked()
        self.entries = self._read() if resume else {}
        self._write()

    def _locked(self) -> BinaryIO:
        file = self._folder.open_to_append(self._name)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OutputFailed("another run uploads the same output", hint="wait until it has ended") from error
        return file

    def _read(self) -> dict[str, dict[str, Any]]:
        content = self._folder.read(self._name, JOURNAL_BYTES) or b""
        found = {}
        for line in content.splitlines():
            try:
                name, size, sha256 = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # cut off by a crash
                continue
            if isinstance(name, str) and is_inner(name) and isinstance(size, int) and _is_sha256(sha256):
                found[name] = {"bytes": size, "sha256": sha256}
        return found

    def _write(self) -> None:
        os.ftruncate(self._file.fileno(), 0)
        for name, entry in self.entries.items():
            self._append(name, entry)

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Records that the Hub has a file."""
        self.entries[name] = entry
        self._append(name, entry)

    def _append(self, name: str, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps([name, entry["bytes"], entry["sha256"]]).encode() + b"\n")
        os.fsync(self._file.fileno())

    def new_file(self) -> NewFile:
        """An empty file to write; it is removed at the end of the block."""
        return self._folder.begin("shard")

    def close(self, *, keep: bool) -> None:
        """Unlocks the journal, and removes it unless an interrupted run is to `keep` it."""
        if not keep:
            self._folder.remove(self._name)
        self._file.close()
        self._folder.close()


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
