"""A model without some of its layers computes what the shortened graph computes, and holds no weights of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmconv.errors import UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner, skip_layers
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.runner import default_positions

SKIPPED = ("model.layers.1", "model.layers.3")


def logits(runner: EagerRunner) -> np.ndarray:
    """Of a few tokens."""
    mask = np.ones((2, 6), dtype=np.int64)
    return runner.prefill(np.arange(12).reshape(2, 6), mask, default_positions(mask, 6)).logits


@pytest.mark.slow
def test_the_other_layers_compute_what_a_model_of_them_computes(tiny: Callable[[str], Path]) -> None:
    found = logits(EagerRunner(tiny("llama"), skipped=SKIPPED))
    shorter = EagerRunner(tiny("llama"))
    layers = shorter.model.model.layers
    shorter.model.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
    shorter.model.config.num_hidden_layers = 2
    assert np.array_equal(found, logits(shorter))
    assert not np.array_equal(found, logits(EagerRunner(tiny("llama"))))


def test_a_streamed_model_skips_the_same_layers(tiny: Callable[[str], Path]) -> None:
    wanted = logits(EagerRunner(tiny("llama"), skipped=SKIPPED))
    assert np.array_equal(wanted, logits(StreamedRunner(tiny("llama"), skipped=SKIPPED)))


@pytest.mark.slow
def test_skipped_layers_hold_no_weights(tiny: Callable[[str], Path]) -> None:
    model = EagerRunner(tiny("llama"), skipped=SKIPPED).model
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert {".".join(name.split(".")[:3]) for name in empty} == set(SKIPPED)


class Silent(torch.nn.Module):
    """A layer that returns no hidden state."""

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": hidden}


def test_layers_that_return_no_hidden_state_are_refused() -> None:
    layers = {"layers.0": Silent(), "layers.1": Silent()}
    skip_layers(layers, ["layers.1"])
    layers["layers.0"](torch.zeros(1))
    with pytest.raises(UnsupportedInput, match="`layers.1` returns no hidden state"):
        layers["layers.1"](torch.zeros(1))
