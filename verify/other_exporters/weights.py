"""The weight audit of external graphs: which initializers are the model's by content, and wrong names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import initializer_values, reference_name
from llmconv.verify.other_exporters.content_matching import PREFIX, InitializerContent, match_contents
from llmconv.verify.results.report import Check

SHOWN = 3
FLOAT_TYPES = {getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")}


def initializer_contents(
    model: onnx.ModelProto, folder: Path, reference: Mapping[str, LazyTensor], excluded: Collection[str] = ()
) -> dict[str, InitializerContent]:
    """Every larger float initializer, matched with the model's tensors.

    Args:
        model: the graph.
        folder: folder of its external data.
        reference: tensors of the model by name.
        excluded: names of initializers to leave out.
    """
    contents = {
        tensor.name: _content(tensor, folder)
        for tensor in model.graph.initializer
        if tensor.data_type in FLOAT_TYPES and prod(tensor.dims) >= PREFIX and tensor.name not in excluded
    }
    match_contents(contents, reference)
    return contents


def _content(tensor: onnx.TensorProto, folder: Path) -> InitializerContent:
    def read() -> Array:
        return np.asarray(initializer_values(tensor, folder))

    return InitializerContent(tuple(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), read)


def audit_contents(
    graph: str, contents: Mapping[str, InitializerContent], reference: Mapping[str, LazyTensor]
) -> Check:
    """One check: an initializer with a tensor's name but other content fails; unknown content does not.

    Args:
        graph: name of the graph.
        contents: matched content by initializer.
        reference: tensors of the model.
    """
    wrong = [
        f"`{name}` differs from the model's tensor of that name"
        for name, content in contents.items()
        if (named := reference_name(name, reference)) and named not in content.names
    ]
    matched = [content for content in contents.values() if content.matched]
    verdict = "fail" if wrong else "pass" if matched else "skip"
    return Check("weights", graph, "", verdict=verdict, detail="; ".join(wrong[:5]) or _summary(contents, matched))


def _summary(contents: Mapping[str, InitializerContent], matched: list[InitializerContent]) -> str:
    counts = Counter(content.form or "as they are" if content.whole else "in parts" for content in matched)
    forms = ", ".join(f"{count} {form}" for form, count in counts.items())
    other = [name for name, content in contents.items() if not content.matched]
    rest = f"; others: {', '.join(f'`{name[:60]}`' for name in other[:SHOWN])}" + (" …" if other[SHOWN:] else "")
    return f"{len(matched)} of {len(contents)} are the model's by content ({forms or 'none'})" + (rest if other else "")


def missing_tensors(contents: Mapping[str, InitializerContent], reference: Mapping[str, LazyTensor]) -> set[str]:
    """Tensors of the model that match no initializer."""
    return set(reference) - {name for content in contents.values() for name in content.names}
