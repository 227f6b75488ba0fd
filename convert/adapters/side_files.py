"""The tokenizer and the chat template of a merged model: the base's, an adapter's, or the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, own_file, read_json, read_side_files
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.tokenizers.ids import added_tokens, known_tokens, special_tokens
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import LlmconvError, MalformedInput, listing
from llmconv.output.plan import json_bytes

TOKENIZER = ("tokenizer", "special_", "added_", "vocab", "merges", "spiece", "sentencepiece", "chat_template")
"""Prefixes of the names of tokenizer files."""

VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
GENERATION = "generation_config.json"
NOT_OF_DECODING = ("transformers_version", "_from_model_config")
"""Fields of `generation_config.json` without a meaning for decoding."""

TEMPLATE, OLD_TEMPLATE, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"

SideFiles = dict[str, bytes]


def side_files_of(
    base: Checkpoint, adapters: Sequence[Adapter], tokenizer: Path | None, config: dict[str, Any], *, resized: bool
) -> tuple[SideFiles, list[str]]:
    """The side files of the merged model, and warnings about tokenizers and chat templates that differ.

    The ids of special tokens in `config` (changed in place) and in `generation_config.json` follow the tokenizer, if it
    is not the base's: the user's file or folder, which replaces all others (InputRefused if it is none), or that of an
    adapter which changed the vocabulary (`resized`).
    """
    others = {name: content for name, content in base.side_files.items() if not name.startswith(TOKENIZER)}
    if tokenizer:
        return _with_ids(base.side_files, others | read_tokenizer(tokenizer), config), []
    own = [(adapter, files) for adapter in adapters if (files := _tokenizer(adapter, needed=resized))]
    if not own:
        return dict(base.side_files), [*_other_tokens(base, [(adapter, {}) for adapter in adapters])]
    adapter, files = own[0]
    if resized:
        return _with_ids(base.side_files, others | files, config), []
    if not any(name in base.side_files for name in VOCABULARY) and any(name in files for name in VOCABULARY):
        note = f"the base has no tokenizer; it is taken from the adapter `{adapter.name}`"
        return _with_ids(base.side_files, others | files, config), [note]
    kept, notes = _with_template(base, own)
    return kept, [*notes, *_other_tokens(base, own)]


def _other_tokens(base: Checkpoint, own: Sequence[tuple[Adapter, SideFiles]]) -> Iterator[str]:
    """A warning for each adapter that was saved with other special or added tokens, or other decoding settings.

    A model trained to end its turns with another token does not stop at the base's.
    """
    for adapter, files in own:
        found = [*_token_differences(base.side_files, files), *_generation_differences(base, adapter)]
        if found:
            yield (
                f"the adapter `{adapter.name}` was saved with other settings than the base, whose are kept: "
                f"{'; '.join(found)}; `--tokenizer {adapter.path}` takes the tokenizer from there, with its ids"
            )


def _token_differences(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[str]:
    if not any(name in files for name in (CONFIG, "special_tokens_map.json", "tokenizer.json", "added_tokens.json")):
        return []
    try:
        mine, others = special_tokens(files), special_tokens(base)
        added = sorted(added_tokens(files) - added_tokens(base) - known_tokens(base))
    except MalformedInput:  # a tokenizer in a form that is not compared
        return []
    changed = [
        f"`{kind}` {text!r} (base: {others[kind][0]!r})" if kind in others else f"`{kind}` {text!r} (base: none)"
        for kind, (text, _) in mine.items()
        if text != others.get(kind, ("",))[0]
    ]
    return [*changed, *([f"{len(added)} added tokens, {listing(added)}"] if added else [])]


def _generation_differences(base: Checkpoint, adapter: Adapter) -> list[str]:
    """The fields of the adapter's `generation_config.json` that the base's has with another value, or not at all."""
    path = adapter.path / GENERATION
    if not path.is_file():
        return []
    try:
        mine, others = read_json(own_file(adapter.path, GENERATION)), _json(base.side_files.get(GENERATION, b"{}"))
    except LlmconvError:
        return []
    fields = [name for name, value in mine.items() if name not in NOT_OF_DECODING and value != others.get(name)]
    return [f"{listing(fields)} in `{GENERATION}`"] if fields else []


def _with_ids(base: Mapping[str, bytes], files: SideFiles, config: dict[str, Any]) -> SideFiles:
    """The files of another tokenizer, with the ids of its special tokens in `config` and `generation_config.json`.

    Only for tokens that differ from the base tokenizer's; a list of ids keeps its other members.
    """
    try:
        mine, others = special_tokens(files), special_tokens(base)
    except MalformedInput:
        return files
    ids = {f"{kind}_id": number for kind, (_, number) in mine.items() if number is not None}
    ids = {
        name: number for name, number in ids.items() if others.get(name.removesuffix("_id"), ("", None))[1] != number
    }
    if not others:  # without a tokenizer the base's ids are those of its config
        ids = {name: number for name, number in ids.items() if config.get(name) is not None}
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _set_ids(part, ids if part is config else {name: ids[name] for name in ids if name in part})
    if GENERATION not in files or not ids:
        return files
    generation = _json(files[GENERATION])
    _set_ids(generation, ids)
    return files | {GENERATION: json_bytes(generation)}


def _set_ids(fields: dict[str, Any], ids: Mapping[str, int]) -> None:
    for name, number in ids.items():
        old = fields.get(name)
        if not isinstance(old, list):
            fields[name] = number
        elif number not in old:
            fields[name] = [number, *old]


def _json(content: bytes) -> dict[str, Any]:
    """The object in a JSON file; empty where it has none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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
        found = _json(files.get(name, b"{}")).get("chat_template")
        if isinstance(found, str) and found:
            return found
    return ""
