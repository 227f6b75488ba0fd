"""The ids of special tokens, from the files of a Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmconv.convert.tokenizers.sentencepiece_json import parse_sentencepiece
from llmconv.errors import MalformedInput


def special_ids(files: Mapping[str, bytes]) -> tuple[int | None, int | None]:
    """Ids of the tokens that begin and end a text; None if the files do not contain them.

    Args:
        files: content by name; `tokenizer_config.json` (or `special_tokens_map.json`) contains the tokens,
            `tokenizer.json` their ids.

    Raises:
        MalformedInput: a file is not JSON.
    """
    settings = {**_object(files, "special_tokens_map.json"), **_object(files, "tokenizer_config.json")}
    ids = _ids(_object(files, "tokenizer.json"))
    bos, eos = (ids.get(_text(settings.get(kind)) or "") for kind in ("bos_token", "eos_token"))
    return bos, eos


def vocabulary_size(files: Mapping[str, bytes]) -> int | None:
    """One more than the highest id of a tokenizer; None if its files do not contain the ids.

    Args:
        files: content by name: `tokenizer.json`; or `vocab.json` and `added_tokens.json`; or `tokenizer.model`.

    Raises:
        MalformedInput: a file is damaged.
    """
    added = _object(files, "added_tokens.json")
    ids = _ids(_object(files, "tokenizer.json")) or {**_object(files, "vocab.json"), **added}
    numbers = [number for number in ids.values() if type(number) is int]
    if not numbers and "tokenizer.model" in files:
        pieces = parse_sentencepiece(files["tokenizer.model"]).pieces
        numbers = [len(pieces) - 1, *(number for number in added.values() if type(number) is int)]
    return max(numbers) + 1 if numbers else None


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{name}` is not valid JSON: {error}", hint="repair or replace the tokenizer") from error
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token to id: those of the model (a dict, or a list of pairs), overridden by added tokens."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs: list[tuple[Any, Any]] = []
    if isinstance(vocabulary, dict):
        pairs = list(vocabulary.items())
    elif isinstance(vocabulary, list):
        pairs = [(row[0], index) for index, row in enumerate(vocabulary) if isinstance(row, list) and row]
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            pairs.append((token.get("content"), token.get("id")))
    return {text: number for text, number in pairs if isinstance(text, str) and isinstance(number, int)}
