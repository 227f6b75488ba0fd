"""The tokenizer and the chat template of a merged model: the base's, an adapter's, or the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmconv.checkpoint import Checkpoint, read_side_files
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import LlmconvError

TOKENIZER = ("tokenizer", "special_", "added_", "vocab", "merges", "spiece", "sentencepiece", "chat_template")
"""Prefixes of the names of tokenizer files."""

VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
TEMPLATE, OLD_TEMPLATE, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"

SideFiles = dict[str, bytes]


def side_files_of(
    base: Checkpoint, adapters: Sequence[Adapter], tokenizer: Path | None, *, resized: bool
) -> tuple[SideFiles, list[str]]:
    """The side files of the merged model, and warnings about tokenizers and chat templates that differ.

    Args:
        base: checkpoint with its side files.
        adapters: opened adapters.
        tokenizer: the user's tokenizer file or folder, which replaces all others.
        resized: an adapter changed the vocabulary, so the tokenizer in its folder is the right one.

    Raises:
        InputRefused: `tokenizer` is not a tokenizer.
    """
    others = {name: content for name, content in base.side_files.items() if not name.startswith(TOKENIZER)}
    if tokenizer:
        return others | read_tokenizer(tokenizer), []
    own = [(adapter, files) for adapter in adapters if (files := _tokenizer(adapter, needed=resized))]
    if not own:
        return dict(base.side_files), []
    adapter, files = own[0]
    if resized:
        return others | files, []
    if not any(name in base.side_files for name in VOCABULARY) and any(name in files for name in VOCABULARY):
        return others | files, [f"the base has no tokenizer; it is taken from the adapter `{adapter.name}`"]
    return _with_template(base, own)


def _with_template(base: Checkpoint, own: Sequence[tuple[Adapter, SideFiles]]) -> tuple[SideFiles, list[str]]:
    """The base's files; if it has no chat template, with that of the first adapter that has one."""
    kept, template = dict(base.side_files), template_of(base.side_files)
    for adapter, files in own:
        found = template_of(files)
        if not found or found == template:
            continue
        if template:
            hint = f"`--tokenizer {adapter.path}` takes the tokenizer from there"
            return kept, [
                f"the adapter `{adapter.name}` has another chat template than the base, which is kept; {hint}"
            ]
        kept[TEMPLATE] = found.encode()
        return kept, [f"the base has no chat template; that of the adapter `{adapter.name}` is written with it"]
    return kept, []


def _tokenizer(adapter: Adapter, *, needed: bool) -> SideFiles:
    """The tokenizer files in an adapter's folder; unreadable ones are ignored unless they are needed."""
    try:
        return {name: data for name, data in read_side_files(adapter.path).items() if name.startswith(TOKENIZER)}
    except LlmconvError:
        if needed:
            raise
        return {}


def template_of(files: Mapping[str, bytes]) -> str:
    """The chat template in tokenizer files; empty if there is none, or if there are several named ones."""
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="replace")
    for name in (OLD_TEMPLATE, CONFIG):
        try:
            content = json.loads(files.get(name, b"{}"))
        except (ValueError, RecursionError):
            continue
        found = content.get("chat_template") if isinstance(content, dict) else None
        if isinstance(found, str) and found:
            return found
    return ""
