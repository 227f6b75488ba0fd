"""The context length of a model, where its rotary frequencies change, and whether its attention has a window.

Sources: transformers modeling_rope_utils.py; for what a scaled model reaches, the model cards of Qwen2.5 (`yarn`),
Vicuna 16k (`linear`) and Gemma 3, and vLLM's `_get_and_verify_max_len`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json

OWN_LENGTH = "model_max_length"
"""Of tokenizers, and of Cohere's models, which declare a shorter `max_position_embeddings` (Command-R 8,192 of 131,072
tokens); their rotary embedding has no table."""

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_sequence_length",
    "seq_length",
    OWN_LENGTH,
)
"""Fields of `config.json`: the fourth of MPT, then of Whisper's decoder and of models with code of their own; most
models with ALiBi or states have none."""

ORIGINAL = "original_max_position_embeddings"
# families that transformers' `generate` reads again from the start when a text outgrows the original context
LIKE_PHI3 = ("phi3", "phi4_multimodal", "phimoe")
LONGEST = 1 << 40  # maximum in tokens; larger numbers are not context lengths
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
    """Tokens that a language model's config declares, or that its rotary scaling reaches beyond; None for neither."""
    declared = _declared(config)
    if declared is None:
        return None
    reached = [_reach(one, declared, is_flat) for one, is_flat in _rotary(config)]
    return int(min(max(declared, *reached, 0), LONGEST))


@dataclass(frozen=True)
class LengthSwitch:
    """Where the rotary frequencies of all tokens of a call change with the length of the sequence."""

    tokens: int  # length of the longest sequence with the original frequencies
    reads_again: bool = False  # a text that outgrows it while it is generated is read again from the start


def length_switch(config: Mapping[str, Any]) -> LengthSwitch | None:
    """Where a `longrope` or `dynamic` model changes its frequencies, from a `language_config`; None for others."""
    declared, found = _declared(config), []
    for one, _ in _rotary(config):
        if "dynamic" in (kind := _kind(one)):
            found.append(declared)
        elif kind in ("longrope", "su") or (kind == "yarn" and config.get("model_type") in LIKE_PHI3):
            found.append(_size(config.get(ORIGINAL)) or _size(one.get(ORIGINAL)) or declared)
    lengths = [length for length in found if length is not None]
    return LengthSwitch(min(lengths), config.get("model_type") in LIKE_PHI3) if lengths else None


def _declared(config: Mapping[str, Any]) -> int | None:
    """The length that a config declares, without scaling."""
    order = (OWN_LENGTH, *LENGTHS) if str(config.get("model_type")).startswith("cohere") else LENGTHS
    return next((length for name in order if (length := _size(config.get(name)))), None)


def _rotary(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], bool]]:
    """The parameters of the rotary embedding, and whether they are those of all layers, or one entry per layer type."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return []
    nested = [one for one in rope.values() if isinstance(one, dict)]
    is_flat = not nested and "rope_local_base_freq" not in config  # Gemma 3, where it is that of some layers
    return [(one, is_flat) for one in nested or [rope]]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def _reach(rope: Mapping[str, Any], declared: int, is_flat: bool) -> float:
    """Tokens that a rotary embedding reaches; `llama3` and `longrope` declare the length that they reach."""
    kind, factor = _kind(rope), rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor <= LONGEST:
        return declared
    if kind == "dynamic":  # by definition a multiple of the declared length
        return declared * factor
    # Gemma 3 declares the length that `linear` reaches in some of its layers
    if kind == "yarn" or (kind in ("linear", "proportional") and is_flat):
        return (_size(rope.get(ORIGINAL)) or declared) * factor
    return declared


def _size(value: Any) -> int | None:
    """A length in a config; None if it is none."""
    return value if isinstance(value, int) and 0 < value <= LONGEST else None


def has_window(folder: Path) -> bool:
    """Whether a token of the model attends to the latest tokens only, in any layer, by a folder's `config.json`."""
    config = language_config(folder)
    if config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)
    sizes = [value for name, value in config.items() if WINDOW.fullmatch(name) and not isinstance(value, bool)]
    return any(sizes)
