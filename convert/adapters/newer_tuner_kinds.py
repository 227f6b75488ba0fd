"""PEFT's newer tuners, a formula and a row of `NEWER` each, as in `tuner_kinds.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from llmconv.convert.adapters.adapter import FittingShape, ModuleTensors, RowChange, Tuner, WeightShape
from llmconv.convert.adapters.low_rank_sum import thin_product
from llmconv.errors import UnsupportedInput
from llmconv.tensors import Array

# MiSS, formerly Bone: W[o, i] + D[i mod r, o] (arXiv 2409.15371; PEFT `tuners/miss/layer.py`).
# D is r×out, or with `init_weights` "mini" r×m, repeated over the outputs. With "bat" each block of r×r is
# W·D + D, with a D of out/r×r×r.


def _miss_name(learned: ModuleTensors) -> str:
    return "bone_block" if "bone_block" in learned.tensors else "miss_block"


def _miss_fit(learned: ModuleTensors) -> FittingShape:
    """out, unless D is repeated."""
    rank, columns = learned.shape(_miss_name(learned), 2)
    learned.same("the rank", rank, learned.rank(64))
    return (None if learned.settings.values.get("init_weights") == "mini" else columns), None


def _miss_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """A repeated D fills the outputs, and every row of it has an input."""
    rank, columns = learned.shape(_miss_name(learned))
    if not columns or shape[0] % columns or rank > shape[1]:
        raise learned.misfit(f"a block of {rank}×{columns} for {shape[0]}×{shape[1]} weights")


def _miss_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    block = learned.read(_miss_name(learned)).T
    inputs = np.arange(shape[1]) % block.shape[1]
    return lambda weight, start: block[np.arange(start, start + len(weight)) % len(block)][:, inputs]


def _bat_fit(learned: ModuleTensors) -> FittingShape:
    """out: the blocks of all outputs."""
    blocks, size, other = learned.shape(_miss_name(learned), 3)
    learned.same("the side of a block", size, other, learned.rank(64))
    return blocks * size, None


def _bat_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """Blocks fill the inputs."""
    if shape[1] % (size := learned.shape(_miss_name(learned))[1]):
        raise learned.misfit(f"blocks of {size} do not fill {shape[1]} inputs")


def _bat_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update; those of one block together."""
    blocks = learned.read(_miss_name(learned))
    size = blocks.shape[1]

    def rows(weight: Array, start: int) -> Array:
        result, first = np.empty_like(weight), 0
        while first < len(weight):
            block, line = divmod(start + first, size)
            last = min(first + size - line, len(weight))
            parts = weight[first:last].reshape(last - first, -1, size)
            changed = parts @ blocks[block] + blocks[block][line : line + last - first, None]
            result[first:last] = changed.reshape(last - first, -1)
            first = last
        return result

    return rows


MISS = Tuner(
    "MISS", ("miss_block", "bone_block"), ("r", "miss_dropout", "mini_r"), _miss_fit, _miss_delta, _miss_require
)
BAT = replace(MISS, fit=_bat_fit, delta=_bat_delta, require=_bat_require, of_weight=True)


# C3A: W + C/in, C of circulant blocks C[p·b + s, q·b + j] = kernel[p, q, (j - s) mod b] (arXiv 2407.19342; PEFT
# `tuners/c3a`). The kernel is out/b×in/b×b.


def _c3a_fit(learned: ModuleTensors) -> FittingShape:
    rows, columns, size = learned.shape("c3a_kernel", 3)
    return rows * size, columns * size


def _c3a_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    kernel = learned.read("c3a_kernel") / shape[1]
    size = kernel.shape[2]

    def rows(weight: Array, start: int) -> Array:
        blocks, shifts = np.divmod(np.arange(start, start + len(weight)), size)
        turned = (np.arange(size) - shifts[:, None]) % size
        return np.take_along_axis(kernel[blocks], turned[:, None, :], axis=2).reshape(len(weight), -1)

    return rows


C3A = Tuner("C3A", ("c3a_kernel",), ("block_size", "block_size_pattern"), _c3a_fit, _c3a_delta)


# RoAd: R·W with R of 2×2 rotations and scales of pairs of outputs (arXiv 2409.00119; PEFT `tuners/road/layer.py`).
# In a group of outputs, x1 of the first half and x2 of the second become a·x1 - b·x2 and c·x2 + d·x1; a to d are
# α·cos θ and α·sin θ: `road_1` has an α and a θ for each pair, `road_2` for each output, `road_4` for each of a to d.


ROAD_SIZES = {"road_1": (2, 1), "road_2": (1, 1), "road_4": (1, 2)}
"""Outputs per angle and angles per output, by variant."""


def _road_fit(learned: ModuleTensors) -> FittingShape:
    """out, by the number of angles."""
    (angles,), (scales,), group = learned.shape("road_theta", 1), learned.shape("road_alpha", 1), _road_group(learned)
    if (variant := learned.settings.word("variant", "road_1")) not in ROAD_SIZES:
        raise learned.settings.invalid("variant", variant, "road_1, road_2 or road_4")
    outputs, numbers = ROAD_SIZES[variant]
    learned.same("the number of angles", angles, scales)
    rows = angles * outputs // numbers
    if group % 2 or rows % group or rows * numbers != angles * outputs:
        raise learned.misfit(f"{angles} angles in groups of {group} outputs")
    return rows, None


def _road_group(learned: ModuleTensors) -> int:
    return learned.settings.count("group_size", default=64)


def _road_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update, of whole groups."""
    group, angles, scales = _road_group(learned), learned.read("road_theta"), learned.read("road_alpha")
    cosine, sine = scales * np.cos(angles), scales * np.sin(angles)
    if learned.settings.word("variant", "road_1") == "road_1":
        cosine, sine = (np.repeat(one.reshape(-1, 1, group // 2), 2, axis=1) for one in (cosine, sine))
    elif learned.settings.word("variant") == "road_4":
        cosine, sine = cosine.reshape(-1, 2, group)[:, 0], sine.reshape(-1, 2, group)[:, 1]
    cosine, sine = (one.reshape(-1, 2, group // 2, 1) for one in (cosine, sine))

    def rows(weight: Array, start: int) -> Array:
        halves, own = weight.reshape(-1, 2, group // 2, weight.shape[1]), slice(start // group, None)
        count = len(halves)
        turned = np.stack((-halves[:, 1], halves[:, 0]), axis=1)
        result: Array = halves * cosine[own][:count] + turned * sine[own][:count] - halves
        return result.reshape(weight.shape)

    return rows


ROAD = Tuner(
    "ROAD",
    ("road_theta", "road_alpha"),
    ("variant", "group_size"),
    _road_fit,
    _road_delta,
    scales_output=True,
    of_weight=True,
    group=_road_group,
)


# DeLoRA: W + λ/r · B·diag(1/(|aₖ|·|bₖ|))·A·diag(n), n the norms of the columns of W before training, in the file
# (arXiv 2503.18225; PEFT `tuners/delora/layer.py`). Norms |aₖ|, |bₖ| are at least 1e-4.


def _delora_fit(learned: ModuleTensors) -> FittingShape:
    (rank, columns), (rows, other) = learned.shape("delora_A", 2), learned.shape("delora_B", 2)
    learned.same("the rank", rank, other, learned.rank())
    learned.same("the length of `delora_lambda`", *learned.shape("delora_lambda", 1), 1)
    return rows, learned.same("in", columns, *learned.shape("delora_w_norm", 1))


def _delora_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    right, left = learned.read("delora_A"), learned.read("delora_B")
    norms = np.maximum(np.linalg.norm(right, axis=1), 1e-4) * np.maximum(np.linalg.norm(left, axis=0), 1e-4)
    left = left * (learned.read("delora_lambda")[0] / len(right) / norms)
    right = right * learned.read("delora_w_norm")
    return lambda weight, start: thin_product(left[start : start + len(weight)], right)


DELORA = Tuner(
    "DELORA",
    ("delora_A", "delora_B", "delora_lambda", "delora_w_norm"),
    ("r", "delora_lambda", "module_dropout", "rank_pattern", "lambda_pattern"),
    _delora_fit,
    _delora_delta,
)


# GraLoRA: W + alpha/(r + h) · (G + B·A), G of k×k blocks: that of outputs p and inputs q is B[p, rows of q]ᵀ times
# A[q, :, columns of p]ᵀ, r/k of both (arXiv 2505.20355; PEFT `tuners/gralora/layer.py`). A is k×in/k×r and B
# k×r×out/k; the product B·A of rank h (`hybrid_r`) is there if h is not 0.


def _gralora_fit(learned: ModuleTensors) -> FittingShape:
    (blocks, columns, rank), (other, same, rows) = learned.shape("gralora_A", 3), learned.shape("gralora_B", 3)
    learned.same("the number of blocks", blocks, other, learned.settings.count("gralora_k", default=2))
    if learned.same("the rank", rank, same, learned.rank(32)) % blocks:
        raise learned.misfit(f"rank {rank} for {blocks} blocks")
    if hybrid := _gralora_hybrid(learned):
        (low, inputs), (outputs, also) = (learned.shape(f"gralora_{part}_general", 2) for part in "AB")
        learned.same("`hybrid_r`", low, also, hybrid)
        learned.same("in", inputs, blocks * columns)
        learned.same("out", outputs, blocks * rows)
    return blocks * rows, blocks * columns


def _gralora_hybrid(learned: ModuleTensors) -> int:
    return int(learned.settings.number("hybrid_r", default=0, least=-1))


def _gralora_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: a thin product for each block of outputs, and one for all."""
    right, left, hybrid = learned.read("gralora_A"), learned.read("gralora_B"), _gralora_hybrid(learned)
    blocks, columns, rank = right.shape
    part, scale = rank // blocks, learned.settings.number("alpha", default=64) / (rank + hybrid)
    left = left * scale

    @lru_cache(maxsize=1)
    def factor(block: int) -> Array:
        """Of one block of outputs: r×in, block-diagonal."""
        result = np.zeros((blocks, part, blocks, columns))
        own = right[:, :, block * part : (block + 1) * part]
        result[range(blocks), :, range(blocks)] = own.transpose(0, 2, 1)
        return result.reshape(rank, -1)

    common = [learned.read(f"gralora_{one}_general") for one in "BA"] if hybrid else []

    def rows(weight: Array, start: int) -> Array:
        result, height = np.empty(weight.shape), left.shape[2]
        first = 0
        while first < len(weight):
            block, line = divmod(start + first, height)
            last = min(first + height - line, len(weight))
            result[first:last] = thin_product(left[block][:, line : line + last - first].T, factor(block))
            first = last
        if common:
            result += scale * thin_product(common[0][start : start + len(weight)], common[1])
        return result

    return rows


GRALORA = Tuner(
    "GRALORA",
    ("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general"),
    ("r", "hybrid_r", "alpha", "gralora_dropout", "gralora_k"),
    _gralora_fit,
    _gralora_delta,
    conv1d=True,
)


# HiRA: W + W ∘ (B·A) (ICLR 2025, openreview TwJrTz9cRS; PEFT `tuners/hira/layer.py`).
# A is r×in(×kernel) and B out×r(×1); of an embedding A is r×vocab, B dim×r, and the factor is (B·A)ᵀ. PEFT applies
# two adapters to the weight as it was before both.


def _hira_fit(learned: ModuleTensors) -> FittingShape:
    embedding = "hira_embedding_A" in learned.tensors
    a, b = (learned.shape(f"hira_{'embedding_' if embedding else ''}{part}") for part in "AB")
    if len(a) != len(b) or len(a) < 2 or prod(b[2:]) != 1:
        raise learned.misfit(f"A has shape {list(a)}, B {list(b)}")
    learned.same("the rank", a[0], b[1])  # PEFT passes over `rank_pattern`, and nothing else depends on the rank
    return (a[1], b[0]) if embedding else (b[0], prod(a[1:]))


def _hira_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    if "hira_embedding_A" in learned.tensors:
        left, right = learned.read("hira_embedding_A").T, learned.read("hira_embedding_B").T
    else:
        left, right = (learned.read(f"hira_{part}") for part in "BA")
        left, right = left.reshape(len(left), -1), right.reshape(len(right), -1)
    return lambda weight, start: weight * thin_product(left[start : start + len(weight)], right)


HIRA = Tuner(
    "HIRA",
    ("hira_A", "hira_B", "hira_embedding_A", "hira_embedding_B"),
    ("r", "hira_dropout", "rank_pattern"),
    _hira_fit,
    _hira_delta,
    conv1d=True,
)


# VB-LoRA: W + B·A, both of vectors that are mixed from a bank of all modules (arXiv 2405.15179; PEFT `tuners/vblora`).
# Logits of A are r×in/l×bank and of B out/l×r×bank; a vector is the sum of the `topk` of the largest logits by their
# softmax. With `save_only_topk_weights` the file has their numbers, and all but the last of their softmax.


def _vblora_sizes(learned: ModuleTensors, part: str) -> tuple[int, ...]:
    name, topk = f"vblora_logits_{part}", _vblora_topk(learned)
    if name in learned.tensors:
        first, second, vectors = learned.shape(name, 3)
        learned.same("the number of vectors", vectors, learned.shape("vblora_vector_bank", 2)[0])
    else:
        first, second, count = learned.shape(f"{name}_topk_indices", 3)
        learned.same("`topk`", count, topk)
        expected = (first, second, topk - 1)
        if learned.shape(f"{name}_topk_weights", 3) != expected:
            raise learned.misfit(f"`{name}_topk_weights` is not {list(expected)}")
    return first, second


def _vblora_topk(learned: ModuleTensors) -> int:
    return learned.settings.count("topk", default=2, most=learned.shape("vblora_vector_bank", 2)[0] + 1)


def _vblora_fit(learned: ModuleTensors) -> FittingShape:
    length = learned.shape("vblora_vector_bank", 2)[1]
    (rank, columns), (rows, other) = (_vblora_sizes(learned, part) for part in "AB")
    learned.same("the rank", rank, other, learned.rank(4))
    return rows * length, columns * length


def _vblora_mixed(learned: ModuleTensors, part: str) -> Array:
    """The vectors of one factor, after its two dimensions."""
    bank, name, topk = learned.read("vblora_vector_bank"), f"vblora_logits_{part}", _vblora_topk(learned)
    if name in learned.tensors:
        logits = learned.read(name)
        chosen = np.argpartition(logits, -topk, axis=-1)[..., -topk:]
        best = np.take_along_axis(logits, chosen, axis=-1)
        weights = np.exp(best - best.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
    else:
        chosen, weights = learned.read(f"{name}_topk_indices").astype(np.int64), learned.read(f"{name}_topk_weights")
        weights = np.concatenate([weights, 1 - weights.sum(axis=-1, keepdims=True)], axis=-1)
    if chosen.min() < 0 or chosen.max() >= len(bank):
        raise learned.misfit(f"a vector of {len(bank)} has number {chosen.max()}")
    mixed: Array = np.einsum("abk,abkm->abm", weights, bank[chosen])
    return mixed


def _vblora_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    right, left = _vblora_mixed(learned, "A"), _vblora_mixed(learned, "B")
    right, left = right.reshape(len(right), -1), left.transpose(0, 2, 1).reshape(shape[0], -1)
    return lambda weight, start: thin_product(left[start : start + len(weight)], right)


VBLORA = Tuner(
    "VBLORA",
    tuple(f"vblora_logits_{part}{kind}" for part in "AB" for kind in ("", "_topk_indices", "_topk_weights")),
    (
        *("r", "num_vectors", "vector_length", "topk", "save_only_topk_weights", "vblora_dropout"),
        *("init_vector_bank_bound", "init_logits_std"),
    ),
    _vblora_fit,
    _vblora_delta,
    shared=("vblora_vector_bank",),
    conv1d=True,
)


# RandLoRA: W + alpha/r · B·(Λ, A, Γ), random A (r×1×smaller side) and B (larger side×n×r) of all modules
# (arXiv 2502.00987; PEFT `tuners/randlora`). Λ (r×n) and Γ (n×smaller side) scale A; where the outputs are the smaller
# side, the product is transposed.


def _randlora_fit(learned: ModuleTensors) -> FittingShape:
    """Nothing: which side is the smaller one is not in the shapes."""
    (rank, bases), (other, _) = learned.shape("randlora_lambda", 2), learned.shape("randlora_gamma", 2)
    learned.same("the rank", rank, learned.rank(32))
    learned.same("the number of bases", bases, other)
    learned.settings.number("randlora_alpha", default=640)
    return None, None


def _randlora_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """A and B are there, and large enough."""
    if not {"randlora_A", "randlora_B"} <= learned.tensors.keys():
        raise UnsupportedInput(
            "the adapter was saved without its random bases (`save_projection`)",
            hint="save it with `save_projection=True`, or merge it with PEFT's `merge_and_unload`",
        )
    a, b, (bases, small) = (
        learned.shape("randlora_A", 3),
        learned.shape("randlora_B", 3),
        learned.shape("randlora_gamma"),
    )
    learned.same("the smaller side", small, min(shape))
    learned.same("the rank", learned.shape("randlora_lambda")[0], a[0], b[2])
    if a[1] != 1 or a[2] < small or b[0] < max(shape) or b[1] < bases:
        raise learned.misfit(f"bases of {list(a)} and {list(b)} for {shape[0]}×{shape[1]} weights")


def _randlora_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    settings, gamma = learned.settings, learned.read("randlora_gamma")
    bases, small = gamma.shape
    scaled = learned.read("randlora_lambda")[:, :, None] * learned.read("randlora_A")[:, :, :small] * gamma
    short = scaled.reshape(-1, small) * (settings.number("randlora_alpha", default=640) / len(scaled))

    def long(start: int, stop: int) -> Array:
        rows = learned.tensors["randlora_B"].rows(start, stop)[:, :bases]
        return rows.reshape(stop - start, -1).astype(np.float64)

    if small == shape[1]:
        return lambda weight, start: thin_product(long(start, start + len(weight)), short)
    right = long(0, shape[1]).T
    return lambda weight, start: thin_product(short.T[start : start + len(weight)], right)


RANDLORA = Tuner(
    "RANDLORA",
    ("randlora_lambda", "randlora_gamma", "randlora_A", "randlora_B"),
    (
        *("r", "projection_prng_key", "save_projection", "sparse", "very_sparse", "randlora_dropout"),
        "randlora_alpha",
    ),
    _randlora_fit,
    _randlora_delta,
    require=_randlora_require,
    shared=("randlora_A", "randlora_B"),  # older files; newer ones repeat them for each module
    conv1d=True,
)


# SHiRA: W plus single trained elements (arXiv 2406.13175; PEFT `tuners/shira/layer.py`), with their places as 2×n
# rows and columns.


def _shira_fit(learned: ModuleTensors) -> FittingShape:
    (count,), (two, places) = learned.shape("shira_weight", 1), learned.shape("shira_indices", 2)
    learned.same("the rows of `shira_indices`", two, 2)
    learned.same("the number of elements", count, places)
    return None, None


def _shira_places(learned: ModuleTensors) -> Array:
    return learned.read("shira_indices").astype(np.int64)


def _shira_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """All places are in the weight, and none is there twice."""
    rows, columns = _shira_places(learned)
    if len(rows) and (min(rows.min(), columns.min()) < 0 or rows.max() >= shape[0] or columns.max() >= shape[1]):
        raise learned.misfit(f"an element at {rows.max()}, {columns.max()} of {shape[0]}×{shape[1]} weights")
    if len(np.unique(rows * shape[1] + columns)) != len(rows):
        raise learned.misfit("an element is there twice")


def _shira_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    (rows, columns), values = _shira_places(learned), learned.read("shira_weight")
    order = np.argsort(rows, kind="stable")
    rows, columns, values = rows[order], columns[order], values[order]

    def change(weight: Array, start: int) -> Array:
        result = np.zeros(weight.shape)
        own = slice(*np.searchsorted(rows, (start, start + len(weight))))
        result[rows[own] - start, columns[own]] = values[own]
        return result

    return change


SHIRA = Tuner(
    "SHIRA",
    ("shira_weight", "shira_indices"),
    ("r", "mask_type", "random_seed"),
    _shira_fit,
    _shira_delta,
    require=_shira_require,
)


ROWS = (MISS, C3A, ROAD, DELORA, GRALORA, HIRA, VBLORA, RANDLORA, SHIRA)
NEWER = {row.peft_type: row for row in ROWS} | {"BONE": MISS}
VARIANTS = {(kind, "bat"): BAT for kind in ("MISS", "BONE")}
"""Tuners by `peft_type` and `init_weights` whose formula is another."""
