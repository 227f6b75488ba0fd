"""Tied output heads: whether a model's head is its embedding, and what happens to a second copy of that matrix.

transformers stores a tied matrix once, under the name of the embedding. A training checkpoint may contain it twice:
`tie_word_embeddings` says whether it is tied; where that is null, the values decide, when the output is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import equal
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import FileTensor
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

TIE = "tie_word_embeddings"
HEAD = HEADS[0]


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether head and embedding are one matrix when the file has only one (transformers' default is yes)."""
    parts = (config, config.get("text_config"))
    return all(part.get(TIE, True) for part in parts if isinstance(part, Mapping))


def set_everywhere(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a field of the config, and of its `text_config` if there is one, in place."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part[key] = value


def find_embedding(names: Iterable[str]) -> str | None:
    """The name of the only input embedding; None where it is not clear."""
    found = [name for name in names if name.endswith(EMBEDDINGS)]
    return found[0] if len(found) == 1 else None


def find_head(names: Iterable[str], embedding: str | None) -> str:
    """The name of the output head, or the one it would have next to this embedding."""
    found = [name for name in names if name.endswith(HEADS)]
    if len(found) == 1:
        return found[0]
    return HEADS[1] if (embedding or "").endswith("embed_in.weight") else HEAD


def settle_head(
    tensors: dict[str, LazyTensor], config: dict[str, Any], warnings: list[str], *, sampled: bool = False
) -> dict[str, Any]:
    """Drops, in place, an output head that is the embedding; returns the config with `tie_word_embeddings` set.

    Values are compared where the config ties them (a warning if they differ), or has null because the training format
    does not record it; with `sampled` only the first block of rows, enough to describe a checkpoint, not to convert it.
    """
    head = next((name for name in HEADS if name in tensors), None)
    embedding = next((name for name in tensors if name.endswith(EMBEDDINGS)), None)
    if head is None or embedding is None:
        return config
    tied, same = config.get(TIE, False), _same_bytes(tensors[head], tensors[embedding])
    if tied is False and not same:
        return config
    may_tie = tied or "lm_head.bias" not in tensors  # where nothing says so, a head with a bias is not tied
    if same or (may_tie and equal(tensors[head], tensors[embedding], sampled=sampled)):
        del tensors[head]
        return {**config, TIE: True}
    if tied:
        warnings.append(f"the configuration ties `{head}` to `{embedding}`, but they differ; both are kept")
    return {**config, TIE: False}


def settled(checkpoint: Checkpoint, *, sampled: bool = False) -> Checkpoint:
    """The training checkpoint after `settle_head`; a Hugging Face folder, or a model with its own code, as it is."""
    if checkpoint.format == "hf" or AUTO_MAP in checkpoint.config:  # its own code was compared with the tensors
        return checkpoint
    tensors, warnings = dict(checkpoint.tensors), list(checkpoint.warnings)
    config = settle_head(tensors, checkpoint.config, warnings, sampled=sampled)
    return replace(checkpoint, tensors=tensors, config=config, warnings=tuple(warnings))


def with_head(checkpoint: Checkpoint, embedding: str, *, tied: bool) -> dict[str, LazyTensor]:
    """The tensors, with the output head (`lm_head.weight`) added if it is tied to the embedding.

    `tied` is transformers' default for configs without `tie_word_embeddings`. Raises MalformedInput without an
    embedding, and without a head that is not tied.
    """
    tensors = dict(checkpoint.tensors)
    if HEAD in tensors:
        return tensors
    if embedding not in tensors or not checkpoint.config.get(TIE, tied):
        missing = HEAD if embedding in tensors else embedding
        raise MalformedInput(
            f"`{checkpoint.path.name}` has no `{missing}`", hint="the folder is incomplete; copy it again"
        )
    return {**tensors, HEAD: tensors[embedding]}


def _same_bytes(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors are one by their place in a file; nothing is read."""
    if one is other:
        return True
    if not (isinstance(one, FileTensor) and isinstance(other, FileTensor)):
        return False
    return (one.path, one.offset, one.shape, one.dtype) == (other.path, other.offset, other.shape, other.dtype)
