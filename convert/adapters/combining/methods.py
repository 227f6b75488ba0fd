"""Several adapters in one: how the changes that each makes of a weight become one change.

A method works on the whole change of each tensor (the task vector), not on the factors A and B of it, so that it fits
adapters of any kind and rank. Changes are made by row blocks, as often as they are needed, and never held: `ties` and
`magnitude_prune` pass over them twice more to find what to keep; only `svd` of changes that are no LoRA holds a tensor.

=================  =====================================================================================================
`linear`, `cat`    Σ wᵢ·Δᵢ, exactly; what PEFT calls linear has terms B₁·A₂ besides, its cat is this sum
`svd`              the best approximation of Σ wᵢ·Δᵢ of a rank (Eckart and Young); a matrix for each expert
`magnitude_prune`  Σ wᵢ·Δᵢ with only the largest of each Δᵢ
`ties`             the largest of each Δᵢ; of those, at each place, the mean of wᵢ·Δᵢ over the ones with the sign that
                   most have (TIES, arXiv 2306.01708)
`dare_linear`      Σ wᵢ·Δᵢ with a random part of each Δᵢ, divided by that part's share (DARE, arXiv 2311.03099)
`dare_ties`        the same parts, elected and averaged as in `ties`
=================  =====================================================================================================

Order and names follow `peft/utils/merge_utils.py`: signs are elected before weights count, by the sum of what is kept
(`total`) or by number (`frequency`); a tie is positive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from llmconv.convert.adapters.combining.selection import kth_largest
from llmconv.convert.adapters.placement.tuned_weight import KeptUntilLastRow
from llmconv.convert.algebra.blas_threads import single_threaded
from llmconv.convert.algebra.rounding import round_into
from llmconv.errors import UsageProblem
from llmconv.tensors import Array, DType, LazyTensor

TILE_ELEMENTS = 1 << 20
"""Elements that are combined at once: 8 MiB for each adapter, and as much again a few times."""

SIGNS = ("total", "frequency")


@dataclass(frozen=True)
class Combination:
    """What becomes of several adapters.

    Attributes:
        method: one of `METHODS`.
        densities: for a method that prunes, the share of each adapter's change that is kept.
        seed: of a method that draws.
        rank: of `svd`.
        majority_sign: one of `SIGNS`.
    """

    method: str = "linear"
    densities: tuple[float, ...] = ()
    seed: int = 0
    rank: int | None = None
    majority_sign: str = "total"

    @property
    def is_sum(self) -> bool:
        """Whether whole changes are only added."""
        method = METHODS[self.method]
        return method.kept is _whole and not (method.elects or method.truncates)

    def check(self, adapters: int) -> None:
        """The options suit each other.

        Raises:
            UsageProblem: they do not.
        """
        if self.method not in METHODS or self.majority_sign not in SIGNS:
            raise UsageProblem(
                f"there is no way {self.method!r} with majority sign {self.majority_sign!r} to combine adapters",
                hint=f"`--combine` is one of {', '.join(METHODS)}, `--majority-sign` one of {', '.join(SIGNS)}",
            )
        if self.seed and METHODS[self.method].kept is not _drawn:
            raise UsageProblem(f"`--seed` means nothing to `--combine {self.method}`", hint="it is for `dare_*`")
        if self.majority_sign != "total" and not METHODS[self.method].elects:
            raise UsageProblem(
                f"`--majority-sign` means nothing to `--combine {self.method}`", hint="it is for `ties` and `dare_ties`"
            )
        self._check_densities(adapters)
        if self.rank is not None and (self.rank < 1 or not METHODS[self.method].truncates):
            raise UsageProblem(
                f"`--rank {self.rank}` does not suit `--combine {self.method}`",
                hint="only `--combine svd` has a rank, of at least 1",
            )

    def _check_densities(self, adapters: int) -> None:
        pruning = ", ".join(name for name, method in METHODS.items() if method.prunes)
        if self.densities and not METHODS[self.method].prunes:
            raise UsageProblem(
                f"`--density` means nothing to `--combine {self.method}`", hint=f"it is for `--combine` {pruning}"
            )
        if METHODS[self.method].prunes and len(self.densities) not in (1, adapters):
            raise UsageProblem(
                f"`--combine {self.method}` of {adapters} adapter(s) has {len(self.densities)} `--density`",
                hint="give it once, or once per adapter",
            )
        if odd := [density for density in self.densities if not 0 < density <= 1]:
            raise UsageProblem(
                f"the density {odd[0]} is not above 0 and at most 1", hint="give the share to keep: `--density 0.5`"
            )

    def density(self, number: int) -> float:
        """Of the adapter of this number."""
        return self.densities[number if len(self.densities) > 1 else 0] if self.densities else 1.0


@dataclass(frozen=True)
class TaskVector:
    """The change that one adapter makes of one weight.

    Attributes:
        delta: the change, float64, of the weight's shape.
        weight: w.
        density: the share that is kept.
        key: tells the adapter from others, whatever the order they are given in.
        factors: where the change is a product of two thin matrices, those.
    """

    delta: LazyTensor
    weight: float
    density: float
    key: str
    factors: Callable[[], tuple[Array, Array]] | None = None


ReadRows = Callable[[int, int], Array]
"""`rows(start, stop)` of a change: float64, of two dimensions."""


def combine(
    base: LazyTensor, name: str, vectors: Sequence[TaskVector], combination: Combination, dtype: DType
) -> LazyTensor:
    """`base` plus the combined change, rounded once (nearest even) to `dtype`.

    The bytes depend on neither the order of `vectors` nor how rows are divided.

    Args:
        base: the weight.
        name: of the tensor, from which with the seed comes what is drawn.
        vectors: one per adapter that changes it.
        combination: the method and its options.
        dtype: element type of the result.
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
    """One way to combine.

    Attributes:
        kept: what of one adapter's change is used, for the tensor of a name, with a seed.
        prunes: that is a share of it, the density.
        elects: signs are elected, and what agrees is averaged; otherwise changes are added.
        truncates: the sum becomes one of a rank.
    """

    kept: Callable[[TaskVector, str, int], ReadRows]
    prunes: bool = False
    elects: bool = False
    truncates: bool = False


def _change(name: str, vectors: Sequence[TaskVector], combination: Combination) -> ReadRows:
    method = METHODS[combination.method]
    if method.truncates:
        return _truncated(vectors, combination.rank or 1)
    kept = [method.kept(vector, name, combination.seed) for vector in vectors]
    weights = np.array([vector.weight for vector in vectors])[:, None, None]
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
    """The mean of what agrees with the elected sign (PEFT `calculate_majority_sign_mask`, `disjoint_merge`)."""
    stacked = np.stack(kept)
    signs = np.sign(stacked)
    elected = np.where((stacked if method == "total" else signs).sum(axis=0) >= 0, 1, -1)
    agree = signs == elected
    mean: Array = (stacked * weights * agree).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    return mean


def _largest(vector: TaskVector, name: str, seed: int) -> ReadRows:
    """The change without its smallest elements; those that are as large as the last one kept are all kept."""
    if vector.density == 1:
        return _whole(vector)
    threshold, count = KeptUntilLastRow(1 << 62), int(vector.density * prod(vector.delta.shape))

    def rows(start: int, stop: int) -> Array:
        least = threshold.take(stop - start, lambda: kth_largest(vector.delta, count))
        values = vector.delta.rows(start, stop).reshape(stop - start, -1)
        return np.where(np.abs(values) >= least, values, 0)

    return rows


def _drawn(vector: TaskVector, name: str, seed: int) -> ReadRows:
    """A random part of the change, divided by its share; a counter-based generator gives any row its numbers."""
    key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}\0{vector.key}".encode()).digest()[:16], "little")
    columns, limit = prod(vector.delta.shape[1:]), int(vector.density * 2**53)

    def rows(start: int, stop: int) -> Array:
        first, surplus = divmod(start * columns, 4)
        draws = np.random.Philox(key=key, counter=first).random_raw(surplus + (stop - start) * columns)[surplus:]
        values = vector.delta.rows(start, stop).reshape(stop - start, -1)
        return np.where((draws >> 11).reshape(values.shape) < limit, values / vector.density, 0)

    return rows


def _truncated(vectors: Sequence[TaskVector], rank: int) -> ReadRows:
    """The sum of the changes, of at most `rank`; a tensor of one dimension stays whole."""
    delta = vectors[0].delta
    rows = [_whole(vector) for vector in vectors]
    weights = np.array([vector.weight for vector in vectors])[:, None, None]
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
    """By the decomposition of a small matrix between the orthogonal parts of the factors."""
    pairs = [vector.factors() for vector in vectors if vector.factors]
    left = np.hstack([vector.weight * pair[0] for vector, pair in zip(vectors, pairs, strict=True)])
    right = np.vstack([pair[1] for pair in pairs])
    with single_threaded():  # the last bits depend on how many threads divide the work
        (left, upper), (down, lower) = np.linalg.qr(left), np.linalg.qr(right.T)
        u, s, v = np.linalg.svd(upper @ lower.T)
        return left @ (u[:, : min(rank, len(s))] * s[:rank]), v[: min(rank, len(s))] @ down.T


def _truncated_matrix(whole: Array, rank: int) -> Array:
    """Of a matrix, of each of a stack of them, or of a convolution as a matrix of its outputs."""
    matrix = whole.reshape(len(whole), -1) if whole.ndim > 3 else whole
    with single_threaded():
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        made: Array = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
    return made


METHODS: dict[str, CombinationMethod] = {
    "linear": CombinationMethod(_whole),
    "cat": CombinationMethod(_whole),
    "svd": CombinationMethod(_whole, truncates=True),
    "magnitude_prune": CombinationMethod(_largest, prunes=True),
    "ties": CombinationMethod(_largest, prunes=True, elects=True),
    "dare_linear": CombinationMethod(_drawn, prunes=True),
    "dare_ties": CombinationMethod(_drawn, prunes=True, elects=True),
}
"""By the names that PEFT has for them."""
