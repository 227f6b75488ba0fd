"""The ids of special tokens, from the files of a Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmconv.convert.tokenizers.sentencepiece_json import parse_sentencepiece
from llmconv.errors import MalformedInput


def special_ids(files: Mapping[str, bytes]) -> tuple[int | None, int | None]:
    """Ids of the tokens that begin and end a text; None if the files do not contain them.

    `files` is content by name; `tokenizer_config.json` (or `special_tokens_map.json`) contains the tokens,
    `tokenizer.json` their ids. Raises MalformedInput if a file is not JSON.
    """
    settings = {**_object(files, "special_tokens_map.json"), **_object(files, "tokenizer_config.json")}
    ids = _ids(_object(files, "tokenizer.json"))
    bos, eos = (ids.get(_text(settings.get(kind)) or "") for kind in ("bos_token", "eos_token"))
    return bos, eos


def special_tokens(files: Mapping[str, bytes]) -> dict[str, tuple[str, int | None]]:
    """The tokens that begin, end and pad a text, by `bos_token`, `eos_token`, `pad_token`: text, and id where known.

    `files` and errors as in `special_ids`.
    """
    settings = {**_object(files, "special_tokens_map.json"), **_object(files, "tokenizer_config.json")}
    ids = {**_ids(_object(files, "tokenizer.json")), **_added(files)}
    texts = {kind: text for kind in ("bos_token", "eos_token", "pad_token") if (text := _text(settings.get(kind)))}
    return {kind: (text, ids.get(text)) for kind, text in texts.items()}


def added_tokens(files: Mapping[str, bytes]) -> frozenset[str]:
    """The tokens beyond a tokenizer's own vocabulary; MalformedInput if a file is not JSON."""
    return frozenset(_added(files))


def known_tokens(files: Mapping[str, bytes]) -> frozenset[str]:
    """The tokens of `tokenizer.json` or `vocab.json`; MalformedInput if a file is not JSON."""
    return frozenset({*_ids(_object(files, "tokenizer.json")), *_object(files, "vocab.json")})


def _added(files: Mapping[str, bytes]) -> dict[str, int]:
    """Token to id: `added_tokens.json`, `added_tokens_decoder` of the config, `added_tokens` of `tokenizer.json`."""
    decoder = _object(files, "tokenizer_config.json").get("added_tokens_decoder")
    rows = decoder.items() if isinstance(decoder, dict) else ()
    pairs: list[tuple[Any, Any]] = [(_text(token), int(number)) for number, token in rows if str(number).isdecimal()]
    listed = _object(files, "tokenizer.json").get("added_tokens")
    tokens = [token for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    pairs += [(_text(token), token.get("id")) for token in tokens]
    pairs += _object(files, "added_tokens.json").items()
    return {text: number for text, number in pairs if isinstance(text, str) and type(number) is int}


def vocabulary_size(files: Mapping[str, bytes]) -> int | None:
    """One more than the highest id of a tokenizer; None if its files do not contain the ids, MalformedInput if damaged.

    Read from `tokenizer.json`; or `vocab.json` and `added_tokens.json`; or `tokenizer.model`.
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
