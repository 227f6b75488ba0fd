"""Runners of external graphs: one graph, or a prefill and a decode graph; recorded steps."""

from __future__ import annotations

from collections.abc import Iterator

from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Cache, Extras, Runner, Step, refuse_placed
from llmconv.tensors import Array
from llmconv.verify.other_exporters.external_graph import ExternalGraph


class ExternalRunner(Runner):
    """A prefill and a decode graph; one graph may serve as both."""

    def __init__(self, prefill: ExternalGraph, decode: ExternalGraph) -> None:
        self._prefill, self._decode = prefill, decode

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """Runs the prompt."""
        refuse_placed(placed)
        return self._prefill.run(input_ids, attention_mask, position_ids, past, extras)

    def decode(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
    ) -> Step:
        """Runs a step."""
        return self._decode.run(input_ids, attention_mask, position_ids, past, extras)


class RecordedSteps(Runner):
    """Returns recorded steps in their order."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """The next step."""
        return next(self._steps)
