"""Compares graphs with quantized weights in two ways: correctness with these weights, and loss of accuracy.

For correctness, an eager model with the same quantized weights is compared with the graph without its rounding of
activations. For accuracy, the unchanged graph is compared with the model at full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.runner import Runner
from llmconv.runtime.tokenizer import CalibrationText
from llmconv.verify.other_exporters.comparison import ExternalComparison, external_candidates
from llmconv.verify.other_exporters.external_graph import ExternalGraph
from llmconv.verify.other_exporters.quantized.accuracy import (
    CHECK,
    AccuracyGate,
    AccuracyLimits,
    TokenSample,
    check_gate,
    check_limits,
    difference,
    gate_of,
    measure_costs,
    ranged_activations,
    token_sample,
)
from llmconv.verify.other_exporters.quantized.dequantized_reference import (
    QuantizedWeights,
    StoredSmoothing,
    tied_head,
    unrounded_copy,
)
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants
from llmconv.verify.other_exporters.quantized.rounding_error import ExpectedCodes
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check, Checks, Quantization, Report, problem_of
from llmconv.verify.scenarios.calls import ModelFacts


@dataclass(frozen=True)
class QuantizationOptions:
    """Options for graphs with quantized weights."""

    text: Path | None = None  # text file for the loss of accuracy; None for the text that ships with llmconv
    limits: AccuracyLimits = AccuracyLimits()  # limits of the loss of accuracy
    # the preset of `llmconv export --quant` that made the graphs, or the method of the quantized model they were made
    # from; its gate applies without limits. Empty for graphs of other exporters.
    preset: str = ""
    code: Path | None = None  # the model's folder if its custom code is trusted
    codes: ExpectedCodes = ExpectedCodes()  # what the codes of the weights must be
    smoothing: StoredSmoothing = StoredSmoothing()  # factors of norms and of matrices in the graphs
    # text on which ranges of activations were measured; None if the graphs contain none of llmconv
    ranges: CalibrationText | None = None
    own: bool = False  # llmconv wrote the graphs, which round activations in fixed ranges only if there is such a text

    def removable(self, model: onnx.ModelProto, constants: Constants) -> Container[str] | None:
        """The values in fixed ranges that are compared before they are rounded; None for all.

        Those of llmconv's graphs whose ranges are checked on the text: any other pair of nodes must change nothing.
        """
        if not self.own:
            return None
        return ranged_activations(model, constants) if self.ranges is not None else ()


def compare_quantized(
    verified: ExternalGraphs,
    graphs: Sequence[ExternalGraph],
    eager: Eager,
    comparison: ExternalComparison,
    options: QuantizationOptions,
    stack: ExitStack,
) -> Generator[list[Check], None, tuple[Eager, ExternalGraphs]]:
    """Measures the loss of accuracy, and checks correctness if all weights are known.

    Returns the reference and the graphs of the check of correctness, or the given ones without it.
    """
    report, tensors, files = comparison.report, comparison.tensors, verified.files
    section = report.quantization
    assert section is not None
    candidate = external_candidates(graphs)[-1]
    weights = [one for file in files for one in file.quantized_weights]
    tie = tied_head(eager.models[0], tensors)
    quantized = QuantizedWeights(eager.folder, tensors, weights, tie, options.smoothing, stack)
    shipped, suite = (candidate.name, candidate.runner), comparison.selection.suite
    plain = partial(rounded_runner, quantized, options.code)
    yield from measure_cost(shipped, plain, eager.runners[0], eager.folder, eager.facts(), options, report, suite)
    unknown = next((one.stored.name for file in files for one in file.quantized_weights if not one.matches), "")
    if unknown or any(file.unreadable for file in files):
        report.notes += [f"correctness was not checked: the content of `{unknown}` is unknown"] if unknown else []
        return eager, verified
    try:
        copies = [stack.enter_context(unrounded_copy(file.path, options.removable)) for file in files]
    except UnsupportedInput as error:
        yield [Check("structure", files[0].name, "", verdict="skip", detail=error.message)]
        return eager, verified
    section.rounded = sorted({operator for _, rounded in copies for operator in rounded})
    report.notes += quantization_notes(section)
    reference, settings = quantized.dequantized(), replace(comparison.settings, float_activations=True)
    dequantized = Eager(reference.folder, eager.dtype, code=options.code, weights=reference.weights).with_defaults()
    unrounded = [replace(file, path=path) for file, (path, _) in zip(files, copies, strict=True)]
    yield from replace(comparison, settings=settings).run(dequantized, unrounded)
    return dequantized, replace(verified, files=unrounded, settings=settings)


def rounded_runner(weights: QuantizedWeights, code: Path | None, *, whole: bool = False) -> EagerRunner | None:
    """The model with plainly rounded codes, layer by layer unless `whole`; None if no codes are of 4 bits."""
    found = weights.plainly_rounded()
    if found is None:
        return None
    with suppress(UnsupportedInput):  # a model without layers that can be loaded one by one
        if not whole:
            return StreamedRunner(found.folder, **found.options(code))
    return EagerRunner(found.folder, **found.options(code))


def measure_cost(  # noqa: PLR0913 - two models, and what is measured
    shipped: tuple[str, Runner],
    plain: Callable[[], Runner | None],  # opens the model with plainly rounded codes
    model: Runner,  # the model at full precision
    folder: Path,  # that of its tokenizer
    facts: ModelFacts,
    options: QuantizationOptions,
    report: Report,
    suite: str,
    most: int = 1 << 30,  # maximum number of tokens
) -> Checks:
    """Measures the loss of accuracy, and that of plain rounding if the preset is judged by it."""
    section = report.quantization
    assert section is not None
    section.max_divergence, section.min_agreement = options.limits.divergence, options.limits.agreement
    sample = token_sample(options.text, folder, facts, suite, options.code is not None, most)
    gate, measured = gate_of(options.preset) if sample.is_text else AccuracyGate(), [shipped]
    try:
        if gate.against_rounding and (rounded := plain()):
            measured.append(("plain rounding", rounded))
        costs = measure_costs(measured, model, sample)
    except LlmconvError as error:
        yield [Check(CHECK, shipped[0], "", verdict="fail", detail=problem_of(error))]
        return
    section.cost, *others = [one.summary(is_text=sample.is_text) for one in costs]
    section.excess = difference(*costs) if others else None
    section.rounding = others[0] if others else None
    yield _judged(options, gate, section, sample, report.notes)


def _judged(
    options: QuantizationOptions, gate: AccuracyGate, section: Quantization, sample: TokenSample, notes: list[str]
) -> list[Check]:
    assert section.cost is not None
    section.preset = options.preset
    if options.limits.given:
        return check_limits(section.cost, options.limits)
    if options.preset and not sample.is_text:
        notes.append(
            f"the cost of `{options.preset}` was not judged: the model has no tokenizer that knows a text, "
            "and random tokens show little"
        )
    return check_gate(options.preset, gate, section.cost, section.excess)


def quantization_notes(section: Quantization) -> list[str]:
    notes = ["quantized: the scenarios are compared with a model that has the same quantized weights"]
    if section.rounded:
        operators = ", ".join(section.rounded)
        notes.append(f"the scenarios run without the rounding of activations ({operators}); the cost includes it")
    return notes
