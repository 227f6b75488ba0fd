"""Complex rotations as two real tensors: equal to torch's own complex numbers."""

from __future__ import annotations

import torch

from llmconv.export.library_patches import complex_as_pairs


def rotate(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As the families with complex rotary embeddings do it."""
    turns = torch.polar(torch.ones_like(angles), angles) * 0.5
    numbers = torch.view_as_complex(states.reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns[:, None, :].to(states.device)).flatten(-2)


def test_a_rotation_of_pairs_equals_the_complex_rotation() -> None:
    states, angles = torch.randn(2, 3, 4, 8), torch.randn(3, 4)
    expected = rotate(states, angles)
    with complex_as_pairs():
        torch.testing.assert_close(rotate(states, angles), expected)
