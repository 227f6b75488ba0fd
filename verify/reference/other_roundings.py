"""Runs of the eager model that round differently, for outputs whose noise may be small by chance in one run.

The float64 outputs of a chain of calls are computed in one call of all tokens, which saves most of the reference's
time. With causal attention, a prompt in pieces and the whole prompt give the same values; in float64 they differ by far
less than the measured noise. Where that does not hold (frequencies that depend on the length, states, attention that
selects among the present keys), the outputs differ from the call-by-call run in the graph's dtype by more than noise
explains (`is_another`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from llmconv.checkpoint import read_json
from llmconv.runtime.eager.limit_margins import ModelLimit
from llmconv.runtime.extra_inputs import SEQUENCE, TOTAL, ExtraInput, is_state, part
from llmconv.runtime.library_patches import TorchDispatchMode
from llmconv.runtime.runner import ArrayCache, Cache, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.results import Check
from llmconv.verify.scenarios.calls import Call, Chain, PastEdit
from llmconv.verify.scenarios.table import Scenario
from llmconv.verify.sigma import ULPS, ExpectedOutput, cache_rows, state_rows

SEEDS = tuple(range(6))  # of the nudged runs

aten = torch.ops.aten
EMBEDDED, COMPUTED = 0.5, 1.0
PRODUCTS = "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "convolution"
SUMS = "mean", "sum", "cumsum", "_softmax", "logsumexp"
NORMS = "native_layer_norm", "native_group_norm"
FORMULAS = "exp", "log", "log1p", "rsqrt", "sqrt", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "erf", "softplus"
MOVED = {aten.embedding: EMBEDDED, **{getattr(aten, name): COMPUTED for name in (*PRODUCTS, *SUMS, *NORMS, *FORMULAS)}}
"""Largest moves of the results of operators, in units in the last place."""

Rows = dict[str, Array]  # outputs as rows, by name
Run = Callable[[str], Array]  # from the name of an output to its rows


def other_roundings(runner: Runner, chain: Chain) -> list[tuple[list[Run], list[Run]]]:
    """For each call, runs in another order of operations, where one exists, and runs with nudged operators.

    Nothing is run before its rows are asked for, and each call once per seed. `runner` is in the graph's dtype.
    """
    nudges = {seed: (_Nudges(seed), steps_of(runner, chain), list[Rows]()) for seed in SEEDS}

    def after_a_nudge(at: int, seed: int) -> Rows:
        mode, steps, found = nudges[seed]
        while len(found) <= at:
            with mode:
                step = next(steps)
            found.append(outputs_of(step, chain[len(found)].known))
        return found[at]

    def of_call(at: int) -> tuple[list[Run], list[Run]]:
        order, new = another_order(chain[: at + 1], runner.extra_inputs), chain[at].input_ids.shape[1]

        @cache
        def in_another_order() -> Rows:
            assert order
            return outputs_of(joined(run_chain(runner, order)), order[0].known)

        def rows(run: Callable[[], Rows], name: str) -> Array:
            return run()[name][:, -new:] if name == "logits" else run()[name]

        orders: list[Run] = [partial(rows, in_another_order)] if order else []
        return orders, [partial(rows, partial(after_a_nudge, at, seed)) for seed in SEEDS]

    return [of_call(at) for at in range(len(chain))]


class _Nudges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the results of operators that libraries compute in different ways; operators inside it see no mode."""

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
    """Context in which operators that libraries compute differently are moved by up to a last place, at random.

    Products of another library sum in another order; its exponentials, roots, sines and norms are other formulas.
    Nudged embeddings alone change no rounding of a residual of 10,000, as first tokens have, to which much smaller
    numbers are added.
    """
    with _Nudges(seed):
        yield


LEAST = 3
"""Minimum number of calls to merge; for fewer, a merged call that turns out to differ costs more than it saves."""


class MergedPrefix(ArrayCache):
    """The first tokens of the cache of a merged call."""


Inputs = Mapping[str, ExtraInput]  # the extra inputs of a model by name, resolved


def one_call(calls: Sequence[Call], inputs: Inputs) -> Call | None:
    """All tokens of consecutive calls in one call.

    None for a single call, an edited cache, a past with states, which transformers continues only token by token, or an
    extra input of the model whose value for all tokens is not that of the calls.
    """
    start = calls[0].start
    if (
        len(calls) < 2
        or any(call.edit != PastEdit() for call in calls)
        or (start and any(map(is_state, start.shapes)))
        or not all(_divides(extra, calls) for extra in inputs.values())
    ):
        return None
    ids = np.concatenate([call.input_ids for call in calls], axis=1)
    positions = np.concatenate([call.position_ids for call in calls], axis=1)
    given = [call.extras or {} for call in calls]
    extras = {name: _joined([one[name] for one in given], inputs[name]) for name in given[0]}
    return Call(ids, calls[-1].attention_mask, positions, start=start, known=calls[0].known, extras=extras)


def _divides(extra: ExtraInput, calls: Sequence[Call]) -> bool:
    """Whether the value of an input for several calls consists of its values in each."""
    given = [(call.extras or {}).get(extra.name) for call in calls]
    is_hook = callable(extra.default) and given[0] is None
    joins = bool(extra.both_ways) and any(array is not None and array.any() for array in given)
    return not is_hook and not joins and not {SEQUENCE, TOTAL} <= set(extra.axes)


def _joined(values: Sequence[Array], extra: ExtraInput) -> Array:
    return np.concatenate(values, axis=extra.axes.index(SEQUENCE)) if SEQUENCE in extra.axes else values[-1]


def another_order(calls: Sequence[Call], inputs: Inputs) -> Chain | None:
    """The same tokens in other calls, which round differently: several calls as one, or one call as several.

    None where no other order exists: a single prompt, an edited cache, states after a past, and as for `one_call`.
    """
    whole, first = one_call(calls, inputs), calls[0]
    if whole is not None:
        return [whole]
    if len(calls) > 1 or not first.start or first.input_ids.shape[1] < 2 or any(map(is_state, first.start.shapes)):
        return None
    if not all(_divides(extra, calls) for extra in inputs.values()):
        return None
    return [_one_token(first, at, inputs) for at in range(first.input_ids.shape[1])]


def _one_token(call: Call, at: int, inputs: Inputs) -> Call:
    new, total = call.input_ids.shape[1], call.attention_mask.shape[1]
    one = replace(
        call,
        input_ids=call.input_ids[:, at : at + 1],
        attention_mask=call.attention_mask[:, : total - new + at + 1],
        position_ids=call.position_ids[:, at : at + 1],
        start=None if at else call.start,
    )
    extras = {name: part(inputs[name], array, one.tokens, at) for name, array in (call.extras or {}).items()}
    return replace(one, extras=extras)


def joined(steps: Sequence[Step]) -> Step:
    """Consecutive steps as one: all logits, and the last cache."""
    return replace(steps[-1], logits=np.concatenate([step.logits for step in steps], axis=1))


def merged_steps(runner: Runner, chain: Chain) -> list[Step] | None:
    """The steps of a chain from one merged call; None where the calls cannot be merged."""
    whole = one_call(chain, runner.extra_inputs)
    if whole is None:
        return None
    step = runner.prefill(*whole.tokens.arrays, whole.start, whole.extras)
    arrays, done, steps = step.present.arrays(), 0, []
    if any(map(is_state, arrays)):
        return None
    for call in chain:
        new = slice(done, done + call.input_ids.shape[1])
        missing = whole.attention_mask.shape[1] - call.attention_mask.shape[1]
        present = {name: array[:, :, : array.shape[2] - missing] for name, array in arrays.items()}
        steps.append(
            replace(step, logits=step.logits[:, new], present=MergedPrefix(present, step.present.length - missing))
        )
        done = new.stop
    return steps


def are_merged(steps: Sequence[Step]) -> bool:
    return isinstance(steps[0].present, MergedPrefix)


def is_another(outputs: Iterable[dict[str, ExpectedOutput]]) -> bool:
    """Whether an output differs from the rounded run by more than noise explains, or is NaN."""
    return any(not truth.excess <= 1 for call in outputs for truth in call.values())


def run_chain(runner: Runner, chain: Chain) -> list[Step]:
    """Runs the calls one after another, each on the cache of the previous; the first one as prefill."""
    return list(steps_of(runner, chain))


def steps_of(runner: Runner, chain: Chain) -> Iterator[Step]:
    past: Cache | None = None
    for index, call in enumerate(chain):
        run = runner.decode if index else runner.prefill
        step = run(*call.tokens.arrays, edited(past, call), call.extras)
        past = step.present
        yield step


def edited(past: Cache | None, call: Call) -> Cache | None:
    """The cache that a call continues: the edited cache of the previous call, or a synthetic past."""
    return call.start or (call.edit.apply(past, call.past_mask) if past else None)


def outputs_of(step: Step, known: int = 0) -> dict[str, Array]:
    """Every output as rows [batch, tokens, features], by name; keys and values without the first `known` tokens."""
    arrays = step.present.arrays().items()
    cached = {name: state_rows(a) if is_state(name) else cache_rows(a[:, :, known:]) for name, a in arrays}
    return {"logits": step.logits, **cached}


def valid_rows(call: Call, output: str) -> Array:
    """Which rows of an output are not padding, bool [batch, tokens]; a state has one row."""
    if is_state(output):
        return np.ones((len(call.input_ids), 1), dtype=bool)
    valid: Array = call.attention_mask[:, call.known :] == 1
    return call.valid if output == "logits" else valid


@dataclass(frozen=True)
class WeightScaling:
    """A set of weights and the factor, a power of two, that they are multiplied by."""

    name: str  # as printed after the scenario's name
    pattern: str  # regular expression; matrices whose names contain a match are scaled
    factor: float  # a power of two
    bug: str  # the faults that it exposes
    hidden: tuple[str, ...]  # the same faults one by one, as a run without it could not have found them

    def factor_of(self, name: str, shape: Sequence[int]) -> float:
        """The factor of a tensor, by its name in a safetensors file and its shape; 1 if it is not scaled."""
        return self.factor if len(shape) > 1 and re.search(self.pattern, name) else 1.0

    def scenario(self, row: Scenario) -> Scenario:
        return replace(row, name=f"{row.name}, {self.name}", bug=self.bug)


INPUTS = r"q_proj|k_proj|c_attn|query_key_value|qkv|gate_proj|up_proj|gate_up|c_fc|fc1|fc_in|dense_h_to_4h"
SOFTCAP = "a dropped softcap"

SCALINGS = (
    WeightScaling(
        "louder weights",
        INPUTS,
        4.0,
        "softcap dropped, activation in another form",
        (SOFTCAP, "an activation in another form"),
    ),
    WeightScaling(
        "fainter weights",
        "",
        1 / 32,
        "a norm's epsilon of another value or in another place",
        ("a norm's epsilon of another value or in another place",),
    ),
)

TARGET_SHARE = 1.5  # the share of a limit that scaled weights should reach
SCALED_SCENARIOS = ("prefill, 7 tokens", "batch of 3")  # scenarios that run on scaled weights
LOUDEST = f"{INPUTS}|v_proj|w1|w3|Wqkv|lm_head|embed_out"
LARGEST_FACTOR = 256.0


def loudest(factor: float) -> WeightScaling:
    """Weights so large that activations reach the limits of the model."""
    bug = "a Clip or a softcap dropped that no activation reaches"
    return WeightScaling(f"weights x {factor:g}", LOUDEST, factor, bug, (bug,))


def hidden_faults(left: Iterable[WeightScaling], reference: Path) -> list[str]:
    """Descriptions of the faults that only the scalings not run (`left`) show; no softcap where the model has none."""
    config = json.dumps(read_json(reference / "config.json"))
    caps = bool(re.search(r"softcap[a-z_]*\": *[0-9]", config))
    return [fault for scaling in left for fault in scaling.hidden if caps or fault != SOFTCAP]


def scaling_of(scenario: str) -> WeightScaling | None:
    """The scaling that a scenario's name ends with; None if it ends with none."""
    known = next((scaling for scaling in SCALINGS if scenario.endswith(f", {scaling.name}")), None)
    found = re.search(r", weights x (\d+)$", scenario)
    return loudest(float(found.group(1))) if found else known


def scalings(eager: LimitShares) -> Iterator[WeightScaling]:
    """The scalings that a model is verified with; later ones depend on the limits that earlier ones reached."""
    yield from SCALINGS
    largest = 0.0
    for share in (median, min):  # most limits first, then the rest: too large a factor turns everything else into noise
        own = eager.own_shares()
        low = [max(own.get(place, 0.0), 1 / LARGEST_FACTOR) for place in unreached(eager) if not place.is_floor]
        factor = (
            min(max(2.0 ** ceil(log2(TARGET_SHARE / share(low))), 8.0, 8 * largest), LARGEST_FACTOR) if low else 0.0
        )
        if factor <= largest:
            return
        largest = factor
        yield loudest(factor)


def unreached(eager: LimitShares) -> list[ModelLimit]:
    """The limits that the model reached with none of its weights, scaled or not."""
    return sorted(place for place, share in eager.shares().items() if 0 < share < 1)


def unreached_checks(eager: LimitShares, graphs: Iterable[str]) -> list[Check]:
    """A skipped check per graph if a limit was never reached: a graph without that limit would compute the same."""
    places = unreached(eager)
    if not places:
        return []
    first = places[0]
    reached = f"{len(places)} limits of the model were not reached in any run, first {first.kind} {first.limit:g}"
    detail = f"{reached} in {first.scope or 'the model'}"
    return [Check("limits of the model", graph, "", verdict="skip", detail=detail) for graph in graphs]


class LimitShares(Protocol):
    """A model that records how close it came to its limits."""

    def own_shares(self) -> Mapping[ModelLimit, float]:
        """The largest share of each limit that the model reached with its own weights."""

    def shares(self) -> Mapping[ModelLimit, float]:
        """The largest share of each limit, with own and scaled weights."""
