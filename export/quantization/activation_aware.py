"""Factors that minimize the error of 4-bit blocks on a text: activation-aware weight quantization (`--method awq`).

Columns that are multiplied with large activations are scaled up before they are rounded, and the norm before them (of
a gated unit the outputs of its other matrix) is divided by the same factors: `s = mean|x| ** alpha / sqrt(max * min)`
of these powers (AWQ, Lin et al., arXiv:2306.00978, equation 4), rounded to powers of two, so that the model stays the
same function. Of a grid of alphas, each group takes the one with the least error of its products on the text,
`tr(D H D^T)` with `H = X^T X` and the rounding errors `D`. `awq-columns` takes the diagonal of `H` alone, for which
vectors are kept instead of matrices, and a few hundred tokens are enough (docs/quantization.md has what it costs).

Values and the output of attention have no factors: with grouped heads they gain 0.7 % (SmolLM2-135M, groups of 128).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    every = smoothing_groups(graphs, coded(quantized, BlockFormat), gated=True)
    groups = [group for group in every if any(quantized[name].is_searched for name, _ in group.matrices)]
    if not groups:
        warn("AWQ does not fit this model (no norm can be divided): its codes are those of `--calibrate` alone")
        return Smoothing()
    by_name, tensors = {group.matrices[0][0]: group for group in groups}, run.tensors
    found: list[tuple[SmoothingGroup, Array]] = []
    if columns is None:
        inputs = _sums(run.reduced(_moments, by_name), len(run.texts))
    else:
        inputs = ((name, columns[name].astype(np.float32)) for name in by_name if name in columns)
    for name, moments in inputs:
        group = by_name[name]
        require_finite(name, moments)
        candidates = _candidates(moments[-1], group, tensors, quantized[name].scale_dtype)
        sampled = [sampled_matrix(tensors[one], quantized[one], importance.get(one, NONE)) for one, _ in group.matrices]
        found.append((group, least_error(candidates, sampled, moments[:-1])))
    return Smoothing.of((group, factors) for group, factors in found if (factors != 1).any())


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


def sampled_matrix(tensor: LazyTensor, weight: QuantizedWeight, importance: Array) -> SampledMatrix:
    """Up to `ROWS` evenly spaced rows [K] of a matrix [N, K], or [K, N] if `weight` is transposed.

    `weight` rounds it in blocks; an empty `importance` means that all columns count alike.
    """
    assert isinstance(weight.form, BlockFormat)
    count = tensor.shape[1 if weight.transposed else 0]
    chosen = np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(np.int64))
    if weight.transposed:
        rows = np.concatenate([tensor.rows(*block)[:, chosen] for block in tensor.blocks()]).T
    else:
        rows = np.concatenate([tensor.rows(int(row), int(row) + 1) for row in chosen])
    wide = np.ascontiguousarray(widened(np.ascontiguousarray(rows)))
    return SampledMatrix(wide, count / len(chosen), weight.form, weight.scale_dtype, importance)


def least_error(candidates: Sequence[Array], matrices: Sequence[SampledMatrix], products: Array) -> Array:
    """Of candidates float32 [K], the factors with the least error of all products; of equal ones the first.

    `products` is X^T X float32 [K, K] of the activations that all matrices are multiplied with, or its diagonal [1, K].
    """

    def error(factors: Array) -> float:
        return sum(matrix.error(factors, products) for matrix in matrices)

    jobs = (partial(error, factors) for factors in candidates)
    return candidates[int(np.argmin(list(prefetch(jobs, depth=1))))]
