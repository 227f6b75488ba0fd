"""Claim: the object by which one run, or several with the same key, own an output in a store until it is published."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from llmconv.checkpoint import parse_object
from llmconv.errors import OutputFailed
from llmconv.files.named_file import is_inner
from llmconv.output.plan import json_bytes
from llmconv.progress import warn
from llmconv.stores.object_store import ObjectStore

JOURNAL = ".llmconv"
CLAIM = f"{JOURNAL}/claim.json"

SMALL = 64 << 20
"""Largest size, in bytes, of a manifest, configuration or journal entry that is read."""

TRIES = 5
"""How often a claim that vanishes between two requests, because its run has just ended, is asked for again."""


@dataclass(frozen=True)
class Claim:
    """Who writes an output, and what of it.

    Attributes:
        key: fingerprint of sources and options.
        files: names of all files that will be written except the manifest, by which `llmconv clean` finds them.
        replaced: names of the files of the output that `--overwrite` replaces.
        old: sha256 of the manifest that is replaced; empty if there is none.
    """

    key: str
    files: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    old: str = ""

    def replaces(self, manifest: bytes) -> bool:
        """Whether this manifest will be replaced, rather than being the one that the claim's run has published."""
        return self.old == digest(manifest)


def digest(manifest: bytes) -> str:
    """By which a claim names the manifest that it replaces."""
    return hashlib.sha256(manifest).hexdigest()


def read_claim(store: ObjectStore) -> Claim | None:
    """The claim of an output, None if there is none.

    Raises:
        MalformedInput: it is not JSON.
        InputRefused, OutputFailed: see `ObjectStore`.
    """
    content = store.read(CLAIM, SMALL)
    if content is None:
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
    """Puts a claim, or joins one with the same key.

    Args:
        store: the objects of the output.
        claim: to put, if there is none.
        joins: accept an existing claim with the same key.

    Returns:
        The claim that holds, and whether it is new.

    Raises:
        OutputFailed: another run has the output, or the store failed.
    """
    for _ in range(TRIES):
        if found := read_claim(store):
            _require_same(store, found, claim, joins=joins)
            return found, False
        content = json_bytes({name: getattr(claim, name) for name in ("key", "files", "replaced", "old")})
        if store.create(CLAIM, content):
            if not store.refuses_second(CLAIM, content):
                warn(f"the store of `{store.address}` cannot refuse a second writer: let no other run write there")
            return claim, True
    raise _taken(store, "wait until it has ended")


def _require_same(store: ObjectStore, found: Claim, claim: Claim, *, joins: bool) -> None:
    if found.key != claim.key:
        clean = f"`llmconv clean {store.address}`"
        raise _taken(store, f"it has other inputs or options: wait, or remove what it left with {clean}")
    if not joins:
        raise _taken(store, "wait until it has ended; `--resume` continues an interrupted run")


def _taken(store: ObjectStore, way: str) -> OutputFailed:
    return OutputFailed(f"another run is writing `{store.address}`, or was interrupted there", hint=way)
