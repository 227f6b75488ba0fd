"""CostEstimate: what a verification will need of memory and time, said before it begins; it may then go layer by layer."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmconv.checkpoint import open_weights
from llmconv.errors import InputRefused
from llmconv.memory import available_memory
from llmconv.progress import say
from llmconv.runtime.low_memory.pieced_graph import PIECE

SMALL = 50_000_000
"""Elements up to which nothing is forecast."""
WORTH_SAYING = 400_000_000
"""Elements from which the forecast is printed."""
BASE = 400 << 20
"""Bytes beside the weights: results, activations, sessions."""
ADDRESSES = 3 << 29
"""Bytes of addresses beside the weights: stacks and heaps of threads."""
PER_ELEMENT = 8 + 4
"""Bytes of an element of the model: in float64 and in float32."""
SECONDS = 0.45e-6
"""Per element, of the quick suite on two idle cores, the twins with it; see docs/benchmarks.md."""
GB = 1e9


@dataclass(frozen=True)
class CostEstimate:
    """What a verification needs.

    Attributes:
        elements: of the model.
        whole: bytes of memory with the model held as a whole.
        layered: the same layer by layer.
        mapped: bytes of files that are mapped beside; they take addresses.
    """

    elements: int
    whole: int
    layered: int
    mapped: int

    @classmethod
    def of(cls, reference: Path, graphs: int) -> CostEstimate:
        """For some distinct graphs of a model.

        Raises:
            InputRefused: the reference has no safetensors weights.
        """
        tensors = open_weights(reference)
        sizes: dict[str, int] = defaultdict(int)
        for name, tensor in tensors.items():
            layer = re.search(r"\.\d+\.", name)
            sizes[name[: layer.end()] if layer else ""] += prod(tensor.shape)
        elements = sum(sizes.values())
        layers = [size for name, size in sizes.items() if name]
        is_cast = any(tensor.dtype.itemsize < 4 for tensor in tensors.values())
        sessions = 4 * elements * (graphs + 1) if is_cast else 0  # onnxruntime folds the casts of weights
        stored = sum(tensor.nbytes for tensor in tensors.values())
        layered = BASE + 10 * max(layers, default=elements) + min(4 * elements, PIECE)
        return cls(elements, BASE + PER_ELEMENT * elements + sessions, layered, (graphs + 2) * stored)

    def lacking(self, size: int) -> int | None:
        """Bytes that are available, where they are too few for `size`; None where they suffice."""
        have, addresses = available_memory(), available_memory(mapped=True)
        if have is not None and have < size:
            return have
        return addresses if addresses is not None and addresses < size + self.mapped + ADDRESSES else None

    @property
    def minutes(self) -> str:
        """Of the quick suite, in words."""
        minutes = max(1, round(self.elements * SECONDS / 60))
        return f"about {minutes} minute{'s' * (minutes > 1)}"


def choose(forecast: CostEstimate, asked: bool | None, why_not: str = "") -> tuple[bool, str]:
    """Whether to go layer by layer, and a note where nobody asked for it.

    Args:
        forecast: of the model.
        asked: what the user wants; None for whatever fits.
        why_not: why it cannot be done layer by layer; empty when it can.

    Raises:
        InputRefused: nobody asked, and neither fits into memory.
    """
    have = None if forecast.elements < SMALL else forecast.lacking(forecast.whole)
    layered, note = bool(asked), ""
    if asked is None and have is not None:
        if why_not or forecast.lacking(forecast.layered) is not None:
            raise too_little(forecast, have, why_not)
        layered = True
        note = (
            f"layer by layer, as with `--low-memory`: the whole model takes about {forecast.whole / GB:.1f} GB of "
            f"memory, and {have / GB:.1f} GB are available"
        )
    if forecast.elements >= WORTH_SAYING or note:
        _say(forecast, layered)
    return layered, note


def too_little(forecast: CostEstimate, have: int, why_not: str) -> InputRefused:
    """The refusal of what does not fit."""
    way = f"layer by layer it cannot be verified: {why_not}" if why_not else (
        f"layer by layer it takes about {forecast.layered / GB:.1f} GB; close other programs, or raise the limit"
    )  # fmt: skip
    return InputRefused(
        f"verify needs about {forecast.whole / GB:.1f} GB of memory, and {have / GB:.1f} GB are available",
        hint=f"{way}; `--no-low-memory` begins all the same",
    )


def _say(forecast: CostEstimate, layered: bool) -> None:
    have = available_memory()
    needed = (forecast.layered if layered else forecast.whole) / GB
    of = f" of {have / GB:.1f}" if have is not None else ""
    how = "layer by layer" if layered else "the whole model in memory"
    say(f"{how}: about {needed:.1f}{of} GB of memory, {forecast.minutes} on {os.cpu_count()} idle cores")


def distinct_files(paths: Sequence[Path]) -> int:
    """How many files differ; a graph and its copy take one session."""
    return len({path.read_bytes() for path in paths if path.is_file()})
