"""Float64Casts: makes a whole model compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmconv.runtime.eager.limit_margins import LimitMargins
from llmconv.runtime.library_patches import TorchDispatchMode

LOW_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class Float64Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces casts to lower floats with casts to float64.

    `model.double()` alone does not compute in float64: norms, rotary tables and softmax cast to float32.

    Args:
        margins: observes every operator.
    """

    def __init__(self, margins: LimitMargins | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._margins = margins or LimitMargins()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in LOW_FLOATS or _fills_beyond_float32(func, args, kwargs):
            kwargs = {**kwargs, "dtype": torch.float64}
        self._margins.see(func, args, kwargs)
        return func(*args, **kwargs)


def _fills_beyond_float32(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a new tensor without a dtype, float32 by default, gets a number of float64 (a mask of XGLM)."""
    if func is not torch.ops.aten.full.default or kwargs.get("dtype") is not None or not isinstance(args[1], float):
        return False
    return torch.finfo(torch.float32).max < abs(args[1]) < float("inf")
