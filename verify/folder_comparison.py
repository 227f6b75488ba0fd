"""Compares the graphs of a folder with the eager model: those in half precision also as copies in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from llmconv.checkpoint import read_json
from llmconv.runtime.onnxruntime.float32_graph import HALF_PRECISION
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.guard import is_external
from llmconv.runtime.onnxruntime.session_settings import CPU, provider_name
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.half_precision import (
    IN_FLOAT32,
    ROUNDED,
    WITHOUT_KERNELS,
    round_every_value,
    widen,
)
from llmconv.verify.comparison.known_constants import KnownConstants
from llmconv.verify.comparison.layer_by_layer import StreamedEager, open_in_pieces
from llmconv.verify.comparison.run import FolderComparison, GraphOpener, open_graphs
from llmconv.verify.layers.induction import Induction
from llmconv.verify.layers.layer_checks import PART_BYTES, Drift, SingleLayerChecks
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import SCALED_SCENARIOS
from llmconv.verify.results.report import Check, Report
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import Checking


@dataclass(frozen=True)
class Compared:
    """A folder that is compared with its model.

    Attributes:
        verified: the graphs.
        reference: the model's folder.
        report: receives evidence and notes.
        selection: the scenarios.
        code: the reference's folder where its own code is trusted.
        layered: run layer by layer.
        induction: the classes of layers, of which one each runs the scenarios; None to run all layers.
        drift: receives the errors of single layers.
    """

    verified: VerifiedFolder
    reference: Path
    report: Report
    selection: Selection
    code: Path | None
    layered: bool
    induction: Induction | None = None
    drift: Drift = field(default_factory=lambda: Drift([], []))

    @property
    def on_cpu(self) -> bool:
        """Whether onnxruntime's CPU provider runs the graphs."""
        return provider_name(self.verified.settings.provider) == CPU

    def eager(self, dtype: str, known: Eager | None) -> Eager:
        """The reference with the noise of a dtype; `known` is an open reference of the model."""
        skipped = self.induction.left_out(self.induction.kept) if self.induction else frozenset()
        fixed = self.verified.entries[0].fixed_inputs
        options: dict[str, Any] = {"code": self.code, "skipped": skipped, "fixed_inputs": fixed}
        if self.layered:
            return StreamedEager(self.reference, dtype, selection=self.selection, **options)
        return known.in_dtype(dtype).with_fixed(fixed) if known else Eager(self.reference, dtype, **options)

    def run(self, known: Eager | None, dtype: str = "", *, is_half: bool = False) -> Checking:
        """Opens the graphs and runs the scenarios.

        Args:
            known: an open reference of the model, if any.
            dtype: of the noise (default: that of the graphs).
            is_half: the graphs round to half precision: original weights and settings only, calmest rows if routed.
        """
        verified, opener = self.verified, self._opener()
        if self.induction:
            verified = self.induction.shortened(verified)
        graphs = yield from open_graphs(opener, verified.path, verified.entries, verified.settings)
        if not graphs:
            return known, verified
        eager = self.eager(dtype or graphs[0].dtype.name, known)
        files = verified.path, verified.models, verified.settings
        kinds = verified.named, not is_half, is_half and any(map(routes, verified.models.values()))
        comparison = FolderComparison(eager, *files, self.selection, self.report, opener, *kinds)
        yield from comparison.checks(graphs)
        if self.induction:
            eager.release()
            yield from self._single_layers(eager.dtype).checks()
        return eager, verified

    def _opener(self) -> GraphOpener:
        """Opens graphs whole, or in pieces: smaller ones if few layers run."""
        if not self.layered:
            return open_graph
        return partial(open_in_pieces, piece_bytes=PART_BYTES) if self.induction else open_in_pieces

    def _single_layers(self, dtype: str) -> SingleLayerChecks:
        assert self.induction is not None
        verified = self.verified
        settings = replace(verified.settings, change=None)  # the models are changed already
        files = verified.path, verified.models, self.reference
        return SingleLayerChecks(self.induction, *files, dtype, settings, self.code, verified.named, self.drift)

    def changed(self, change: Callable[[onnx.ModelProto], None], named: str) -> Compared:
        """The same folder with graphs that are changed in memory; arguments as in `VerifiedFolder.changed`."""
        return replace(self, verified=self.verified.changed(change, named))

    def few(self) -> Compared | None:
        """The same folder with the scenarios that are also run on scaled weights; None if none was selected."""
        names = [row.name for row in self.selection.scenarios() if row.name in SCALED_SCENARIOS]
        return replace(self, selection=replace(self.selection, only=names)) if names else None


def compare_half_precision(compared: Compared, half: str, known: Eager | None) -> Checking:
    """Runs all scenarios on the graphs, a few with every value rounded, and all on copies that compute in float32.

    Args:
        compared: the folder.
        half: dtype of the graphs, `float16` or `bfloat16`.
        known: an open reference of the model, if any.

    Returns:
        The reference and the graphs in which a faulty node is searched: the float32 copies.
    """
    kind = HALF_PRECISION[half]
    rounding = partial(round_every_value, half=kind)
    compared.report.notes += _notes(half, on_cpu=compared.on_cpu)
    if half == WITHOUT_KERNELS and compared.on_cpu:
        eager, _ = yield from compared.changed(rounding, "").run(known, half, is_half=True)
    else:
        eager, _ = yield from compared.run(known, half, is_half=True)
        if few := compared.few():
            yield from few.changed(rounding, ROUNDED).run(eager, half, is_half=True)
    if eager is None:
        return eager, compared.verified
    constants = KnownConstants.of(read_json(compared.reference / "config.json"), eager.rotary_frequencies())
    models = compared.verified.models.items()
    if unknown := [check for name, model in models for check in unknown_tables(name, model, kind, constants)]:
        compared.report.unseen.append("faults that the rounding of half precision hides")
        yield unknown
        return eager, compared.verified
    return (yield from compared.changed(partial(widen, half=kind, known=constants), IN_FLOAT32).run(eager, "float32"))


def unknown_tables(name: str, model: onnx.ModelProto, kind: int, known: KnownConstants) -> list[Check]:
    """Skipped checks for tables that the model's code rounds to half precision, so that no float32 copy is exact.

    Args:
        name: of the graph.
        model: the graph without its weights.
        kind: the half-precision element type.
        known: constants of the model.
    """
    blank = Check(IN_FLOAT32.removeprefix(", "), name, "", verdict="skip")
    tables = [tensor for tensor in model.graph.initializer if tensor.data_type == kind and not is_external(tensor)]
    detail = "`{}` is a table that the model's code rounds: a float32 copy would keep its rounding"
    return [
        replace(blank, detail=detail.format(t.name)) for t in tables if not known.is_exact(numpy_helper.to_array(t))
    ]


def routes(model: onnx.ModelProto) -> bool:
    """Whether a graph chooses experts for each token; the likeliest tokens of `--postprocess topk:K` are outputs."""
    results = {port.name for port in model.graph.output}
    return any(node.op_type == "TopK" and not results.intersection(node.output) for node in model.graph.node)


def _notes(half: str, *, on_cpu: bool) -> list[str]:
    notes = [f"the graphs compute in {half}; scenarios named `…{IN_FLOAT32}` run copies with the same weights"]
    if half == WITHOUT_KERNELS and on_cpu:
        notes.append(f"onnxruntime's CPU has no {half} kernels: nodes run in float32, results are rounded")
    return notes
