"""The two verdicts on a graph with quantised weights: whether it is right with those, and what they cost.

Whether it is right is asked of an eager model with the same quantised weights, and of the graph without the rounding of
activations; what they cost of the graph as it is shipped, against the model at full precision.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.verify.other_exporters.candidates import foreign_candidates
from llmconv.verify.other_exporters.comparison import ForeignComparison
from llmconv.verify.other_exporters.quantized.accuracy_cost import Limits, check_cost, measure_cost, sample_of
from llmconv.verify.other_exporters.quantized.dequantized_reference import shadow_of, tie_of
from llmconv.verify.other_exporters.quantized.unrounded_copies import plain_copy
from llmconv.verify.other_exporters.replay import Graphs
from llmconv.verify.other_exporters.session import ForeignGraph
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.quantization import Quantization
from llmconv.verify.results.report import Check, Checks


@dataclass(frozen=True)
class Asked:
    """What a user asks of quantised graphs.

    Attributes:
        text: a file that their perplexity is taken of; None for random tokens.
        limits: of the cost.
        code: the model's folder where its own code is trusted.
    """

    text: Path | None = None
    limits: Limits = Limits()
    code: Path | None = None


def compare_quantized(
    verified: Graphs,
    graphs: Sequence[ForeignGraph],
    eager: Eager,
    by: ForeignComparison,
    asked: Asked,
    stack: ExitStack,
) -> Generator[list[Check], None, tuple[Eager, Graphs]]:
    """Both verdicts; the first one only where all weights are known.

    Args:
        graphs: the files as they are shipped, opened.
        eager: the model at full precision.
        stack: keeps the copies and the reference of the first verdict.

    Returns:
        What the first verdict is about, for the search for a node; what was given where there is none.
    """
    section, files = by.report.quantization, verified.files
    assert section is not None
    section.max_divergence, section.min_agreement = asked.limits.divergence, asked.limits.agreement
    yield from _measure(graphs, eager, by, asked, section)
    unknown = next((one.stored.name for file in files for one in file.found if not one.placements), "")
    if unknown or any(file.unread for file in files):
        by.report.notes += [f"whether the graph is right is not known: what is `{unknown}`?"] if unknown else []
        return eager, verified
    try:
        copies = [stack.enter_context(plain_copy(file.path)) for file in files]
    except UnsupportedInput as error:
        yield [Check("structure", files[0].name, "", verdict="skip", detail=error.message)]
        return eager, verified
    section.rounded = sorted({operator for _, rounded in copies for operator in rounded})
    by.report.notes += _notes(section)
    found = [one for file in files for one in file.found]
    tie = tie_of(eager.models[0], by.tensors)
    shadow = stack.enter_context(shadow_of(eager.folder, by.tensors, found, tie))
    same, settings = Eager(shadow, eager.dtype, code=asked.code), replace(by.settings, float_activations=True)
    plain = [replace(file, path=path) for file, (path, _) in zip(files, copies, strict=True)]
    yield from replace(by, settings=settings).run(same, plain)
    return same, replace(verified, files=plain, settings=settings)


def _measure(
    graphs: Sequence[ForeignGraph], eager: Eager, by: ForeignComparison, asked: Asked, section: Quantization
) -> Checks:
    """The cost, of the two graphs together where there are two."""
    trusted = asked.code is not None
    sample = sample_of(asked.text, eager.folder, eager.facts(), by.selection.suite, trusted)
    candidate = foreign_candidates(graphs)[-1]
    try:
        section.cost = measure_cost(candidate.name, candidate.runner, eager.runners[0], sample)
    except LlmconvError as error:
        yield [Check("cost of quantisation", candidate.name, "", verdict="fail", detail=error.message)]
        return
    yield check_cost(section.cost, asked.limits)


def _notes(section: Quantization) -> list[str]:
    notes = ["quantised: the scenarios are compared with a model of the same quantised weights"]
    if section.rounded:
        taken = ", ".join(section.rounded)
        notes.append(f"the scenarios are run without the rounding of activations ({taken}); its cost is with it")
    return notes
