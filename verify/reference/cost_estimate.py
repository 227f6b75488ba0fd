"""Estimates the memory and time of a verification, and decides whether it runs layer by layer."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmconv.errors import InputRefused
from llmconv.memory import available_memory
from llmconv.progress import say
from llmconv.runtime.low_memory.pieced_graph import PIECE_BYTES
from llmconv.tensors import LazyTensor

SMALL = 50_000_000  # models with fewer elements need no estimate
WORTH_SAYING = 400_000_000  # the estimate is printed for models with at least this many elements
BASE = 400 << 20  # bytes for results, activations and sessions
ADDRESSES = 3 << 29  # bytes of address space for stacks and heaps of threads
PER_ELEMENT = 8 + 4  # bytes per element of the model, which is held in float64 and in float32
SECONDS = 0.45e-6
"""Seconds per element for the quick suite on two idle cores, scaled weights included; see docs/benchmarks.md."""
SECONDS_QUANTIZED = 4e-6
"""The same for quantized graphs, which are dequantized into a second model, and whose cost is measured."""
QUANTIZED_PER_ELEMENT = 24, 28
"""Bytes per element for two models in float64 and float32, and for the copies of each distinct graph: 10.9 GB were
measured for two graphs of 135 million elements with 4 bits."""
WORTH_SAYING_QUANTIZED = 20_000_000  # the estimate is printed for quantized models with at least this many elements
GB = 1e9


@dataclass(frozen=True)
class CostEstimate:
    """The resources that a verification needs."""

    elements: int
    whole: int  # bytes of memory with the whole model held
    layered: int  # bytes of memory layer by layer
    mapped: int  # bytes of mapped files, which take address space
    seconds: float = SECONDS  # per element

    @classmethod
    def of(cls, tensors: Mapping[str, LazyTensor], graphs: int) -> CostEstimate:
        """The estimate for a model's weights and a number of distinct graphs."""
        sizes = elements_of_layers(tensors)
        elements = sum(sizes.values())
        layers = [size for name, size in sizes.items() if name]
        is_cast = any(tensor.dtype.itemsize < 4 for tensor in tensors.values())
        sessions = 4 * elements * (graphs + 1) if is_cast else 0  # onnxruntime folds the casts of weights
        stored = sum(tensor.nbytes for tensor in tensors.values())
        layered = BASE + 10 * max(layers, default=elements) + min(4 * elements, PIECE_BYTES)
        return cls(elements, BASE + PER_ELEMENT * elements + sessions, layered, (graphs + 2) * stored)

    @classmethod
    def of_quantized(cls, tensors: Mapping[str, LazyTensor], graphs: int) -> CostEstimate:
        """The same for graphs with quantized weights."""
        plain, (models, copies) = cls.of(tensors, graphs), QUANTIZED_PER_ELEMENT
        size = BASE + (models + copies * graphs) * plain.elements
        return cls(plain.elements, size, plain.layered, plain.mapped, SECONDS_QUANTIZED)

    def lacking(self, size: int) -> int | None:
        """The available bytes if they are fewer than `size`, else None."""
        have, addresses = available_memory(), available_memory(mapped=True)
        if have is not None and have < size:
            return have
        return addresses if addresses is not None and addresses < size + self.mapped + ADDRESSES else None

    @property
    def minutes(self) -> str:
        minutes = max(1, round(self.elements * self.seconds / 60))
        return f"about {minutes} minute{'s' * (minutes > 1)}"


def suite_seconds(tensors: Mapping[str, LazyTensor], skipped: Collection[str] = ()) -> float:
    """Seconds of the quick suite on two idle cores, without the layers named in `skipped`."""
    prefixes = tuple(f"{name}." for name in skipped)
    kept = (tensor for name, tensor in tensors.items() if not name.startswith(prefixes))
    return SECONDS * sum(prod(tensor.shape) for tensor in kept)


def elements_of_layers(tensors: Mapping[str, LazyTensor]) -> dict[str, int]:
    """Number of elements of each layer by the beginning of its tensors' names; of the rest under an empty name."""
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        layer = re.search(r"\.\d+\.", name)
        sizes[name[: layer.end()] if layer else ""] += prod(tensor.shape)
    return sizes


def largest_layer(tensors: Mapping[str, LazyTensor]) -> tuple[int, int]:
    sizes = {name: size for name, size in elements_of_layers(tensors).items() if name}
    elements = max(sizes.values(), default=0)
    return elements * max(tensor.dtype.itemsize for tensor in tensors.values()), elements


def choose(estimate: CostEstimate, wanted: bool | None, why_not: str = "") -> tuple[bool, str]:
    """Whether to verify layer by layer, and a note if the user did not ask for it.

    `wanted` is None to choose by the available memory; `why_not` why it cannot run layer by layer, empty if it can.
    Raises InputRefused: `wanted` is None and neither way fits into memory.
    """
    have = None if estimate.elements < SMALL else estimate.lacking(estimate.whole)
    layered, note = bool(wanted), ""
    if wanted is None and have is not None:
        if why_not or estimate.lacking(estimate.layered) is not None:
            raise too_little(estimate, have, why_not)
        layered = True
        note = (
            f"layer by layer, as with `--low-memory`: the whole model takes about {estimate.whole / GB:.1f} GB of "
            f"memory, and {have / GB:.1f} GB are available"
        )
    worth_saying = WORTH_SAYING if estimate.seconds == SECONDS else WORTH_SAYING_QUANTIZED
    if estimate.elements >= worth_saying or note:
        _say(estimate, layered)
    return layered, note


def too_little(estimate: CostEstimate, have: int, why_not: str) -> InputRefused:
    """The error for a model that does not fit into `have` bytes of free memory; `why_not` as in `choose`."""
    way = f"it cannot be verified layer by layer: {why_not}" if why_not else (
        f"layer by layer it takes about {estimate.layered / GB:.1f} GB; close other programs, or raise the limit"
    )  # fmt: skip
    return InputRefused(
        f"verify needs about {estimate.whole / GB:.1f} GB of memory, and {have / GB:.1f} GB are available",
        hint=f"{way}; `--no-low-memory` begins all the same",
    )


def _say(estimate: CostEstimate, layered: bool) -> None:
    have = available_memory()
    needed = (estimate.layered if layered else estimate.whole) / GB
    of = f" of {have / GB:.1f}" if have is not None else ""
    how = "layer by layer" if layered else "the whole model in memory"
    say(f"{how}: about {needed:.1f}{of} GB of memory, {estimate.minutes} on {os.cpu_count()} idle cores")


def distinct_files(paths: Sequence[Path]) -> int:
    """Number of files with different content; identical graphs share one session."""
    return len({path.read_bytes() for path in paths if path.is_file()})
