"""Weight scalings: which weights are multiplied, so that constants matter that the real weights hide in the noise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Protocol

from llmconv.checkpoint import read_json
from llmconv.runtime.eager.limit_margins import ModelLimit
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.table import Scenario


@dataclass(frozen=True)
class WeightScaling:
    """A set of weights and the factor, a power of two, that they are multiplied by.

    Attributes:
        name: as printed after the scenario's name.
        pattern: regular expression; matrices whose names contain a match are scaled.
        factor: a power of two.
        bug: the faults that it exposes.
        hidden: the same faults one by one, as a run without it could not have found them.
    """

    name: str
    pattern: str
    factor: float
    bug: str
    hidden: tuple[str, ...]

    def factor_of(self, name: str, shape: Sequence[int]) -> float:
        """The factor of a tensor, by its name in a safetensors file and its shape; 1 if it is not scaled."""
        return self.factor if len(shape) > 1 and re.search(self.pattern, name) else 1.0

    def scenario(self, row: Scenario) -> Scenario:
        """The scenario with the name and bug of this scaling."""
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


TARGET_SHARE = 1.5
"""The share of a limit that scaled weights should reach."""


SCALED_SCENARIOS = ("prefill, 7 tokens", "batch of 3")
"""Scenarios that run on scaled weights."""


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
