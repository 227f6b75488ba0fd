"""Finds the prefix of a Hugging Face model's names in a state dict of a wrapped model, or of one without a head.

`lit.model.transformer.wte.weight` has the prefix `lit.model.`; `wte.weight` of a GPT2Model lacks `transformer.`, which
is added as transformers adds it when it loads (`base_model_prefix`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmconv.convert.models.blueprint.names import ModelNames
from llmconv.convert.state_dicts.recognition import EMBEDDING
from llmconv.errors import MalformedInput, UnsupportedInput, listing


@dataclass(frozen=True)
class NameMapping:
    """Stored names to Hugging Face's.

    Attributes:
        names: stored name to Hugging Face's.
        outside: stored names outside the model.
        prefix: the prefix of every name of the model.
        added: prefix that was added to names of a base model, such as `transformer.`; empty if they had it.
    """

    names: dict[str, str]
    outside: tuple[str, ...]
    prefix: str
    added: str


def map_names(stored: Sequence[str], model: ModelNames, source: str) -> NameMapping:
    """Maps the stored names by the one prefix after which they are those of `model`.

    Args:
        stored: the names in the state dict.
        model: the names of the model's parts.
        source: name of the file or folder, for error messages.

    Raises:
        MalformedInput: the model's embedding is missing.
        UnsupportedInput: the state dict contains several such models.
    """
    whole, base_only = _prefixes(stored, model)
    found = whole or base_only
    if not found:
        raise MalformedInput(
            f"missing key `{model.embedding or 'embed_tokens.weight'}` in `{source}`; it begins with {listing(stored)}",
            hint="the configuration belongs to another model, or the checkpoint is partial",
        )
    if len(found) > 1:
        raise UnsupportedInput(
            f"`{source}` contains {len(found)} models, with the prefixes {listing(found)}",
            hint="save the `state_dict()` of one model alone",
        )
    prefix, added = found[0], "" if whole else f"{model.base}."
    names: dict[str, str] = {}
    outside: list[str] = []
    for name in stored:
        rest = name.removeprefix(prefix)
        target = rest if rest.startswith(model.roots[1:]) else added + rest
        if not name.startswith(prefix) or not target.startswith(model.roots):
            outside.append(name)
        else:
            names[name] = target
    return NameMapping(names, tuple(outside), prefix, added)


def _prefixes(stored: Iterable[str], model: ModelNames) -> tuple[list[str], list[str]]:
    """The prefixes of whole models, and those of base models."""
    whole: dict[str, None] = {}
    base_only: dict[str, None] = {}
    for name in stored:
        embedding = model.embedding or _embedding(name, model.base)
        short = embedding.removeprefix(f"{model.base}.")
        if _ends_with(name, embedding):
            whole[name.removesuffix(embedding)] = None
        elif _ends_with(name, short):
            base_only[name.removesuffix(short)] = None
    return list(whole), list(base_only)


def _ends_with(name: str, ending: str) -> bool:
    return bool(ending) and (name == ending or name.endswith(f".{ending}"))


def _embedding(name: str, base: str) -> str:
    """The embedding's name for a model whose names are unknown: from the last `base` on, if it looks like one."""
    if not EMBEDDING.search(name):
        return ""
    start = f".{name}".rfind(f".{base}.")
    return name[start:] if start >= 0 else f"{base}.{name}"
