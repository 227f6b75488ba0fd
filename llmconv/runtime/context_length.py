"""The context length of a model, and whether its attention has a window."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
"""Fields of `config.json`, the last two of MPT and of Whisper's decoder; most models with ALiBi or states have none."""

LONGEST = 1 << 40
"""Maximum in tokens; larger numbers are not context lengths."""


WINDOW = re.compile(r"(?!max_)\w*(window(s|_size|_sizes|_len)?|attention_chunk_size|local_attention)")
"""Fields with the size of a window: `sliding_window` in most families, `window_size` in GPT-Neo, and others."""


def language_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`, with the fields of its `text_config` on top; empty if there is no such file."""
    path = folder / "config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def context_length(folder: Path) -> int | None:
    """Maximum number of tokens from a folder's `config.json`; None if it declares none."""
    return length_of(language_config(folder))


def length_of(config: Mapping[str, Any]) -> int | None:
    """Maximum number of tokens that the config of a language model declares; None if it declares none."""
    length = next((config[name] for name in LENGTHS if isinstance(config.get(name), int)), None)
    return int(min(length * _stretch(config), LONGEST)) if length and 0 < length <= LONGEST else None


def has_window(folder: Path) -> bool:
    """Whether a token of the model attends to the latest tokens only, in any layer, by a folder's `config.json`."""
    config = language_config(folder)
    if config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)
    sizes = [value for name, value in config.items() if WINDOW.fullmatch(name) and not isinstance(value, bool)]
    return any(sizes)


def _stretch(config: Mapping[str, Any]) -> float:
    """Factor of the length: with dynamic rotary frequencies the config declares the original length."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "dynamic":
        return 1.0
    factor = rope.get("factor", 1.0)
    return float(factor) if isinstance(factor, int | float) and 1 < factor <= LONGEST else 1.0
