"""Weights that hide differences are reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmconv.checkpoint import open_weights
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, LazyTensor
from llmconv.verify import verify
from llmconv.verify.audit.weights import odd_weights


def lazy(*rows: float, dtype: str = "float32") -> LazyTensor:
    """A matrix with a column."""
    array = np.array(rows, dtype=BY_NAME[dtype].numpy).reshape(-1, 1)
    return LazyTensor(BY_NAME[dtype], array.shape, lambda start, stop: array[start:stop])


def test_ordinary_weights_have_no_note() -> None:
    assert odd_weights({"a": lazy(1.0, 0.0), "b": lazy(-2.0, dtype="bfloat16")}) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_nan_is_found_in_every_dtype(dtype: str) -> None:
    (note,) = odd_weights({"a": lazy(1.0, float("nan"), dtype=dtype)})
    assert note.startswith("`a` contains NaN or infinity")


def test_many_are_counted() -> None:
    (note,) = odd_weights({name: lazy(0.0, 0.0) for name in "abcde"})
    assert note.startswith("`a`, `b`, `c` and 2 more contain zeros only")


@pytest.mark.slow
def test_verify_reports_a_layer_of_zeros(exported: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported("llama"), tmp_path / "zeros"))
    tensor = open_weights(folder)["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(tensor, FileTensor)
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(tensor.nbytes))
    report = verify(folder, scenario=["prefill, 7 tokens"])
    assert any("layers.1.mlp.up_proj.weight` contains zeros only" in note for note in report.notes)
