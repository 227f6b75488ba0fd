"""Copies of float16 and bfloat16 graphs: one that computes in float32, and one that rounds after every node.

Half precision hides small faults: an epsilon, a variant of GELU, or rotary angles of too few bits change less than its
rounding. So such a graph is compared twice: unchanged, with the rounding noise of the model in that precision, and as a
copy that computes in float32 with the same weights, with the noise of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import helper, inliner

from llmconv.runtime.onnxruntime.float32_graph import HALF_PRECISION
from llmconv.tensors import LazyTensor
from llmconv.verify.comparison.half_precision import IN_FLOAT32, WITHOUT_KERNELS, round_every_value, widen
from llmconv.verify.comparison.known_constants import KnownConstants
from llmconv.verify.other_exporters.content_matching import InitializerContent
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.results.report import Check


@contextmanager
def float32_copy(file: GraphFile, known: KnownConstants) -> Iterator[GraphFile]:
    """Context with a temporary copy of a graph in which float32 replaces the half-precision dtype.

    Args:
        file: the graph.
        known: numbers that half-precision constants may be roundings of.
    """
    model = _loaded(file)
    widen(model, HALF_PRECISION[file.dtype], known, _weights(file))
    with _saved(file, model) as copy:
        yield copy


@contextmanager
def rounding_copy(file: GraphFile) -> Iterator[GraphFile]:
    """Context with a temporary copy that computes every node in float32 and rounds the result to half precision.

    Half-precision kernels, which accumulate in float32, have the same arithmetic; onnxruntime's CPU provider has almost
    none for bfloat16. Inputs and outputs are float32 with rounded values.
    """
    model = _loaded(file)
    round_every_value(model, HALF_PRECISION[file.dtype], typed=_loaded(file, weights=False))
    with _saved(file, model) as copy:
        yield replace(copy, model=file.model, emulates=file.path)


def half_precision_notes(file: GraphFile) -> list[str]:
    """Notes for the report on how a half-precision graph is run."""
    if file.dtype not in HALF_PRECISION:
        return []
    notes = [f"computes in {file.dtype}; scenarios named `…{IN_FLOAT32}` use a float32 copy with the same weights"]
    if file.dtype == WITHOUT_KERNELS:
        notes.append(f"onnxruntime's CPU has no {WITHOUT_KERNELS} kernels: nodes run in float32, results are rounded")
    return [f"{file.name}: {note}" for note in notes]


def unknown_tables(file: GraphFile, known: KnownConstants, tensors: Mapping[str, LazyTensor]) -> list[Check]:
    """Skipped checks for half-precision tables of unknown content, with which a float32 copy is not possible.

    Initializers with the shape of a model tensor or of a rotary table are assumed to be one, and are compared.

    Args:
        file: the graph.
        known: constants of the model.
        tensors: tensors of the model by name.
    """
    if file.dtype not in HALF_PRECISION:
        return []
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(HALF_PRECISION[file.dtype]))
    shapes = {shape for tensor in tensors.values() for shape in (tensor.shape, tensor.shape[::-1])}
    blank = Check(IN_FLOAT32.removeprefix(", "), file.name, "", verdict="skip")
    return [
        replace(
            blank, detail=f"the content of `{name}` ({file.dtype}) is unknown: a float32 copy would keep its rounding"
        )
        for name, content in file.contents.items()
        if content.dtype == kind and not content.matched and content.shape not in shapes
        if not _is_constant(content) and not known.is_rotary(content.shape)
    ]


def _is_constant(content: InitializerContent) -> bool:
    """Whether all values are equal."""
    values = content.read()
    return bool((values == values.ravel()[0]).all())


def _weights(file: GraphFile) -> set[str]:
    return {name for name, content in file.contents.items() if content.names}


def _loaded(file: GraphFile, *, weights: bool = True) -> onnx.ModelProto:
    """The graph with its functions inlined."""
    model = onnx.load(file.path, load_external_data=weights)
    return inliner.inline_local_functions(model) if model.functions else model


@contextmanager
def _saved(file: GraphFile, model: onnx.ModelProto) -> Iterator[GraphFile]:
    with TemporaryDirectory(prefix="llmconv-float32-") as folder:
        path = Path(folder) / file.path.name
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        yield replace(file, path=path, model=onnx.load(path, load_external_data=False))
