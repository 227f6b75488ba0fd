"""Downloads models of the Hugging Face hub into its cache: only the files that the model needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llmconv.errors import InputRefused

TORCH_WEIGHTS = re.compile(r"pytorch_model.*\.bin(?:\.index\.json)?|(?:pytorch_)?model-\d+-of-\d+\.bin")
SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
ADAPTER = re.compile(r"adapter_(?:model\.(?:safetensors|bin)|config\.json)")
MARKS = ("config.json", "adapter_config.json", "llmconv.json", "params.json")
"""Files by which a model in the cache is found."""

SECONDS = 10
"""Timeout of the hub, after which the cache is used."""

SMALL = re.compile(r"[^/]+\.(?:json|jinja|txt|model|py|yaml|yml|md)")
"""Configuration, tokenizer and code at the top of a repository."""


def from_hub(name: str) -> Path:
    """The folder of a model in the hub's cache; missing files are downloaded.

    Args:
        name: `org/name`, or the bare name of one of the oldest models, optionally with `@revision`.

    Raises:
        InputRefused: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - 0.3 s that a local path does not pay

    repository, _, revision = name.partition("@")
    try:
        info = HfApi().model_info(repository, revision=revision or None, timeout=SECONDS)
        files = needed(file.rfilename for file in info.siblings or [])
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except Exception as error:  # the class for "no connection" differs between versions
        if isinstance(error, MemoryError):
            raise
        problem = _problem(error, name)
        if problem is None and (found := cached(name)):
            return found
        raise problem or _unreachable(name) from error


def _problem(error: Exception, name: str) -> InputRefused | None:
    """The error for an answer of the hub, None if there was no clear answer."""
    from huggingface_hub import errors  # noqa: PLC0415

    repository, _, revision = name.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return InputRefused(
            f"`{repository}` is a gated repository, and access was not granted",
            hint="request access on its page, and log in with `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputRefused(
            f"`{repository}` on the hub has no revision `{revision}`", hint="give a branch, a tag or a commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return InputRefused(
            f"`{name}` does not exist, neither on this machine nor on the hub",
            hint="check the spelling; for a private model log in with `hf auth login`",
        )
    return None


def _unreachable(name: str) -> InputRefused:
    from huggingface_hub.constants import HF_HUB_OFFLINE  # noqa: PLC0415

    why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
    return InputRefused(
        f"`{name}` does not exist on this machine and is not in the hub's cache; {why}",
        hint="check the spelling or the network, or give a local path",
    )


def cached(name: str) -> Path | None:
    """The folder of a hub id (`[org/]name[@revision]`) in the hub's cache, None if it is not cached.

    A folder with only the needed files counts, too, although `snapshot_download` calls it incomplete.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415 - see above
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except HFValidationError:
        return None
    except LocalEntryNotFoundError:
        found = (try_to_load_from_cache(repository, file, revision=revision or None) for file in MARKS)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)


def needed(files: Iterable[str]) -> list[str]:
    """The files of a repository that its model needs: one kind of weights, the configuration, the tokenizer.

    Of any other repository (a training checkpoint, or a model exported by llmconv) all files are needed.
    """
    listed = list(files)
    if "llmconv.json" in listed:
        return listed
    for weights in (SAFETENSORS, ADAPTER, TORCH_WEIGHTS):
        if any(weights.fullmatch(name) for name in listed):
            kinds = (weights, SMALL, ADAPTER)
            return [name for name in listed if any(kind.fullmatch(name) for kind in kinds)]
    return listed
