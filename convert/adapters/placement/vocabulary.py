"""Embedding, tied head and vocabulary size of a merged model, with the fields of the config that depend on them."""

from __future__ import annotations

from typing import Any

from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.models.tied_head import TIE, is_tied, set_everywhere
from llmconv.errors import MalformedInput


def fit_vocabulary(edits: Edits, embedding: str | None, head: str, config: dict[str, Any]) -> bool:
    """Sets `vocab_size` to the rows of an embedding that an adapter resized.

    Args:
        edits: changes by the adapters.
        embedding: name of the input embedding.
        head: name of the output head.
        config: changed in place.

    Returns:
        Whether the size changed.

    Raises:
        MalformedInput: embedding and head would have different sizes.
    """
    sizes = {name: edits.current(name).num_rows for name in (embedding, head) if name and edits.tensors.get(name)}
    changed = [name for name, size in sizes.items() if size != edits.tensors[name].num_rows]
    if not changed:
        return False
    if len(set(sizes.values())) > 1:
        raise MalformedInput(
            f"the adapter resizes `{changed[0]}` to {sizes[changed[0]]} rows, but not both embedding and head",
            hint="they must have one size; save the adapter again with `save_embedding_layers=True`",
        )
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part in [part for part in parts if "vocab_size" in part] or parts[:1]:
        part["vocab_size"] = sizes[changed[0]]
    return True


def follow_tokens(edits: Edits, embedding: str | None, head: str) -> None:
    """Copies trained rows of the embedding to a tied head, as PEFT does (`TrainableTokensWrapper`, `tied_adapter`).

    Args:
        edits: the edits of all adapters; changed in place.
        embedding: name of the input embedding; None if there is none.
        head: name of the output head.
    """
    tied = edits.tied or (head in edits.tensors and edits.config.get(TIE) is True)
    if embedding in edits.tokens and tied and head not in edits.tokens:
        edits.tokens[head] = edits.tokens[embedding]


def untie(edits: Edits, embedding: str | None, head: str, config: dict[str, Any]) -> None:
    """Gives the head its own tensor if it no longer equals the embedding.

    Args:
        edits: changes by the adapters; a head that stays tied is removed from its tensors.
        embedding: name of the input embedding.
        head: name of the output head.
        config: changed in place.
    """
    if edits.tied and edits.same(head, embedding):
        del edits.tensors[head]
    elif head in edits.tensors and (edits.touches(head) or edits.touches(embedding)) and is_tied(config):
        set_everywhere(config, TIE, False)
