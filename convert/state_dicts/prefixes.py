"""Where the names of a Hugging Face model begin in a state dict whose module a trainer wrapped, or which has no head.

`lit.model.transformer.wte.weight` has the prefix `lit.model.`; `wte.weight` of a GPT2Model lacks `transformer.`, which
transformers adds when it loads (`base_model_prefix`), and so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmconv.convert.algebra.operations import listing
from llmconv.convert.models.blueprint.names import ModelNames
from llmconv.convert.state_dicts.signs import EMBEDDING
from llmconv.errors import MalformedInput, UnsupportedInput


@dataclass(frozen=True)
class Placement:
    """Where each name goes.

    Attributes:
        names: stored name to Hugging Face's.
        outside: stored names that are of no part of the model.
        prefix: what stood in front of every name.
        added: what base model names had to be given, such as `transformer.`; empty where they had it.
    """

    names: dict[str, str]
    outside: tuple[str, ...]
    prefix: str
    added: str


def place(stored: Sequence[str], model: ModelNames, source: str) -> Placement:
    """Finds the one prefix after which the names are those of `model`.

    Raises:
        MalformedInput: no name is that of the model's embedding.
        UnsupportedInput: there are two or more such models in the state dict.
    """
    whole, base_only = _prefixes(stored, model)
    found = whole or base_only
    if not found:
        raise MalformedInput(
            f"`{source}` holds no `{model.embedding or 'embed_tokens.weight'}`; it begins with {listing(stored)}",
            hint="the configuration belongs to another model, or the checkpoint is partial",
        )
    if len(found) > 1:
        raise UnsupportedInput(
            f"`{source}` holds {len(found)} models, under the prefixes {listing(found)}",
            hint="save the `state_dict()` of the one model that is wanted",
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
    return Placement(names, tuple(outside), prefix, added)


def _prefixes(stored: Iterable[str], model: ModelNames) -> tuple[list[str], list[str]]:
    """The prefixes in front of whole models, and those in front of base models."""
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
    """The embedding of a model whose source does not name it: from the last `base` on, if it looks like one."""
    if not EMBEDDING.search(name):
        return ""
    start = f".{name}".rfind(f".{base}.")
    return name[start:] if start >= 0 else f"{base}.{name}"
