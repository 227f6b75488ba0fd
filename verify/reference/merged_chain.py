"""Computes the float64 outputs of a chain of calls in one call of all tokens, which saves most of the reference's time.

With causal attention, a prompt in pieces and the whole prompt give the same values; in float64 they differ by far less
than the measured noise. Where that does not hold (frequencies that depend on the length, states, attention that
selects among the present keys), the outputs differ from the call-by-call run in the graph's dtype by more than noise
explains, see `is_another`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.extra_inputs import SEQUENCE, TOTAL, ExtraInput
from llmconv.runtime.extra_values import part
from llmconv.runtime.runner import Runner, Step
from llmconv.tensors import Array
from llmconv.verify.results.sigma import ExpectedOutput
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain, EditedCache

LEAST = 3
"""Minimum number of calls to merge; for fewer, a merged call that turns out to differ costs more than it saves."""


class MergedPrefix(EditedCache):
    """The first tokens of the cache of a merged call."""


Inputs = Mapping[str, ExtraInput]
"""The extra inputs of a model by name, resolved."""


def one_call(calls: Sequence[Call], inputs: Inputs) -> Call | None:
    """All tokens of consecutive calls in one call.

    None for a single call, an edited cache, a past with states, which transformers continues only token by token, or an
    extra input whose value for all tokens is not that of the calls.

    Args:
        calls: the calls.
        inputs: the extra inputs of the model.
    """
    start = calls[0].start
    if (
        len(calls) < 2
        or any(call.edit != CacheEdit() for call in calls)
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
    """The value of an input for all tokens of consecutive calls."""
    return np.concatenate(values, axis=extra.axes.index(SEQUENCE)) if SEQUENCE in extra.axes else values[-1]


def another_order(calls: Sequence[Call], inputs: Inputs) -> Chain | None:
    """The same tokens in other calls, which round differently: several calls as one, or one call as several.

    None where no other order exists: a single prompt, an edited cache, states after a past, and as for `one_call`.

    Args:
        calls: the calls.
        inputs: the extra inputs of the model.
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
    """The call of one of several new tokens."""
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
    """Whether the steps come from `merged_steps`."""
    return isinstance(steps[0].present, MergedPrefix)


def is_another(outputs: Iterable[dict[str, ExpectedOutput]]) -> bool:
    """Whether an output differs from the rounded run by more than noise explains, or is NaN."""
    return any(not truth.excess <= 1 for call in outputs for truth in call.values())
