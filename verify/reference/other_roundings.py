"""Runs of the eager model that round otherwise, for outputs of a few rows, whose noise may be small by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.runner import Runner
from llmconv.tensors import Array
from llmconv.verify.reference.chain_runs import rows_of, run_chain
from llmconv.verify.reference.merged_chain import another_order, joined
from llmconv.verify.results.sigma import ULPS
from llmconv.verify.scenarios.calls import Chain

SEEDS = tuple(range(6))
"""Of the nudged runs."""

EMBEDDED, MULTIPLIED = 0.5, 1.0
"""Largest moves in units in the last place."""

Rows = dict[str, Array]
"""Outputs as rows, by name."""


def other_roundings(model: EagerRunner, runner: Runner, calls: Chain) -> list[Callable[[str], Array]]:
    """Functions from the name of an output of the last call to its rows in another run.

    One run has another order of operations, where one exists; in the others embeddings and products are nudged. Nothing
    is run before its rows are asked for.

    Args:
        model: the model in the graph's dtype.
        runner: runs calls with it.
        calls: the calls up to the one whose outputs are wanted.
    """
    order, new = another_order(calls, runner.extra_inputs), calls[-1].input_ids.shape[1]

    @cache
    def in_another_order() -> Rows:
        assert order
        return rows_of(joined(run_chain(runner, order)), order[0].known)

    @cache
    def after_a_nudge(seed: int) -> Rows:
        with nudged(model, seed):
            return rows_of(run_chain(runner, calls)[-1], calls[-1].known)

    def rows(run: Callable[[], Rows], name: str) -> Array:
        return run()[name][:, -new:] if name == "logits" else run()[name]

    runs: list[Callable[[], Rows]] = [
        *([in_another_order] if order else []),
        *(partial(after_a_nudge, seed) for seed in SEEDS),
    ]
    return [partial(rows, run) for run in runs]


class TorchModel(Protocol):
    """A module that computes in one dtype."""

    dtype: str

    @property
    def model(self) -> Any:
        """The module."""


@contextmanager
def nudged(model: TorchModel, seed: int) -> Iterator[None]:
    """Context in which embeddings and products are moved by a few units in the last place before they are rounded.

    Products of another library differ by as much, since it sums in another order. Nudged embeddings alone change no
    rounding of a residual of 10,000, as first tokens have, to which much smaller products are added.

    Args:
        model: computes in its own dtype.
        seed: of the random moves.
    """
    generator, unit = torch.Generator().manual_seed(seed), ULPS[model.dtype]

    def nudge(units: float, _module: Any, _inputs: Any, computed: torch.Tensor) -> torch.Tensor:
        moves = torch.rand(computed.shape, generator=generator, dtype=torch.float64) - 0.5
        return (computed.double() * (1 + 2 * units * unit * moves)).to(computed.dtype)

    embedding = model.model.get_input_embeddings()
    products = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [embedding.register_forward_hook(partial(nudge, EMBEDDED))]
    hooks += [module.register_forward_hook(partial(nudge, MULTIPLIED)) for module in products]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
