"""Graphs without an input for positions, which may count padding as tokens.

transformers' `generate` computes positions from the mask. A graph that counts padding may still be correct: padding on
the left shifts all positions of a row alike, which relative positions show in the rotated keys only, not in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.other_exporters.external_graph import ExternalGraph
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import Call, Chain

DETAIL = "positions count padding, as the graph has no input for them"


def may_count_padding(graphs: Sequence[ExternalGraph], chains: list[Chain]) -> bool:
    """Whether positions may differ from those of `generate`."""
    padded = any(not chain[-1].attention_mask.all() for chain in chains)
    return padded and any(not graph.limits.takes_positions for graph in graphs)


def with_padding_counted(chains: list[Chain]) -> list[Chain]:
    """The same calls with positions 0, 1, … in every row."""
    return [[replace(call, position_ids=_all_positions(call)) for call in chain] for chain in chains]


def _all_positions(call: Call) -> Array:
    total, (rows, new) = call.attention_mask.shape[1], call.input_ids.shape
    return np.tile(np.arange(total - new, total), (rows, 1))


def checks_with_padding_counted(checks: list[Check], counted: list[Check], chains: list[Chain]) -> list[Check]:
    """The checks against a model that counts padding, except for logits after padding on the left.

    Clients use those logits in padded batches, so they must equal those of `generate`.

    Args:
        checks: the checks against `generate`'s positions.
        counted: the checks against positions that count padding.
        chains: the calls.
    """
    if any(check.verdict == "fail" for check in counted if check.output != "logits"):
        return checks
    left = all((np.diff(chain[-1].attention_mask, axis=1) >= 0).all() for chain in chains)
    kept = {check.output: check for check in checks if left and check.output == "logits"}
    return [kept.get(check.output, replace(check, detail=check.detail or DETAIL)) for check in counted]
