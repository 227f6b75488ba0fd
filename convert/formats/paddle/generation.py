"""`generation_config.json` of PaddleNLP from and to that of transformers, for the fields that both have.

Source: paddlenlp `generation/configuration_utils.py`; its `max_length` counts new tokens, transformers' all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.output.plan import json_bytes

FILE = "generation_config.json"
SHARED_FIELDS = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty"),
)
STRATEGY, SAMPLING, GREEDY = "decode_strategy", "sampling", "greedy_search"


def read_generation_config(folder: Path) -> dict[str, bytes]:
    """transformers' `generation_config.json` from Paddle's, by file name; empty if there is none."""
    if not (folder / FILE).is_file():
        return {}
    stored = read_json(folder / FILE)
    kept = _shared_fields(stored) | ({"do_sample": True} if stored.get(STRATEGY) == SAMPLING else {})
    return {FILE: json_bytes(kept)} if kept else {}


def paddle_generation_config(content: bytes) -> bytes:
    """PaddleNLP's `generation_config.json` from transformers'; without fields if that is not a JSON object."""
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError):
        stored = None
    fields = stored if isinstance(stored, dict) else {}
    return json_bytes(_shared_fields(fields) | {STRATEGY: SAMPLING if fields.get("do_sample") else GREEDY})


def _shared_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in SHARED_FIELDS if fields.get(name) is not None}
