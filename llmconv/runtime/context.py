"""How many tokens a model was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Fields of `config.json`; ALiBi and state-space families have none that bounds them."""


LONGEST = 1 << 40
"""Tokens; a larger number is no length of a context."""


def language_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`, with the fields of its `text_config` on top; empty if there is no such file."""
    path = folder / "config.json"
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def context_length(folder: Path) -> int | None:
    """Tokens that the positions of a folder's model reach; None where nothing says so."""
    config = language_config(folder)
    length = next((config[name] for name in LENGTHS if isinstance(config.get(name), int)), None)
    return int(min(length * _stretch(config), LONGEST)) if length and 0 < length <= LONGEST else None


def _stretch(config: dict[str, Any]) -> float:
    """What the length is to be multiplied by: it is the original one where rotary frequencies follow the length."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "dynamic":
        return 1.0
    factor = rope.get("factor", 1.0)
    return float(factor) if isinstance(factor, int | float) and 1 < factor <= LONGEST else 1.0
