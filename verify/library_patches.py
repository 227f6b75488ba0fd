"""Internals of torch that verification depends on, each with the versions that it was checked with.

torch does not document these names; `tests/verify/test_library_patches.py` fails when one of them changes.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # torch 2.2 to 2.13
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes  # torch 2.2 to 2.13

__all__ = ["TorchDispatchMode", "without_dispatch_modes"]
