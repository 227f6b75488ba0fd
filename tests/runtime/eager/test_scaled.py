"""The eager model on scaled weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmconv.runtime.eager.runner import EagerRunner
from tools import tiny_models


@pytest.mark.quick_rows("llama4")
@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
def test_the_text_model_of_a_composite_configuration_is_scaled(tmp_path: Path, model_type: str) -> None:
    tiny_models.save_tiny(model_type, tmp_path, 2 if model_type == "llama4" else 4)
    plain, scaled = EagerRunner(tmp_path), EagerRunner(tmp_path, factors=lambda *_: 2.0)
    weights = [runner.model.get_input_embeddings().weight for runner in (plain, scaled)]
    assert type(scaled.model) is type(plain.model)
    assert (weights[1] == 2 * weights[0]).all()
