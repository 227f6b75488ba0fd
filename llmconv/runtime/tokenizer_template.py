"""Refuses a `tokenizer.json` whose template adds so many special tokens to a text that these take all memory.

Source of the format: `TemplateProcessing` of tokenizers: pieces of the template, and the ids of each special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmconv.errors import MalformedInput

MAX_SPECIAL, MAX_TEXTS = 1024, 8
"""Maximum number of special tokens, and of places for a text, in one template; models have up to 5 and 2."""

FILE = "tokenizer.json"
MAX_PLACES = 8
"""Maximum number of post-processors in one file, which has one."""
TEMPLATE = re.compile(r'"post_processor"\s*:\s*')
HIDDEN = re.compile(r"\\u00[2-7][0-9a-fA-F]", re.IGNORECASE)
"""A letter written as an escape, as no program writes one."""


def require_small_template(folder: Path) -> None:
    """Raises MalformedInput if templates in `tokenizer.json` add too many tokens, before anything else opens it.

    Most of the file is the vocabulary, so only the templates are parsed.
    """
    path = folder / FILE
    if not path.is_file():
        return
    found = list(_templates(path.read_bytes().decode("utf-8", "replace")))
    for name in ("single", "pair"):
        counts = [_counts(template, name) for template in found]
        special, texts = (sum(count[at] for count in counts) for at in (0, 1))
        if special > MAX_SPECIAL or texts > MAX_TEXTS:
            raise MalformedInput(
                f"the template of `{FILE}` adds {special:,} tokens to every text, and has {texts} places for it",
                hint=f"at most {MAX_SPECIAL} and {MAX_TEXTS}: copy the tokenizer of the original model",
            )


def _counts(template: dict[str, Any], name: str) -> tuple[int, int]:
    """Number of special tokens, and of places for a text, in one of the forms of a template."""
    ids, pieces = template.get("special_tokens"), template.get(name)
    sizes = {known: _size(one) for known, one in ids.items()} if isinstance(ids, dict) else {}
    pieces = pieces if isinstance(pieces, list) else []
    named = [(_piece(piece, "SpecialToken"), _piece(piece, "Sequence")) for piece in pieces]
    return sum(sizes.get(special, 1) for special, _ in named if special), sum(text is not None for _, text in named)


def _templates(text: str) -> Iterator[dict[str, Any]]:
    """Every template in the post-processors of a file; none of a file that is not valid JSON.

    Raises MalformedInput for too many post-processors.
    """
    places = [found.end() for found in TEMPLATE.finditer(text)]
    if len(places) > MAX_PLACES:
        raise MalformedInput(
            f"`{FILE}` has {len(places)} fields `post_processor`", hint="copy the tokenizer of the original model"
        )
    try:
        if HIDDEN.search(text):
            yield from _nested(json.loads(text))
        else:
            for place in places:
                yield from _nested(json.JSONDecoder().raw_decode(text, place)[0])
    except (ValueError, RecursionError):
        return


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a value, itself included, that are templates."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "single" in one or "pair" in one:
                yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _size(special: Any) -> int:
    """Number of ids of a special token."""
    ids = special.get("ids") if isinstance(special, dict) else None
    return len(ids) if isinstance(ids, list) else 1


def _piece(piece: Any, kind: str) -> str | None:
    """The id of a piece of a template; None for a piece of another kind."""
    found = piece.get(kind) if isinstance(piece, dict) else None
    return str(found.get("id")) if isinstance(found, dict) else None
