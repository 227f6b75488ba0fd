"""Runs chains of calls, and arranges their outputs as rows."""

from __future__ import annotations

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Cache, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.results.sigma import cache_rows, state_rows
from llmconv.verify.scenarios.calls import Call, Chain


def run_chain(runner: Runner, chain: Chain) -> list[Step]:
    """Runs the calls one after another, each on the cache of the previous; the first one as prefill."""
    steps: list[Step] = []
    past: Cache | None = None
    for index, call in enumerate(chain):
        run = runner.decode if index else runner.prefill
        past = edited(past, call)
        steps.append(run(*call.tokens.arrays, past, call.extras))
        past = steps[-1].present
    return steps


def edited(past: Cache | None, call: Call) -> Cache | None:
    """The cache that a call continues: the edited cache of the previous call, or a synthetic past."""
    return call.start or (call.edit.apply(past, call.past_mask) if past else None)


def rows_of(step: Step, known: int = 0) -> dict[str, Array]:
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
