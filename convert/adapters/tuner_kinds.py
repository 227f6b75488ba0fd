"""PEFT's tuners other than LoRA, a formula and a row of `TUNERS` each, and those that cannot be merged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import isqrt, prod

import numpy as np

from llmconv.convert.adapters.adapter import FittingShape, ModuleTensors, RowChange, Tuner, WeightShape
from llmconv.convert.adapters.lora_config import AdapterFields
from llmconv.convert.adapters.low_rank_sum import thin_product
from llmconv.convert.adapters.newer_tuner_kinds import NEWER, VARIANTS
from llmconv.convert.fields import LARGEST
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

# Some adapters store only a seed: torch's CPU generator is the Mersenne Twister, seeded like numpy's `RandomState`
# (`aten/src/ATen/core/MT19937RNGEngine.h`).
LONG = (2**32 - 1) // 20
"""Size from which torch draws permutations in another way (`aten/src/ATen/native/TensorFactories.cpp`)."""


class TorchRandom:
    """The 32-bit numbers of torch's generator after `manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def take(self, count: int) -> Array:
        """The next `count` numbers, uint32."""
        return np.frombuffer(self._state.bytes(4 * count), "<u4")

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Array:
        """A float32 array with the values of `tensor.uniform_(low, high)` (`at::uniform_real_distribution`)."""
        fractions = (self.take(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        start, width = np.float32(low), np.float32(high) - np.float32(low)
        return (fractions * float(width) + float(start)).astype(np.float32).reshape(shape)


def first_of_permutation(size: int, count: int, seed: int) -> Array:
    """The first `count` of `torch.randperm(size)` by this seed, int64; UnsupportedInput if `size` is `LONG` or more."""
    if size >= LONG:
        raise UnsupportedInput(
            f"unsupported: a seeded permutation of {size:,} elements", hint="merge it with PEFT's `merge_and_unload`"
        )
    draws = TorchRandom(seed).take(count) % (size - np.arange(count, dtype=np.int64))
    moved: dict[int, int] = {}
    result = np.empty(count, np.int64)
    for step, draw in enumerate(draws.tolist()):
        result[step] = moved.get(step + draw, step + draw)
        moved[step + draw] = moved.pop(step, step)
    return result


# IA3: rows of W times a vector, or columns in feed-forward modules (arXiv 2205.05638; PEFT `tuners/ia3/layer.py`).
# l is out×1, or 1×in in a feed-forward module; the bias is scaled with the rows.


def _ia3_fit(learned: ModuleTensors) -> FittingShape:
    """out or in, by the direction of the vector."""
    if len(learned.shape("ia3_l")) > 2:
        raise UnsupportedInput(
            f"`{learned.module}` is a convolution scaled by IA3", hint="merge it with PEFT's `merge_and_unload`"
        )
    rows, columns = learned.shape("ia3_l", 2)
    learned.same("the short side of `ia3_l`", min(rows, columns), 1)
    return (None, columns) if rows == 1 else (rows, None)


def _ia3_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: W ∘ l - W."""
    excess = learned.read("ia3_l") - 1

    def rows(weight: Array, start: int) -> Array:
        change: Array = weight * (excess if len(excess) == 1 else excess[start : start + len(weight)])
        return change

    return rows


IA3 = Tuner(
    "IA3", ("ia3_l",), ("feedforward_modules",), _ia3_fit, _ia3_delta, conv1d=True, scales_output=True, of_weight=True
)


# LN tuning: trained norms that replace the base's (arXiv 2312.11420; PEFT `tuners/ln_tuning`).
# The file contains `<module>.ln_tuning_layers.weight` and `.bias`, which are whole tensors; there is no formula.


LN_TUNING = Tuner("LN_TUNING", (), ())


# AdaLoRA: W + alpha/(ranknum + 1e-5) · B·diag(E)·A (Zhang et al., arXiv 2303.10512; PEFT `tuners/adalora/layer.py`).
# ranknum is the rank before pruning: `init_r`, or a tensor in files of older PEFT.


def _adalora_fit(learned: ModuleTensors) -> FittingShape:
    """out×in of B·A; the three ranks must agree (0 is a module that was pruned away)."""
    (rank, columns), (rows, other) = learned.shape("lora_A", 2), learned.shape("lora_B", 2)
    learned.same("the rank", rank, other, learned.shape("lora_E", 2)[0])
    learned.same("the width of `lora_E`", learned.shape("lora_E")[1], 1)
    _ = learned.settings.number("lora_alpha", default=8), _adalora_rank_before(learned)
    return rows, columns


def _adalora_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    scale = learned.settings.number("lora_alpha", default=8) / (_adalora_rank_before(learned) + 1e-5)
    left, right = learned.read("lora_B") * scale, learned.read("lora_A") * learned.read("lora_E")

    return lambda weight, start: thin_product(left[start : start + len(weight)], right)


def _adalora_rank_before(learned: ModuleTensors) -> float:
    if "ranknum" not in learned.tensors:
        return learned.settings.number("init_r", default=12)
    learned.same("the length of `ranknum`", *learned.shape("ranknum", 1), 1)
    if (rank := float(learned.read("ranknum")[0])) <= 0:
        raise learned.misfit(f"`ranknum` is {rank:g}")
    return rank


ADALORA = Tuner(
    "ADALORA",
    ("lora_A", "lora_B", "lora_E", "ranknum"),
    (
        *("r", "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
        *("rank_pattern", "alpha_pattern", "lora_alpha", "lora_dropout", "init_lora_weights", "use_rslora"),
        *("megatron_core", "loftq_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    ),
    _adalora_fit,
    _adalora_delta,
    conv1d=True,
)


# LoHa: W + alpha/r · (w1_a·w1_b) ∘ (w2_a·w2_b) (FedPara, arXiv 2108.06098; PEFT `tuners/loha/layer.py`).
# Convolutions may also have a core t (r×r×k×k): then `a` is r×out, `b` is r×in, and the factor is Σᵢⱼ tᵢⱼ aᵢ bⱼ.


def _loha_fit(learned: ModuleTensors) -> FittingShape:
    first, second = _loha_factor(learned, "1"), _loha_factor(learned, "2")
    learned.scale()
    return learned.same("out", first[0], second[0]), learned.same("in", first[1], second[1])


def _loha_factor(learned: ModuleTensors, number: str) -> WeightShape:
    a, b = learned.shape(f"hada_w{number}_a", 2), learned.shape(f"hada_w{number}_b", 2)
    if f"hada_t{number}" not in learned.tensors:
        learned.same("the rank", a[1], b[0], learned.rank())
        return a[0], b[1]
    core = learned.shape(f"hada_t{number}", 4)
    learned.same("the rank", a[0], b[0], *core[:2], learned.rank())
    return a[1], b[1] * prod(core[2:])


def _loha_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update: two thin products, multiplied element by element."""
    (left1, right1), (left2, right2) = (_loha_thin(learned, number) for number in "12")
    scale = learned.scale()

    def rows(weight: Array, start: int) -> Array:
        part = slice(start, start + len(weight))
        product = thin_product(left1[part], right1)
        product *= thin_product(left2[part], right2)
        product *= scale
        return product

    return rows


def _loha_thin(learned: ModuleTensors, number: str) -> tuple[Array, Array]:
    """Two matrices out×r and r×in whose product is the factor."""
    a, b = learned.read(f"hada_w{number}_a"), learned.read(f"hada_w{number}_b")
    if f"hada_t{number}" not in learned.tensors:
        return a, b
    core = learned.read(f"hada_t{number}")
    return a.T, np.einsum("ijkl,jr->irkl", core, b).reshape(len(core), -1)


LOHA = Tuner(
    "LOHA",
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    ("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout", "use_effective_conv2d"),
    _loha_fit,
    _loha_delta,
)


# LoKr: W + alpha/r · w1 ⊗ w2 (KronA, arXiv 2212.10650; LyCORIS, arXiv 2309.14859; PEFT `tuners/lokr/layer.py`).
# w1 is whole or w1_a·w1_b; w2 is whole, w2_a·w2_b, or for a convolution Σᵢⱼ t2ᵢⱼ w2_aᵢ w2_bⱼ with a core t2 (r×r×k×k).


def _lokr_fit(learned: ModuleTensors) -> FittingShape:
    """out×in of the Kronecker product; kernel sizes count as columns."""
    first, second = _lokr_shape(learned, "1"), _lokr_shape(learned, "2")
    learned.same("the dimensions of `lokr_w1`", len(first), 2)
    learned.scale()
    return first[0] * second[0], first[1] * prod(second[1:])


def _lokr_shape(learned: ModuleTensors, number: str) -> tuple[int, ...]:
    if (whole := f"lokr_w{number}") in learned.tensors:
        shape = learned.shape(whole)
        return shape if len(shape) > 1 else learned.shape(whole, 2)
    a, b = learned.shape(f"lokr_w{number}_a", 2), learned.shape(f"lokr_w{number}_b", 2)
    if number == "2" and "lokr_t2" in learned.tensors:
        core = learned.shape("lokr_t2", 4)
        learned.same("the rank", a[0], b[0], *core[:2])
        return a[1], b[1], *core[2:]
    learned.same("the rank", a[1], b[0])
    return a[0], b[1]


def _lokr_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Row p is row p // c of w1 times row p % c of w2 (c rows); PEFT multiplies a w2 of three dims unflattened."""
    left, right = _lokr_read(learned, "1") * learned.scale(), _lokr_read(learned, "2")
    if right.ndim == 3:
        whole = np.kron(left, right).reshape(shape)
        return lambda weight, start: whole[start : start + len(weight)]
    right = right.reshape(len(right), -1)

    def rows(weight: Array, start: int) -> Array:
        index = np.arange(start, start + len(weight))
        outer = left[index // len(right), :, None] * right[index % len(right), None, :]
        return outer.reshape(len(weight), -1)

    return rows


def _lokr_read(learned: ModuleTensors, number: str) -> Array:
    if (whole := f"lokr_w{number}") in learned.tensors:
        return learned.read(whole)
    a, b = learned.read(f"lokr_w{number}_a"), learned.read(f"lokr_w{number}_b")
    if number == "2" and "lokr_t2" in learned.tensors:
        made: Array = np.einsum("ijkl,ip,jr->prkl", learned.read("lokr_t2"), a, b, optimize=True)
        return made
    return a @ b


LOKR = Tuner(
    "LOKR",
    ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    (
        *("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "rank_dropout_scale", "module_dropout"),
        *("use_effective_conv2d", "decompose_both", "decompose_factor"),
    ),
    _lokr_fit,
    _lokr_delta,
)


# VeRA: W + diag(λ_b)·B·diag(λ_d)·A with random A and B shared by all modules (arXiv 2310.11454; PEFT `tuners/vera`).
# A is r×(largest in), B (largest out)×r; a module takes the first columns and rows. Files saved with
# `save_projection=False` lack both: they are drawn again as PEFT draws them.


def _vera_fit(learned: ModuleTensors) -> FittingShape:
    """out; A and B are as wide as the widest module."""
    (rows,), (rank,) = learned.shape("vera_lambda_b", 1), learned.shape("vera_lambda_d", 1)
    learned.same("the rank", rank, learned.rank(256))
    return rows, None


def _vera_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """A and B are large enough and of the rank of λ_d."""
    (rank, columns), (rows, other) = learned.shape("vera_A", 2), learned.shape("vera_B", 2)
    learned.same("the rank", learned.shape("vera_lambda_d")[0], rank, other)
    if rows < shape[0] or columns < shape[1]:
        raise learned.misfit(f"`vera_B` and `vera_A` are for {rows}×{columns} weights, one has {shape[0]}×{shape[1]}")


def _vera_drawn(settings: AdapterFields, shapes: Sequence[WeightShape]) -> Mapping[str, LazyTensor]:
    """A and B as PEFT draws them (`VeraModel._init_vera_A_vera_B`): uniform in ±√(6/columns), one after the other."""
    if not isinstance(seed := settings.values.get("projection_prng_key", 0), int):
        raise settings.invalid("projection_prng_key", seed)
    draws, rank = TorchRandom(seed), int(settings.number("r", default=256))
    sizes = {"vera_A": (rank, max(columns for _, columns in shapes)), "vera_B": (max(rows for rows, _ in shapes), rank)}
    bounds = {name: math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns)) for name, (_, columns) in sizes.items()}
    return {
        name: in_memory(draws.uniform(size, -bounds[name], bounds[name]), BY_NAME["float32"])
        for name, size in sizes.items()
    }


def _vera_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    left = learned.read("vera_lambda_b")[:, None] * learned.read("vera_B")[: shape[0]]
    right = learned.read("vera_lambda_d")[:, None] * learned.read("vera_A")[:, : shape[1]]

    return lambda weight, start: thin_product(left[start : start + len(weight)], right)


VERA = Tuner(
    "VERA",
    ("vera_lambda_b", "vera_lambda_d"),
    ("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial"),
    _vera_fit,
    _vera_delta,
    require=_vera_require,
    shared=("vera_A", "vera_B"),
    drawn=_vera_drawn,
    conv1d=True,
)


# FourierFT: W + scaling · Re(inverse FFT of a sparse spectrum) (arXiv 2405.03003; PEFT `tuners/fourierft/layer.py`).
# The file contains the values of the spectrum; their positions are the first of a permutation that torch draws from
# `random_loc_seed`. The whole update of a tensor is computed at once by an inverse FFT: 16 bytes per element.


def _fourierft_fit(learned: ModuleTensors) -> FittingShape:
    """Any size; the number of frequencies must be the config's."""
    (count,), settings = learned.shape("fourierft_spectrum", 1), learned.settings
    expected = settings.of_module("n_frequency_pattern", learned.module, settings.number("n_frequency", default=1000))
    learned.same("the number of frequencies", count, int(expected))
    settings.number("scaling", default=150, least=-LARGEST)
    if not isinstance(seed := settings.values.get("random_loc_seed", 777), int):
        raise MalformedInput(
            f"the adapter config has {seed!r} for `random_loc_seed`, so the positions of its frequencies are unknown",
            hint="ask the adapter's author for the seed it was trained with",
        )
    return None, None


def _fourierft_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """The weight has at least as many elements as there are frequencies."""
    if (count := learned.shape("fourierft_spectrum")[0]) > shape[0] * shape[1]:
        raise learned.misfit(f"{count} frequencies for {shape[0]}×{shape[1]} weights")


def _fourierft_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update, from half of the spectrum's Hermitian part, whose transform is the real part."""
    values, settings = learned.read("fourierft_spectrum"), learned.settings
    seed = settings.values.get("random_loc_seed", 777)
    rows, columns = np.divmod(first_of_permutation(shape[0] * shape[1], len(values), seed), shape[1])
    spectrum = np.zeros((shape[0], shape[1] // 2 + 1), np.complex128)
    for down, across in ((rows, columns), (-rows % shape[0], -columns % shape[1])):
        near = across < spectrum.shape[1]
        np.add.at(spectrum, (down[near], across[near]), values[near] / 2)
    change: Array = np.fft.irfft2(spectrum, s=shape) * settings.number("scaling", default=150, least=-LARGEST)
    return lambda weight, start: change[start : start + len(weight)]


FOURIERFT = Tuner(
    "FOURIERFT",
    ("fourierft_spectrum",),
    ("n_frequency", "n_frequency_pattern", "scaling", "random_loc_seed"),
    _fourierft_fit,
    _fourierft_delta,
    require=_fourierft_require,
    conv1d=True,
)


# HRA: W·Π(I - 2·uᵢ·uᵢᵀ), Householder reflections of the inputs (arXiv 2405.17484; PEFT `tuners/hra/layer.py`).
# hra_u is in×r; its columns are normalized, with `apply_GS` after Gram-Schmidt orthogonalization.


def _hra_fit(learned: ModuleTensors) -> FittingShape:
    """in; the rank must be the config's."""
    columns, rank = learned.shape("hra_u", 2)
    learned.same("the rank", rank, int(learned.settings.number("r", default=8)))
    learned.settings.flag("apply_GS")
    return None, columns


def _hra_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """Every column is nonzero, also after orthogonalization."""
    if not np.isfinite(_hra_directions(learned)).all():
        raise learned.misfit("a column of `hra_u` is zero, or linearly dependent on those before it")


def _hra_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update, one reflection after the other."""
    vectors = _hra_directions(learned)

    def rows(weight: Array, start: int) -> Array:
        product = weight.copy()
        for vector in vectors:
            product -= 2 * np.outer(product @ vector, vector)
        return product - weight

    return rows


def _hra_directions(learned: ModuleTensors) -> Array:
    """u, one in each row."""
    vectors = learned.read("hra_u").T
    with np.errstate(invalid="ignore", divide="ignore"):
        if learned.settings.flag("apply_GS"):
            # gram-Schmidt: each vector made orthogonal to those before it
            done: list[Array] = []
            for vector in vectors:
                for other in done:
                    vector = vector - (other @ vector) * other
                done.append(vector / np.linalg.norm(vector))
            vectors = np.array(done)
        lengths: Array = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / lengths


HRA = Tuner("HRA", ("hra_u",), ("r", "apply_GS"), _hra_fit, _hra_delta, require=_hra_require, of_weight=True)


# OFT: W·Rᵀ with R block-diagonal and orthogonal (arXiv 2306.07280, 2506.19847; PEFT `tuners/oft/layer.py`).
# Each block is the Cayley transform of a skew matrix Q, stored as its upper triangle: (I - Q)(I + Q)⁻¹, or with
# `use_cayley_neumann` I + 2Q + 2Q² + … + Qⁿ⁻¹ (2Qⁿ⁻¹ in a config without `peft_version`: before PEFT 0.18).
# `coft` first shortens Q to eps/√blocks. An embedding is W·R.


MOST_TERMS = 1000  # limit of the length of the series, which has converged long before


def _oft_fit(learned: ModuleTensors) -> FittingShape:
    """in: the size of all blocks; with `block_share` a single block is repeated, so any size."""
    name = _oft_name(learned)
    (blocks, elements), settings = learned.shape(name, 2), learned.settings
    size = _oft_size(elements)
    learned.same(f"the width of `{name}`", elements, size * (size - 1) // 2)
    settings.number("eps", default=6e-5, least=-LARGEST)
    _ = settings.flag("use_cayley_neumann"), settings.flag("coft")
    if (terms := settings.number("num_cayley_neumann_terms", default=5)) not in range(1, MOST_TERMS):
        raise settings.invalid("num_cayley_neumann_terms", terms)
    if settings.flag("block_share"):
        learned.same("the number of shared blocks", blocks, 1)
        return None, None
    return None, blocks * size


def _oft_name(learned: ModuleTensors) -> str:
    return "oft_embedding_R" if "oft_embedding_R" in learned.tensors else "oft_R"


def _oft_size(elements: int) -> int:
    """The side of a square matrix with this number of elements above the diagonal."""
    return (1 + isqrt(1 + 8 * elements)) // 2


def _oft_require(learned: ModuleTensors, shape: WeightShape) -> None:
    """Shared blocks fill the inputs."""
    if shape[1] % (size := _oft_size(learned.shape(_oft_name(learned))[1])):
        raise learned.misfit(f"blocks of {size} do not fill {shape[1]} inputs")


def _oft_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update; each block of columns is rotated separately."""
    blocks = rotations(learned)
    turned = blocks if _oft_name(learned) == "oft_embedding_R" else blocks.transpose(0, 2, 1)
    return lambda weight, start: rotate(weight, turned) - weight


def rotate(weight: Array, blocks: Array) -> Array:
    """weight · diag(blocks): n×in and b×k×k with in = b·k (or b = 1, which is repeated)."""
    parts = weight.reshape(len(weight), -1, blocks.shape[-1])
    turned: Array = np.matmul(parts.transpose(1, 0, 2), blocks)
    return turned.transpose(1, 0, 2).reshape(weight.shape)


def rotations(learned: ModuleTensors) -> Array:
    """The blocks of R: b×k×k."""
    triangles, settings = learned.read(_oft_name(learned)), learned.settings
    size = _oft_size(triangles.shape[1])
    rows, columns = np.triu_indices(size, 1)
    skew = np.zeros((len(triangles), size, size))
    skew[:, rows, columns] = triangles
    skew -= skew.transpose(0, 2, 1)
    if settings.flag("coft"):
        # each matrix with a norm of at most `limit` (PEFT `_project_batch`)
        limit = settings.number("eps", default=6e-5, least=-LARGEST) / np.sqrt(len(skew))
        norms = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
        skew = skew * np.where(norms <= limit, 1, limit / np.maximum(norms, np.finfo(float).tiny))
    if settings.flag("use_cayley_neumann", default=True):
        # the series with n terms: I + 2Q + … + 2Qⁿ⁻² + Qⁿ⁻¹; with three, PEFT computes I + 2Q + 2Q² + Q³
        terms = int(settings.number("num_cayley_neumann_terms", default=5))
        before = not settings.word("peft_version")
        last = max(terms, 4) - 1 if terms > 2 and not before else terms - 1
        power: Array = np.broadcast_to(np.eye(size), skew.shape)
        total = power
        for number in range(1, last + 1):
            power = power @ skew
            total = total + (power if number == last > 2 and not before else 2 * power)
        return total
    return cayley(skew)


def cayley(skew: Array) -> Array:
    """(I - Q)(I + Q)⁻¹ of each matrix."""
    identity = np.eye(skew.shape[-1])
    solved: Array = np.linalg.solve(identity - skew, identity + skew)
    return solved.transpose(0, 2, 1)


OFT = Tuner(
    "OFT",
    ("oft_R", "oft_embedding_R"),
    (
        *("r", "oft_block_size", "module_dropout", "coft", "eps", "block_share"),
        *("use_cayley_neumann", "num_cayley_neumann_terms"),
    ),
    _oft_fit,
    _oft_delta,
    require=_oft_require,
    former=dict.fromkeys(("oft_r", "oft_s"), "PEFT 0.13, or 0.15 if its config has `oft_block_size`"),
    of_weight=True,
)


# BOFT: diag(s)·W·Bᵀ with B a product of butterfly rotations (arXiv 2311.06243; PEFT `tuners/boft/layer.py`).
# boft_R is factors×blocks×k×k: each block is the Cayley transform of its skew part, and factor i is between a
# permutation of the inputs and its inverse, so that it mixes inputs 2ⁱ half blocks apart. boft_s is out×1 (a
# convolution: 1×out).


def _boft_fit(learned: ModuleTensors) -> FittingShape:
    (factors, blocks, size, other), scale = learned.shape("boft_R", 4), learned.shape("boft_s", 2)
    learned.same("the side of a block", size, other)
    learned.same("the short side of `boft_s`", min(scale), 1)
    if factors > 1 and (size % 2 or blocks % 2 ** (factors - 1)):
        raise learned.misfit(f"{factors} factors of {blocks} blocks of {size}")
    return max(scale), blocks * size


def _boft_delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update; a permutation and a rotation per factor."""
    stored, scale = learned.read("boft_R"), learned.read("boft_s").reshape(-1, 1)
    turned = [cayley(skew).transpose(0, 2, 1) for skew in 0.5 * (stored - stored.swapaxes(2, 3))]
    orders = [_boft_order(shape[1], stored.shape[2], number, len(stored)) for number in range(len(stored))]

    def rows(weight: Array, start: int) -> Array:
        product = weight
        for blocks, order in zip(turned, orders, strict=True):
            product = rotate(product[:, np.argsort(order)], blocks)[:, order]
        return product * scale[start : start + len(weight)] - weight

    return rows


def _boft_order(columns: int, size: int, number: int, factors: int) -> Array:
    """The permutation of factor `number` (PEFT `block_butterfly_perm`): even half blocks of a group before odd ones."""
    index = np.arange(columns)
    if factors == 1:
        return index
    halves = index.reshape(-1, 2 << number, size // 2)
    return np.concatenate([halves[:, 0::2], halves[:, 1::2]], axis=1).reshape(-1)


BOFT = Tuner(
    "BOFT",
    ("boft_R", "boft_s"),
    ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout"),
    _boft_fit,
    _boft_delta,
    of_weight=True,
)


ROWS = (IA3, LN_TUNING, ADALORA, LOHA, LOKR, VERA, FOURIERFT, HRA, OFT, BOFT)
TUNERS = {row.peft_type: row for row in ROWS} | NEWER

VIRTUAL = "it adds virtual tokens and changes no weight, so no merged model equals it"
PROMPT = f"{VIRTUAL}; serve the adapter with PEFT"
PREFIX = f"{VIRTUAL}: `llmconv generate MODEL --prefix-tuning ADAPTER`, or `llmconv export MODEL --prefix ADAPTER`"
MIXTURE = "the update depends on the input, so no merged model equals it; serve the adapter with PEFT"
LAYERS = "it adds layers to the model, so no merged model equals it; serve the adapter with PEFT"
UNMERGEABLE: dict[str, str] = {  # `peft_type` to the way out, for adapters that no merged weights equal
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), PREFIX),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"), PROMPT),
    **dict.fromkeys(("XLORA", "POLY"), MIXTURE),
    **dict.fromkeys(("ADAPTION_PROMPT",), LAYERS),
}


def by_peft_type(kind: object, initialization: object = None) -> Tuner:
    """The tuner of an adapter's `peft_type` and `init_weights`; UnsupportedInput: not mergeable, or unknown."""
    if isinstance(kind, str) and kind in TUNERS:
        return VARIANTS.get((kind, str(initialization)), TUNERS[kind])
    if isinstance(kind, str) and kind in UNMERGEABLE:
        raise UnsupportedInput(f"the adapter has `peft_type` {kind!r}", hint=UNMERGEABLE[kind])
    raise UnsupportedInput(
        f"the adapter has `peft_type` {kind!r}, not one of LORA, {', '.join(TUNERS)}",
        hint="merge it with PEFT's `merge_and_unload` and `save_pretrained`",
    )
