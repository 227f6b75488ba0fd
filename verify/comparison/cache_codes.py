"""Compares a graph whose cache contains integer codes with what its operators must compute, call by call.

A number near the middle of two codes may become either, and later layers read the result: after some layers two correct
graphs have different codes. So every attention node is compared alone, given what it reads in the graph, and logits
only have to be about as near to those of the copy that rounds with standard operators as the rounding allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from llmconv.runtime.cache_names import past_of
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.attention_nodes import AttentionNodes
from llmconv.verify.reference.chain_runs import run_chain
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import Call, ModelFacts

NAME = "cache codes"
"""Name of the checks in reports."""

SEED = 20251
PROMPT, STEPS, PADDING = 96, 3, 7
OBSERVED = ((0, 4), (1,))
"""Calls of each chain in which attention nodes are compared: a prompt and a second turn; a step after padding."""
LIMIT, FLOOR = 4.0, 1e-5
"""Largest difference of logits as a multiple of what the rounding changes, plus a share of the logits themselves."""
ROOM, LARGEST = 8, 127


@dataclass(frozen=True)
class CodedGraph:
    """A graph with a cache of codes, and its copies; all run prompts and steps.

    Attributes:
        name: in reports.
        shipped: the graph.
        rounded: the copy that rounds with standard operators.
        exact: the copy that rounds nothing.
        nodes: its attention nodes.
    """

    name: str
    shipped: Runner
    rounded: Runner
    exact: Runner
    nodes: AttentionNodes


def check_codes(graph: CodedGraph, facts: ModelFacts) -> list[Check]:
    """One check of all codes, and one of all logits, over all calls.

    Args:
        graph: the graph and its copies.
        facts: properties of the model.
    """
    problems: list[str] = []
    ratios = [0.0]
    for chain, observed in zip(chains(facts), OBSERVED, strict=True):
        shipped, rounded, exact = (run_chain(runner, chain) for runner in (graph.shipped, graph.rounded, graph.exact))
        for at, call in enumerate(chain):
            past = dict(shipped[at - 1].present.arrays()) if at else {}
            problems += _changed(past, shipped[at])
            if at in observed:
                problems += graph.nodes.problems(_feeds(graph.nodes, call, past), call)
            error, effect = _rms(call, shipped[at], rounded[at]), _rms(call, exact[at], rounded[at])
            limit = LIMIT * effect + FLOOR * _rms(call, rounded[at], None)
            ratios.append(error / limit if limit else inf if error else 0.0)
    worst = float(np.max(ratios))
    detail = "; ".join(problems[:3]) or f"{len(graph.nodes.attention)} attention nodes write and read code * scale"
    logits = f"difference from rounding with standard operators: {worst:.2g} of the limit"
    return [
        Check(NAME, graph.name, "present", verdict="fail" if problems else "pass", detail=detail),
        Check(NAME, graph.name, "logits", verdict="pass" if worst <= 1 else "fail", detail=logits),
    ]


def chains(facts: ModelFacts) -> list[list[Call]]:
    """A prompt with steps and a second turn, and a batch of two with padding on the left."""
    rng = np.random.default_rng(SEED)
    prompt = min(PROMPT, (facts.max_positions or 2 * PROMPT) // 2)
    return [
        _chain(rng.integers(0, facts.vocab_size, (1, prompt + STEPS + PADDING)), [prompt, *[1] * STEPS, PADDING]),
        _chain(rng.integers(0, facts.vocab_size, (2, prompt + STEPS)), [prompt, *[1] * STEPS], PADDING),
    ]


def _chain(ids: Array, widths: list[int], padding: int = 0) -> list[Call]:
    mask = np.ones_like(ids)
    mask[1:, :padding] = 0
    calls, end = [], 0
    for width in widths:
        start, end = end, end + width
        seen = mask[:, :end]
        calls.append(Call(ids[:, start:end], seen, default_positions(seen, width)))
    return calls


def _changed(past: Mapping[str, Array], step: Step) -> list[str]:
    """Outputs whose codes of earlier tokens are not those after the call before."""
    now = step.present.arrays()
    return [
        f"`{name}` has other codes for earlier tokens"
        for name, codes in past.items()
        if not np.array_equal(codes, now[name][:, :, : codes.shape[2]])
    ]


def _feeds(nodes: AttentionNodes, call: Call, past: Mapping[str, Array]) -> dict[str, Array]:
    """All inputs of a call; the unfilled part of the buffers contains large codes."""
    rows, capacity = len(call.input_ids), call.attention_mask.shape[1] + ROOM
    feeds = {"input_ids": call.input_ids, "attention_mask": call.attention_mask, "position_ids": call.position_ids}
    for name, scale in nodes.scales.items():
        feeds[name] = np.full((rows, scale.shape[1], capacity, scale.shape[3]), LARGEST, np.int8)
    for name, codes in past.items():
        feeds[past_of(name)][:, :, : codes.shape[2]] = codes
    return feeds


def _rms(call: Call, step: Step, other: Step | None) -> float:
    """Root mean square of the difference of two steps' logits where nothing is padding, or of the logits of one."""
    valid = call.attention_mask[:, -step.logits.shape[1] :].astype(bool)
    values = step.logits.astype(np.float64)[valid]
    if other is not None:
        values = values - other.logits.astype(np.float64)[valid]
    return float(np.sqrt(np.mean(values**2)))
