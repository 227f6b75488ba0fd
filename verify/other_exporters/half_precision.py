"""Compares half-precision graphs: unchanged, and as temporary copies that compute in float32 or round after every node.

`llmconv.verify.comparison.half_precision` explains why: half precision hides small faults.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, inliner

from llmconv.checkpoint import read_json
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.verify.comparison.half_precision import (
    IN_FLOAT32,
    ROUNDED,
    WITHOUT_KERNELS,
    KnownConstants,
    round_every_value,
    widen,
)
from llmconv.verify.other_exporters.comparison import ExternalComparison
from llmconv.verify.other_exporters.external_graph import ExternalGraph, GraphFile
from llmconv.verify.other_exporters.quantized.tensor_matching import FLOATS, InitializerContent
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check, Checks


def compare_half_precision(
    verified: ExternalGraphs,
    graphs: Sequence[ExternalGraph],
    eager: Eager,
    comparison: ExternalComparison,
    stack: ExitStack,
) -> Generator[list[Check], None, tuple[Eager, ExternalGraphs]]:
    """Runs all scenarios on the graphs, a few with every value rounded, and all on float32 copies.

    `eager` has weights as in the graphs. Returns the reference and the graphs in which a faulty node is searched: the
    copies, if they are possible.
    """
    yield from comparison.compare(eager, graphs)
    yield from _compare_rounding(verified, eager, comparison)
    known = KnownConstants.of(read_json(eager.folder / "config.json"), eager.rotary_frequencies())
    comparison.report.notes += [note for file in verified.files for note in half_precision_notes(file)]
    if unknown := [check for file in verified.files for check in unknown_tables(file, known, verified.tensors)]:
        yield unknown
        return eager, verified
    wide = [
        stack.enter_context(float32_copy(file, known)) if file.dtype in HALF_PRECISION else file
        for file in verified.files
    ]
    eager = eager.in_dtype("float32")
    yield from comparison.run(eager, wide, IN_FLOAT32)
    return eager, replace(verified, files=wide, named=IN_FLOAT32)


def _compare_rounding(verified: ExternalGraphs, eager: Eager, comparison: ExternalComparison) -> Checks:
    """Runs a few scenarios with every value rounded, if onnxruntime's CPU provider does not round every value."""
    if all(file.dtype in {WITHOUT_KERNELS, "float32"} for file in verified.files):
        return
    with ExitStack() as stack:
        copies = [
            stack.enter_context(rounding_copy(file)) if file.dtype in HALF_PRECISION else file
            for file in verified.files
        ]
        if graphs := (yield from comparison.opened(copies)):
            yield from comparison.compare(eager, graphs, named=ROUNDED, few=True)


@contextmanager
def float32_copy(file: GraphFile, known: KnownConstants) -> Iterator[GraphFile]:
    """Context with a temporary copy of a graph in which float32 replaces the half-precision dtype."""
    model = _loaded(file)
    widen(model, HALF_PRECISION[file.dtype], known, {name for name, one in file.contents.items() if one.names})
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
    if file.dtype not in HALF_PRECISION:
        return []
    notes = [f"computes in {file.dtype}; scenarios named `…{IN_FLOAT32}` use a float32 copy with the same weights"]
    if file.dtype == WITHOUT_KERNELS:
        notes.append(f"onnxruntime's CPU has no {WITHOUT_KERNELS} kernels: nodes run in float32, results are rounded")
    return [f"{file.name}: {note}" for note in notes]


def unknown_tables(file: GraphFile, known: KnownConstants, tensors: Mapping[str, LazyTensor]) -> list[Check]:
    """Skipped checks for half-precision tables of unknown content, with which a float32 copy is not possible.

    Initializers with the shape of a model tensor or of a rotary table are assumed to be one, and are compared.
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
    values = content.read()
    return bool((values == values.ravel()[0]).all())


def _loaded(file: GraphFile, *, weights: bool = True) -> onnx.ModelProto:
    model = onnx.load(file.path, load_external_data=weights)
    return inliner.inline_local_functions(model) if model.functions else model


@contextmanager
def _saved(file: GraphFile, model: onnx.ModelProto) -> Iterator[GraphFile]:
    with TemporaryDirectory(prefix="llmconv-float32-") as folder:
        path = Path(folder) / file.path.name
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        yield replace(file, path=path, model=onnx.load(path, load_external_data=False))


NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def rounded_weights(
    tensors: Mapping[str, LazyTensor], files: Sequence[GraphFile], dtype: str
) -> Mapping[str, LazyTensor]:
    """The weights rounded to half precision, in float32; the same mapping if that changes nothing.

    A tensor that the graph stores in float32 is not rounded; if the graph stores a tensor plus one (the norms of
    Gemma), one is subtracted from the stored values. `files` are the graphs after the audit of their initializers;
    `dtype` is `float16` or `bfloat16`.
    """
    stored = {content.whole: content for file in files for content in file.contents.values() if content.whole}
    rounded = {name: _as_stored(tensor, stored.get(name), NUMPY[dtype]) for name, tensor in tensors.items()}
    return tensors if all(_same(rounded[name], tensor) for name, tensor in tensors.items()) else rounded


def _same(first: LazyTensor, second: LazyTensor) -> bool:
    return first.dtype == second.dtype and all(
        np.array_equal(first.rows(*at), second.rows(*at)) for at in second.blocks()
    )


def _as_stored(tensor: LazyTensor, content: InitializerContent | None, half: np.dtype[np.generic]) -> LazyTensor:
    """A tensor as the graph stores it, in float32."""
    if tensor.dtype.name not in FLOATS:
        return tensor
    kind = content.dtype if content else half

    def load(start: int, stop: int) -> Array:
        if kind == half and content and content.form == "plus one":
            kept = content.read().astype(np.float32)[start:stop] - np.float32(1)
        else:
            kept = tensor.rows(start, stop).astype(np.float32)
            kept = kept if kind.itemsize > half.itemsize else kept.astype(half).astype(np.float32)
        return np.ascontiguousarray(kept)

    return LazyTensor(BY_NAME["float32"], tensor.shape, load)
