"""Factors that minimize the error of 4-bit blocks on a text: activation-aware weight quantization (`--method awq`).

Columns that are multiplied with large activations are scaled up before they are rounded, and the norm before them (of
a gated unit the outputs of its other matrix) is divided by the same factors: `s = mean|x| ** alpha / sqrt(max * min)`
of these powers (AWQ, Lin et al., arXiv:2306.00978, equation 4), rounded to powers of two, so that the model stays the
same function. Of a grid of alphas, each group takes the one with the least error of its products on the text,
`tr(D H D^T)` with `H = X^T X` and the rounding errors `D`. `awq-columns` takes the diagonal of `H` alone, for which
vectors are kept instead of matrices, and a few hundred tokens are enough (docs/quantization.md has what it costs).

The norm before experts has one factor for all of them, and for the router, which is multiplied with it, too. `H` is
then the sum over the tokens of some experts, in which each of these counts as much as it has of that sum.

Values and the output of attention have no factors: with grouped heads they gain 0.7 % (SmolLM2-135M, groups of 128).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from llmconv.background import prefetch
from llmconv.export.quantization.block_rounding import NONE, BlockFormat
from llmconv.export.quantization.calibration import TextRun, require_finite
from llmconv.export.quantization.quantized_tensor import FLOAT32, QuantizedTensor, multiplied, widened
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.smoothing import (
    Graphs,
    Matrix,
    Smoothing,
    SmoothingGroup,
    coded,
    exact_factors,
    smoothing_groups,
)
from llmconv.export.traced_graph import NodeEditor, integers
from llmconv.progress import warn
from llmconv.tensors import Array, DType, LazyTensor, in_memory

ALPHAS = 20  # number of exponents that are tried, from 0 (no factors) to less than 1, as in the authors' code
LEAST = 1e-4  # A channel whose mean is a smaller share of the largest one counts as if it had this share
ROWS = 128  # rows of a matrix on which alpha is chosen, evenly spaced; the choice hardly depends on the number
OF_EXPERT = 32  # the same of a matrix of an expert
EXPERTS = 8  # those by which alpha of all is chosen, evenly spaced


@dataclass(frozen=True)
class SampledMatrix:
    """Some rows of a matrix, and how it is rounded."""

    rows: Array  # float32 [rows, K]
    share: float  # number of rows of the matrix that each of them stands for
    form: BlockFormat
    scale_dtype: DType
    importance: Array  # of its columns, float32 [K]; empty if all count alike

    def error(self, factors: Array, products: Array) -> float:
        """Squared error of products, if columns are multiplied with factors [K] first.

        `products` is X^T X float32 [K, K], or its diagonal [1, K], as if columns did not depend on one another.
        """
        weight = multiplied(in_memory(self.rows, FLOAT32), factors)
        importance = self.importance / factors**2 if self.importance.size else NONE
        made = QuantizedTensor("", weight, self.form, scale_dtype=self.scale_dtype, importance=importance)
        lost = made.values() / factors - self.rows
        weighted = lost * products if len(products) == 1 else lost @ products
        return self.share * float(np.sum(weighted * lost, dtype=np.float64))


def groups_with_factors(
    graphs: Graphs, quantized: Mapping[str, QuantizedWeight], *, brief: bool
) -> list[SmoothingGroup]:
    """The groups for which factors are looked for; `brief`: on a few hundred tokens, too few for each expert."""
    every = smoothing_groups(graphs, coded(quantized, BlockFormat), aware=True)
    groups = [group for group in every if any(quantized[one.name].is_searched for one in group.matrices)]
    if not brief:
        return groups
    return [group for group in groups if len({one.expert for one in group.matrices} - {None}) != 1]


def measure_activation_aware(
    graphs: Graphs,
    quantized: Mapping[str, QuantizedWeight],
    importance: Mapping[str, Array],
    run: TextRun,
    columns: Mapping[str, Array] | None = None,
) -> Smoothing:
    """Factors of weights with which blocks of 4 bits lose less, and of the norms before them; reads weights once.

    With the sums of `columns` on the text the text does not run again. InputRefused if activations are not finite.
    """
    groups = groups_with_factors(graphs, quantized, brief=columns is not None)
    if not groups:
        warn("AWQ does not fit this model (no norm can be divided): its codes are those of `--calibrate` alone")
        return Smoothing()
    choices = [_Choice.of(group) for group in groups]
    by_label, tensors = {label: one for one in choices for label in one.labels}, run.tensors
    found: list[tuple[SmoothingGroup, Array]] = []
    if columns is None:
        inputs = _sums(run.reduced(_moments, by_label), len(run.texts))
    else:
        inputs = ((label, columns[label].astype(np.float32)) for label in by_label if label in columns)
    for label, moments in inputs:
        require_finite(label, moments)
        choice = by_label[label]
        if choice.add(label, moments):
            group, products, magnitudes = choice.group, choice.moments[:-1], choice.moments[-1]
            candidates = _candidates(magnitudes, group, tensors, quantized[group.matrices[0].name].scale_dtype)
            sampled = [
                replace(sample, share=sample.share * weight)
                for one, weight in choice.weights()
                for sample in [
                    sampled_matrix(one, tensors[one.name], quantized[one.name], importance.get(one.name, NONE))
                ]
            ]
            found.append((group, least_error(candidates, sampled, products)))
            choice.moments = NONE
    return Smoothing.of((group, factors) for group, factors in found if (factors != 1).any())


@dataclass
class _Choice:
    """What the text tells of a group: moments [K + 1, K], summed over all tokens and those of some experts."""

    group: SmoothingGroup
    labels: Mapping[str, int | None]  # of one matrix of these experts each, and of those that all tokens are for
    moments: Array = field(default_factory=lambda: NONE)
    sizes: dict[int | None, float] = field(default_factory=dict)  # what each of them adds to the trace

    @classmethod
    def of(cls, group: SmoothingGroup) -> _Choice:
        experts = list(dict.fromkeys(one.expert for one in group.matrices if one.expert is not None))
        places = np.unique(np.linspace(0, len(experts) - 1, min(len(experts), EXPERTS)).astype(np.int64))
        chosen = {None, *(experts[place] for place in places)}
        first = {one.expert: one.label for one in reversed(group.matrices) if one.expert in chosen}
        return cls(group, {label: expert for expert, label in first.items()})

    def add(self, label: str, moments: Array) -> bool:
        """Adds the moments of a matrix; whether these were the last."""
        self.moments = self.moments + moments if self.moments.size else moments
        products = moments[:-1]
        trace = products if len(products) == 1 else products.diagonal()
        self.sizes[self.labels[label]] = float(trace.sum(dtype=np.float64))
        return len(self.sizes) == len(self.labels)

    def weights(self) -> Iterator[tuple[Matrix, float]]:
        """The matrices whose errors are measured, and how much each counts: by its tokens, and by all experts."""
        count = len({one.expert for one in self.group.matrices} - {None})
        share, total = count / max(1, len(self.sizes.keys() - {None})), sum(self.sizes.values())
        for one in self.group.matrices:
            if one.expert in self.sizes:
                yield one, self.sizes[one.expert] / (total or 1) * (share if one.expert is not None else 1)


def _moments(editor: NodeEditor, values: ir.Value) -> ir.Value:
    """X^T X, and below it the sums of magnitudes: [(K + 1) * K]."""
    products = editor.one("MatMul", [editor.one("Transpose", [values], {"perm": [1, 0]}), values])
    magnitudes = editor.one("ReduceSum", [editor.one("Abs", [values]), integers(editor.graph, 0)], {"keepdims": 1})
    both = editor.one("Concat", [products, magnitudes], {"axis": 0})
    return editor.one("Reshape", [both, integers(editor.graph, -1)])


def _sums(inputs: Iterator[tuple[str, Array]], texts: int) -> Iterator[tuple[str, Array]]:
    """The moments [K + 1, K] of each input, summed over all texts, as soon as the last one is known."""
    sums: dict[str, tuple[int, Array]] = {}
    for name, moments in inputs:
        count, total = sums.pop(name, (0, np.zeros((), np.float32)))
        sums[name] = count + 1, total + moments
        if count + 1 == texts:
            flat = sums.pop(name)[1]
            width = int(flat.size**0.5)
            yield name, flat.reshape(width + 1, width)


def _candidates(
    magnitudes: Array, group: SmoothingGroup, tensors: Mapping[str, LazyTensor], dtype: DType
) -> list[Array]:
    """Distinct factors float32 [K]; the first are all 1."""
    levels = np.log2(
        np.maximum(magnitudes, LEAST * magnitudes.max()), where=magnitudes.max() > 0, out=np.zeros(magnitudes.shape)
    )
    centered = levels - (levels.max() + levels.min()) / 2
    made = [exact_factors(alpha / ALPHAS * centered, group, tensors, dtype) for alpha in range(ALPHAS)]
    return list({factors.tobytes(): factors for factors in made}.values())


def sampled_matrix(matrix: Matrix, tensor: LazyTensor, weight: QuantizedWeight, importance: Array) -> SampledMatrix:
    """Some evenly spaced rows [K] of a matrix [N, K] or [K, N], which is the `tensor` or one of its stack.

    `weight` rounds it in blocks; an empty `importance` means that all columns count alike.
    """
    assert isinstance(weight.form, BlockFormat)
    if matrix.is_stacked:
        assert matrix.expert is not None
        importance = importance[matrix.expert] if importance.size else NONE
        tensor = in_memory(tensor.rows(matrix.expert, matrix.expert + 1)[0], tensor.dtype)
    count, most = matrix.sizes[0], ROWS if matrix.expert is None else OF_EXPERT
    chosen = np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
    if matrix.turned:
        rows = np.concatenate([tensor.rows(*block)[:, chosen] for block in tensor.blocks()]).T
    else:
        rows = np.concatenate([tensor.rows(int(row), int(row) + 1) for row in chosen])
    wide = np.ascontiguousarray(widened(np.ascontiguousarray(rows), matrix.name))
    return SampledMatrix(wide, count / len(chosen), weight.form, weight.scale_dtype, importance)


def least_error(candidates: Sequence[Array], matrices: Sequence[SampledMatrix], products: Array) -> Array:
    """Of candidates float32 [K], the factors with the least error of all products; of equal ones the first.

    `products` is X^T X float32 [K, K] of the activations that all matrices are multiplied with, or its diagonal [1, K].
    """

    def error(factors: Array) -> float:
        return sum(matrix.error(factors, products) for matrix in matrices)

    jobs = (partial(error, factors) for factors in candidates)
    return candidates[int(np.argmin(list(prefetch(jobs, depth=1))))]
