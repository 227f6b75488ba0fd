"""Twins: the same graphs on changed weights, so that constants show which the real weights leave in the noise.

A tiny or young model has small attention scores, so a missing softcap changes nothing that rounding would not; one with
large activations hides a wrong epsilon. Factors are powers of two, so nothing is written: the eager model scales what
it reads, and the graphs scale what they multiply by (`scaling`), from the files as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Protocol

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused
from llmconv.runtime.guard import external_fields
from llmconv.runtime.ort import SessionSettings
from llmconv.runtime.reach import Place
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import LazyTensor
from llmconv.verify.report import Check
from llmconv.verify.scaling import scale
from llmconv.verify.scenarios import Scenario
from llmconv.verify.weights import reference_name


@dataclass(frozen=True)
class Change:
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

    def of(self, name: str, shape: Sequence[int]) -> float:
        """The factor of a tensor, by its name in a safetensors file; 1 where it stays what it is."""
        return self.factor if len(shape) > 1 and re.search(self.pattern, name) else 1.0

    def scenario(self, row: Scenario) -> Scenario:
        """A scenario as it is called on this twin."""
        return replace(row, name=f"{row.name}, {self.name}", bug=self.bug)


INPUTS = r"q_proj|k_proj|c_attn|query_key_value|qkv|gate_proj|up_proj|gate_up|c_fc|fc1|fc_in|dense_h_to_4h"
CHANGES = (
    Change("louder weights", INPUTS, 4.0, "softcap dropped, activation in another form"),
    Change("fainter weights", "", 1 / 32, "a norm's epsilon of another value or in another place"),
)
REACHED = 1.5
"""The share of a limit that a twin aims at."""
SCENARIOS = ("prefill, 7 tokens", "batch of 3")
"""What is run on twins."""


LOUDEST = f"{INPUTS}|v_proj|w1|w3|Wqkv|lm_head|embed_out"
MOST = 256.0
"""The largest factor."""


def loudest(factor: float) -> Change:
    """A twin whose weights are so large that its activations reach the limits that the model sets them."""
    return Change(f"weights x {factor:g}", LOUDEST, factor, "a Clip or a softcap dropped that no activation reaches")


def change_of(scenario: str) -> Change | None:
    """The change that a scenario's name ends with."""
    known = next((change for change in CHANGES if scenario.endswith(f", {change.name}")), None)
    found = re.search(r", weights x (\d+)$", scenario)
    return loudest(float(found.group(1))) if found else known


def changes(eager: Reaching) -> Iterator[Change]:
    """The changes that a model is verified with; the later ones depend on what its twins before them reached."""
    yield from CHANGES
    largest = 0.0
    for share in (median, min):  # most of them, then the rest: a factor too large makes noise of everything else
        own = eager.own_shares()
        low = [max(own.get(place, 0.0), 1 / MOST) for place in unreached(eager) if not place.is_floor]
        factor = min(max(2.0 ** ceil(log2(REACHED / share(low))), 8.0, 8 * largest), MOST) if low else 0.0
        if factor <= largest:
            return
        largest = factor
        yield loudest(factor)


def unreached(eager: Reaching) -> list[Place]:
    """The limits of a model that neither it nor one of its twins has reached."""
    return sorted(place for place, share in eager.shares().items() if 0 < share < 1)


def unreached_checks(eager: Reaching, graphs: Iterable[str]) -> list[Check]:
    """One check per graph where some limit was never reached: without it the graph would have computed the same."""
    places = unreached(eager)
    if not places:
        return []
    first = places[0]
    told = f"{len(places)} limits of the model are reached by no run, first {first.kind} {first.limit:g}"
    detail = f"{told} in {first.scope or 'the model'}"
    return [Check("limits of the model", graph, "", verdict="skip", detail=detail) for graph in graphs]


class Reaching(Protocol):
    """A model that knows how near it came to its own limits."""

    def own_shares(self) -> Mapping[Place, float]:
        """By limit, the largest share of it that the model itself reached."""

    def shares(self) -> Mapping[Place, float]:
        """The same of the model and its twins."""


def why_no_twin(folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> str:
    """Why a folder can have no twin; empty when it can."""
    if "quantization_config" in read_json(reference / "config.json"):
        return "the model's own weights are quantised"
    try:
        tensors = open_weights(folder)
    except InputRefused:
        return "the graphs map no safetensors file"
    shapes = {tensor.shape for tensor in tensors.values() if len(tensor.shape) > 1}
    shapes |= {shape[::-1] for shape in shapes}
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        if tuple(tensor.dims) in shapes and not _is_mapped(tensor) and not reference_name(tensor.name, tensors):
            return f"what `{tensor.name}` holds is unknown"
    return ""


def _is_mapped(tensor: onnx.TensorProto) -> bool:
    return external_fields(tensor).get("location", "").endswith(".safetensors")


def scaled_settings(
    settings: SessionSettings, folder: Path, change: Change, *, at_weights: bool = False
) -> SessionSettings:
    """Settings with which a folder's graphs are opened as their twins; `at_weights` as for `scale`."""
    tensors = Tensors.of(folder)

    def apply(path: Path, model: onnx.ModelProto) -> None:
        scale(model, tensors.factors(model, change), at_weights=at_weights)

    return replace(settings, change=apply)


@dataclass(frozen=True)
class Tensors:
    """A folder's tensors by name, and by the bytes that they lie in.

    Attributes:
        named: by name.
        places: by file: offset and tensor, in order.
    """

    named: Mapping[str, LazyTensor]
    places: Mapping[str, Sequence[tuple[int, str, FileTensor]]]

    @classmethod
    def of(cls, folder: Path) -> Tensors:
        """Reads the headers of a folder's files."""
        named, places = open_weights(folder), defaultdict(list)
        for name, tensor in named.items():
            if isinstance(tensor, FileTensor):
                places[tensor.path.name].append((tensor.offset, name, tensor))
        return cls(named, {file: sorted(found, key=lambda place: place[0]) for file, found in places.items()})

    def factors(self, model: onnx.ModelProto, change: Change) -> dict[str, float]:
        """The factor of every initializer that is one of these tensors, or a part of one."""
        found = {tensor.name: self.source(tensor) for tensor in model.graph.initializer}
        return {mine: change.of(name, self.named[name].shape) for mine, name in found.items() if name}

    def source(self, tensor: onnx.TensorProto) -> str:
        """The name of the tensor whose bytes an initializer maps, or whose name it has; or empty."""
        fields = external_fields(tensor)
        places = self.places.get(fields.get("location", ""), ())
        if not places:
            return reference_name(tensor.name, self.named) if not _is_mapped(tensor) else ""
        offset = int(fields.get("offset", 0))
        at = bisect_right(places, offset, key=lambda place: place[0]) - 1
        first, name, whole = places[max(at, 0)]
        return name if first <= offset < first + whole.nbytes else ""
