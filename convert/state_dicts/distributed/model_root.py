"""Finds the model in a distributed checkpoint: its keys in the nested dict (`model`, `app.model`, …) and its prefix."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.convert.state_dicts.distributed.folder import PARTS
from llmconv.convert.state_dicts.distributed.metadata import TensorItem

META_EMBEDDING = "tok_embeddings.weight"
DEPTH_LIMIT = 4
BASE = re.compile(
    r"^((?:.*?\.)?)(?:model|transformer|gpt_neox)\.(?:decoder\.|language_model\.)?"
    r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$"
)
"""Names of the embedding in Hugging Face models; the first group is the prefix that a trainer's module added."""


def roots(
    tree: Mapping[Any, Any], above: tuple[str, ...] = (), *, own_names: bool = False
) -> dict[tuple[str, ...], Mapping[Any, Any]]:
    """The state dicts of language models in `tree`, by their keys from the root on; optimizers are skipped.

    Args:
        tree: nested dict.
        above: keys that lead to it.
        own_names: any state dict, since the model's own code has its own names.
    """
    is_part = _is_tensor if own_names else _is_embedding
    found = {above: tree} if any(map(is_part, tree.items())) else {}
    if len(above) < DEPTH_LIMIT:
        for key, inner in tree.items():
            if isinstance(inner, dict) and key not in PARTS:
                found |= roots(inner, (*above, str(key)), own_names=own_names)
    return found


def _is_tensor(entry: tuple[Any, Any]) -> bool:
    return isinstance(entry[1], TensorItem)


def _is_embedding(entry: tuple[Any, Any]) -> bool:
    key, value = entry
    return isinstance(value, TensorItem) and str(key).endswith((*EMBEDDINGS, META_EMBEDDING))


def is_meta_named(state: Mapping[Any, Any]) -> bool:
    """Whether the model has Meta's own names (torchtitan's Llama), not Hugging Face's."""
    return any(str(key).endswith(META_EMBEDDING) for key in state)


def prefix_of(names: Collection[str]) -> str:
    """The prefix that a trainer's module gave the model's names, such as `model.` of a LightningModule."""
    for end in (*HEADS, META_EMBEDDING):
        for name in names:
            if f".{name}".endswith(f".{end}"):
                return name.removesuffix(end)
    return next((match[1] for name in names if (match := BASE.match(name))), "")


def outside(names: Collection[str], prefix: str) -> list[str]:
    """Names outside the model: those that do not begin as the embedding or the head does."""
    ends = tuple(f".{end}" for end in (*EMBEDDINGS, *HEADS))
    own = {name.removeprefix(prefix).partition(".")[0] for name in names if f".{name}".endswith(ends)}
    return [
        name for name in names if not name.startswith(prefix) or name.removeprefix(prefix).partition(".")[0] not in own
    ]
