"""Bisection: searches for the first node of a graph that differs from the eager model, after a check failed.

The cache, or else a binary search over the layers' outputs, shows between which layers the fault is. There, every value
is compared with the model's values in the same module (`agreement_trace`), the failing nodes are reduced to the
smallest failing piece (`smallest_piece`), and compared with the model's modules (`findings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from llmconv.errors import OutputFailed, first_line
from llmconv.runtime.cache_names import layer_of
from llmconv.tensors import Array
from llmconv.verify.bisect.agreement import ValueComparison
from llmconv.verify.bisect.agreement_trace import AgreementTrace, GraphIndex
from llmconv.verify.bisect.findings import Suspect, find
from llmconv.verify.bisect.module_scopes import ANYWHERE, ModuleScopes, layer_of_scope
from llmconv.verify.bisect.recording import OUT, RecordedValue
from llmconv.verify.bisect.replay import Replayable, ReplayedCall
from llmconv.verify.bisect.smallest_piece import FailingPiece, TargetValue, smallest_piece
from llmconv.verify.bisect.write_piece import WrittenPiece, write_piece
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check, Report, Where

NOTHING = "nothing to find: every check passed"


def name_node(report: Report, verified: Replayable, eager: Eager | None, minimize: Path | None = None) -> None:
    """Names the first node that differs in `report.where`; other results become notes.

    Args:
        report: of a verification; only gets a note if nothing failed.
        verified: replays the failed call.
        eager: the reference; None if no graph could be run.
        minimize: a new folder for the smallest failing piece; None for none.

    Raises:
        OutputFailed: the piece cannot be written.
    """
    if report.where is None:
        report.notes.append(NOTHING if report.verdict == "pass" else "nothing to find: no check failed")
        return
    if eager is None:
        report.notes.append("no node named: only a graph with a cache that runs is searched")
        return
    written = None
    try:
        with verified.replayed(report.where, eager) as replay:
            if replay:
                search = NodeSearch(replay, report.where, report.checks)
                report.where = search.run()
                written = search.write(report.where, minimize)
    except OutputFailed:
        raise
    except Exception as error:  # an error in the search must not change the verdict
        report.notes.append(f"no node named: {first_line(error)}")
    if not report.where.node and not report.where.finding:
        report.notes.append("no node named: the values of no module could be compared")
    if minimize:
        report.notes.append(_written_text(minimize, written))


def _written_text(folder: Path, written: WrittenPiece | None) -> str:
    if written is None:
        return f"nothing written to `{folder}`: no piece of the graph fails by itself"
    return f"{written.nodes} node{'s' * (written.nodes > 1)} with inputs in `{folder}`, {written.difference}"


@dataclass(frozen=True)
class LayerRange:
    """Layers whose values are compared one by one.

    Attributes:
        first: first layer; nodes outside the layers are always included.
        last: last layer.
        output: a wrong value.
    """

    first: int
    last: int
    output: str


class NodeSearch:
    """Searches for the first node that differs.

    Args:
        replay: the failed call.
        where: the known location of the failure.
        checks: of the whole run, for the results of the weight audit.
    """

    def __init__(self, replay: ReplayedCall, where: Where, checks: Sequence[Check]) -> None:
        self.replay, self.where, self.checks = replay, where, checks
        self.index = GraphIndex(replay.probe.model)
        self.scopes = ModuleScopes(name for name, _ in replay.model.named_modules())
        self.layers = {id(node): layer_of_scope(self.scopes.of(node)) for node in self.index.nodes}
        self.comparison = ValueComparison(replay.dtype, replay.call, replay.virtual)
        self._found: tuple[AgreementTrace, FailingPiece | None] | None = None

    def run(self) -> Where:
        """The location of the failure, with the node if it is found."""
        if all(self.scopes.of(node) == ANYWHERE for node in self.index.nodes):
            return replace(self.where, text=f"{self.where.text}; no node is named after a module of the model")
        layers = self._layer_range()
        trace = self._trace(layers)
        piece = None
        if trace.back_from(layers.output):
            target = TargetValue(layers.output, self._expected(layers, trace))
            piece = smallest_piece(trace, self.replay.probe, self.replay.feeds, target)
        self._found = (trace, piece)
        finding = find(Suspect(self.replay, self.where, self.checks, trace, piece))
        node = (finding.node if finding else None) or (piece.node if piece else None)
        return self._text(finding.text if finding else "", node, trace.scope(node) if node is not None else "")

    def write(self, where: Where, folder: Path | None) -> WrittenPiece | None:
        """Writes the piece that `run` found; None without a piece or folder."""
        trace, piece = self._found or (None, None)
        if folder is None or trace is None or piece is None:
            return None
        return write_piece(folder, piece, trace, self.replay, where)

    def _layer_range(self) -> LayerRange:
        """The layers of the fault, from the compared outputs or by binary search."""
        last = max((layer for layer in self.layers.values() if layer is not None), default=0)
        cached = {layer for name in self.index.outputs if (layer := layer_of(name)) is not None}
        reached = self.where.layer
        if reached is None:
            first, layers_last = max(cached, default=last + 1), last
        else:
            first, layers_last = max((layer for layer in cached if layer < reached), default=0), reached
        if first == 0 or self._agrees_after(first - 1):
            return LayerRange(first, layers_last, self.where.output)
        low, high = 0, first - 1  # the first layer with a wrong output is between `low` and `high`
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._agrees_after(middle) else (low, middle)
        return LayerRange(low, low, self._crossing(low)[-1])

    def _crossing(self, layer: int) -> list[str]:
        """Values of a layer that are used after it."""
        return [
            name
            for node in self.index.nodes
            if self.layers[id(node)] == layer and not self.index.is_shape(node)
            for name in node.output
            if any(self._is_after(self.layers[id(user)], layer) for user in self.index.users[name])
        ]

    @staticmethod
    def _is_after(layer: int | None, other: int) -> bool:
        return layer is None or layer > other

    def _agrees_after(self, layer: int) -> bool:
        """Whether the layer's output agrees, also if it cannot be determined.

        A fused norm may add the residual, so that the output is computed in the next layer.
        """
        found = self.replay.record(lambda scope: layer_of_scope(scope) == layer and scope.endswith(f".{layer}"))
        records = [record for record in found if record.op == OUT]
        handed = self._read_like(records, self._crossing(layer))
        if not handed or self._any_agrees(records, handed):
            return True
        following = [node for node in self.index.nodes if self.layers[id(node)] in (layer + 1, None)]
        fused = [name for node in following if "Norm" in node.op_type for name in node.output if name]
        return self._any_agrees(records, self._read_like(records, fused))

    def _read_like(self, records: Sequence[RecordedValue], names: Sequence[str]) -> dict[str, Array]:
        """The values of these names that have as many elements as one of the records."""
        values = self.replay.probe.read(self.replay.feeds, names)
        sizes = {record.exact.size for record in records}
        return {name: value for name, value in values.items() if value.size in sizes}

    def _any_agrees(self, records: Sequence[RecordedValue], values: Mapping[str, Array]) -> bool:
        return any(self.comparison.agrees(record, value) for record in records for value in values.values())

    def _trace(self, layers: LayerRange) -> AgreementTrace:
        """Compares every value of the layers with the model's."""

        def is_before(layer: int | None, first: int) -> bool:
            return layer is not None and layer < first

        before = [node for node in self.index.nodes if is_before(self.layers[id(node)], layers.first)]
        trusted = [name for node in before for name in node.output if name]
        nodes = [node for node in self.index.before(layers.output, trusted) if not self.index.is_shape(node)]
        read = {name for node in nodes for name in node.input if name in self.index.maker}
        names = list(dict.fromkeys([*(name for node in nodes for name in node.output if name), *sorted(read)]))
        values = self.replay.probe.read(self.replay.feeds, names)
        # with a fused norm, nodes of the first layer compute the output of the layer before
        records = self.replay.record(lambda scope: not is_before(layer_of_scope(scope), layers.first - 1))
        return AgreementTrace(self.index, self.scopes, values, records, self.comparison, trusted)

    def _expected(self, layers: LayerRange, trace: AgreementTrace) -> RecordedValue | None:
        """The model's value at the end of the range: an output of the graph or of a layer; None for other values."""
        if layers.output not in self.index.outputs:
            return next((r for r in trace.ports if r.op == OUT and r.scope.endswith(f".{layers.last}")), None)
        return self.replay.outputs().get(layers.output)

    def _text(self, finding: str, node: onnx.NodeProto | None, scope: str) -> Where:
        """The location with its text."""
        place = f"{self.where.scenario}, {self.where.graph}, step {self.where.step}"
        if node is None:
            text = f"{finding} ({place})" if finding else self.where.text
            return replace(self.where, finding=finding, text=text)
        text = finding or f"first node that differs: `{node.name}` ({node.op_type})"
        text = f"{short(scope) or node.name}: {text} ({place})"
        layer = layer_of_scope(scope)
        return replace(self.where, layer=layer, node=node.name, scope=scope, finding=finding, text=text)


def short(scope: str) -> str:
    """A scope without the model's prefix: `layers.7.mlp` of `model.layers.7.mlp`."""
    first, _, rest = scope.partition(".")
    return rest if rest and first in {"model", "transformer", "gpt_neox", "backbone"} else scope
