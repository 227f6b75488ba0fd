"""What a projector returns, without the code of the model after it, which would count the images one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

PROJECTOR = "multi_modal_projector"


class _Reached(Exception):
    """Leaves the model's code after its projector."""


class _Captured:
    """Stands for the projector's output in the code that is left, which splits, reshapes or iterates it first."""

    def __getattr__(self, name: str) -> Any:
        raise _Reached

    def __iter__(self) -> Iterator[Any]:
        raise _Reached


def projected(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor:
    """The output of the projector of a whole model, for arguments of its `get_image_features`."""
    found: list[Tensor] = []

    def capture(module: nn.Module, arguments: Any, output: Tensor) -> _Captured:
        found.append(output)
        return _Captured()

    hook = model.model.get_submodule(PROJECTOR).register_forward_hook(capture)
    try:
        with suppress(_Reached):
            model.model.get_image_features(**given)
    finally:
        hook.remove()
    return found[0]
