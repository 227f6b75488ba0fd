"""The logits that tokens are judged by are those of the model after the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmconv.export import export
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.verify.clients.comparison import EagerLogits, LogitsSource, OwnLogits, PaddedBatch, judged
from tests.conftest import save_tiny

PROMPTS, NEW = [[5, 9, 11, 23], [7]], 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(save_tiny("gemma2", tmp_path_factory.mktemp("expected") / "gemma2", sliding_window=3)).folder


@pytest.fixture(scope="module", params=["eager", "own"])
def source(folder: Path, request: pytest.FixtureRequest) -> LogitsSource:
    return (
        EagerLogits(folder, "float32", None) if request.param == "eager" else OwnLogits(OrtRunner.from_folder(folder))
    )


def greedy(folder: Path) -> list[list[int]]:
    """transformers' own tokens, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )
        rows.append(found[0, len(prompt) :].tolist())
    return rows


@pytest.mark.slow
def test_the_tokens_of_transformers_are_right_and_others_are_not(folder: Path, source: LogitsSource) -> None:
    batch = PaddedBatch(PROMPTS, greedy(folder), "left")
    expected = source.logits(batch)
    assert expected.exact.shape[:2] == (2, NEW)
    assert judged(expected, batch, source.title)[0] == ""
    other = PaddedBatch(PROMPTS, [[*row[:-1], (row[-1] + 1) % 90] for row in greedy(folder)], "left")
    assert "new token 4" in judged(source.logits(other), other, source.title)[0]


@pytest.mark.slow
def test_the_first_token_follows_the_prompt_and_not_the_padding_after_it(folder: Path, source: LogitsSource) -> None:
    rows = greedy(folder)
    for side in ("left", "right"):
        first = source.logits(PaddedBatch(PROMPTS, rows, side)).exact[:, 0]
        alone = [source.logits(PaddedBatch([p], [r], side)).exact[0, 0] for p, r in zip(PROMPTS, rows, strict=True)]
        np.testing.assert_allclose(first, alone, atol=1e-5)
