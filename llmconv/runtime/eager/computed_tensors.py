"""ComputedTensor: a lazy tensor as transformers loads it, computed when it is sliced."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llmconv.runtime.eager.stored_tensors import INTEGERS
from llmconv.tensors import LazyTensor


class ComputedTensor:
    """A tensor that is computed when it is sliced.

    Args:
        tensor: the tensor, in any dtype that torch has under the same name.
    """

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of the same name."""
        found: torch.dtype = getattr(torch, self._tensor.dtype.name)
        return found

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The whole tensor; transformers requests `[...]`."""
        array = np.ascontiguousarray(self._tensor.read())
        if not array.flags.writeable:
            array = array.copy()
        integers = torch.from_numpy(array.reshape(-1).view(INTEGERS[array.itemsize]))
        return integers.view(self.dtype).view(self._tensor.shape)[key]
