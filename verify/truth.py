"""The reference's side: every output of every call, in float64, with the noise of the graph's dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.export.input_maps import decoder_config
from llmconv.runtime.cache_names import is_state
from llmconv.runtime.eager import EagerRunner
from llmconv.runtime.runner import Cache, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.compare import NoiseFloor, Truth, cache_rows, state_rows
from llmconv.verify.scenarios import Call, Chain, Facts, Scenario
from llmconv.verify.twin import Change, scaled_copy

Truths = list[list[dict[str, Truth]]]
"""By chain, by call, by output."""


class Eager:
    """The model in float64 and in the graph's dtype, and the noise between the two.

    Args:
        folder: of the model.
        dtype: of the graphs.
        keep: remembers what it computed, for several folders with graphs of one model.
    """

    def __init__(self, folder: Path, dtype: str, *, keep: bool = False) -> None:
        self.folder, self.dtype = folder, dtype
        self._kept: dict[str, Truths] | None = {} if keep else None
        self._twins: dict[str, Eager] = {}
        self._exact = EagerRunner(folder, "float64")
        self._rounded = EagerRunner(folder, dtype)
        self._floor = NoiseFloor(dtype)

    def facts(self) -> Facts:
        """What the scenarios must know of the model."""
        config = decoder_config(self._exact.config)
        window = getattr(config, "sliding_window", None)
        limit = getattr(config, "max_position_embeddings", None)
        return Facts(self._exact.vocab_size, limit, window, self._exact.takes_positions)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the cache consists of, by the name of the output: shapes for a batch of one and one token."""
        one = np.zeros((1, 1), dtype=np.int64)
        present = self._exact.prefill(one, one + 1, one).present
        return {name: array.shape for name, array in present.arrays().items()}

    def twin(self, change: Change) -> Eager:
        """The same model with scaled weights."""
        if self._kept is not None and change.name in self._twins:
            return self._twins[change.name]
        with scaled_copy(self.folder, (), change) as copy:
            twin = Eager(copy, self.dtype, keep=self._kept is not None)
        self._twins = {**self._twins, change.name: twin} if self._kept is not None else {}
        return twin

    def truths(self, scenario: Scenario, chains: list[Chain]) -> Truths:
        """Every output of every call."""
        if self._kept is None:
            return [self._chain(chain) for chain in chains]
        if scenario.name not in self._kept:
            self._kept[scenario.name] = [self._chain(chain) for chain in chains]
        return self._kept[scenario.name]

    def _chain(self, chain: Chain) -> list[dict[str, Truth]]:
        runs = zip(run_chain(self._exact, chain), run_chain(self._rounded, chain), strict=True)
        found = []
        for call, (exact, rounded) in zip(chain, runs, strict=True):
            pairs = zip(rows_of(exact).items(), rows_of(rounded).values(), strict=True)
            found.append({name: self._floor.truth(name, a, b, valid_rows(call, name)) for (name, a), b in pairs})
        return found


def run_chain(runner: Runner, chain: Chain) -> list[Step]:
    """Runs the calls one after another, each on the cache of the one before; the first one as prefill."""
    steps: list[Step] = []
    past: Cache | None = None
    for index, call in enumerate(chain):
        run = runner.decode if index else runner.prefill
        steps.append(run(call.input_ids, call.attention_mask, call.position_ids, past))
        past = steps[-1].present
    return steps


def rows_of(step: Step) -> dict[str, Array]:
    """Every output as rows [batch, tokens, features], by name."""
    arrays = step.present.arrays().items()
    return {"logits": step.logits, **{name: state_rows(a) if is_state(name) else cache_rows(a) for name, a in arrays}}


def valid_rows(call: Call, output: str) -> Array:
    """The rows of an output that are not padding; a state is one row for all tokens."""
    if is_state(output):
        return np.ones((len(call.input_ids), 1), dtype=bool)
    return call.valid if output == "logits" else call.attention_mask == 1
