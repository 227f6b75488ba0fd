"""What a report says of the cost of quantized weights."""

from __future__ import annotations

import pytest

from llmconv.verify.results.quantization import AccuracyCost, Estimate, Perplexities


@pytest.mark.parametrize(("perplexity", "suits"), [(83_020.0, False), (12.5, True)])
def test_a_text_that_the_model_guesses_worse_than_chance_is_named(perplexity: float, suits: bool) -> None:
    nats = {"mean": 0.2, "median": 0.1, "p99": 1.0, "max": 2.0}
    same = Estimate(perplexity, 1.0)
    cost = AccuracyCost(
        "model.onnx", 512, nats, 0.01, 0.9, "evaluation text", Perplexities(same, same, Estimate(1.0, 0.1)), 3.0, 480
    )
    assert ("the text does not suit the model, give `--text FILE`" not in cost.text) is suits
