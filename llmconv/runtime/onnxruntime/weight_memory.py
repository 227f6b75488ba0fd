"""The memory that the weights of graphs take: mapped from their files, or held in float32 by this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from llmconv.errors import InputRefused
from llmconv.memory import available_memory
from llmconv.progress import say
from llmconv.runtime.onnxruntime.float32_graph import HALF_PRECISION, half_precision
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, load_guarded, nodes
from llmconv.runtime.onnxruntime.packed_cache import is_packed
from llmconv.runtime.onnxruntime.session_settings import CPU, SessionSettings, provider_name

FLOATS = {onnx.TensorProto.FLOAT, *HALF_PRECISION.values()}

WORTH_SAYING = 256 << 20
"""Copies of fewer bytes are not mentioned."""

GB = 1e9
MAPPED_FLOATS = "`llmconv export MODEL -o OUT --dtype float32` writes weights that the graphs map without a copy"
MAPPED_PACKED = "`--packed-cache` writes packed weights to a file once, and maps it from then on"
LOOKUPS = {"Gather", "GatherBlockQuantized"}
"""Operators that read rows of a table where it is."""


@dataclass(frozen=True)
class WeightMemory:
    """The memory that the weights of some graphs take in onnxruntime.

    Attributes:
        mapped: bytes of weights in files, which the system reads and discards on demand.
        copied: bytes that onnxruntime or llmconv copies to memory of the process.
        other_way: how to do without the copies.
    """

    mapped: int
    copied: int
    other_way: str = MAPPED_FLOATS

    @classmethod
    def of(cls, paths: Iterable[Path], settings: SessionSettings) -> WeightMemory:
        """The memory for graphs by their paths; graphs with the same content share it. Raises MalformedInput."""
        contents = {path.read_bytes(): path for path in paths if path.is_file()}
        models = [(path, load_guarded(path)) for path in contents.values()]
        weights = [_weights(path, model) for path, model in models]
        distinct = {place: tensor for found in weights for place, tensor in found.items()}
        mapped = sum(length for _, _, length in distinct)
        if provider_name(settings.provider) != CPU or settings.packed_cache:
            return cls(mapped, 0)
        copied, shared, packs = 0, set[Place](), False
        for (_, model), found in zip(models, weights, strict=True):
            if settings.prepack or is_packed(model):
                copied, packs = copied + _packed_bytes(model, found), True  # in each session
            else:
                shared |= set(_widened(model, found))
        copied += sum(4 * prod(distinct[place].dims) for place in shared)
        return cls(mapped, copied, MAPPED_PACKED if packs else MAPPED_FLOATS)

    def announce(self) -> None:
        """Prints what copies will be held, if they are large; raises InputRefused if they do not fit into memory."""
        have = available_memory()
        if have is not None and self.copied > have:
            raise InputRefused(
                f"the weights take {self.copied / GB:.1f} GB of memory, and {have / GB:.1f} GB are available",
                hint=self.other_way,
            )
        if self.copied > WORTH_SAYING:
            copies = f"{self.copied / GB:.1f} GB of copies in memory"
            say(f"weights: {self.mapped / GB:.1f} GB mapped, {copies}; {self.other_way}")


Place = tuple[Path, int, int]
"""File, offset and length in bytes."""


def _weights(path: Path, model: onnx.ModelProto) -> dict[Place, onnx.TensorProto]:
    """The external weights of a graph by their place."""
    found = {}
    for tensor in external_tensors(model):
        fields = external_fields(tensor)
        file, offset = (path.parent / fields["location"]).resolve(), int(fields.get("offset") or 0)
        length = int(fields.get("length") or 0) or file.stat().st_size - offset  # optional: up to the end
        found[file, offset, length] = tensor
    return found


def _packed_bytes(model: onnx.ModelProto, weights: dict[Place, onnx.TensorProto]) -> int:
    """Bytes of a packed copy: floats in float32, codes as stored, nothing of tables that rows are looked up in."""
    multiplied = {
        name for node in nodes(model) for at, name in enumerate(node.input) if at or node.op_type not in LOOKUPS
    }
    return sum(
        4 * prod(tensor.dims) if tensor.data_type in FLOATS else length
        for (_, _, length), tensor in weights.items()
        if tensor.name in multiplied
    )


def _widened(model: onnx.ModelProto, weights: dict[Place, onnx.TensorProto]) -> list[Place]:
    """The weights that the CPU holds in float32: those that a Cast follows, and all of a bfloat16 graph."""
    cast = {node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    is_bfloat16 = half_precision(model) == "bfloat16"
    halves = {*HALF_PRECISION.values()}
    return [
        place
        for place, tensor in weights.items()
        if tensor.data_type in halves and (is_bfloat16 or tensor.name in cast)
    ]
