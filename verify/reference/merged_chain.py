"""Computes the float64 outputs of a chain of calls in one call of all tokens, which saves most of the reference's time.

With causal attention, a prompt in pieces and the whole prompt give the same values; in float64 they differ by far less
than the measured noise. Where that does not hold (frequencies that depend on the length, states, attention that
selects among the present keys), the outputs differ from the call-by-call run in the graph's dtype by more than noise
explains, see `is_another`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Runner, Step
from llmconv.verify.results.sigma import ExpectedOutput
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain, EditedCache

LEAST = 3
"""Minimum number of calls to merge; for fewer, a merged call that turns out to differ costs more than it saves."""


class MergedPrefix(EditedCache):
    """The first tokens of the cache of a merged call."""


def one_call(calls: Sequence[Call]) -> Call | None:
    """All tokens of consecutive calls in one call.

    None for a single call, an edited cache, or a past with states, which transformers continues only token by token.
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
    """The same tokens in other calls, which round differently: several calls as one, or one call as several.

    None where no other order exists: a single prompt, an edited cache, states after a past.
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
    """Consecutive steps as one: all logits, and the last cache."""
    return replace(steps[-1], logits=np.concatenate([step.logits for step in steps], axis=1))


def merged_steps(runner: Runner, chain: Chain) -> list[Step] | None:
    """The steps of a chain from one merged call; None where the calls cannot be merged."""
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
    """Whether the steps come from `merged_steps`."""
    return isinstance(steps[0].present, MergedPrefix)


def is_another(outputs: Iterable[dict[str, ExpectedOutput]]) -> bool:
    """Whether an output differs from the rounded run by more than noise explains, or is NaN."""
    return any(not truth.excess <= 1 for call in outputs for truth in call.values())
