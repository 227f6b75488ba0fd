"""The ids of the special tokens that a Hugging Face tokenizer's files name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmconv.errors import MalformedInput


def special_ids(files: Mapping[str, bytes]) -> tuple[int | None, int | None]:
    """Ids of the tokens that begin and end a text; None where the files do not tell.

    Args:
        files: content by name; `tokenizer_config.json` (or `special_tokens_map.json`) names the tokens,
            `tokenizer.json` their ids.

    Raises:
        MalformedInput: a file is not JSON.
    """
    settings = {**_object(files, "special_tokens_map.json"), **_object(files, "tokenizer_config.json")}
    ids = _ids(_object(files, "tokenizer.json"))
    bos, eos = (ids.get(_text(settings.get(kind))) for kind in ("bos_token", "eos_token"))
    return bos, eos


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{name}` is not valid JSON: {error}", hint="repair or replace the tokenizer") from error
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _ids(tokenizer: Mapping[str, Any]) -> dict[Any, int]:
    """Token to id: those of the model (a dict, or a list of pairs), then the added ones, which win."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        vocabulary = {row[0]: index for index, row in enumerate(vocabulary) if isinstance(row, list) and row}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            ids[token.get("content")] = token["id"]
    return ids
