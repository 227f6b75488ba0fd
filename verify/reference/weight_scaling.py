"""Which weights are scaled, and by how much, so that constants show which the real weights leave in the noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from statistics import median
from typing import Protocol

from llmconv.runtime.eager.limit_margins import Place
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.table import Scenario


@dataclass(frozen=True)
class WeightScaling:
    """Which weights a twin scales, and by how much.

    Attributes:
        name: as printed after the scenario's name.
        pattern: matrices whose name matches are scaled.
        factor: a power of two.
        bug: what it shows.
    """

    name: str
    pattern: str
    factor: float
    bug: str

    def factor_of(self, name: str, shape: Sequence[int]) -> float:
        """The factor of a tensor, by its name in a safetensors file; 1 where it stays what it is."""
        return self.factor if len(shape) > 1 and re.search(self.pattern, name) else 1.0

    def scenario(self, row: Scenario) -> Scenario:
        """A scenario as it is called on this twin."""
        return replace(row, name=f"{row.name}, {self.name}", bug=self.bug)


INPUTS = r"q_proj|k_proj|c_attn|query_key_value|qkv|gate_proj|up_proj|gate_up|c_fc|fc1|fc_in|dense_h_to_4h"


SCALINGS = (
    WeightScaling("louder weights", INPUTS, 4.0, "softcap dropped, activation in another form"),
    WeightScaling("fainter weights", "", 1 / 32, "a norm's epsilon of another value or in another place"),
)


REACHED = 1.5
"""The share of a limit that a twin aims at."""


SCALED_SCENARIOS = ("prefill, 7 tokens", "batch of 3")
"""What is run on twins."""


LOUDEST = f"{INPUTS}|v_proj|w1|w3|Wqkv|lm_head|embed_out"


MOST = 256.0
"""The largest factor."""


def loudest(factor: float) -> WeightScaling:
    """A twin whose weights are so large that its activations reach the limits that the model sets them."""
    return WeightScaling(
        f"weights x {factor:g}", LOUDEST, factor, "a Clip or a softcap dropped that no activation reaches"
    )


def scaling_of(scenario: str) -> WeightScaling | None:
    """The change that a scenario's name ends with."""
    known = next((change for change in SCALINGS if scenario.endswith(f", {change.name}")), None)
    found = re.search(r", weights x (\d+)$", scenario)
    return loudest(float(found.group(1))) if found else known


def scalings(eager: LimitShares) -> Iterator[WeightScaling]:
    """The scalings that a model is verified with; the later ones depend on what its twins before them reached."""
    yield from SCALINGS
    largest = 0.0
    for share in (median, min):  # most of them, then the rest: a factor too large makes noise of everything else
        own = eager.own_shares()
        low = [max(own.get(place, 0.0), 1 / MOST) for place in unreached(eager) if not place.is_floor]
        factor = min(max(2.0 ** ceil(log2(REACHED / share(low))), 8.0, 8 * largest), MOST) if low else 0.0
        if factor <= largest:
            return
        largest = factor
        yield loudest(factor)


def unreached(eager: LimitShares) -> list[Place]:
    """The limits of a model that neither it nor one of its twins has reached."""
    return sorted(place for place, share in eager.shares().items() if 0 < share < 1)


def unreached_checks(eager: LimitShares, graphs: Iterable[str]) -> list[Check]:
    """One check per graph where some limit was never reached: without it the graph would have computed the same."""
    places = unreached(eager)
    if not places:
        return []
    first = places[0]
    reached = f"{len(places)} limits of the model are reached by no run, first {first.kind} {first.limit:g}"
    detail = f"{reached} in {first.scope or 'the model'}"
    return [Check("limits of the model", graph, "", verdict="skip", detail=detail) for graph in graphs]


class LimitShares(Protocol):
    """A model that knows how near it came to its own limits."""

    def own_shares(self) -> Mapping[Place, float]:
        """By limit, the largest share of it that the model itself reached."""

    def shares(self) -> Mapping[Place, float]:
        """The same of the model and its twins."""
