"""StoreFolder: a folder in an object store as a Destination. A store cannot rename, so the manifest comes last.

    OUT/.llmconv/claim.json        put only if there is none: one run, or several with the same key, own the output
    OUT/model-00001-of-00002.…     shards, as multipart uploads while they are made
    OUT/.llmconv/done/NAME.json    the journal: one object per finished shard, with size, sha256 and ETag
    OUT/tokenizer.json, …          small files, `config.json` last of them
    OUT/llmconv.json               put only if there is none: this publishes the output; then `.llmconv/` is deleted

`--resume` compares size and ETag of each shard with the journal, and reads nothing again. The claim lists what
`--overwrite` replaces, so that a later run deletes what one that was killed did not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from llmconv.addresses import StoreAddress, is_store_address, parse_address
from llmconv.checkpoint import INDEX, parse_object
from llmconv.errors import InputRefused, OutputFailed, word
from llmconv.files import mirror
from llmconv.files.safe_folder import Link, is_inner, refuse_links
from llmconv.files.source_file import open_source
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, is_file_entry, parse_manifest
from llmconv.output.plan import (
    Destination,
    Shard,
    ShardContent,
    UnfinishedOutput,
    check_copy,
    failing_safely,
    json_bytes,
    require_unchanged,
)
from llmconv.progress import warn
from llmconv.stores.object_store import ObjectStore, abort_uploads, open_uploads

JOURNAL = ".llmconv"
CLAIM = f"{JOURNAL}/claim.json"
SMALL = 64 << 20  # largest size, in bytes, of a manifest, configuration or journal entry that is read
TRIES = 5  # how often a claim that vanishes between two requests, because its run has just ended, is asked for again


@dataclass(frozen=True)
class Claim:
    """Who writes an output, and what of it."""

    key: str  # fingerprint of sources and options
    # names of all files that will be written except the manifest, by which `llmconv clean` finds them
    files: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()  # names of the files of the output that `--overwrite` replaces
    old: str = ""  # sha256 of the manifest that is replaced; empty if there is none


def digest(manifest: bytes) -> str:
    """By which a claim names the manifest that it replaces."""
    return hashlib.sha256(manifest).hexdigest()


def read_claim(store: ObjectStore) -> Claim | None:
    """The claim of an output, None if there is none; raises MalformedInput unless JSON, and as `ObjectStore`."""
    if (content := store.read(CLAIM, SMALL)) is None:
        return None
    found = parse_object(content, CLAIM)
    key, old = found.get("key"), found.get("old")
    return Claim(
        key if isinstance(key, str) else "",
        _names(found.get("files")),
        _names(found.get("replaced")),
        old if isinstance(old, str) else "",
    )


def _names(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else []
    return tuple(name for name in names if isinstance(name, str) and is_inner(name))


def take(store: ObjectStore, claim: Claim, *, joins: bool) -> tuple[Claim, bool]:
    """Puts a claim, or `joins` one with the same key; the claim, and whether it is new; OutputFailed if taken."""
    for _ in range(TRIES):
        if found := read_claim(store):
            if found.key != claim.key:
                clean = f"`llmconv clean {word(store.address)}`"
                raise _taken(store, f"it has other inputs or options: wait, or remove what it left with {clean}")
            if not joins:
                raise _taken(store, "wait until it has ended; `--resume` continues an interrupted run")
            return found, False
        content = json_bytes(asdict(claim))
        if store.create(CLAIM, content):
            if not store.refuses_second(CLAIM, content):
                warn(f"the store of `{store.address}` cannot refuse a second writer: let no other run write there")
            return claim, True
    raise _taken(store, "wait until it has ended")


def _taken(store: ObjectStore, way: str) -> OutputFailed:
    return OutputFailed(f"another run is writing `{store.address}`, or was interrupted there", hint=way)


DONE = f"{JOURNAL}/done"
COPY_BYTES = 8 << 20  # bytes per block of an unchanged file
GATES = ("config.json", INDEX, MANIFEST)
"""Files by which readers know a model; the first that go when an output is replaced, in this order.

The manifest is the last of them: as long as it is there, a later run knows that the others may be, too.
"""

LAST = (INDEX, "config.json")  # the last files that come before the manifest


@dataclass(frozen=True)
class StoreFolder(Destination):
    """The folder at `address`; a store has room, and several processes can write it."""

    address: StoreAddress

    @cached_property
    def store(self) -> ObjectStore:
        return ObjectStore(self.address, writes=True)

    def is_complete(self) -> bool:
        """See `Destination`; a run that was killed after it had published has left its claim."""
        content = self.read(MANIFEST)
        files = parse_manifest(content).files if content else {}
        sizes = {head.key: head.size for head in self.store.list()} if files else {}
        if not files or any(sizes.get(name) != entry.get("bytes") for name, entry in files.items()):
            return False
        claim = read_claim(self.store) if CLAIM in sizes else None
        # which will be replaced, rather than being the one that the claim's run has published
        return content is not None and not (claim and claim.old == digest(content))

    def tidy(self) -> None:
        self.store.delete(sorted((head.key for head in self.store.list(JOURNAL)), key=CLAIM.__eq__))

    def require_free(self, overwrite: bool, inputs: Sequence[Path] = (), *, resume: bool = False) -> None:
        for place in filter(None, map(mirror.address_of, inputs)):
            if place.is_within(self.address) or self.address.is_within(place):
                where = "contains" if place.is_within(self.address) else "is inside"
                problem = f"`{self.address}` {where} the input `{place}`"
                raise InputRefused(problem, hint="choose an `-o` that neither contains an input nor is inside one")
        found = {head.key for head in self.store.list() if not head.key.startswith(f"{JOURNAL}/")}
        if MANIFEST not in found and found and self.store.head(CLAIM) is None:
            problem = f"`{self.address}` contains `{min(found)}` and was not made by llmconv"
            raise InputRefused(problem, hint="choose another `-o`, or remove it yourself")
        if MANIFEST not in found:
            return
        if not overwrite and not (resume and self.is_complete()):
            message = f"`{self.address}` already exists"
            raise InputRefused(message, hint="choose another `-o`, or give `--overwrite` to make it again")
        foreign = sorted(found - {MANIFEST, *self.manifest().files})
        if overwrite and foreign:
            raise InputRefused(
                f"`{self.address}` also contains `{foreign[0]}`, which llmconv did not make, so it is not overwritten",
                hint="choose another `-o`, or remove it yourself",
            )

    def read(self, name: str) -> bytes | None:
        return self.store.read(name, SMALL)

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> UnfinishedObjects:
        return UnfinishedObjects(self, key, files, overwrite=overwrite, joins=resume)

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> UnfinishedObjects:
        return UnfinishedObjects(self, key, files, joins=True, mine=frozenset(mine))

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> UnfinishedObjects:
        """See `Destination`; the store's ETags are trusted."""
        return UnfinishedObjects(self, key, files, joins=True, owns=trusted)


@dataclass
class UnfinishedObjects(UnfinishedOutput):
    """An output in a store that is being made, in which the claim stays when a process leaves it."""

    target: StoreFolder
    key: str  # fingerprint of sources and options
    files: Sequence[str] = ()  # names of all files that will be written, by which `llmconv clean` finds them
    overwrite: bool = False  # an existing output is deleted first
    joins: bool = False  # a claim with the same key is no other run: this one goes on after it, or at the same time
    # names of the shards that this process writes while others have the same key; None: it is alone
    mine: frozenset[str] | None = None
    owns: bool = False  # no other run has joined the claim, as far as this one knows; always so if it has put the claim
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)  # manifest entries of finished files, by name
    _small: dict[str, bytes] = field(default_factory=dict)
    _tags: dict[str, str] = field(default_factory=dict)
    _claim: Claim = field(init=False, repr=False)

    @property
    def store(self) -> ObjectStore:
        return self.target.store

    def __enter__(self) -> Self:
        old = (self.target.read(MANIFEST) if self.overwrite else None) or b""
        replaced = tuple(parse_manifest(old).files) if old else ()
        claim = Claim(self.key, tuple(self.files), replaced, digest(old) if old else "")
        self._claim, is_new = take(self.store, claim, joins=self.joins)
        self.owns = self.owns or is_new
        if self.overwrite:  # deletes an output, first what readers know it by, so that nobody sees a mixture of two
            self.store.delete([*GATES, *(name for name in self.target.manifest().files if name not in GATES)])
        self.finished = self._read_journal()
        if self.store.head(MANIFEST):  # after the journal, which another run deletes once it has published
            self.store.delete([CLAIM] if is_new else [])
            raise self._appeared()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Keeps what is finished after a failure of the store or an interrupt, deletes it after anything else.

        What others have joined, or may have, is kept: they go on with it.
        """
        if error is None or self.mine is not None or not self.owns:
            return
        if isinstance(error, OSError | OutputFailed | KeyboardInterrupt) and self.finished:
            return
        with suppress(Exception):  # the first error is the one to show
            # deletes all files of this output, also those of a worker that was stopped before it had recorded them
            mine = {*self.files, *map(entry_key, self.files)}
            self.store.delete([*(head.key for head in self.store.list() if head.key in mine), CLAIM])
            abort_uploads(self.target.address, self.files)  # of workers and tasks that were stopped

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """Entries of files of this output whose size and ETag are those of the store; nothing is read again."""
        heads = {head.key: head for head in self.store.list()} if self.joins else {}
        if self.mine is not None:
            heads = {name: heads[name] for own in self.mine for name in (own, entry_key(own)) if name in heads}
        found: dict[str, dict[str, Any]] = {}
        keys = [key for key in heads if key.startswith(f"{DONE}/")]
        for key, content in zip(keys, self.store.read_all(keys, SMALL), strict=True):
            line = parse_object(content or b"{}", key)
            name, entry, e_tag = str(line.get("file")), line.get("entry"), line.get("e_tag")
            if line.get("key") != self.key or name not in self.files or not is_file_entry(entry):
                continue
            if (head := heads.get(name)) and (head.size, head.e_tag) == (entry.get("bytes"), e_tag):
                found[name], self._tags[name] = entry, head.e_tag
        return found

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Uploads one file while it is made; see `UnfinishedOutput`."""
        with failing_safely():
            content = FileBlocks(shard.copy_of) if shard.copy_of else ShardContent(shard)
            self.store.write(shard.name, _counted(content.blocks(), advance), content.nbytes)
            if shard.copy_of:
                require_unchanged(shard.copy_of, shard)
                check_copy(shard.copy_of, shard)
            head, size = self.store.head(shard.name), content.entry["bytes"]
        if head is None or head.size != size:
            place = self.target.address / shard.name
            problem = f"the store keeps {head.size if head else 0:,} bytes of `{place}`, not {size:,}"
            raise OutputFailed(problem, hint="check the store, and run again with `--resume`")
        self._tags[shard.name] = head.e_tag
        return content.entry

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Puts the journal entry of a shard; see `UnfinishedOutput`."""
        self.finished[name] = entry
        line = {"key": self.key, "file": name, "e_tag": self._tags[name], "entry": entry}
        self.store.write(entry_key(name), json_bytes(line), 0)

    def write_file(self, name: str, content: bytes | Link) -> None:
        refuse_links({name: content})
        assert not isinstance(content, Link)
        self._small[name] = content
        self.finished[name] = file_entry(content)

    def commit(self, manifest: Manifest) -> None:
        """Puts the small files, then the manifest unless there is one, and deletes the journal."""
        manifest.files = dict(self.finished)
        # deletes files of the replaced output that a run which was killed has left, and that are not of this one
        replaced = {*self._claim.replaced} - {*self.finished}
        self.store.delete([head.key for head in self.store.list() if head.key in replaced] if replaced else [])
        for name in sorted(self._small, key=lambda name: LAST.index(name) if name in LAST else -1):
            self.store.write(name, self._small[name], len(self._small[name]))
        content = manifest.encode()
        if not self.store.create(MANIFEST, content) and self.target.read(MANIFEST) != content:
            raise self._appeared()
        self.store.delete_all(entry_key(name) for name in self._tags)
        self.store.delete([CLAIM])

    def _appeared(self) -> OutputFailed:
        problem = f"`{self.target}` appeared while it was being made"
        return OutputFailed(problem, hint="choose another `-o`, or give `--overwrite`")


class FileBlocks:
    """The bytes of a local file in blocks, with their sha256."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, path.stat().st_size
        self._sha256, self._read = hashlib.sha256(), 0

    def blocks(self) -> Generator[memoryview, None, None]:
        with open_source(self.path) as file:
            while block := file.read(COPY_BYTES):
                self._sha256.update(block)
                self._read += len(block)
                yield memoryview(block)

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._read, "sha256": self._sha256.hexdigest()}


def _counted(blocks: Generator[memoryview, None, None], advance: Callable[[int], None]) -> Iterator[memoryview]:
    with closing(blocks):
        for block in blocks:
            yield block
            advance(len(block))


def entry_key(name: str) -> str:
    return f"{DONE}/{name}.json"


@dataclass(frozen=True)
class Cleaned:
    """What was, or would be, deleted: paths of objects below the address, and the number of open multipart uploads.

    The number is None if uploads cannot be listed (no boto3, or no S3).
    """

    objects: tuple[str, ...]
    uploads: int | None


def clean(output: str | StoreAddress, *, dry_run: bool = False) -> Cleaned:
    """Deletes the journal and the files that an interrupted run left below `output`, and their open uploads.

    A published output stays, and so does everything that llmconv did not write: uploads of other files may be at work.
    Raises InputRefused unless `output` is in an object store with access, OutputFailed if the store failed.
    """
    if not is_store_address(output):
        raise InputRefused(
            f"`{output}` is not an address in an object store",
            hint="a local run that was interrupted left a folder `.OUT.llmconv-partial` next to OUT, which you can "
            "remove; one to the Hub left nothing there",
        )
    address = output if isinstance(output, StoreAddress) else parse_address(output)
    store = ObjectStore(address)
    keys = {head.key for head in store.list()}
    claim = read_claim(store) or Claim("")
    published = store.read(MANIFEST, SMALL) if MANIFEST in keys else None
    files = set() if published is not None else {*claim.files, *claim.replaced}
    # an upload that a lost worker left open may be of a file that has been published since
    written = {*claim.files, *(parse_manifest(published).files if published else ())}
    objects = sorted(key for key in keys if key.startswith(f"{JOURNAL}/") or key in files)
    if dry_run:
        found = open_uploads(address, written)
        return Cleaned(tuple(objects), len(found[1]) if found else None)
    store.delete([*(key for key in objects if key != CLAIM), CLAIM])
    return Cleaned(tuple(objects), abort_uploads(address, written))
