"""Models of the Hugging Face hub: from the cache where they are there, and no more of one than its model needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llmconv.errors import InputRefused

TORCH_WEIGHTS = re.compile(r"pytorch_model.*\.bin(?:\.index\.json)?|(?:pytorch_)?model-\d+-of-\d+\.bin")
SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
ADAPTER = re.compile(r"adapter_(?:model\.(?:safetensors|bin)|config\.json)")
MARKS = ("config.json", "adapter_config.json", "llmconv.json", "params.json")
"""Files by which a folder of the cache is found."""

SECONDS = 10
"""How long the hub is waited for, before the cache is looked at."""

SMALL = re.compile(r"[^/]+\.(?:json|jinja|txt|model|py|yaml|yml|md)")
"""Configuration, tokenizer and code at the top of a repository."""


def from_hub(name: str) -> Path:
    """The folder of a model in the hub's cache; what it lacks is downloaded.

    Args:
        name: `org/name`, or the bare name of one of the oldest models; `@revision` may follow.

    Raises:
        InputRefused: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - 0.3 s that a local path does not pay

    repository, _, revision = name.partition("@")
    try:
        told = HfApi().model_info(repository, revision=revision or None, timeout=SECONDS)
        files = needed(file.rfilename for file in told.siblings or [])
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except Exception as error:  # its HTTP library, and so the class of "no connection", differs between versions
        if isinstance(error, MemoryError):
            raise
        problem = _problem(error, name)
        if problem is None and (found := cached(name)):
            return found
        raise problem or _unreachable(name) from error


def _problem(error: Exception, name: str) -> InputRefused | None:
    """What the hub answered, None where there was no answer to go by."""
    from huggingface_hub import errors  # noqa: PLC0415

    repository, _, revision = name.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return InputRefused(
            f"the hub gives `{repository}` only to those who were granted access",
            hint="ask for access on its page, and log in with `hf auth login`",
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
    """The folder of a hub id (`[org/]name[@revision]`) in the hub's cache; None where it is not there.

    A folder without the files that were not needed is there, too, which `snapshot_download` would call incomplete.
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
    """Those files of a repository that its model needs: one kind of weights, the configuration, the tokenizer.

    A repository that is neither a model nor an adapter of Hugging Face's is a training checkpoint, or one that llmconv
    exported: all of it is needed.
    """
    listed = list(files)
    if "llmconv.json" in listed:
        return listed
    for weights in (SAFETENSORS, ADAPTER, TORCH_WEIGHTS):
        if any(weights.fullmatch(name) for name in listed):
            kinds = (weights, SMALL, ADAPTER)
            return [name for name in listed if any(kind.fullmatch(name) for kind in kinds)]
    return listed
