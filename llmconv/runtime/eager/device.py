"""Devices of torch."""

from __future__ import annotations

import torch

from llmconv.errors import UsageProblem, first_line


def require_device(name: str) -> torch.device:
    """A device of this machine by torch's name.

    Raises:
        UsageProblem: torch does not have it.
    """
    try:  # a build without CUDA raises AssertionError, without MPS or XLA NotImplementedError
        probe = torch.zeros(1, device=name)
        probe.item()  # the device `meta` has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageProblem(
            f"torch cannot use the device `{name}`: {first_line(error)}",
            hint="`cpu` is always there; for `cuda` install torch's build for your CUDA version",
        ) from error
    return probe.device
