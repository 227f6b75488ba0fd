"""LoRA factors of graphs: the names of their inputs, and onnxruntime's files of factors (`.onnx_adapter`).

    {module}.lora_A.weight   [rank, in]     {module}.weight is the name of the stored matrix
    {module}.lora_B.weight   [out, rank]    the scale alpha/rank included

Both are inputs with a default: empty factors of rank 0, with which the graph computes the base model.

A file is a flatbuffer with the identifier `TORT` (onnxruntime `lora/adapter_format/adapter_schema.fbs`):

    table Parameter { name: string; dims: [int64]; data_type: int32; raw_data: [ubyte]; }
    table Adapter   { format_version: int32; adapter_version: int32; model_version: int32; parameters: [Parameter]; }

onnxruntime writes them; llmconv reads them itself, with every offset and size checked.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx

from llmconv.errors import InputRefused, MalformedInput, listing
from llmconv.not_a_model_folder import ONNX_ADAPTER
from llmconv.runtime.extra_inputs import FACTOR_A, FACTOR_B, factor_names, is_factor
from llmconv.tensors import Array


def require_factors(factors: Mapping[str, Array], inputs: Mapping[str, Sequence[int | str]]) -> None:
    """Raises InputRefused unless pairs of factors A [rank, in] and B [out, rank] fit the declared shapes of inputs."""
    if absent := sorted({module_of(name) for name in factors if name not in inputs}):
        there = sorted({module_of(name).rpartition(".")[2] for name in inputs})
        raise InputRefused(
            f"the graphs have no LoRA inputs for {listing(absent)}",
            hint=f"they have some for {', '.join(there)}: export again with other `--lora-inputs`, or merge the "
            "adapter: `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    for module in {module_of(name) for name in factors}:
        first, second = factor_names(module)
        a, b = factors.get(first), factors.get(second)
        wanted = inputs[first][-1], inputs[second][0]
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise InputRefused(f"incomplete LoRA factors for `{module}`", hint="write the adapter again")
        if (a.shape[1], b.shape[0]) != wanted:
            raise InputRefused(
                f"shape mismatch for the LoRA factors of `{module}`: expected {wanted[0]} inputs and {wanted[1]} "
                f"outputs, got {a.shape[1]} and {b.shape[0]}",
                hint="the adapter was trained on another model",
            )


def without_inputs(way_out: str) -> InputRefused:
    """The error for an adapter and graphs that take none; `way_out` is the alternative to an export with inputs."""
    problem = "the graphs have no inputs for LoRA factors"
    return InputRefused(
        problem, hint=f"`llmconv export MODEL --lora-inputs all-linear --overwrite` makes them with such; {way_out}"
    )


def declared_factors(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    """The declared shapes of a graph's inputs for LoRA factors, by name."""
    defaults = {tensor.name for tensor in model.graph.initializer if is_factor(tensor.name)}
    return {
        port.name: [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]
        for port in model.graph.input
        if port.name in defaults
    }


def module_of(name: str) -> str:
    """The module of a factor, or of the weight of that module."""
    for ending in (FACTOR_A, FACTOR_B, ".weight"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


SUFFIX = ".onnx_adapter"
FLOAT = 1  # `TensorDataType` of float32
NAME, DIMS, DATA_TYPE, RAW_DATA = range(4)  # fields of a Parameter, by number
PARAMETERS = 3  # field of an Adapter
VERSION = 1  # written as adapter and model version, which onnxruntime stores and does not compare


def encode_adapter(factors: Mapping[str, Array]) -> bytes:
    """The content of an adapter file with float32 arrays by input name."""
    import onnxruntime as ort  # noqa: PLC0415 - names alone need none

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
        start, count = self._vector(self._field(self._follow(0), PARAMETERS), 4)
        arrays = dict(self._parameter(self._follow(start + 4 * at)) for at in range(count))
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
