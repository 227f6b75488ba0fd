"""Files of onnxruntime's adapters are read with every offset and size checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from llmconv.errors import MalformedInput
from llmconv.runtime.onnxruntime.lora_names import encode_adapter, read_adapter

FACTORS = {
    "a.lora_A.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.lora_B.weight": np.ones((2, 3), np.float32),
    "empty": np.ones((2, 0), np.float32),
}


def test_arrays_are_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "x.onnx_adapter").write_bytes(encode_adapter(FACTORS))
    found = read_adapter(tmp_path / "x.onnx_adapter")
    assert found.keys() == FACTORS.keys()
    for name, array in FACTORS.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 9, b"\xff\xff\xff\xffTORT", b"\x08\0\0\0TORT" + b"\xff" * 40])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx_adapter").write_bytes(content)
    with pytest.raises(MalformedInput, match=r"x\.onnx_adapter"):
        read_adapter(tmp_path / "x.onnx_adapter")


def test_damaged_files_raise_no_other_errors(tmp_path: Path) -> None:
    content, rng, refused = encode_adapter(FACTORS), np.random.default_rng(1), 0
    for _ in range(2000):
        damaged = bytearray(content[: rng.integers(8, len(content) + 1)])
        damaged[rng.integers(0, len(damaged))] = rng.choice([0, 1, 127, 128, 255])
        (tmp_path / "x.onnx_adapter").write_bytes(damaged)
        try:
            read_adapter(tmp_path / "x.onnx_adapter")
        except MalformedInput:
            refused += 1
    assert refused > 1000


def test_other_dtypes_and_infinite_numbers_are_refused(tmp_path: Path) -> None:
    adapter = ort.AdapterFormat()
    adapter.set_parameters({"a": ort.OrtValue.ortvalue_from_numpy(np.ones(2, np.float16))})
    adapter.export_adapter(str(tmp_path / "half.onnx_adapter"))
    with pytest.raises(MalformedInput, match="not float32"):
        read_adapter(tmp_path / "half.onnx_adapter")
    (tmp_path / "x.onnx_adapter").write_bytes(encode_adapter({"a": np.array([np.inf])}))
    with pytest.raises(MalformedInput, match="not finite"):
        read_adapter(tmp_path / "x.onnx_adapter")
