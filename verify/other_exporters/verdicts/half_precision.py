"""The verdicts on graphs in half precision: as they are, and as float32 copies, which show what it hides."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from llmconv.checkpoint import read_json
from llmconv.verify.other_exporters.comparison import ForeignComparison
from llmconv.verify.other_exporters.half_precision.float32_copy import (
    EMULATED,
    HALVES,
    IN_FLOAT32,
    ROUNDED,
    emulated,
    half_notes,
    unknown_tables,
    widened,
)
from llmconv.verify.other_exporters.half_precision.known_constants import Known
from llmconv.verify.other_exporters.replay import Graphs
from llmconv.verify.other_exporters.session import ForeignGraph
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check, Checks


def compare_halves(
    verified: Graphs, graphs: Sequence[ForeignGraph], eager: Eager, by: ForeignComparison, stack: ExitStack
) -> Generator[list[Check], None, tuple[Eager, Graphs]]:
    """All scenarios as they are, a few with every value rounded, and all on float32 copies.

    Args:
        graphs: the same, opened.
        eager: the model with its weights as the graphs hold them.
        stack: keeps the copies.

    Returns:
        The copies with their reference, for the search for a node; the graphs where there can be no copies.
    """
    yield from by.compare(eager, graphs)
    yield from _compare_rounding(verified, eager, by)
    known = Known.of(read_json(eager.folder / "config.json"), eager.rotary_frequencies())
    by.report.notes += [note for file in verified.files for note in half_notes(file)]
    if unknown := [check for file in verified.files for check in unknown_tables(file, known, verified.tensors)]:
        yield unknown
        return eager, verified
    wide = [stack.enter_context(widened(file, known)) if file.dtype in HALVES else file for file in verified.files]
    eager = eager.in_dtype("float32")
    yield from by.run(eager, wide, IN_FLOAT32)
    return eager, replace(verified, files=wide, named=IN_FLOAT32)


def _compare_rounding(verified: Graphs, eager: Eager, by: ForeignComparison) -> Checks:
    """A few scenarios with every value rounded, where onnxruntime's CPU runs half precision without doing so."""
    if all(file.dtype in {EMULATED, "float32"} for file in verified.files):
        return
    with ExitStack() as stack:
        copies = [stack.enter_context(emulated(file)) if file.dtype in HALVES else file for file in verified.files]
        if graphs := (yield from by.opened(copies)):
            yield from by.compare(eager, graphs, named=ROUNDED, few=True)


def sharpest(checks: list[Check]) -> list[Check]:
    """The checks of the float32 copy, where those found something: half precision would place it too late."""
    sharp = [check for check in checks if not check.output or check.name.endswith(IN_FLOAT32)]
    return sharp if any(check.verdict == "fail" and check.output for check in sharp) else checks
