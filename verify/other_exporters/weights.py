"""The weight audit of foreign graphs: what is the model's by content, what is not, and names that lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import initializer_values, reference_name
from llmconv.verify.other_exporters.content_matching import BEGINNING, Content, find_contents
from llmconv.verify.results.report import Check

SHOWN = 3
FLOAT_TYPES = {getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")}


def contents_of(
    model: onnx.ModelProto, folder: Path, reference: Mapping[str, LazyTensor], but: Collection[str] = ()
) -> dict[str, Content]:
    """Every float initializer of some size, looked up among the model's tensors; without those named in `but`."""
    contents = {
        tensor.name: _content(tensor, folder)
        for tensor in model.graph.initializer
        if tensor.data_type in FLOAT_TYPES and prod(tensor.dims) >= BEGINNING and tensor.name not in but
    }
    find_contents(contents, reference)
    return contents


def _content(tensor: onnx.TensorProto, folder: Path) -> Content:
    def read() -> Array:
        return np.asarray(initializer_values(tensor, folder))

    return Content(tuple(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), read)


def audit_contents(graph: str, contents: Mapping[str, Content], reference: Mapping[str, LazyTensor]) -> Check:
    """One check: a tensor's name on another content is a failure, content that is unknown is none."""
    lies = [
        f"`{name}` differs from the model's tensor of that name"
        for name, content in contents.items()
        if (named := reference_name(name, reference)) and named not in content.names
    ]
    matched = [content for content in contents.values() if content.matched]
    verdict = "fail" if lies else "pass" if matched else "skip"
    return Check("weights", graph, "", verdict=verdict, detail="; ".join(lies[:5]) or _told(contents, matched))


def _told(contents: Mapping[str, Content], matched: list[Content]) -> str:
    counts = Counter(content.form or "as they are" if content.whole else "in parts" for content in matched)
    told = ", ".join(f"{count} {form}" for form, count in counts.items())
    other = [name for name, content in contents.items() if not content.matched]
    rest = f"; others: {', '.join(f'`{name[:60]}`' for name in other[:SHOWN])}" + (" …" if other[SHOWN:] else "")
    return f"{len(matched)} of {len(contents)} are the model's by content ({told or 'none'})" + (rest if other else "")


def absent(contents: Mapping[str, Content], reference: Mapping[str, LazyTensor]) -> set[str]:
    """Tensors of the model that no initializer holds."""
    return set(reference) - {name for content in contents.values() for name in content.names}
