"""The internals of torch that verification depends on behave as it expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmconv.verify.library_patches import TorchDispatchMode, without_dispatch_modes


class Names(TorchDispatchMode):
    """Records the names of operators, and copies each result without being called for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(str(func))
        with without_dispatch_modes():
            result.clone()
        return result


def test_a_dispatch_mode_sees_every_operator_once_and_nothing_while_it_is_disabled() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with torch.no_grad(), Names() as names:
        torch.relu(weight.t() + 1)
    assert names.seen == ["aten.t.default", "aten.add.Tensor", "aten.relu.default"]


def test_operators_declare_whether_they_return_views() -> None:
    assert torch.ops.aten.t.default.is_view and not torch.ops.aten.relu.default.is_view
