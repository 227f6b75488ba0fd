"""HubFiles: the files of one commit of the Hugging Face Hub, of which parts are fetched, as of a store's objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, first_line
from llmconv.files.mirror.mirror_folder import mirror_files
from llmconv.hub.address import HubAddress
from llmconv.hub.repository import hub_refusal
from llmconv.stores.object_store import Head

SECONDS = 30
"""Timeout of one answer."""

WHOLE, PART = 200, 206
"""Status of an answer with all of a file, from a server that knows no ranges, and of one with the range."""


class HubFiles:
    """The files of a repository at a commit hash; the content of a file at a commit never changes."""

    def __init__(self, address: HubAddress, commit: str) -> None:
        self._address, self._commit = address, commit

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start` to `stop` (exclusive, larger than `start`) of a file by one request, as they arrive.

        Raises InputRefused if the Hub does not give the file, or cannot be reached.
        """
        from huggingface_hub import hf_hub_url, utils  # noqa: PLC0415 - 0.3 s that a local path does not pay

        hub: Any = utils  # its names are not exported to type checkers
        url = hf_hub_url(self._address.repository, head.key, revision=self._commit)
        headers = {**hub.build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        with self._failing(), hub.http_stream_backoff("GET", url, headers=headers, timeout=SECONDS) as answer:
            hub.hf_raise_for_status(answer)
            position = start if answer.status_code == PART else 0
            for block in answer.iter_bytes():
                wanted = memoryview(block)[max(start - position, 0) : stop - position]
                position += len(block)
                if wanted:
                    yield wanted
                if position >= stop:
                    return

    def changed(self, key: str) -> InputRefused:
        """The error for a file that is shorter than the Hub says."""
        return InputRefused(
            f"`{key}` of `{self._address.repository}` on the hub is not as long as its list of files says",
            hint="run again; if it happens again, download the repository with `hf download`",
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the class for "no connection" differs between versions
            if isinstance(error, MemoryError | InputRefused):
                raise
            raise hub_refusal(error, self._address) or InputRefused(
                f"`{self._address.short}` cannot be read from the hub: {first_line(error, 120)}",
                hint="check the network, and run again",
            ) from error


def mirror_hub(address: HubAddress, commit: str, sizes: Mapping[str, int], folder: Path) -> Path:
    """Mirrors files of the Hub at a commit in `folder`, as `make_mirror`, and returns the path of what is at `address`.

    `sizes` maps paths in the repository to bytes, for the files at the address that the model needs. Raises
    InputRefused if the Hub does not give a file, or cannot be reached.
    """
    root = folder / address.repository.rpartition("/")[2]
    files = [(root / name, Head(name, size, "")) for name, size in sizes.items()]
    mirror_files(HubFiles(address, commit), files, folder)
    return root / address.folder
