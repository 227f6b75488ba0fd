"""What a report says of the cost of quantized weights."""

from __future__ import annotations

import pytest

from llmconv.verify.results import AccuracyCost, Check, Estimate, Perplexities, Quantization, Report


@pytest.mark.parametrize(("perplexity", "suits"), [(83_020.0, False), (12.5, True)])
def test_a_text_that_the_model_guesses_worse_than_chance_is_named(perplexity: float, suits: bool) -> None:
    nats = {"mean": 0.2, "median": 0.1, "p99": 1.0, "max": 2.0}
    same = Estimate(perplexity, 1.0)
    cost = AccuracyCost(
        "model.onnx", 512, nats, 0.01, 0.9, "evaluation text", Perplexities(same, same, Estimate(1.0, 0.1)), 3.0, 480
    )
    assert ("the text does not suit the model, give `--text FILE`" not in cost.text) is suits


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.158, "same most likely token in 73%, perplexity x 1.16, KL 0.26"),
        (None, "same most likely token in 73%, KL 0.26 (random tokens)"),
    ],
)
def test_the_last_line_has_the_cost(ratio: float | None, said: str) -> None:
    nats = {"mean": 0.2601, "median": 0.1, "p99": 1.0, "max": 2.0}
    same = Estimate(12.5, 1.0)
    found = Perplexities(same, same, Estimate(ratio, 0.01)) if ratio else None
    report = Report("int4", "model", "quick", checks=[Check("prefill", "decode.onnx", "logits", sigma=1.0)])
    report.quantization = Quantization(cost=AccuracyCost("decode.onnx", 512, nats, 0.01, 0.731, perplexities=found))
    assert report.summary().endswith(f"; quantization: {said}")
