"""Runs of the eager model that round otherwise, for outputs whose noise may be small by chance in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.runner import Runner
from llmconv.tensors import Array
from llmconv.verify.library_patches import TorchDispatchMode
from llmconv.verify.reference.chain_runs import rows_of, run_chain
from llmconv.verify.reference.merged_chain import another_order, joined
from llmconv.verify.results.sigma import ULPS
from llmconv.verify.scenarios.calls import Chain

SEEDS = tuple(range(6))
"""Of the nudged runs."""

aten = torch.ops.aten
EMBEDDED, COMPUTED = 0.5, 1.0
SUMS = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "mean",
    "sum",
    "cumsum",
    "_softmax",
    "logsumexp",
)
NORMS = "native_layer_norm", "native_group_norm"
FORMULAS = "exp", "log", "log1p", "rsqrt", "sqrt", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "erf", "softplus"
MOVED = {aten.embedding: EMBEDDED, **{getattr(aten, name): COMPUTED for name in (*SUMS, *NORMS, *FORMULAS)}}
"""Largest moves of the results of operators, in units in the last place."""

Rows = dict[str, Array]
"""Outputs as rows, by name."""


def other_roundings(model: EagerRunner, runner: Runner, calls: Chain) -> list[Callable[[str], Array]]:
    """Functions from the name of an output of the last call to its rows in another run.

    One run has another order of operations, where one exists; in the others operators are nudged. Nothing is run before
    its rows are asked for.

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
        with nudged(seed):
            return rows_of(run_chain(runner, calls)[-1], calls[-1].known)

    def rows(run: Callable[[], Rows], name: str) -> Array:
        return run()[name][:, -new:] if name == "logits" else run()[name]

    runs: list[Callable[[], Rows]] = [
        *([in_another_order] if order else []),
        *(partial(after_a_nudge, seed) for seed in SEEDS),
    ]
    return [partial(rows, run) for run in runs]


class _Nudges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the results of operators that libraries compute in different ways; operators inside it see no mode.

    Args:
        seed: of the random moves.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = func(*args, **(kwargs or {}))
        units = MOVED.get(func.overloadpacket)
        if units is None:
            return computed
        if isinstance(computed, tuple):  # a norm, with its statistics
            return self._moved(computed[0], units), *computed[1:]
        return self._moved(computed, units)

    def _moved(self, computed: torch.Tensor, units: float) -> torch.Tensor:
        unit = ULPS.get(str(computed.dtype).removeprefix("torch."))
        if unit is None:
            return computed
        moves = torch.rand(computed.shape, generator=self._generator, dtype=torch.float64) - 0.5
        return (computed.double() * (1 + 2 * units * unit * moves)).to(computed.dtype)


@contextmanager
def nudged(seed: int) -> Iterator[None]:
    """Context in which operators that libraries compute differently are moved by up to a last place.

    Products of another library sum in another order; its exponentials, roots, sines and norms are other formulas.
    Nudged embeddings alone change no rounding of a residual of 10,000, as first tokens have, to which much smaller
    numbers are added.

    Args:
        seed: of the random moves.
    """
    with _Nudges(seed):
        yield
