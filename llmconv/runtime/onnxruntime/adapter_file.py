"""onnxruntime's adapter files (`.onnx_adapter`): arrays by the names of graph inputs.

A flatbuffer with the identifier `TORT` (onnxruntime `lora/adapter_format/adapter_schema.fbs`):

    table Parameter { name: string; dims: [int64]; data_type: int32; raw_data: [ubyte]; }
    table Adapter   { format_version: int32; adapter_version: int32; model_version: int32; parameters: [Parameter]; }

onnxruntime writes them; llmconv reads them itself, with every offset and size checked.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnxruntime as ort

from llmconv.errors import MalformedInput
from llmconv.not_a_model_folder import ONNX_ADAPTER
from llmconv.tensors import Array

SUFFIX = ".onnx_adapter"
FLOAT = 1
"""`TensorDataType` of float32."""
NAME, DIMS, DATA_TYPE, RAW_DATA = range(4)
"""Fields of a Parameter, by number."""
PARAMETERS = 3
"""Field of an Adapter."""
VERSION = 1
"""Written as adapter and model version, which onnxruntime stores and does not compare."""


def encode_adapter(factors: Mapping[str, Array]) -> bytes:
    """The content of an adapter file with float32 arrays by input name."""
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(VERSION)
    adapter.set_model_version(VERSION)
    arrays = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in factors.items()}
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    with tempfile.TemporaryDirectory() as folder:  # onnxruntime writes only files
        path = Path(folder, f"adapter{SUFFIX}")
        adapter.export_adapter(str(path))
        return path.read_bytes()


def read_adapter(path: Path) -> dict[str, Array]:
    """The float32 arrays of an adapter file by name; raises MalformedInput for a truncated file, or other dtypes."""
    content = path.read_bytes()
    if content[4:8] != ONNX_ADAPTER:
        raise MalformedInput(f"`{path.name}` is not an adapter file of onnxruntime", hint="write it again")
    try:
        return _FlatBuffer(content).arrays()
    except (struct.error, ValueError, UnicodeDecodeError, OverflowError) as error:
        raise MalformedInput(f"`{path.name}` is damaged: {error}", hint="copy or write it again") from error


class _FlatBuffer:
    """The tables of one file; offsets outside of it raise `struct.error` or `ValueError`."""

    def __init__(self, content: bytes) -> None:
        self._content, self._read = content, 0

    def arrays(self) -> dict[str, Array]:
        """All parameters."""
        start, count = self._vector(self._field(self._follow(0), PARAMETERS), 4)
        tables = [self._follow(start + 4 * at) for at in range(count)]
        arrays = dict(map(self._parameter, tables))
        if len(arrays) < count:
            raise ValueError("duplicate names")
        return arrays

    def _parameter(self, table: int) -> tuple[str, Array]:
        start, length = self._vector(self._field(table, NAME), 1)
        name = self._content[start : start + length].decode()
        start, count = self._vector(self._field(table, DIMS), 8)
        shape = struct.unpack_from(f"<{count}q", self._content, start)
        kind = self._field(table, DATA_TYPE)
        if not kind or self._number("<i", kind) != FLOAT:
            raise ValueError(f"`{name[:80]}` is not float32")
        start, length = self._vector(self._field(table, RAW_DATA), 1)
        self._read += length
        if self._read > len(self._content):
            raise ValueError("parameters overlap")
        if any(size < 0 for size in shape) or length != 4 * prod(shape):
            raise ValueError(f"`{name[:80]}` has {length} bytes for the shape {list(shape)}")
        array = np.frombuffer(self._content, "<f4", length // 4, start).reshape(shape)
        if not np.isfinite(array).all():
            raise ValueError(f"`{name[:80]}` contains values that are not finite")
        return name, array

    def _number(self, kind: str, at: int) -> int:
        if at < 0:
            _outside()
        return int(struct.unpack_from(kind, self._content, at)[0])

    def _follow(self, at: int) -> int:
        """The position that the offset at a position points to."""
        return at + self._number("<I", at)

    def _field(self, table: int, number: int) -> int:
        """The position of a field; 0 if the table does not have it."""
        layout = table - self._number("<i", table)
        if 4 + 2 * number >= self._number("<H", layout):
            return 0
        offset = self._number("<H", layout + 4 + 2 * number)
        return table + offset if offset else 0

    def _vector(self, field: int, size: int) -> tuple[int, int]:
        """Start and length of a vector of elements of `size` bytes; of none if the field is absent."""
        if not field:
            return 0, 0
        at = self._follow(field)
        count = self._number("<I", at)
        if at + 4 + size * count > len(self._content):
            _outside()
        return at + 4, count


def _outside() -> NoReturn:
    raise ValueError("an offset lies outside of the file")
