"""Low-rank deltas: a PEFT adapter that approximates a tuned model, with factors of linear weights and whole tensors.

Layout as PEFT saves it (`utils/save_and_load.py`): `lora_A` (rank×in) and `lora_B` (out×rank) and alpha = rank, so a
factor of 1; norms and embeddings as `modules_to_save`; biases as `bias="all"`.

The factors are the largest singular triples of D = tuned − base (Eckart and Young): with Q, the singular vectors of D
on its smaller side, Q·Qᵀ·D (or D·Q·Qᵀ), which is D itself if Q is square. Up to a million elements Q is exact; for
larger weights it is iterated (`singular_vectors`), and of white noise the product captures 99.9 % of the optimum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from threading import Lock
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.conv1d import is_conv1d
from llmconv.convert.algebra.blas_threads import single_threaded
from llmconv.convert.algebra.operations import equal
from llmconv.convert.deltas.singular_vectors import MatrixChange, largest_vectors, not_finite
from llmconv.convert.models.blueprint.blueprint import blueprint
from llmconv.convert.models.blueprint.names import EMBEDDINGS
from llmconv.convert.models.completeness import DROPPED
from llmconv.convert.models.tied_head import HEAD, find_embedding, is_tied
from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.output.plan import Plan, plan_checkpoint
from llmconv.tensors import BY_NAME, FLOATS, Array, LazyTensor, cast

PREFIX = "base_model.model."
TRACES = ("torch_dtype", "dtype", "transformers_version", "architectures", "use_cache", "vocab_size")
"""Fields of the config that are irrelevant to an adapter."""

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
        return {name: self.factors.share(name).captured for name in self.products}

    def captured_overall(self) -> float:
        """The same ratio for all products together."""
        shares = [self.factors.share(name) for name in self.products]
        return CapturedNorm(sum(share.held for share in shares), sum(share.change for share in shares)).captured


def plan_low_rank(base: Checkpoint, tuned: Checkpoint, rank: int, dtype: str) -> LowRankDelta:
    """The files of an adapter. Reads and compares both models; products are computed later.

    Args:
        rank: rank of the products; less for smaller weights.
        dtype: `keep` (products in float32, other tensors unchanged) or a floating-point type.

    Raises:
        UsageProblem: `rank` is not positive.
        UnsupportedInput: a change that a PEFT adapter cannot represent.
    """
    if rank < 1:
        raise UsageProblem(f"invalid `--rank {rank}`", hint="give a positive number, such as 16")
    below, above = _effective(base), _effective(tuned)
    products, whole = _sorted(base, below, above)
    changes = {name: MatrixChange(below[name], above[name]) for name in products}
    factors = FactoredChanges(changes, {name: min(rank, *changes[name].shape) for name in products})
    turned = {name for name in products if is_conv1d(base.config, name)}
    tensors: dict[str, LazyTensor] = {}
    for name in products:
        tensors |= _pair(name, changes[name], min(rank, *changes[name].shape), factors, turned=name in turned)
    tensors |= {_stored_name(name, products): above[name] for name in whole}
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in tensors.items()}
    config = _adapter_config(base, rank, changes, whole, turned=bool(turned))
    adapter = replace(tuned, tensors=tensors, config=config)
    warnings = tuple(_warnings(base, tuned, below, above, whole))
    plan = plan_checkpoint(replace(tuned, tensors={}, adapter=adapter))
    return LowRankDelta(replace(plan, warnings=warnings), tuple(products), tuple(whole), factors)


def _effective(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """The tensors without buffers, including a tied head; UnsupportedInput if they are quantized."""
    if checkpoint.config.get("quantization_config"):
        raise UnsupportedInput(f"`{checkpoint.path.name}` is quantized", hint=EXACT)
    tensors = {name: tensor for name, tensor in checkpoint.items() if not DROPPED.search(name)}
    embedding = find_embedding(tensors)
    if HEAD not in tensors and embedding and is_tied(checkpoint.config):
        tensors[HEAD] = tensors[embedding]
    return tensors


NamedTensors = Mapping[str, LazyTensor]


def _sorted(base: Checkpoint, below: NamedTensors, above: NamedTensors) -> tuple[list[str], list[str]]:
    """Names of changed tensors with a product and of those stored whole; UnsupportedInput if neither is possible."""
    if odd := sorted(below.keys() ^ above.keys()):
        raise UnsupportedInput(f"only one of the two models has {listing(odd)}", hint=EXACT)
    changed = [name for name in above if _differ(below[name], above[name])]
    odd = [name for name in changed if not _fits(name, below[name], above[name])]
    if odd:
        raise UnsupportedInput(f"no adapter has the change of {len(odd)} tensors: {listing(odd)}", hint=EXACT)
    model = blueprint(base.config)
    if model and (odd := [name for name in changed if name not in model.shapes]):
        raise UnsupportedInput(
            f"transformers has other names for {len(odd)} changed tensors: {listing(odd)}",
            hint=EXACT,
        )
    routers, own_head = _beside_experts(above), HEAD in base and not is_tied(base.config)
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
    return products, _with_siblings([name for name in changed if name not in products], above)


def _with_siblings(whole: list[str], above: NamedTensors) -> list[str]:
    """`whole` with all parameters of the same modules, as PEFT saves them; the bias of a linear layer goes alone."""
    modules = [_module(name) for name in whole if not _is_linear_bias(name, above)]
    return [name for name in above if name in whole or (_module(name) in modules and not _is_linear_bias(name, above))]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_linear(name: str, tensor: LazyTensor) -> bool:
    is_embedding = name.endswith((*EMBEDDINGS, "wpe.weight")) or "embed" in name
    return name.endswith(".weight") and len(tensor.shape) == 2 and not is_embedding


def _beside_experts(tensors: NamedTensors) -> set[str]:
    """The modules with experts; weights directly in one are routers, which PEFT only saves whole."""
    return {name.partition(".experts.")[0] for name in tensors if ".experts." in name}


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


def _stored_name(name: str, products: list[str]) -> str:
    """PEFT's name for a tensor that is stored whole; that of a layer with a product has one more level."""
    module, _, kind = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{kind}" if f"{module}.weight" in products else PREFIX + name


def _adapter_config(
    base: Checkpoint, rank: int, changes: Mapping[str, MatrixChange], whole: list[str], *, turned: bool
) -> dict[str, Any]:
    small = {_module(name): min(change.shape) for name, change in changes.items() if min(change.shape) < rank}
    biases = [name for name in whole if _is_linear_bias(name, base)]
    saved = sorted({_module(name) for name in whole if name not in biases})
    return {
        "alpha_pattern": small,
        "base_model_name_or_path": base.path.absolute().name,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": turned,
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


def _warnings(
    base: Checkpoint, tuned: Checkpoint, below: NamedTensors, above: NamedTensors, whole: list[str]
) -> list[str]:
    names = sorted({*base.config, *tuned.config} - {*TRACES})
    odd = [name for name in names if base.config.get(name) != tuned.config.get(name)]
    warnings = [f"an adapter does not contain other changes of the config: {listing(odd)}"] if odd else []
    grown = next((name for name in whole if below[name].shape != above[name].shape), None)
    if grown:
        rows = above[grown].num_rows
        warnings.append(f"the vocabulary changed: PEFT needs `resize_token_embeddings({rows})` on the base first")
    return warnings


KEPT = 8
"""Number of products in memory: as many as the writer may need out of order."""

CHUNK = 4096

DENSE, THIN, SPARSE = 1 << 20, 512, 8
"""All singular vectors are computed exactly up to this number of elements, up to this length of the smaller side, and
for ranks above this fraction (1/`SPARSE`) of it."""


@dataclass(frozen=True)
class CapturedNorm:
    """Squared Frobenius norms: of the product (`held`), and of the change that it approximates."""

    held: float
    change: float

    @property
    def captured(self) -> float:
        """‖product‖ / ‖change‖, 0 to 1."""
        return sqrt(min(1.0, self.held / self.change)) if self.change else 1.0


class FactoredChanges:
    """The products of many changes by name of the weight, each computed when one of its factors is first needed.

    Only one is computed at a time; `ranks` has the width of each.
    """

    def __init__(self, changes: Mapping[str, MatrixChange], ranks: Mapping[str, int]) -> None:
        self._changes, self._ranks = changes, ranks
        self._shares: dict[str, CapturedNorm] = {}
        self._recent: OrderedDict[str, tuple[Array, Array]] = OrderedDict()
        self._lock = Lock()

    def of(self, name: str) -> tuple[Array, Array]:
        """left [rows, rank] and right [rank, columns], float32, each times the roots of the singular values.

        Raises UnsupportedInput if the change is not finite.
        """
        with self._lock:
            if name not in self._recent:
                with single_threaded():
                    left, right, self._shares[name] = factored(name, self._changes[name], self._ranks[name])
                self._recent[name] = left, right
                if len(self._recent) > KEPT:
                    self._recent.popitem(last=False)
            return self._recent[name]

    def share(self, name: str) -> CapturedNorm:
        """The norms of a change and of its product."""
        if name not in self._shares:
            self.of(name)
        return self._shares[name]


def factored(name: str, change: MatrixChange, rank: int) -> tuple[Array, Array, CapturedNorm]:
    """left, right and the norms of their product and the change; see `FactoredChanges.of`."""
    rows, columns = change.shape
    if rows * columns > DENSE and min(rows, columns) > THIN and SPARSE * rank <= min(rows, columns):
        found = largest_vectors(name, change, rank)
        pair = (found.images, found.vectors.T) if rows >= columns else (found.vectors, found.images.T)
        left, right, total = *pair, found.total
    else:
        left, right, total = _dense(name, change, rank)
    # One side is orthonormal, the other as long as the singular values; √σ for each.
    values = np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=1)
    share = CapturedNorm(float(np.square(values).sum()), total)
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
        gram = sum((_squared(change.rows(*block).T) for block in blocks), np.zeros((columns, columns)))
        basis = _top(name, gram, rank)
        left = np.concatenate([change.rows(*block) @ basis for block in blocks])
        right = basis.T
    else:
        whole = np.concatenate([change.rows(*block).astype(np.float32) for block in blocks])
        parts = [slice(first, first + CHUNK) for first in range(0, columns, CHUNK)]
        gram = sum((_squared(whole[:, part].astype(np.float64)) for part in parts), np.zeros((rows, rows)))
        basis = _top(name, gram, rank)
        left, right = basis, np.hstack([basis.T @ whole[:, part] for part in parts])
    return left, right, float(np.trace(gram))


def _squared(part: Array) -> Array:
    return part @ part.T


def _top(name: str, gram: Array, rank: int) -> Array:
    """The eigenvectors of the `rank` largest eigenvalues, as columns, the largest first."""
    if not np.isfinite(gram).all():
        raise not_finite(name)
    return np.asarray(np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
