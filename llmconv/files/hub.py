"""Downloads models of the Hugging Face hub into its cache: only the files that the model needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from llmconv.addresses import HubAddress
from llmconv.errors import InputRefused, first_line, listing
from llmconv.files.mirror import mirror_files
from llmconv.hub.repository import hub_refusal
from llmconv.stores.object_store import Head

TORCH_WEIGHTS = re.compile(r"pytorch_model.*\.bin(?:\.index\.json)?|(?:pytorch_)?model-\d+-of-\d+\.bin")
SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
ADAPTER = re.compile(r"adapter_(?:model\.(?:safetensors|bin)|config\.json)")
# files by which a model in the cache is found
MARKS = ("config.json", "adapter_config.json", "llmconv.json", "params.json")
# files that may contain weights
WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pth?|ckpt|pdparams|distcp|npz|tar|t?gz|zip|zst|msgpack|gguf)")
SECONDS = 10  # timeout of the hub, after which the cache is used
SMALL = re.compile(r"[^/]+\.(?:json|jinja|txt|model|py|yaml|yml|md)")
"""Configuration, tokenizer and code at the top of a repository."""


def from_hub(address: HubAddress, headers_in: Path | None = None) -> Path:
    """The folder of a model in the hub's cache; missing files are downloaded.

    With a folder or file in `address`, nothing else is downloaded. If not all files are in the cache, an empty folder
    `headers_in` gets a `mirror_hub`: then only small files are downloaded, and of weights what is read. Raises
    InputRefused if the hub has no such model or folder, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - 0.3 s that a local path does not pay
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415 - slow to import

    repository, revision = address.repository, address.revision or None
    try:
        info = HfApi().model_info(repository, revision=revision, timeout=SECONDS)
        files = _needed_below(address, [file.rfilename for file in info.siblings or []])
        if headers_in and not _is_cached(repository, str(info.sha), files):
            listed = HfApi().list_repo_tree(repository, revision=info.sha, recursive=True)
            sizes = {file.path: file.size for file in listed if isinstance(file, RepoFile)}
            return mirror_hub(address, str(info.sha), {name: sizes[name] for name in files}, headers_in)
        home = Path(snapshot_download(repository, revision=revision, allow_patterns=[escape(name) for name in files]))
        return home / address.folder
    except InputRefused:
        raise
    except Exception as error:  # the class for "no connection" differs between versions
        if isinstance(error, MemoryError):
            raise
        problem = hub_refusal(error, address)
        if problem is None and (found := cached(address)):
            return found
        raise problem or _unreachable(address) from error


def _is_cached(repository: str, commit: str, files: list[str]) -> bool:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    return all(isinstance(try_to_load_from_cache(repository, name, revision=commit), str) for name in files)


def _needed_below(address: HubAddress, listed: list[str]) -> list[str]:
    """The files to download for an address, by their paths in the repository; raises InputRefused if there are none."""
    if address.folder in listed:
        return [address.folder]
    _require_one_model(address, listed)
    if not address.folder:
        return needed(listed)
    start = f"{address.folder}/"
    inside = [name.removeprefix(start) for name in listed if name.startswith(start)]
    if not inside:
        problem = f"`{address.repository}` on the hub has no folder or file `{address.folder}`"
        raise InputRefused(problem, hint="look at the list of its files, on its page")
    return [start + name for name in needed(inside)]


def _require_one_model(address: HubAddress, listed: list[str]) -> None:
    """Raises InputRefused for a folder that only contains folders of models, which it lists, before the download."""
    start = f"{address.folder}/" if address.folder else ""
    weights = [name for name in listed if name.startswith(start) and WEIGHTS.fullmatch(name)]
    homes = {name.rpartition("/")[0] for name in weights}
    models = sorted(home for home in homes if {f"{home}/{mark}" for mark in MARKS} & {*listed})
    is_checkpoint = address.folder in homes or any(name.endswith(".distcp") for name in weights)
    if is_checkpoint or len(models) < 2:
        return
    found = [f"hf://{replace(address, folder=home).short}" for home in models]
    problem = f"`{address.short}` on the hub is not a model itself; it contains {listing(found)}"
    raise InputRefused(problem, hint=f"give one of them: `{found[0]}`")


def _unreachable(address: HubAddress) -> InputRefused:
    from huggingface_hub.constants import HF_HUB_OFFLINE  # noqa: PLC0415

    why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
    problem = f"`{address.short}` does not exist on this machine and is not in the hub's cache; {why}"
    return InputRefused(problem, hint="check the spelling, the current folder and the network")


def cached(address: HubAddress) -> Path | None:
    """The folder (or file) of a model in the hub's cache, even if only the needed files are there; else None."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415 - see above
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, revision = address.repository, address.revision or None
    place = f"{address.folder}/" if address.folder else ""
    try:
        home = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except HFValidationError:
        return None
    except LocalEntryNotFoundError:
        names = [*(place + mark for mark in MARKS), *([address.folder] if place else [])]
        found = [try_to_load_from_cache(repository, name, revision=revision) for name in names]
        files = [Path(file) for file in found if isinstance(file, str)]
        return next((file if file.name not in MARKS else file.parent for file in files), None)
    path = home / address.folder
    return path if path.exists() else None


def snapshot_home(path: Path) -> Path | None:
    """The folder `models--org--name` of the hub's cache whose snapshots contain `path`, None outside the cache."""
    above = [path, *path.parents]
    return next((home for folder, home in zip(above[1:], above[2:], strict=False) if _is_cache(folder, home)), None)


def _is_cache(folder: Path, home: Path) -> bool:
    return folder.name == "snapshots" and home.name.startswith("models--")


def source_name(path: Path) -> str:
    """The name of an input: `org/name@commit[/folder]` in the hub's cache, else the last part of its path."""
    home = snapshot_home(path)
    if home is None:
        return path.name
    commit, *folder = path.relative_to(home / "snapshots").parts
    return "/".join([f"{home.name.removeprefix('models--').replace('--', '/')}@{commit}", *folder])


def needed(files: Iterable[str]) -> list[str]:
    """The files that a repository's model needs: weights of one kind, configuration, tokenizer; all of any other."""
    listed = list(files)
    if "llmconv.json" in listed:
        return listed
    for weights in (SAFETENSORS, ADAPTER, TORCH_WEIGHTS):
        if any(weights.fullmatch(name) for name in listed):
            kinds = (weights, SMALL, ADAPTER)
            return [name for name in listed if any(kind.fullmatch(name) for kind in kinds)]
    return listed


WAIT_SECONDS = 30  # timeout of one answer
WHOLE, PART = 200, 206
"""Status of an answer with all of a file, from a server that knows no ranges, and of one with the range."""


class HubFiles:
    """The files of a repository at a commit hash; the content of a file at a commit never changes."""

    def __init__(self, address: HubAddress, commit: str) -> None:
        self._address, self._commit = address, commit

    def blocks(self, head: Head, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start:stop` of a file by one request, as they arrive; InputRefused if the Hub does not give it."""
        from huggingface_hub import hf_hub_url, utils  # noqa: PLC0415 - 0.3 s that a local path does not pay

        hub: Any = utils  # its names are not exported to type checkers
        url = hf_hub_url(self._address.repository, head.key, revision=self._commit)
        headers = {**hub.build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        with self._failing(), hub.http_stream_backoff("GET", url, headers=headers, timeout=WAIT_SECONDS) as answer:
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
        problem = f"`{key}` of `{self._address.repository}` on the hub is not as long as its list of files says"
        return InputRefused(problem, hint="run again; if it happens again, download the repository with `hf download`")

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
