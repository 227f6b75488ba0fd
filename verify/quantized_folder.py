"""Compares quantized graphs of a folder with a model of the same codes, and their codes with the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.quantized_weights.quantized_checkpoint import FIELD
from llmconv.runtime.cache_names import is_past
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS
from llmconv.runtime.onnxruntime.extra_feeds import extra_names
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.runtime.onnxruntime.shared_buffers import WRITE_INDICES
from llmconv.verify.audit.file_checksums import NAME as GRAPH_FILE
from llmconv.verify.bisect.replay import Replayable, VerifiedFolder
from llmconv.verify.comparison.identical_files import distinct_entries, with_copies
from llmconv.verify.other_exporters.external_graph import ModelSizes
from llmconv.verify.other_exporters.graph_file import MAX_GRAPHS, read_graphs
from llmconv.verify.other_exporters.maps.llmconv import MAP
from llmconv.verify.other_exporters.quantized.plain_model import plain_model
from llmconv.verify.other_exporters.quantized.quantized_matrix import attributes
from llmconv.verify.other_exporters.quantized.schemes import quantized_operators
from llmconv.verify.other_exporters.quantized.slow_layouts import INT8, LEVEL
from llmconv.verify.other_exporters.quantized.stacked_matrices import unstacked
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.other_exporters.run import compare_graph_files
from llmconv.verify.other_exporters.verdicts.quantized import QuantizationOptions
from llmconv.verify.quantized_entries.comparison import compare_entries
from llmconv.verify.reference.cost_estimate import CostEstimate, choose
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check, Report
from llmconv.verify.verification import Checking, Session

OWN_INPUTS = {WRITE_INDICES, INPUTS_EMBEDS}


def is_quantized(models: Mapping[str, onnx.ModelProto]) -> bool:
    """Whether a graph has quantized weights."""
    return any(map(quantized_operators, models.values()))


def compare_quantized_folder(
    compared: VerifiedFolder,
    reference: Path,
    report: Report,
    session: Session,
    eager: Eager | None,
    options: QuantizationOptions,
    *,
    in_any_memory: bool = False,
) -> Checking:
    """Compares all graphs, prefill and decode together.

    Args:
        compared: the graphs.
        reference: the model before it was quantized, or the quantized model whose codes the graphs have.
        report: receives evidence and notes.
        session: the options of the verification.
        eager: an open reference of the model.
        options: options of the cost of quantization.
        in_any_memory: begin even if the memory seems too small.

    Raises:
        InputRefused: the memory is too small.
    """
    yield [*_unrecorded(compared, reference, report, options.preset), *_other_levels(compared, options.preset)]
    entries, copies = distinct_entries(compared.path, compared.entries)
    report.copies = {name: first for first, names in copies.items() for name in names}
    models = {name: model for name, model in compared.models.items() if name not in report.copies}
    if eager is None:
        estimate = CostEstimate.of_quantized(reference, len(entries))
        choose(estimate, False if in_any_memory else None, "quantized graphs are compared whole")
    once = replace(compared, entries=entries, models=models)
    return (yield from with_copies(_of_distinct(once, reference, report, session, eager, options), copies))


def _of_distinct(
    compared: VerifiedFolder,
    reference: Path,
    report: Report,
    session: Session,
    eager: Eager | None,
    options: QuantizationOptions,
) -> Checking:
    """All checks of graphs of which no two are the same bytes; arguments as in `compare_quantized_folder`."""
    result: tuple[Eager | None, Replayable] = (eager, compared)
    with ExitStack() as stack:
        plain = stack.enter_context(plain_model(reference))
        options = replace(options, codes=replace(options.codes, kept=plain.kept))
        if any(_is_own(compared, entry) for entry in compared.entries):
            return (yield from compare_entries(compared, plain.folder, report, session, eager, options, stack))
        for start in range(0, len(compared.entries), MAX_GRAPHS):
            paths = [compared.path / entry.files[0] for entry in compared.entries[start : start + MAX_GRAPHS]]
            files = read_graphs(paths, MAP.name)
            verified = ExternalGraphs(files, ModelSizes({}), session.settings, unstacked(open_weights(plain.folder)))
            result = yield from compare_graph_files(verified, plain.folder, report, session, eager, options, stack)
    return result


def _unrecorded(compared: VerifiedFolder, reference: Path, report: Report, preset: str) -> list[Check]:
    """A failed check of graphs that are as recorded by an export without quantization, of a model without either."""
    as_recorded = [one.graph for one in report.checks if one.name == GRAPH_FILE and one.verdict == "pass"]
    if not _exported(compared) or preset or not as_recorded or read_json(reference / "config.json").get(FIELD):
        return []
    operators = ", ".join(sorted({name for model in compared.models.values() for name in quantized_operators(model)}))
    detail = f"{operators}, but `{MANIFEST}` records an export without `quant` of a model without quantized weights"
    return [Check("structure", as_recorded[0], "", verdict="fail", detail=detail)]


def _other_levels(compared: VerifiedFolder, preset: str) -> list[Check]:
    """A failed check of each graph with products of another level than `export --quant` writes."""
    checks = []
    for name, model in compared.models.items() if preset and _exported(compared) else ():
        products = [node for node in nodes(model) if node.op_type == "MatMulNBits"]
        levels = {attributes(node).get(LEVEL, 0): node for node in products}
        if other := [level for level in levels if level != INT8]:
            found = f"`{levels[other[0]].name or levels[other[0]].output[0]}` has {LEVEL} {other[0]}"
            detail = f"{found}; an export writes {INT8}"
            checks.append(Check("structure", name, "", verdict="fail", detail=detail))
    return checks


def _exported(compared: VerifiedFolder) -> bool:
    """Whether the manifest records an export."""
    return any(step.get("command") == "export" for step in read_manifest(compared.path).steps)


def _is_own(compared: VerifiedFolder, entry: GraphEntry) -> bool:
    """Whether only llmconv's own runner runs a graph."""
    inputs = {port.name for port in compared.models[entry.name].graph.input}
    states = {name for name in inputs if is_past(name) and not MAP.fits(MAP.past, name)}  # of convolutions, recurrences
    own = inputs & OWN_INPUTS or extra_names(dict.fromkeys(inputs, ()))
    return bool(len(entry.files) > 1 or entry.postprocess or entry.prefix or states or own)
