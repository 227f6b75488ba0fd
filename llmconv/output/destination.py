"""Destination: where an output is made, a local folder or a folder in an object store; both keep the same promises.

A reader sees all of an output or nothing; what a failed run finished is kept for `--resume`; two runs never mix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from llmconv.files.safe_folder import Link
from llmconv.output.manifest import Manifest
from llmconv.output.plan import Plan, Shard


class UnfinishedOutput(Protocol):
    """An output that is being made, with its journal."""

    @property
    def finished(self) -> Mapping[str, Mapping[str, Any]]:
        """The manifest entries of the files that are complete, by name, those of an earlier run included."""

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Writes one file and returns its manifest entry, which `record` takes once the sources are known to be whole.

        Args:
            shard: the file.
            advance: called with the number of bytes of each block written.
        """

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Records in the journal that the file `name` is complete."""

    def write_file(self, name: str, content: bytes | Link) -> None:
        """Writes one small file, or a relative symbolic link."""

    def release(self, name: str, sources: Sequence[Path]) -> None:
        """Gives back memory that caches the file `name` and the sources, which will not be read again soon."""

    def leave(self) -> None:
        """Lets other processes go on with the output when this one leaves it."""

    def commit(self, manifest: Manifest) -> None:
        """Adds the manifest of all finished files, and makes the output visible."""


class Destination(Protocol):
    """A folder to make."""

    @property
    def name(self) -> str:
        """Its last part, for messages."""

    def is_complete(self) -> bool:
        """Whether llmconv made it, all files have the recorded sizes, and no unfinished run was to replace it."""

    def tidy(self) -> None:
        """Deletes what a run has left that was killed after it had published; the output is complete."""

    def require_free(self, overwrite: bool, inputs: Sequence[Path], *, resume: bool) -> None:
        """Requires that it can be made: `overwrite` replaces only what llmconv made.

        Args:
            overwrite: it may be replaced.
            inputs: paths that the run reads; neither may be inside the other.
            resume: it may be complete; the plan is compared with it later.

        Raises:
            InputRefused: it exists and may not be replaced.
        """

    def require_space(self, plan: Plan) -> None:
        """Requires room for the plan; raises InputRefused."""

    def space_needed(self, plan: Plan) -> int:
        """Bytes of new storage that the plan takes."""

    def manifest(self) -> Manifest:
        """The manifest of a complete output."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file of it, None if there is none."""

    def made_at(self) -> int:
        """When its manifest was written, in ns since 1970."""

    def begin(
        self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool
    ) -> AbstractContextManager[UnfinishedOutput]:
        """Starts or continues the output.

        Args:
            key: fingerprint of sources and options; what was finished with another key is not used.
            files: names of all files that will be written.
            overwrite: an existing output may be replaced.
            resume: keep what an interrupted run with the same key finished.

        Raises:
            OutputFailed: another run is writing it, or writing fails.
        """

    def require_shared(self) -> None:
        """Raises UnsupportedInput if several processes cannot write it."""

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> AbstractContextManager[UnfinishedOutput]:
        """Joins the processes with the same key that write the output, none of which commits; it stays unfinished.

        Args:
            key: fingerprint of sources and options.
            files: names of all files of the output.
            mine: names of the shards that this process writes.

        Raises:
            OutputFailed: a run with another key, or one that is about to commit, has the output.
        """

    def finish(
        self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool
    ) -> AbstractContextManager[UnfinishedOutput]:
        """Starts the last step of an output whose shards were written by processes that called `share`.

        Args:
            key: fingerprint of sources and options.
            files: names of all files of the output.
            overwrite: an existing output may be replaced.
            trusted: this run has just written all of it, so that what is unchanged since is not read again.
        """
