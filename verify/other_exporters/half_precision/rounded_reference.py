"""The reference of a half-precision graph: the model with its weights as the graph holds them."""

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
from llmconv.verify.other_exporters.content_matching import FLOATS, Content
from llmconv.verify.other_exporters.graph_file import GraphFile

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@contextmanager
def rounded_reference(
    folder: Path, tensors: Mapping[str, LazyTensor], files: Sequence[GraphFile], dtype: str
) -> Iterator[Path]:
    """A temporary copy of a model folder, its weights rounded to half precision and stored as float32.

    A tensor that the graph holds in float32 is not rounded; one that it holds with one added (the norms of Gemma) is
    what is left when one is taken away. Where this changes nothing, `folder` itself.
    """
    held = {content.whole: content for file in files for content in file.contents.values() if content.whole}
    made = {name: _as_held(tensor.read(), held.get(name), NUMPY[dtype]) for name, tensor in tensors.items()}
    if all(_same(made[name], tensor.read()) for name, tensor in tensors.items()):
        yield folder
        return
    with TemporaryDirectory(prefix="llmconv-rounded-") as name:
        copy = Path(name) / folder.resolve().name
        copy.mkdir()
        for path in folder.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, copy / path.name)
        save_file(made, copy / "model.safetensors", metadata={"format": "pt"})
        yield copy


def _same(made: Array, given: Array) -> bool:
    return made.dtype == given.dtype and np.array_equal(made, given)


def _as_held(values: Array, content: Content | None, half: np.dtype[np.generic]) -> Array:
    """One tensor's values, in float32."""
    if values.dtype.name not in FLOATS:
        return values
    wide = values.astype(np.float32)
    kind = content.dtype if content else half
    if kind == half and content and content.form == "plus one":
        return content.read().astype(np.float32) - np.float32(1)
    kept: Array = wide if kind.itemsize > half.itemsize else wide.astype(half).astype(np.float32)
    return np.ascontiguousarray(kept)
