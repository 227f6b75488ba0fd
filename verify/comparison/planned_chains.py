"""Runs the calls of all scenarios in advance, in as few passes over the weights as their edited caches allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from llmconv.errors import LlmconvError
from llmconv.runtime.low_memory.precomputed import CallChain, KeyedCache, PrecomputedRunner
from llmconv.verify.reference.chain_runs import edited
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain


@dataclass(frozen=True)
class _Rest:
    """The calls of a chain that are left, and the cache before them."""

    past: KeyedCache | None
    calls: Chain
    is_begun: bool


def precompute_chains(first: PrecomputedRunner, then: PrecomputedRunner, chains: Sequence[Chain]) -> None:
    """Runs all calls of all chains; errors of calls are raised when their results are requested.

    Args:
        first: runs the first call of each chain.
        then: runs the others; may be the same.
        chains: the chains.

    Raises:
        UnsupportedInput: the calls cannot run together.
    """
    rest = [_Rest(None, chain, is_begun=False) for chain in chains]
    while rest:
        parts = [(one, _until_edit(one, together=one.is_begun or first is then)) for one in rest]
        for runner, begun in ((first, False), (then, True)):
            planned: list[CallChain] = [
                (_before(one.past, calls[0]), calls) for one, calls in parts if one.is_begun is begun
            ]
            runner.precompute(planned)
        found = [_after(one, calls, then if one.is_begun else first) for one, calls in parts]
        rest = [one for one in found if one]


def _until_edit(rest: _Rest, *, together: bool) -> Chain:
    """The next calls that continue each other without an edit; one call if they do not run together."""
    stop = 1
    while together and stop < len(rest.calls) and rest.calls[stop].edit == CacheEdit():
        stop += 1
    return rest.calls[:stop]


def _after(rest: _Rest, calls: Chain, runner: PrecomputedRunner) -> _Rest | None:
    """What is left after some calls; None if nothing is, or a call failed."""
    left = rest.calls[len(calls) :]
    if not left:
        return None
    past = _before(rest.past, calls[0])
    try:
        for call in calls:
            past = runner.present(past, call)
    except LlmconvError:  # reported by the checks of the scenario
        return None
    return _Rest(past, left, is_begun=True)


def _before(past: KeyedCache | None, call: Call) -> KeyedCache | None:
    """The cache that a call continues, edited or made up."""
    return cast("KeyedCache | None", edited(past, call))
