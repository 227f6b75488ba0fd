"""The reference of a half-precision graph: the model with its weights rounded as in the graph."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.content_matching import FLOATS, InitializerContent
from llmconv.verify.other_exporters.graph_file import GraphFile

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@contextmanager
def rounded_reference(
    folder: Path, tensors: Mapping[str, LazyTensor], files: Sequence[GraphFile], dtype: str
) -> Iterator[Path]:
    """Context with a temporary copy of a model folder, with weights rounded to half precision and stored as float32.

    A tensor that the graph stores in float32 is not rounded; if the graph stores a tensor plus one (the norms of
    Gemma), one is subtracted from the stored values. If nothing changes, the result is `folder` itself.

    Args:
        folder: a Hugging Face folder.
        tensors: its tensors by name.
        files: the graphs, after the audit of their initializers.
        dtype: `float16` or `bfloat16`.
    """
    stored = {content.whole: content for file in files for content in file.contents.values() if content.whole}
    rounded = {name: _as_stored(tensor.read(), stored.get(name), NUMPY[dtype]) for name, tensor in tensors.items()}
    if all(_same(rounded[name], tensor.read()) for name, tensor in tensors.items()):
        yield folder
        return
    with TemporaryDirectory(prefix="llmconv-rounded-") as name:
        copy = Path(name) / folder.resolve().name
        copy.mkdir()
        for path in folder.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, copy / path.name)
        save_file(rounded, copy / "model.safetensors", metadata={"format": "pt"})
        yield copy


def _same(first: Array, second: Array) -> bool:
    return first.dtype == second.dtype and np.array_equal(first, second)


def _as_stored(values: Array, content: InitializerContent | None, half: np.dtype[np.generic]) -> Array:
    """The values of a tensor as the graph stores them, in float32."""
    if values.dtype.name not in FLOATS:
        return values
    wide = values.astype(np.float32)
    kind = content.dtype if content else half
    if kind == half and content and content.form == "plus one":
        return content.read().astype(np.float32) - np.float32(1)
    kept: Array = wide if kind.itemsize > half.itemsize else wide.astype(half).astype(np.float32)
    return np.ascontiguousarray(kept)
