"""What a repository on the Hub contains beside the output of llmconv, and what of it a new output replaces."""

from __future__ import annotations

import re
from collections.abc import Collection

from llmconv.errors import InputRefused
from llmconv.hub.repository import HubRepository
from llmconv.output.manifest import MANIFEST, Manifest, parse_manifest

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
    """Refuses a branch with weights of others, which would be one model with those of the output.

    A branch that does not exist yet begins as a copy of `main`, and its first commit may delete them.

    Raises:
        InputRefused: there are such weights.
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
