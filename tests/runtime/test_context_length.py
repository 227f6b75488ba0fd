"""The context length of a model, under the names that its family gives to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmconv.runtime.context_length import context_length


@pytest.mark.parametrize(
    "name", ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"]
)
def test_the_context_is_a_field_of_the_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", name: 448}))
    assert context_length(tmp_path) == 448


def test_a_model_may_declare_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    assert context_length(tmp_path) is None
