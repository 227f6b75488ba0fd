"""Initializers of a quantized folder map the bytes of their names, whole tensors and parts of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from llmconv.files.safetensors_file import read_header
from llmconv.verify.quantized_folder import misplaced_codes


def mapped(name: str, offset: int, length: int) -> onnx.ModelProto:
    """A graph of one initializer of bytes."""
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[length], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "quantized.safetensors", "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return helper.make_model(helper.make_graph([], "codes", [], [], [tensor]))


@pytest.mark.parametrize(
    ("name", "of", "first", "rows", "right"),
    [
        ("x.codes", "x.codes", 0, 4, True),
        ("x.codes", "x.codes", 1, 3, False),
        ("x.codes", "y.codes", 0, 4, False),
        ("x.codes+y.codes", "x.codes", 0, 8, True),
        ("y.codes+x.codes", "x.codes", 0, 8, False),
        ("x.codes:4x6", "x.codes", 0, 4, True),
        ("x.codes[2]", "x.codes", 2, 1, True),
        ("x.codes[2]", "x.codes", 3, 1, False),
        ("x.codes[2]", "y.codes", 2, 1, False),
        ("x.codes[1:3]", "x.codes", 1, 2, True),
        ("x.codes[1:3]", "x.codes", 1, 1, False),
        ("x.codes[4]", "y.codes", 0, 1, False),
        ("z.codes", "x.codes", 0, 4, False),
    ],
)
def test_bytes_are_those_of_the_name(name: str, of: str, first: int, rows: int, right: bool, tmp_path: Path) -> None:
    stored = {f"{key}.codes": np.full((4, 6), at, np.uint8) for at, key in enumerate("xy")}
    save_file(stored, tmp_path / "quantized.safetensors")
    offset = read_header(tmp_path / "quantized.safetensors").tensors[of].offset
    found = misplaced_codes("decode.onnx", mapped(name, offset + 6 * first, 6 * rows), tmp_path)
    assert [check.verdict for check in found] == ([] if right else ["fail"])
