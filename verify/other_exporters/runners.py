"""What runs the calls on foreign graphs: one graph, or the graph of the prompt and that of the steps."""

from __future__ import annotations

from collections.abc import Iterator

from llmconv.runtime.runner import Cache, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.other_exporters.session import ForeignGraph


class ForeignRunner(Runner):
    """The graph of the prompt and that of the steps; one may serve as both."""

    def __init__(self, prefill: ForeignGraph, decode: ForeignGraph) -> None:
        self._prefill, self._decode = prefill, decode

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs the prompt."""
        return self._prefill.run(input_ids, attention_mask, position_ids, past)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs a step."""
        return self._decode.run(input_ids, attention_mask, position_ids, past)


class Replay(Runner):
    """Steps that were run before, in their order."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """The next step."""
        return next(self._steps)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """The next step."""
        return next(self._steps)
