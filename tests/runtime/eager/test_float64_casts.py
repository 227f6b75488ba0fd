"""Float64Casts: what a model casts, or fills with numbers of float64, stays float64."""

from __future__ import annotations

import torch

from llmconv.runtime.eager.limit_margins import Float64Casts


def test_the_lowest_number_of_float64_fills_a_tensor_of_float64() -> None:
    lowest = torch.finfo(torch.float64).min
    with Float64Casts():
        assert torch.full((), lowest).item() == lowest


def test_other_numbers_stay_what_the_model_computes() -> None:
    with Float64Casts():
        assert torch.full((), 0.1).dtype == torch.float32
        assert torch.full((), float("-inf")).dtype == torch.float32
