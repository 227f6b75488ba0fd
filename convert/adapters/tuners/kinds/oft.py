"""OFT: W·Rᵀ with R block-diagonal and orthogonal (arXiv 2306.07280, 2506.19847; PEFT `tuners/oft/layer.py`).

Each block is the Cayley transform of a skew matrix Q, stored as its upper triangle: (I - Q)(I + Q)⁻¹, or with
`use_cayley_neumann` I + 2Q + 2Q² + … + Qⁿ⁻¹. `coft` first shortens Q to eps/√blocks. An embedding is W·R.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange, invalid_field
from llmconv.tensors import Array

MOST_TERMS = 1000
"""Limit of the length of the series, which has converged long before."""


def fit(learned: ModuleTensors) -> FittingShape:
    """in: the size of all blocks; with `block_share` a single block is repeated, so any size."""
    name = _name(learned)
    (blocks, elements), settings = learned.shape(name, 2), learned.settings
    size = _size(elements)
    learned.same(f"the width of `{name}`", elements, size * (size - 1) // 2)
    _ = settings.number("eps", 6e-5), settings.flag("use_cayley_neumann"), settings.flag("coft")
    if (terms := settings.positive("num_cayley_neumann_terms", 5)) not in range(1, MOST_TERMS):
        raise invalid_field("num_cayley_neumann_terms", terms)
    if settings.flag("block_share"):
        learned.same("the number of shared blocks", blocks, 1)
        return None, None
    return None, blocks * size


def _name(learned: ModuleTensors) -> str:
    return "oft_embedding_R" if "oft_embedding_R" in learned.tensors else "oft_R"


def _size(elements: int) -> int:
    """The side of a square matrix with this number of elements above the diagonal."""
    return (1 + isqrt(1 + 8 * elements)) // 2


def require(learned: ModuleTensors, shape: WeightShape) -> None:
    """Shared blocks fill the inputs."""
    if shape[1] % (size := _size(learned.shape(_name(learned))[1])):
        raise learned.misfit(f"blocks of {size} do not fill {shape[1]} inputs")


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update; each block of columns is rotated separately."""
    blocks = rotations(learned)
    turned = blocks if _name(learned) == "oft_embedding_R" else blocks.transpose(0, 2, 1)

    def rows(weight: Array, start: int) -> Array:
        return rotate(weight, turned) - weight

    return rows


def rotate(weight: Array, blocks: Array) -> Array:
    """weight · diag(blocks): n×in and b×k×k with in = b·k (or b = 1, which is repeated)."""
    parts = weight.reshape(len(weight), -1, blocks.shape[-1])
    turned: Array = np.matmul(parts.transpose(1, 0, 2), blocks)
    return turned.transpose(1, 0, 2).reshape(weight.shape)


def rotations(learned: ModuleTensors) -> Array:
    """The blocks of R: b×k×k."""
    triangles, settings = learned.read(_name(learned)), learned.settings
    size = _size(triangles.shape[1])
    rows, columns = np.triu_indices(size, 1)
    skew = np.zeros((len(triangles), size, size))
    skew[:, rows, columns] = triangles
    skew -= skew.transpose(0, 2, 1)
    if settings.flag("coft"):
        # each matrix with a norm of at most `limit` (PEFT `_project_batch`)
        limit = settings.number("eps", 6e-5) / np.sqrt(len(skew))
        norms = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
        factors: Array = np.where(norms <= limit, 1, limit / np.maximum(norms, np.finfo(float).tiny))
        skew = skew * factors
    if settings.flag("use_cayley_neumann", True):
        return neumann(skew, int(settings.positive("num_cayley_neumann_terms", 5)))
    return cayley(skew)


def cayley(skew: Array) -> Array:
    """(I - Q)(I + Q)⁻¹ of each matrix."""
    identity = np.eye(skew.shape[-1])
    solved: Array = np.linalg.solve(identity - skew, identity + skew)
    return solved.transpose(0, 2, 1)


def neumann(skew: Array, terms: int) -> Array:
    """The series with n terms: I + 2Q + … + 2Qⁿ⁻² + Qⁿ⁻¹; with three, PEFT computes I + 2Q + 2Q² + Q³."""
    identity: Array = np.broadcast_to(np.eye(skew.shape[-1]), skew.shape)
    if terms < 2:
        return identity
    total: Array = identity + 2 * skew
    if terms == 2:
        return total
    power = skew @ skew
    total = total + 2 * power
    for _ in range(3, terms - 1):
        power = power @ skew
        total = total + 2 * power
    last: Array = power @ skew
    return total + last


TUNER = Tuner(
    peft_type="OFT",
    parts=("oft_R", "oft_embedding_R"),
    fields=(
        *("r", "oft_block_size", "module_dropout", "coft", "eps", "block_share"),
        *("use_cayley_neumann", "num_cayley_neumann_terms"),
    ),
    fit=fit,
    delta=delta,
    require=require,
)
