"""Restores, byte for byte and under safe names, the tokenizer files in a Composer checkpoint.

Layout (mosaicml/composer `models/huggingface.py`, `get_metadata`): `{key: {file_extension, content}}`; the key is the
file's name, without its extension before August 2023. JSON is stored parsed, text as lines, sentencepiece as bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from llmconv.checkpoint import SIDE_FILES
from llmconv.errors import MalformedInput

DEPTH_LIMIT = 64
VALUE_LIMIT = 10_000_000
REPEAT_LIMIT = 1_000
"""How often one list or dict may occur: parsed JSON is a tree; only a hostile file refers to one many times."""


def restore_files(entries: Mapping[str, Any], source: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """File contents by name, and the names of files that do not belong to a tokenizer.

    Raises:
        MalformedInput: a name leads out of the folder, or a content has the wrong type.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    for key, entry in entries.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("file_extension"), str):
            raise MalformedInput(f"`{source}` contains a tokenizer file {key!r} without content", hint=HINT)
        extension = entry["file_extension"]
        name = str(key) if str(key).endswith(extension) else f"{key}{extension}"
        if PurePosixPath(name).name != name or "\\" in name or name.startswith("."):
            raise MalformedInput(f"`{source}` contains a tokenizer file {name!r} outside the folder", hint=HINT)
        if name not in SIDE_FILES:
            left_out.append(name)
            continue
        try:
            files[name] = _encode(name, extension, entry.get("content"), source)
        except UnicodeEncodeError as error:
            raise MalformedInput(f"`{source}` contains `{name}` with invalid text", hint=HINT) from error
    return files, tuple(left_out)


HINT = "the checkpoint was changed after it was saved; do not trust it, or give a tokenizer with `--tokenizer`"


def _encode(name: str, extension: str, content: Any, source: str) -> bytes:
    match extension, content:
        case ".json", dict() | list():
            return _json(name, plain(content, source))
        case ".txt", list() if all(isinstance(line, str) for line in content):
            # upstream adds a newline to every line; joining restores the file
            return "\n".join(content).encode()
        case ".model", bytes():
            return content
        case ".jinja", str():
            return content.encode()
    raise MalformedInput(f"`{source}` contains `{name}` with content of the wrong type", hint=HINT)


def _json(name: str, content: Any) -> bytes:
    """JSON as its library writes it: tokenizers (Rust) for `vocab.json` and `tokenizer.json`, else transformers."""
    if name == "vocab.json":
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    end = "" if name == "tokenizer.json" else "\n"
    return (json.dumps(content, ensure_ascii=False, indent=2) + end).encode()


def plain(value: Any, source: str) -> Any:
    """A copy of `value`, which must consist of JSON types only.

    Raises:
        MalformedInput: there are other types or too many values, or it is too deep, or too often the same list or dict.
    """
    return _Copier(source).copy(value, 0)


class _Copier:
    """Copies nested values, and counts values and repeats, because a pickle may refer to one list a million times."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0
        self.seen: Counter[int] = Counter()

    def copy(self, value: Any, depth: int) -> Any:
        self.count += 1
        if value is None or isinstance(value, str | int | float):
            return value
        self.seen[id(value)] += bool(value)
        if depth > DEPTH_LIMIT or self.count > VALUE_LIMIT or self.seen[id(value)] > REPEAT_LIMIT:
            raise MalformedInput(f"`{self.source}` contains a configuration that is too large or nested", hint=HINT)
        if isinstance(value, list | tuple):
            return [self.copy(item, depth + 1) for item in value]
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {str(key): self.copy(item, depth + 1) for key, item in value.items()}
        raise MalformedInput(f"`{self.source}` contains a configuration with values that are not JSON", hint=HINT)
