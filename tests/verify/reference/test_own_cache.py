"""A model whose tokens attend to later ones fails, though graphs agree with its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from llmconv import causal_lm
from llmconv.export import export
from llmconv.verify import verify
from llmconv.verify.reference.eager import NAME, Eager, check_own_cache
from tests.builders.seeded import TEXT, save_seeded
from tests.conftest import save_tiny
from tests.test_causal_lm import BERT

ENDING = "attend to later ones"


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an encoder that no table knows as one."""
    monkeypatch.setattr(causal_lm, "ENCODERS", frozenset())
    return save_seeded(AutoConfig.for_model("bert", **BERT), tmp_path / "encoder", TEXT)


def test_an_encoder_differs_after_a_cache(encoder: Path) -> None:
    found = check_own_cache(Eager(encoder, "float32"), ["prefill.onnx", "decode.onnx"])
    assert [(check.name, check.graph, check.verdict) for check in found] == [
        (NAME, "prefill.onnx", "fail"),
        (NAME, "decode.onnx", "fail"),
    ]
    assert all(ENDING in check.detail for check in found)


def test_an_encoder_of_one_layer_differs_before_its_last_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its cache of embeddings is right, and its last token attends to all others: only earlier logits differ."""
    monkeypatch.setattr(causal_lm, "ENCODERS", frozenset())
    save_seeded(AutoConfig.for_model("bert", **{**BERT, "num_hidden_layers": 1}), tmp_path, TEXT)
    assert [check.name for check in check_own_cache(Eager(tmp_path, "float32"), ["prefill.onnx"])] == [NAME]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_decoder_does_not(kind: str, tmp_path: Path) -> None:
    if kind == "bert":
        save_seeded(AutoConfig.for_model("bert", **BERT, is_decoder=True), tmp_path, TEXT)
    else:
        save_tiny(kind, tmp_path)
    assert check_own_cache(Eager(tmp_path, "float32"), ["prefill.onnx"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [False, True])
def test_graphs_of_an_encoder_that_agree_with_its_cache_fail(encoder: Path, low_memory: bool) -> None:
    export(encoder)
    report = verify(encoder, scenario="decode chain, 16 steps", low_memory=low_memory)
    failed = [check for check in report.checks if check.verdict == "fail"]
    assert {check.name for check in failed} == {NAME} and report.exit_code == 1
    assert any(check.verdict == "pass" and check.is_measured for check in report.checks)
