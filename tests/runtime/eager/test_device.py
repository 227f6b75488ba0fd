"""`--backend torch` on a device of torch, in a dtype of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.generation import TextModel
from llmconv.runtime import default_positions
from llmconv.runtime.eager.torch_runner import TorchRunner

IDS, MASK = np.arange(5)[None] + 3, np.ones((1, 5), dtype=np.int64)


@pytest.mark.slow
def test_a_dtype_other_than_that_of_the_weights_is_computed_in(talking: Path) -> None:
    exact, rounded = (TorchRunner(talking, dtype) for dtype in ("float32", "bfloat16"))
    first, second = (r.prefill(IDS, MASK, default_positions(MASK, 5)).logits for r in (exact, rounded))
    assert str(rounded.model.dtype) == "torch.bfloat16"
    assert not np.array_equal(first, second)
    assert np.allclose(first, second, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["nonsense", "", "meta", "cuda:99", "xla"])
def test_a_device_that_torch_does_not_have_is_refused(talking: Path, device: str) -> None:
    with pytest.raises(UsageProblem, match=f"torch cannot use the device `{device}`"):
        TextModel.open(talking, backend="torch", device=device)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("device", "cuda"), ("dtype", "float16")])
def test_graphs_refuse_options_of_torch(talking: Path, option: str, value: str) -> None:
    options: Any = {option: value}
    with pytest.raises(UsageProblem, match=f"`--{option}` is for `--backend torch`"):
        TextModel.open(talking, **options)


@pytest.mark.slow
def test_an_unknown_dtype_is_refused(talking: Path) -> None:
    with pytest.raises(UsageProblem, match="unknown dtype `float8`"):
        TextModel.open(talking, backend="torch", dtype="float8")


@pytest.mark.slow
def test_the_command_runs_the_eager_model_in_bfloat16(talking: Path) -> None:
    given = ["generate", str(talking), "--backend", "torch", "--device", "cpu", "--dtype", "bfloat16"]
    result = CliRunner().invoke(main, [*given, "--prompt", "ab", "--max-new-tokens", "3"])
    assert result.exit_code == 0, result.output
