"""Merged: what the calls of a chain give in float64, from one call of all their tokens.

Where every token sees those before it alone, a prompt that is fed piece by piece and the same prompt at once are one
computation, and in float64 the two differ by far less than what is measured. A model reads all its weights in every
call, so this is most of the time that the reference takes. Where it does not hold (frequencies that depend on the
length, states, attention that chooses among the keys that are there), the outputs are further from the run in the
graph's dtype, which is made call by call, than noise explains: see `is_another`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Runner, Step
from llmconv.verify.results.measure import ExpectedOutput
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain, EditedCache

LEAST = 3
"""Calls of a chain from which on one call is worth it: where it is another computation, it is made in vain."""


class MergedPrefix(EditedCache):
    """The first tokens of a cache that one call made."""


def one_call(calls: Sequence[Call]) -> Call | None:
    """All tokens of calls that continue each other in one call.

    None of a single call, where a cache was changed, and behind a past with states, which several tokens lose.
    """
    start = calls[0].start
    if (
        len(calls) < 2
        or any(call.edit != CacheEdit() for call in calls)
        or (start and any(map(is_state, start.shapes)))
    ):
        return None
    ids = np.concatenate([call.input_ids for call in calls], axis=1)
    positions = np.concatenate([call.position_ids for call in calls], axis=1)
    return Call(ids, calls[-1].attention_mask, positions, start=start, known=calls[0].known)


def another_order(calls: Sequence[Call]) -> Chain | None:
    """The same tokens in other calls, whose rounding is another: several calls as one, one behind a past as several.

    None where there is no other order: a single prompt, a cache that was changed, states behind a past.
    """
    whole, first = one_call(calls), calls[0]
    if whole is not None:
        return [whole]
    if len(calls) > 1 or not first.start or first.input_ids.shape[1] < 2 or any(map(is_state, first.start.shapes)):
        return None
    new, total = first.input_ids.shape[1], first.attention_mask.shape[1]
    return [
        replace(
            first,
            input_ids=first.input_ids[:, at : at + 1],
            attention_mask=first.attention_mask[:, : total - new + at + 1],
            position_ids=first.position_ids[:, at : at + 1],
            start=None if at else first.start,
        )
        for at in range(new)
    ]


def joined(steps: Sequence[Step]) -> Step:
    """Steps that continue each other as one: all logits, and the last cache."""
    return replace(steps[-1], logits=np.concatenate([step.logits for step in steps], axis=1))


def merged_steps(runner: Runner, chain: Chain) -> list[Step] | None:
    """The steps of a chain as its calls would make them; None where one call cannot be all of them."""
    whole = one_call(chain)
    if whole is None:
        return None
    step = runner.prefill(whole.input_ids, whole.attention_mask, whole.position_ids, whole.start)
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
    """Whether `merged_steps` made them."""
    return isinstance(steps[0].present, MergedPrefix)


def is_another(truths: Iterable[dict[str, ExpectedOutput]]) -> bool:
    """Whether some output of some call is further from the rounded run than noise explains; NaN counts."""
    return any(not truth.excess <= 1 for outputs in truths for truth in outputs.values())
