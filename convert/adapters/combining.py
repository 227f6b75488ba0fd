"""The options of `merge-lora`, and the methods to combine adapters: their updates of one weight become one update.

A method works on the whole update of each tensor (the task vector), not on its factors A and B, so it fits adapters of
any kind and rank. Updates are computed by row blocks and never held: `ties` and `magnitude_prune` compute them twice
more to find their thresholds; only `svd` of updates other than LoRA holds a tensor.

=================  =====================================================================================================
`linear`, `cat`    Σ wᵢ·Δᵢ, exactly; PEFT's `linear` also has terms B₁·A₂, its `cat` is this sum
`svd`              the best approximation of Σ wᵢ·Δᵢ by a given rank (Eckart and Young); a matrix for each expert
`magnitude_prune`  Σ wᵢ·Δᵢ with only the largest elements of each Δᵢ
`ties`             the largest elements of each Δᵢ; per element, the mean of wᵢ·Δᵢ over those with the majority sign
                   (TIES, arXiv 2306.01708)
`dare_linear`      Σ wᵢ·Δᵢ with random elements of each Δᵢ, divided by the density (DARE, arXiv 2311.03099)
`dare_ties`        the same random elements, averaged as in `ties`
=================  =====================================================================================================

Order and names follow `peft/utils/merge_utils.py`: the majority sign is that of the sum of the kept elements, before
the weights are applied (`total`), or of their number (`frequency`); a tie is positive.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.edits import Edits, KeptUntilLastRow
from llmconv.convert.adapters.low_rank_sum import LoraProduct, round_into, single_threaded
from llmconv.convert.adapters.targets import add_changes
from llmconv.convert.models.head_and_dtype import check_dtype
from llmconv.errors import UsageProblem
from llmconv.files.source_file import open_source
from llmconv.files.sources import local_path, source_name
from llmconv.output.plan import KEEP
from llmconv.tensors import BLOCK_BYTES, BY_NAME, Array, DType, LazyTensor

# Elements combined at once: 8 MiB for each adapter, and a few intermediate results of this size
TILE_ELEMENTS = 1 << 20
SIGNS = ("total", "frequency")


@dataclass(frozen=True)
class Combination:
    """A method to combine adapters (one of `METHODS`), with its options."""

    method: str = "linear"
    densities: tuple[float, ...] = ()  # share of each adapter's update to keep, for a method that prunes
    seed: int = 0  # random seed of `dare_*`
    rank: int | None = None  # rank of the result of `svd`
    majority_sign: str = "total"  # one of `SIGNS`

    @property
    def is_sum(self) -> bool:
        """Whether whole updates are only added."""
        method = METHODS[self.method]
        return method.kept is _whole and not (method.elects or method.truncates)

    def check(self, adapters: int) -> None:
        """Raises UsageProblem for an unknown method, or options that contradict it or the number of adapters."""
        if self.method not in METHODS or self.majority_sign not in SIGNS:
            raise UsageProblem(
                f"unsupported combination {self.method!r} with majority sign {self.majority_sign!r}",
                hint=f"`--combine` is one of {', '.join(METHODS)}, `--majority-sign` one of {', '.join(SIGNS)}",
            )
        method = METHODS[self.method]
        pruning, drawing, electing = (
            ", ".join(f"`{name}`" for name, other in METHODS.items() if has(other))
            for has in (lambda one: one.prunes, lambda one: one.kept is _drawn, lambda one: one.elects)
        )
        options = {  # whether one is given, whether the method has it, and which have
            "seed": (self.seed, method.kept is _drawn, drawing),
            "majority-sign": (self.majority_sign != "total", method.elects, electing),
            "density": (self.densities, method.prunes, pruning),
            f"rank {self.rank}": (self.rank is not None, method.truncates, "`svd`"),
        }
        for name, (is_given, applies, having) in options.items():
            if is_given and not applies:
                raise UsageProblem(
                    f"`--{name}` does not apply to `--combine {self.method}`", hint=f"only to `--combine` {having}"
                )
        if method.prunes and len(self.densities) not in (1, adapters):
            raise UsageProblem(
                f"`--combine {self.method}` needs one `--density`, or one per adapter ({adapters}); "
                f"got {len(self.densities)}",
                hint="give the share of each update to keep: `--density 0.5`",
            )
        if odd := [density for density in self.densities if not 0 < density <= 1]:
            raise UsageProblem(
                f"the density {odd[0]} is not above 0 and at most 1", hint="give the share to keep: `--density 0.5`"
            )
        if self.rank is not None and self.rank < 1:
            raise UsageProblem(f"invalid `--rank {self.rank}`", hint="give a rank of at least 1")

    def density(self, number: int) -> float:
        return self.densities[number if len(self.densities) > 1 else 0] if self.densities else 1.0


@dataclass(frozen=True)
class TaskVector:
    """The update of one weight by one adapter."""

    delta: LazyTensor  # the update, float64, of the weight's shape
    weight: float  # the adapter's weight w
    density: float  # share of the elements to keep
    key: str  # identifies the adapter, independent of the order of adapters
    # returns two thin matrices, if the update is their product
    factors: Callable[[], tuple[Array, Array]] | None = None


ReadRows = Callable[[int, int], Array]  # `rows(start, stop)` of an update: float64, two-dimensional


def combine(
    base: LazyTensor, name: str, vectors: Sequence[TaskVector], combination: Combination, dtype: DType
) -> LazyTensor:
    """`base` plus the combined update, rounded once (nearest even) to `dtype`; `name` is part of the random seed.

    The result does not depend on the order of `vectors` (one per adapter) or the division into rows.
    """
    change = _change(name, sorted(vectors, key=lambda vector: (vector.key, vector.weight)), combination)

    def load(start: int, stop: int) -> Array:
        result = np.empty((stop - start, *base.shape[1:]), dtype.numpy)
        height = max(1, TILE_ELEMENTS // max(1, prod(base.shape[1:])))
        for first in range(start, stop, height):
            last = min(first + height, stop)
            rows = base.rows(first, last)
            total = rows.astype(np.float64).reshape(len(rows), -1) + change(first, last)
            round_into(result[first - start : last - start], total.reshape(rows.shape))
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: combine(base, name, vectors, combination, other))


@dataclass(frozen=True)
class CombinationMethod:
    """One method to combine adapters."""

    # `kept(vector, name, seed)` returns the kept elements of one update, zeros elsewhere
    kept: Callable[[TaskVector, str, int], ReadRows]
    prunes: bool = False  # only a share of the elements is kept, the density
    elects: bool = False  # elements with the majority sign are averaged; otherwise updates are added
    truncates: bool = False  # the sum is approximated by a low rank


def _change(name: str, vectors: Sequence[TaskVector], combination: Combination) -> ReadRows:
    method = METHODS[combination.method]
    weights = np.array([vector.weight for vector in vectors])[:, None, None]
    if method.truncates:
        return _truncated(vectors, weights, combination.rank or 1)
    kept = [method.kept(vector, name, combination.seed) for vector in vectors]
    if not method.elects:
        return lambda start, stop: _sum(kept, weights, start, stop)
    return lambda start, stop: _elect([rows(start, stop) for rows in kept], weights, combination.majority_sign)


def _whole(vector: TaskVector, name: str = "", seed: int = 0) -> ReadRows:
    return lambda start, stop: vector.delta.rows(start, stop).reshape(stop - start, -1)


def _sum(kept: Sequence[ReadRows], weights: Array, start: int, stop: int) -> Array:
    total: Array = weights[0] * kept[0](start, stop)
    for weight, rows in zip(weights[1:], kept[1:], strict=True):
        total += weight * rows(start, stop)
    return total


def _elect(kept: Sequence[Array], weights: Array, method: str) -> Array:
    """The mean of the elements with the majority sign (PEFT `calculate_majority_sign_mask`, `disjoint_merge`)."""
    stacked = np.stack(kept)
    signs = np.sign(stacked)
    elected = np.where((stacked if method == "total" else signs).sum(axis=0) >= 0, 1, -1)
    agree = signs == elected
    mean: Array = (stacked * weights * agree).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    return mean


def _largest(vector: TaskVector, name: str, seed: int) -> ReadRows:
    """The update without its smallest elements; elements equal to the threshold are all kept."""
    if vector.density == 1:
        return _whole(vector)
    threshold, count = KeptUntilLastRow(1 << 62), int(vector.density * prod(vector.delta.shape))

    def rows(start: int, stop: int) -> Array:
        least = threshold.take(stop - start, lambda: kth_largest(vector.delta, count))
        values = vector.delta.rows(start, stop).reshape(stop - start, -1)
        return np.where(np.abs(values) >= least, values, 0)

    return rows


def _drawn(vector: TaskVector, name: str, seed: int) -> ReadRows:
    """Random elements of the update, divided by the density; a counter-based generator serves rows in any order."""
    key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}\0{vector.key}".encode()).digest()[:16], "little")
    columns, limit = prod(vector.delta.shape[1:]), int(vector.density * 2**53)

    def rows(start: int, stop: int) -> Array:
        first, surplus = divmod(start * columns, 4)
        draws = np.random.Philox(key=key, counter=first).random_raw(surplus + (stop - start) * columns)[surplus:]
        values = vector.delta.rows(start, stop).reshape(stop - start, -1)
        return np.where((draws >> 11).reshape(values.shape) < limit, values / vector.density, 0)

    return rows


def _truncated(vectors: Sequence[TaskVector], weights: Array, rank: int) -> ReadRows:
    """The sum of the updates, truncated to `rank`; a one-dimensional tensor stays whole."""
    delta = vectors[0].delta
    rows = [_whole(vector) for vector in vectors]
    if len(delta.shape) < 2:
        return lambda start, stop: _sum(rows, weights, start, stop)
    once = KeptUntilLastRow(delta.num_rows)
    if all(vector.factors for vector in vectors):

        def product(start: int, stop: int) -> Array:
            left, right = once.take(stop - start, lambda: _truncated_factors(vectors, rank))
            made: Array = left[start:stop] @ right
            return made

        return product

    def part(start: int, stop: int) -> Array:
        whole: Array = once.take(
            stop - start, lambda: _truncated_matrix(_sum(rows, weights, 0, delta.num_rows).reshape(delta.shape), rank)
        )
        return whole[start:stop].reshape(stop - start, -1)

    return part


def _truncated_factors(vectors: Sequence[TaskVector], rank: int) -> tuple[Array, Array]:
    """Two factors of the truncated sum, by the SVD of a small matrix between the orthogonal parts of its factors."""
    pairs = [vector.factors() for vector in vectors if vector.factors]
    left = np.hstack([vector.weight * pair[0] for vector, pair in zip(vectors, pairs, strict=True)])
    right = np.vstack([pair[1] for pair in pairs])
    with single_threaded():  # the last bits depend on the number of threads
        (left, upper), (down, lower) = np.linalg.qr(left), np.linalg.qr(right.T)
        u, s, v = np.linalg.svd(upper @ lower.T)
        return left @ (u[:, : min(rank, len(s))] * s[:rank]), v[: min(rank, len(s))] @ down.T


def _truncated_matrix(whole: Array, rank: int) -> Array:
    """The truncation of a matrix, of each matrix in a stack, or of a convolution as out×(all others)."""
    with single_threaded():
        u, s, v = np.linalg.svd(whole.reshape(len(whole), -1) if whole.ndim > 3 else whole, full_matrices=False)
        made: Array = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
    return made


METHODS: dict[str, CombinationMethod] = {  # by PEFT's names
    "linear": CombinationMethod(_whole),
    "cat": CombinationMethod(_whole),
    "svd": CombinationMethod(_whole, truncates=True),
    "magnitude_prune": CombinationMethod(_largest, prunes=True),
    "ties": CombinationMethod(_largest, prunes=True, elects=True),
    "dare_linear": CombinationMethod(_drawn, prunes=True),
    "dare_ties": CombinationMethod(_drawn, prunes=True, elects=True),
}


SHIFT = 44  # low bits of a float64 that the first pass ignores: it counts by exponent and eight bits of the fraction


def kth_largest(tensor: LazyTensor, count: int) -> float:
    """The magnitude of the `count`-th largest element of a finite float64 tensor; infinite when `count` is 0.

    The bits of positive floats are ordered as their values are, so the first pass counts elements by their upper bits,
    and the second sorts those of one group. Memory is that of a row block, 8 MiB, and a group: a few thousandths of the
    elements, more where many are nearly equal.
    """
    if count == 0:
        return np.inf
    counts = np.zeros(1 << (63 - SHIFT), np.int64)
    for start, stop in tensor.blocks():
        counts += np.bincount((_bits(tensor, start, stop) >> np.uint64(SHIFT)).astype(np.int64), minlength=len(counts))
    above = np.cumsum(counts[::-1])[::-1]
    group = int(np.flatnonzero(above >= count)[-1])
    rest = count - (int(above[group + 1]) if group + 1 < len(above) else 0)
    parts = []
    for start, stop in tensor.blocks():
        bits = _bits(tensor, start, stop)
        parts.append(bits[(bits >> np.uint64(SHIFT)) == group])
    members = np.concatenate(parts)
    return float(np.partition(members, len(members) - rest)[len(members) - rest].view(np.float64))


def _bits(tensor: LazyTensor, start: int, stop: int) -> Array:
    """The magnitudes of rows as integers in the same order."""
    return np.abs(tensor.rows(start, stop)).reshape(-1).view(np.uint64)


FLOAT64 = BY_NAME["float64"]


class TaskVectors:
    """Each adapter placed alone on one base, unless updates are only added (`summed`); `order`: adapters by content."""

    def __init__(
        self, base: Edits, adapters: Sequence[Adapter], weights: Sequence[float], combination: Combination
    ) -> None:
        """Places the adapters on `base` (without edits), unless they are only summed; errors as in `Edits.place`."""
        self.summed = combination.is_sum
        self._combination, self._weights = combination, weights
        alone = len(adapters) == 1 and self.summed
        self._keys = [""] if alone else [sha256_of((adapter.settings, *adapter.weights)) for adapter in adapters]
        self.order = sorted(range(len(adapters)), key=lambda number: (self._keys[number], weights[number]))
        self._alone: list[Edits] = []
        for adapter in () if self.summed else adapters:
            self._alone.append(Edits(dict(base.tensors), base.config, base.tied, naming=base.naming))
            self._alone[-1].place(adapter, 1.0)

    def combined(self, name: str, current: LazyTensor, dtype: DType) -> LazyTensor:
        """`current`, the weight before the update, plus the combined update, rounded once to `dtype`."""
        vectors = [
            TaskVector(
                _difference(edits, name),
                self._weights[number],
                self._combination.density(number),
                self._keys[number],
                _factors(edits, name),
            )
            for number, edits in enumerate(self._alone)
            if name in edits.changes
        ]
        return combine(current, name, vectors, self._combination, dtype)


def sha256_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open_source(path) as file:
            while chunk := file.read(BLOCK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _difference(edits: Edits, name: str) -> LazyTensor:
    """The update of a weight by one adapter, float64: the result minus the weight, for any kind of update."""
    weight = edits.current(name)
    result = add_changes(weight, edits.changes[name], FLOAT64)

    def load(start: int, stop: int) -> Array:
        return result.rows(start, stop) - weight.rows(start, stop).astype(np.float64)

    return LazyTensor(FLOAT64, weight.shape, load)


def _factors(edits: Edits, name: str) -> Callable[[], tuple[Array, Array]] | None:
    """Returns two thin matrices with the update as their product, for a matrix with LoRA updates only."""
    changes, weight = edits.changes[name], edits.current(name)
    plain = [change for change in changes if isinstance(change, LoraProduct)]
    if len(plain) != len(changes) or len(weight.shape) != 2:
        return None

    def make() -> tuple[Array, Array]:
        pairs = [change.factors(0, weight.num_rows) for change in plain]
        return np.hstack([left for left, _ in pairs]), np.vstack([right for _, right in pairs])

    return make


class MergeOptions(TypedDict, total=False):
    """The options of a merge, by the names that the command has for them.

    Attributes:
        weights: w, one per adapter; all 1 by default.
        alpha: `lora_alpha` if an adapter's files do not contain it.
        initial_adapters: one per adapter, as it was before training, if training subtracted it from the base (PiSSA,
            OLoRA, CorDA, LoRA-GA): its product is subtracted. `-` for an adapter without one.
        combine: how to combine adapters; one of `METHODS`.
        densities: share of each adapter's update to keep, for a method that prunes; one, or one per adapter.
        seed: random seed of `dare_*`, used together with the tensor's name and the adapter's content.
        rank: of `svd` (default: the largest rank of the adapters).
        majority_sign: how `ties` and `dare_ties` elect signs: by `total` or `frequency`.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the floating-point tensors written.
        base_quant: for a quantized base: `dequantize` (write plain weights, bfloat16 if `dtype` is `keep`) or
            `requantize` (keep its format; refused if too little of the update survives).
        max_shard_size: `keep` (the shards of the base), or the size of the largest safetensors file, such as `5GB`.
        tokenizer: a tokenizer file or folder to use instead of the base's.
    """

    weights: Sequence[float]
    alpha: float | None
    initial_adapters: Sequence[str | Path]
    combine: str
    densities: Sequence[float]
    seed: int
    rank: int | None
    majority_sign: str
    dtype: str
    base_quant: str | None
    max_shard_size: str | int
    tokenizer: str | Path | None


DEFAULTS: MergeOptions = {
    "weights": (),
    "alpha": None,
    "initial_adapters": (),
    "combine": "linear",
    "densities": (),
    "seed": 0,
    "rank": None,
    "majority_sign": "total",
    "dtype": "keep",
    "base_quant": None,
    "max_shard_size": KEEP,
    "tokenizer": None,
}


@dataclass(frozen=True)
class Recipe:
    """The checked options of a merge; attributes as in `MergeOptions`."""

    weights: tuple[float, ...]
    combination: Combination = Combination()
    dtype: str = "keep"
    base_quant: str | None = None
    max_shard_size: str | int = KEEP
    tokenizer: Path | None = None

    def provenance(self) -> dict[str, Any]:
        """The options that are not the default, for the manifest; the tokenizer by its file name."""
        options: dict[str, Any] = {"weights": list(self.weights)}
        if self.combination.method != "linear":
            options["combination"] = asdict(self.combination)
        if self.dtype != "keep":
            options["dtype"] = self.dtype
        if self.tokenizer:
            options["tokenizer"] = source_name(self.tokenizer)
        return options | ({"base_quant": self.base_quant} if self.base_quant else {})


def recipe_of(options: MergeOptions, adapters: Sequence[Adapter]) -> Recipe:
    """The recipe for merging these adapters; UsageProblem if options contradict each other or the adapters."""
    options = DEFAULTS | options
    check_dtype(options["dtype"])
    signs, densities = options["majority_sign"], tuple(options["densities"])
    return Recipe(
        _weights(options["weights"], adapters),
        _ranked(Combination(options["combine"], densities, options["seed"], options["rank"], signs), adapters),
        options["dtype"],
        options["base_quant"],
        options["max_shard_size"],
        local_path(options["tokenizer"], in_parts=True) if options["tokenizer"] else None,
    )


def _weights(weights: Sequence[float], adapters: Sequence[Adapter]) -> tuple[float, ...]:
    if not adapters:
        raise UsageProblem("no adapter is given", hint="give at least one: `llmconv merge-lora BASE ADAPTER -o OUT`")
    if weights and len(weights) != len(adapters):
        raise UsageProblem(
            f"{len(weights)} weight(s) for {len(adapters)} adapter(s)", hint="give `--weight` once per adapter"
        )
    if odd := [weight for weight in weights if not math.isfinite(weight)]:
        raise UsageProblem(f"the weight {odd[0]} is not finite", hint="give numbers such as `--weight 0.5`")
    return tuple(weights) or (1.0,) * len(adapters)


def _ranked(combination: Combination, adapters: Sequence[Adapter]) -> Combination:
    """The combination, checked, with the default rank of `svd` filled in."""
    combination.check(len(adapters))
    if combination.method != "svd" or combination.rank is not None:
        return combination
    if not (ranks := [pair.rank for adapter in adapters for pair in adapter.pairs.values()]):
        raise UsageProblem("no adapter has a rank", hint="give the rank of the result: `--rank R`")
    return replace(combination, rank=max(ranks))
