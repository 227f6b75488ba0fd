"""A quantized model folder as one of plain weights, which transformers opens without the library that quantized it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from llmconv.checkpoint import SINGLE, open_checkpoint, read_json
from llmconv.output.plan import Shard, json_bytes
from llmconv.output.streaming import stream_shard
from llmconv.quantized_weights.quantized_checkpoint import FIELD, QuantizedCheckpoint, quantized_checkpoint
from llmconv.tensors import DType


@dataclass(frozen=True)
class PlainModel:
    """A model folder with plain weights.

    Attributes:
        folder: the folder.
        kept: weights that were integer codes before, which an export keeps, with the dtype of their scales; by name.
    """

    folder: Path
    kept: Mapping[str, DType]


@contextmanager
def plain_model(folder: Path) -> Iterator[PlainModel]:
    """Context with the folder itself if its weights are plain, else a temporary one with their values in float32.

    Args:
        folder: a Hugging Face folder.

    Raises:
        MalformedInput: missing or mismatched parts of a quantized weight.
        UnsupportedInput: an unknown quantization method.
    """
    if not read_json(folder / "config.json").get(FIELD) or not (found := quantized_checkpoint(open_checkpoint(folder))):
        yield PlainModel(folder, {})
        return
    with TemporaryDirectory(prefix="llmconv-plain-") as name:
        copy = Path(name)
        (copy / "config.json").write_bytes(json_bytes({**found.plain.config, "dtype": "float32"}))
        for side, content in found.plain.side_files.items():
            (copy / side).write_bytes(content)
        with open(copy / SINGLE, "xb", buffering=0) as file:
            stream_shard(file, Shard(SINGLE, dict(found.plain)), lambda count: None)
        yield PlainModel(copy, _kept(found))


def _kept(checkpoint: QuantizedCheckpoint) -> dict[str, DType]:
    """The weights whose codes onnxruntime has an operator for."""
    found = {name: weight.integers for name, weight in checkpoint.weights.items()}
    return {name: codes.scale_dtype for name, codes in found.items() if codes and codes.has_operator}
