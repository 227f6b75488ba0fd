"""Graphs without an input for positions: they count padding as tokens, as the model does that is told none.

Where the mask alone tells of padding, transformers' `generate` counts positions from it. A graph that cannot be told
may still be right: with padding on the left all positions of a row are shifted alike, which relative positions never
show in the logits, only in the rotated keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmconv.verify.other_exporters.session import ForeignGraph
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import Chain

SAID = "positions count padding, as the graph has no input for them"


def counts_slots(graphs: Sequence[ForeignGraph], chains: list[Chain]) -> bool:
    """Whether positions may be another matter than `generate` makes them."""
    padded = any(not chain[-1].attention_mask.all() for chain in chains)
    return padded and any(not graph.limits.takes_positions for graph in graphs)


def slot_chains(chains: list[Chain]) -> list[Chain]:
    """The same calls with positions 0, 1, … for every row."""
    moved = []
    for chain in chains:
        starts = [call.attention_mask.shape[1] - call.input_ids.shape[1] for call in chain]
        moved.append(
            [
                replace(call, position_ids=np.tile(np.arange(first, first + new), (len(call.input_ids), 1)))
                for call, first, new in zip(chain, starts, (call.input_ids.shape[1] for call in chain), strict=True)
            ]
        )
    return moved


def with_slots(checks: list[Check], counted: list[Check], chains: list[Chain]) -> list[Check]:
    """The checks against the model that counts padding, but for logits behind padding on the left.

    Those are what a client of the graph gets in a padded batch, so they must be the ones of `generate`.
    """
    if any(check.verdict == "fail" for check in counted if check.output != "logits"):
        return checks
    left = all((np.diff(chain[-1].attention_mask, axis=1) >= 0).all() for chain in chains)
    kept = {check.output: check for check in checks if left and check.output == "logits"}
    return [kept.get(check.output, replace(check, detail=check.detail or SAID)) for check in counted]
