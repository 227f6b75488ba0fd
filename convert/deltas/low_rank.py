"""Low-rank deltas: a PEFT adapter that approximates a tuned model, with factors of linear weights and whole tensors.

Layout as PEFT saves it (`utils/save_and_load.py`): `lora_A` (rank×in) and `lora_B` (out×rank) and alpha = rank, so a
factor of 1; norms and embeddings as `modules_to_save`; biases as `bias="all"`.

The factors are the largest singular triples of D = tuned − base (Eckart and Young): with Q, the singular vectors of D
on its smaller side, Q·Qᵀ·D (or D·Q·Qᵀ), which is D itself if Q is square. Up to a million elements Q is exact; for
larger weights it is iterated, and of white noise, the slowest case, the product captures 99.9 % of the optimum.

The iteration is block Krylov (Musco and Musco 2015, algorithm 2) with reorthogonalized blocks: products with D and Dᵀ
in float32, never Dᵀ·D itself, which would lose the small singular values; the small matrices in float64. It ends when
one more block of vectors adds less than `GAIN` to the captured norm: for a change of exactly low rank after two blocks.
One step of subspace iteration in float64 follows. Products of a large matrix with a narrow one are computed in tiles:
for larger ones OpenBLAS first copies the large matrix into another order, which is half as fast for a few columns
(measured).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from threading import Lock
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, is_conv1d
from llmconv.convert.adapters.low_rank_sum import PRODUCT_LIMIT, single_threaded, widen
from llmconv.convert.algebra import equal
from llmconv.convert.models.blueprint import blueprint, released
from llmconv.convert.models.head_and_dtype import HEAD, is_tied, plain_tensors, with_tied_head
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.output.plan import Plan, plan_checkpoint
from llmconv.tensors import BY_NAME, FLOATS, Array, LazyTensor, cast

# Additional columns of a block; maximum number of blocks; share of the captured norm that another block must add
SPARE, DEPTH, GAIN = 8, 16, 1e-3
# Bytes of a change in float32 that is held; a larger one (a head of a large vocabulary) is computed per product
MEMORY = 512 << 20
SAFE = 30  # float32 safely represents the squares of norms between 2⁻³⁰ and 2³⁰
TINY = 1e-5  # relative to the longest column: the rounding error of float32 for a column that the others span


@dataclass(frozen=True)
class MatrixChange:
    """One linear weight before and after, of one shape (rows×columns)."""

    base: LazyTensor
    tuned: LazyTensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tuned.shape
        return rows, columns

    def rows(self, start: int, stop: int, least: type[np.floating[Any]] = np.float64) -> Array:
        """Rows of tuned − base in float64, or if `least` is float32 in the wider of their types, rounded once."""
        sides = [widen(side.rows(start, stop)) for side in (self.base, self.tuned)]
        before, after = (side.astype(np.result_type(side, least), copy=False) for side in sides)
        return np.asarray(after - before)


MatrixProduct = Callable[[Array], Array]


def not_finite(name: str) -> UnsupportedInput:
    """The error for a change that is not finite."""
    return UnsupportedInput(f"the change of `{name}` is not finite", hint="extract an exact delta, without `--rank`")


def _iterated(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, float]:
    """As `_dense`, with a Q from the iteration; UnsupportedInput if the change is not finite."""
    matrix = _Matrix(name, change)
    both: tuple[MatrixProduct, MatrixProduct] = matrix.times, matrix.transposed_times
    ahead, back = both if change.shape[0] >= change.shape[1] else both[::-1]
    start = np.random.default_rng(0).standard_normal((min(change.shape), rank + SPARE)).astype(np.float32)
    known, gram = _krylov(_orthonormal(start), ahead, back, rank)
    best = product(known, np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
    # One more step in float64 restores the precision of float32 products for changes of low rank.
    basis = np.linalg.qr(ahead(best))[0]
    left, values, right = np.linalg.svd(back(basis), full_matrices=False)
    images = product(basis, right.T * values * matrix.scale)  # of the singular vectors `left`, under D or Dᵀ
    if change.shape[0] >= change.shape[1]:
        return images, left.T, matrix.total
    return left, images.T, matrix.total


def _krylov(block: Array, ahead: MatrixProduct, back: MatrixProduct, rank: int) -> tuple[Array, Array]:
    """An orthonormal basis of the span of `block`, (DᵀD)·`block`, …; the inner products of its images under D."""
    known, images, gram, before = np.empty((len(block), 0), np.float32), None, np.empty((0, 0)), 0.0
    for _ in range(DEPTH):
        known, image = np.hstack([known, block]), ahead(block)
        images = image if images is None else np.hstack([images, image])
        # the inner products of all columns in float64; `gram` has those of the first ones
        there = len(gram)
        more = transposed_product(images, images[:, there:].astype(np.float64))
        gram = np.hstack([np.vstack([gram, more[:there].T]), more])
        held = float(np.sqrt(np.linalg.eigvalsh(gram)[::-1][:rank].clip(0).sum()))
        if held - before <= GAIN * held:
            break
        before = held
        block = _orthogonal(back(_orthonormal(image)), known)
        if not block.size:
            break
    return known, gram


def _orthogonal(block: Array, known: Array) -> Array:
    """An orthonormal basis of `block` outside the span of `known`, without columns that are rounding errors."""
    least = TINY * np.linalg.norm(block, axis=0).max(initial=0)
    rest = block - product(known, transposed_product(known, block))
    basis = _orthonormal(rest, least)
    return _orthonormal(basis - product(known, transposed_product(known, basis)), 0.5)


def _orthonormal(block: Array, least: float = 0.0) -> Array:
    """An orthonormal basis of the columns, without directions in which their norm is at most `least`.

    From the eigenvectors of the small blockᵀ·block (SVQB, Stathopoulos and Wu 2002), twice because of rounding: two
    products with a narrow matrix, while LAPACK's QR goes column by column.
    """
    wide = block.astype(np.float64)
    for _ in range(2):
        values, vectors = np.linalg.eigh(transposed_product(wide, wide))
        long = values > max(least * least, 1e-12 * values.max(initial=0))
        wide = product(wide, vectors[:, long] / np.sqrt(values[long]))
        least = 0.0
    return wide.astype(np.float32)


class _Matrix:
    """A change in float32 by rows, divided by `scale` (a power of two, mostly 1); `total`: its squared norm."""

    def __init__(self, name: str, change: MatrixChange) -> None:
        rows, columns = change.shape
        self._change, self.scale, self.total = change, 1.0, 0.0
        self._kept: list[Array] | None = [] if 4 * rows * columns <= MEMORY else None
        for part in self._computed():
            self.total += float(np.square(part, dtype=np.float64).sum())
            if self._kept is not None:
                self._kept.append(part)
        if not np.isfinite(self.total):
            raise not_finite(name)
        exponent = int(np.frexp(np.sqrt(self.total))[1])
        if abs(exponent) > SAFE:
            self.scale = 2.0**exponent
            self._kept = [self._scaled(part) for part in self._kept] if self._kept is not None else None

    def _computed(self) -> Iterator[Array]:
        for start, stop in self._change.tuned.blocks():
            with np.errstate(all="ignore"):  # values too large for float32 are refused as not finite
                yield self._change.rows(start, stop, np.float32).astype(np.float32, copy=False)

    def _scaled(self, part: Array) -> Array:
        return part if self.scale == 1 else (part / self.scale).astype(np.float32, copy=False)

    def _parts(self) -> Iterable[Array]:
        return self._kept if self._kept is not None else map(self._scaled, self._computed())

    def times(self, right: Array) -> Array:
        """D · `right` / scale, in the dtype of `right`."""
        return np.concatenate([product(part, right) for part in self._parts()])

    def transposed_times(self, left: Array) -> Array:
        total = np.zeros((self._change.shape[1], left.shape[1]), left.dtype)
        start = 0
        for part in self._parts():
            total += transposed_product(part, left[start : start + len(part)])
            start += len(part)
        return total


NARROW = 32  # columns of the narrow matrix per product
HIGH = (8, PRODUCT_LIMIT // (8 * NARROW))
TURNED = (128, PRODUCT_LIMIT // (128 * NARROW))  # rows and columns of a tile of the large matrix


def product(left: Array, right: Array) -> Array:
    """`left` @ `right` (narrow), in the wider of their dtypes."""
    height, width = HIGH
    result = np.zeros((len(left), right.shape[1]), np.result_type(left, right))
    whole = len(left) // height * height
    for first in range(0, right.shape[1], NARROW):
        for start in range(0, len(right), width):
            inner, columns = slice(start, start + width), slice(first, first + NARROW)
            part = right[inner, columns]
            stack = left[:whole, inner].reshape(-1, height, len(part))
            result[:whole, columns] += (stack @ part).reshape(whole, part.shape[1])
            result[whole:, columns] += left[whole:, inner] @ part
    return result


def transposed_product(left: Array, right: Array) -> Array:
    """`left`ᵀ @ `right`, in the wider of their dtypes; see `product`."""
    height, width = TURNED
    result = np.zeros((left.shape[1], right.shape[1]), np.result_type(left, right))
    whole = left.shape[1] // width * width
    for first in range(0, right.shape[1], NARROW):
        for start in range(0, len(left), height):
            inner, columns = slice(start, start + height), slice(first, first + NARROW)
            part = right[inner, columns]
            stack = left[inner, :whole].reshape(len(part), -1, width).transpose(1, 2, 0)
            result[:whole, columns] += (stack @ part).reshape(whole, part.shape[1])
            result[whole:, columns] += left[inner, whole:].T @ part
    return result


PREFIX = "base_model.model."
# Fields of the config that are irrelevant to an adapter
TRACES = ("torch_dtype", "dtype", "transformers_version", "architectures", "use_cache", "vocab_size")
EXACT = "extract an exact delta, without `--rank`"


@dataclass(frozen=True)
class LowRankDelta:
    """The plan of an adapter, the names of its low-rank products and whole tensors, and the products."""

    plan: Plan
    products: tuple[str, ...]
    whole: tuple[str, ...]
    factors: FactoredChanges

    def captured(self) -> dict[str, float]:
        """‖B·A‖ / ‖tuned − base‖ of each product."""
        return {name: _captured(*self.factors.share(name)) for name in self.products}

    def captured_overall(self) -> float:
        held, change = zip(*map(self.factors.share, self.products), strict=True)
        return _captured(sum(held), sum(change))


def _captured(held: float, change: float) -> float:
    """‖product‖ / ‖change‖, 0 to 1, from their squares."""
    return sqrt(min(1.0, held / change)) if change else 1.0


def plan_low_rank(base: Checkpoint, tuned: Checkpoint, rank: int, dtype: str) -> LowRankDelta:
    """The files of an adapter of at most this rank; compares both models, products are computed later.

    `dtype` is `keep` (products in float32) or a float type. Raises UsageProblem for a rank that is not positive,
    UnsupportedInput for a change that a PEFT adapter cannot represent.
    """
    if rank < 1:
        raise UsageProblem(f"invalid `--rank {rank}`", hint="give a positive number, such as 16")
    plain = [released(plain_tensors(side, EXACT), side.config) for side in (base, tuned)]  # one of them may have stacks
    below, above = (with_tied_head(one, side.config, HEAD) for one, side in zip(plain, (base, tuned), strict=True))
    products, whole = _sorted(base, below, above)
    changes = {name: MatrixChange(below[name], above[name]) for name in products}
    factors = FactoredChanges(changes, {name: min(rank, *changes[name].shape) for name in products})
    turned = {name for name in products if is_conv1d(base.config, name)}
    tensors: dict[str, LazyTensor] = {}
    for name in products:
        tensors |= _pair(name, changes[name], min(rank, *changes[name].shape), factors, turned=name in turned)
    for name in whole:
        module, _, kind = name.rpartition(".")  # that of a layer with a product has one more level
        level = ".base_layer" if f"{module}.weight" in products else ""
        tensors[f"{PREFIX}{module}{level}.{kind}"] = above[name]
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in tensors.items()}
    small = {_module(name): min(change.shape) for name, change in changes.items() if min(change.shape) < rank}
    biases = [name for name in whole if _is_linear_bias(name, base)]
    saved = sorted({_module(name) for name in whole if name not in biases})
    config = {
        "alpha_pattern": small,
        "base_model_name_or_path": base.path.absolute().name,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": bool(turned),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": small,
        "target_modules": sorted(map(_module, changes)),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    adapter = replace(tuned, tensors=tensors, config=config)
    odd = differing_fields(base, tuned)
    warnings = [f"an adapter does not contain other changes of the config: {listing(odd)}"] if odd else []
    if grown := next((name for name in whole if below[name].shape != above[name].shape), None):
        rows = above[grown].num_rows
        warnings.append(f"the vocabulary changed: PEFT needs `resize_token_embeddings({rows})` on the base first")
    plan = plan_checkpoint(replace(tuned, tensors={}, adapter=adapter))
    return LowRankDelta(replace(plan, warnings=tuple(warnings)), tuple(products), tuple(whole), factors)


def differing_fields(base: Checkpoint, tuned: Checkpoint) -> list[str]:
    """The fields of the configurations in which two models differ, except `TRACES`."""
    names = sorted({*base.config, *tuned.config} - {*TRACES})
    return [name for name in names if base.config.get(name) != tuned.config.get(name)]


NamedTensors = Mapping[str, LazyTensor]


def _sorted(base: Checkpoint, below: NamedTensors, above: NamedTensors) -> tuple[list[str], list[str]]:
    """Names of changed tensors with a product and of those stored whole; UnsupportedInput if neither is possible."""
    if odd := sorted(below.keys() ^ above.keys()):
        raise UnsupportedInput(f"only one of the two models has {listing(odd)}", hint=EXACT)
    changed = [name for name in above if _differ(below[name], above[name])]
    if odd := [name for name in changed if not _fits(name, below[name], above[name])]:
        raise UnsupportedInput(f"no adapter has the change of {len(odd)} tensors: {listing(odd)}", hint=EXACT)
    model = blueprint(base.config)
    if model and (odd := [name for name in changed if name not in model.shapes]):
        raise UnsupportedInput(
            f"transformers has other names for {len(odd)} changed tensors: {listing(odd)}", hint=EXACT
        )
    # weights directly in a module with experts are routers, which PEFT only saves whole
    routers = {name.partition(".experts.")[0] for name in above if ".experts." in name}
    own_head = HEAD in base and not is_tied(base.config)
    products = [
        name
        for name in changed
        if _is_linear(name, above[name])
        and below[name].shape == above[name].shape
        and (own_head or name != HEAD)
        and _module(_module(name)) not in routers
    ]
    if not products:
        raise UnsupportedInput("no linear weight changed, so an adapter would be empty", hint=EXACT)
    # with all parameters of the same modules, as PEFT saves them; the bias of a linear layer goes alone
    whole = [name for name in changed if name not in products]
    modules = {_module(name) for name in whole if not _is_linear_bias(name, above)}
    siblings = {name for name in above if _module(name) in modules and not _is_linear_bias(name, above)}
    return products, [name for name in above if name in siblings or name in whole]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_linear(name: str, tensor: LazyTensor) -> bool:
    is_embedding = name.endswith((*EMBEDDINGS, "wpe.weight")) or "embed" in name
    return name.endswith(".weight") and len(tensor.shape) == 2 and not is_embedding


def _is_linear_bias(name: str, tensors: NamedTensors) -> bool:
    weight = f"{_module(name)}.weight"
    return name.endswith(".bias") and weight in tensors and _is_linear(weight, tensors[weight])


def _fits(name: str, below: LazyTensor, above: LazyTensor) -> bool:
    """Whether a PEFT adapter can represent the change: not of experts, which are fused in its model, or other names."""
    plain = name.endswith((".weight", ".bias")) and len(above.shape) <= 2 and ".experts." not in name
    grown = name == HEAD or name.endswith(EMBEDDINGS)
    same = below.shape == above.shape or (grown and below.shape[1:] == above.shape[1:])
    return plain and same and all(side.dtype.name in ("float64", *FLOATS) for side in (below, above))


def _differ(below: LazyTensor, above: LazyTensor) -> bool:
    if below.dtype == above.dtype or below.shape != above.shape:
        return not equal(below, above)
    wide = ([side.rows(*block).astype(np.float64) for side in (below, above)] for block in above.blocks())
    return any(not np.array_equal(one, other, equal_nan=True) for one, other in wide)


def _pair(
    name: str, change: MatrixChange, rank: int, factors: FactoredChanges, *, turned: bool
) -> dict[str, LazyTensor]:
    """A and B of one weight, in float32."""
    rows, columns = change.shape

    def a(start: int, stop: int) -> Array:
        left, right = factors.of(name)
        return np.ascontiguousarray((left.T if turned else right)[start:stop])

    def b(start: int, stop: int) -> Array:
        left, right = factors.of(name)
        return np.ascontiguousarray((right.T if turned else left)[start:stop])

    wide, high = (rows, columns) if turned else (columns, rows)
    module = PREFIX + _module(name)
    return {
        f"{module}.lora_A.weight": LazyTensor(BY_NAME["float32"], (rank, wide), a),
        f"{module}.lora_B.weight": LazyTensor(BY_NAME["float32"], (high, rank), b),
    }


KEPT = 8  # number of products in memory: as many as the writer may need out of order
CHUNK = 4096

DENSE, THIN, SPARSE = 1 << 20, 512, 8
"""All singular vectors are computed exactly up to this number of elements, up to this length of the smaller side, and
for ranks above this fraction (1/`SPARSE`) of it."""


class FactoredChanges:
    """The products of changes (width in `ranks`) by weight, each computed once needed, one at a time."""

    def __init__(self, changes: Mapping[str, MatrixChange], ranks: Mapping[str, int]) -> None:
        self._changes, self._ranks = changes, ranks
        self._shares: dict[str, tuple[float, float]] = {}
        self._recent: OrderedDict[str, tuple[Array, Array]] = OrderedDict()
        self._lock = Lock()

    def of(self, name: str) -> tuple[Array, Array]:
        """left [rows, rank] and right [rank, columns], float32, times √σ; UnsupportedInput if not finite."""
        with self._lock:
            if name not in self._recent:
                with single_threaded():
                    left, right, self._shares[name] = factored(name, self._changes[name], self._ranks[name])
                self._recent[name] = left, right
                if len(self._recent) > KEPT:
                    self._recent.popitem(last=False)
            return self._recent[name]

    def share(self, name: str) -> tuple[float, float]:
        """The squared Frobenius norms of the product, and of the change that it approximates."""
        if name not in self._shares:
            self.of(name)
        return self._shares[name]


def factored(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, tuple[float, float]]:
    """left, right and the norms of their product and the change; see `FactoredChanges.of`."""
    rows, columns = change.shape
    is_large = rows * columns > DENSE and min(rows, columns) > THIN and SPARSE * rank <= min(rows, columns)
    left, right, total = (_iterated if is_large else _dense)(name, change, rank)
    # One side is orthonormal, the other as long as the singular values; √σ for each.
    values = np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=1)
    share = float(np.square(values).sum()), total
    root = np.sqrt(np.where(values > 0, values, 1))
    upper, lower = (root, 1 / root) if rows < columns else (1 / root, root)
    return (left * upper).astype(np.float32), (right * lower[:, None]).astype(np.float32), share


def _dense(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, float]:
    """The factors of D·Q·Qᵀ, or of Q·Qᵀ·D if D is wider than high, in float64, and the squared norm of D.

    Q is from all eigenvectors of the smaller of D·Dᵀ and Dᵀ·D. Memory is the smaller side squared, and the whole matrix
    if it is wider than high.
    """
    rows, columns = change.shape
    blocks = list(change.tuned.blocks())
    if rows >= columns:
        gram = sum((part.T @ part for part in (change.rows(*block) for block in blocks)), np.zeros((columns, columns)))
        basis = _top(name, gram, rank)
        left = np.concatenate([change.rows(*block) @ basis for block in blocks])
        right = basis.T
    else:
        whole = np.concatenate([change.rows(*block).astype(np.float32) for block in blocks])
        parts = [slice(first, first + CHUNK) for first in range(0, columns, CHUNK)]
        gram = sum(
            (wide @ wide.T for wide in (whole[:, part].astype(np.float64) for part in parts)), np.zeros((rows, rows))
        )
        basis = _top(name, gram, rank)
        left, right = basis, np.hstack([basis.T @ whole[:, part] for part in parts])
    return left, right, float(np.trace(gram))


def _top(name: str, gram: Array, rank: int) -> Array:
    """The eigenvectors of the `rank` largest eigenvalues, as columns, the largest first."""
    if not np.isfinite(gram).all():
        raise not_finite(name)
    return np.asarray(np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
