"""Bisect: the first node of a graph that differs from the eager model, after a check has failed.

The cache says between which layers the fault lies; where it does not, the outputs of layers are searched by halves. There
every value is compared with what the model computes in the same module (`trail`), the piece that is wrong is cut down to
what can be shown to be wrong (`proof`), and compared with what the module holds (`findings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmconv.errors import LlmconvError
from llmconv.runtime.cache_names import layer_of
from llmconv.verify.agreement import Comparison
from llmconv.verify.findings import Suspect, find
from llmconv.verify.proof import Piece, Target, smallest_piece
from llmconv.verify.recording import OUT, Record
from llmconv.verify.replay import Folder, Replay, replayed
from llmconv.verify.report import Check, Where
from llmconv.verify.scopes import ANYWHERE, Scopes, layer_of_scope
from llmconv.verify.trail import Trail, Wiring
from llmconv.verify.truth import Eager


def bisect(where: Where, checks: Sequence[Check], folder: Folder, eager: Eager) -> Where:
    """What `where` says, with the node where it could be found.

    Args:
        where: the first check that failed.
        checks: all of them.
        folder: what was verified.
        eager: the reference.
    """
    try:
        with replayed(where, folder, eager) as replay:
            if replay is None:
                return where
            found = Search(replay, where, checks).run()
    except LlmconvError as error:
        return replace(where, text=f"{where.text}; no node named: {error.message}")
    return found


@dataclass(frozen=True)
class Window:
    """Layers that are compared value by value.

    Attributes:
        first, last: layers; what lies outside the layers always belongs to it.
        output: a value that is wrong.
    """

    first: int
    last: int
    output: str


class Search:
    """Looks for the node.

    Args:
        replay: the call that failed.
        where: what is known of it.
        checks: of the whole run, for what the weight audit says.
    """

    def __init__(self, replay: Replay, where: Where, checks: Sequence[Check]) -> None:
        self.replay, self.where, self.checks = replay, where, checks
        self.wiring = Wiring(replay.tapped.model)
        self.scopes = Scopes(name for name, _ in replay.model.named_modules())
        self.layers = {id(node): layer_of_scope(self.scopes.of(node.name)) for node in self.wiring.nodes}
        self.comparison = Comparison(replay.dtype, replay.call, replay.virtual)

    def run(self) -> Where:
        """The answer."""
        if all(self.scopes.of(node.name) == ANYWHERE for node in self.wiring.nodes):
            return replace(self.where, text=f"{self.where.text}; no node is named after a module of the model")
        window = self._window()
        trail = self._trail(window)
        if not trail.back_from(window.output):
            return self._told(find(self._suspect(trail, None)), None, "")
        target = Target(window.output, self._expected(window, trail))
        piece = smallest_piece(trail, self.replay.tapped, self.replay.feeds, target)
        return self._told(find(self._suspect(trail, piece)), piece, trail.scope(piece.node))

    def _window(self) -> Window:
        """The layers of the fault, from the outputs that were compared, or by halves."""
        last = max((layer for layer in self.layers.values() if layer is not None), default=0)
        cached = {layer for name in self.wiring.outputs if (layer := layer_of(name)) is not None}
        reached = self.where.layer
        if reached is None:
            first, window_last = max(cached, default=last + 1), last
        else:
            first, window_last = max((layer for layer in cached if layer < reached), default=0), reached
        if first == 0 or self._agrees_after(first - 1):
            return Window(first, window_last, self.where.output)
        low, high = 0, first - 1  # some layer up to `high` is the first whose output is wrong
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._agrees_after(middle) else (low, middle)
        return Window(low, low, self._crossing(low)[0])

    def _crossing(self, layer: int) -> list[str]:
        """Values that a layer hands to what comes after it."""
        return [
            name
            for node in self.wiring.nodes
            if self.layers[id(node)] == layer and not self.wiring.is_shape(node)
            for name in node.output
            if any(self._is_after(self.layers[id(user)], layer) for user in self.wiring.users[name])
        ]

    @staticmethod
    def _is_after(layer: int | None, other: int) -> bool:
        return layer is None or layer > other

    def _agrees_after(self, layer: int) -> bool:
        """Whether the layer's output agrees; yes where it cannot be told."""
        names = self._crossing(layer)
        values = self.replay.tapped.read(self.replay.feeds, names)
        records = [
            record
            for record in self.replay.record(lambda scope: layer_of_scope(scope) == layer and scope.endswith(f".{layer}"))
            if record.op == OUT
        ]
        pairs = [(record, value) for record in records for value in values.values() if value.size == record.exact.size]
        return not pairs or any(self.comparison.agrees(record, value) for record, value in pairs)

    def _trail(self, window: Window) -> Trail:
        """Every value of the window beside the model's."""

        def is_before(layer: int | None) -> bool:
            return layer is not None and layer < window.first

        trusted = [name for node in self.wiring.nodes if is_before(self.layers[id(node)]) for name in node.output]
        nodes = [node for node in self.wiring.before(window.output, trusted) if not self.wiring.is_shape(node)]
        read = {name for node in nodes for name in node.input if name in self.wiring.maker}
        names = list(dict.fromkeys([*(name for node in nodes for name in node.output if name), *sorted(read)]))
        values = self.replay.tapped.read(self.replay.feeds, names)
        records = self.replay.record(lambda scope: not is_before(layer_of_scope(scope)))
        return Trail(self.wiring, self.scopes, values, records, self.comparison, trusted)

    def _expected(self, window: Window, trail: Trail) -> Record | None:
        """The model's value where the window ends: an output of the graph, or of a layer; None for other results."""
        if window.output not in self.wiring.outputs:
            return next((r for r in trail.ports if r.op == OUT and r.scope.endswith(f".{window.last}")), None)
        return self.replay.outputs().get(window.output)

    def _suspect(self, trail: Trail, piece: Piece | None) -> Suspect:
        return Suspect(self.replay, self.where, self.checks, trail, piece)

    def _told(self, finding: str, piece: Piece | None, scope: str) -> Where:
        """The answer in words."""
        place = f"{self.where.scenario}, {self.where.graph}, step {self.where.step}"
        if piece is None:
            text = f"{finding} ({place})" if finding else self.where.text
            return replace(self.where, finding=finding, text=text)
        node = piece.node
        layer = layer_of_scope(scope)
        told = finding or f"first node that differs: `{node.name}` ({node.op_type})"
        text = f"{short(scope) or node.name}: {told} ({place})"
        return replace(self.where, layer=layer, node=node.name, scope=scope, finding=finding, text=text)


def short(scope: str) -> str:
    """Without the model's own prefix: `layers.7.mlp` of `model.layers.7.mlp`."""
    first, _, rest = scope.partition(".")
    return rest if rest and first in {"model", "transformer", "gpt_neox", "backbone"} else scope
