"""Compares half-precision graphs: unchanged, and as float32 copies, which show faults that its rounding hides."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from llmconv.checkpoint import read_json
from llmconv.runtime.onnxruntime.float32_graph import HALF_PRECISION
from llmconv.verify.comparison.half_precision import IN_FLOAT32, ROUNDED, WITHOUT_KERNELS
from llmconv.verify.comparison.known_constants import KnownConstants
from llmconv.verify.other_exporters.comparison import ExternalComparison
from llmconv.verify.other_exporters.external_graph import ExternalGraph
from llmconv.verify.other_exporters.half_precision.float32_copy import (
    float32_copy,
    half_precision_notes,
    rounding_copy,
    unknown_tables,
)
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check, Checks


def compare_half_precision(
    verified: ExternalGraphs,
    graphs: Sequence[ExternalGraph],
    eager: Eager,
    comparison: ExternalComparison,
    stack: ExitStack,
) -> Generator[list[Check], None, tuple[Eager, ExternalGraphs]]:
    """Runs all scenarios on the graphs, a few with every value rounded, and all on float32 copies.

    Args:
        verified: the graphs.
        graphs: the same graphs, opened.
        eager: the model with weights as in the graphs.
        comparison: runs the comparison and collects the checks.
        stack: keeps temporary copies.

    Returns:
        The reference and the graphs in which a faulty node is searched: the copies, if they are possible.
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
