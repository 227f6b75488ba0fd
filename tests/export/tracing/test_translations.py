"""Translations of torch's operators that keep their digits."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from llmconv.export.tracing.fake_model import unchanged_buffers
from llmconv.export.tracing.trace import TRANSLATIONS
from llmconv.tensors import Array


class Expm1(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`exp(x) - 1`."""
        return torch.expm1(x)


def run(x: Array) -> Array:
    """The translation of `expm1` in onnxruntime."""
    program = torch.onnx.export(
        Expm1().eval(), (torch.from_numpy(x),), dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS
    )
    assert program is not None
    session = ort.InferenceSession(program.model_proto.SerializeToString())
    result: Array = session.run(None, {session.get_inputs()[0].name: x})[0]
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own use of torch.utils._pytree
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_expm1_is_exact_near_zero(dtype: type) -> None:
    x: Array = np.array([-8, -1, -1e-2, -1e-3, 0, 1e-3, 1e-2, 1, 8], dtype=dtype)
    unit = float(np.finfo(dtype).eps)
    assert np.allclose(run(x).astype(np.float64), np.expm1(x.astype(np.float64)), rtol=3 * unit, atol=0)


class Reassigned(nn.Module):
    """Like transformers' CTRL, it casts a buffer in its forward and keeps the result."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self) -> None:
        """Assigns to the buffer."""
        self.table = self.table.half()


def test_a_buffer_that_the_model_assigns_to_is_restored() -> None:
    model = Reassigned()
    before = model.table
    with unchanged_buffers(model) as named:
        model()
    assert model.table is before
    assert named["model.table"] is before
