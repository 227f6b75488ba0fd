"""Codes with error feedback (GPTQ): a matrix is rounded column by column; later columns make up for the error of each.

The model's float32 graph runs on a text in pieces, as for `calibration`. A piece runs twice: with its own weights, for
the products X^T X of the inputs of its matrices, then with the rounded ones, for the values that later pieces read.

With H = X^T X of the inputs X, rounding a column changes the output the least if the columns after it move by its error
times a row of the Cholesky factor of the inverse of H (Frantar et al., arXiv:2210.17323, algorithm 1). Scale and zero
point of a block are chosen from the weights as they are when its first column is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
import torch

from llmconv.errors import InputRefused
from llmconv.export.quantization.block_rounding import HALF, BlockFormat, block_scales
from llmconv.export.quantization.calibration import TextRun, as_matrix, label_of, require_finite, scaled
from llmconv.export.quantization.quantized_tensor import (
    RoundedCodes,
    Scratch,
    require_kept,
    squares_lost,
    stored_scales,
)
from llmconv.export.quantization.selection import QuantizedWeight, product_layout
from llmconv.export.traced_graph import NodeEditor, producer, remove_unused
from llmconv.export.weights import StoredRows
from llmconv.runtime.eager.runner import single_torch_thread
from llmconv.tensors import Array

LEAST = 16
"""Tokens of the text per column of the largest matrix; with fewer, later columns fit the text instead of the model."""

SQUARES, COUNT = "squares:", "tokens:"
"""Prefixes of outputs: X^T X [K, K], and the number of rows of X [1]; the rest is the number of the input."""


@dataclass(frozen=True)
class Product:
    """A matrix that is rounded with feedback: its place in the checkpoint, its format, and the number of its input."""

    rows: StoredRows
    weight: QuantizedWeight
    source: int

    @property
    def columns(self) -> int:
        return self.rows.shape[0 if self.weight.transposed else 1]


@dataclass
class _Squares:
    """X^T X and the number of rows of X, summed over texts."""

    total: Array | float = 0.0
    count: int = 0
    found: dict[str, Array] = field(default_factory=dict)


def round_sequentially(
    text: TextRun, quantized: Mapping[str, QuantizedWeight], scratch: Scratch
) -> dict[str, RoundedCodes]:
    """The codes of all 4-bit matrices that one product reads, by name of the stored tensor; `scratch` holds them.

    InputRefused if the text is too short, or its activations are not finite.
    """
    observed = text.bound()
    products = _observe(observed.model, text.rows, quantized)
    found = sum(one.size for one in text.texts)
    least = LEAST * max((one.columns for one in products.values() if not one.rows.single), default=0)
    if found < least:
        raise InputRefused(
            f"the text has {found:,} tokens; `--method gptq` needs {least:,} for {least // LEAST:,} columns",
            hint="give a longer text to `--calibrate`, or leave out `--method gptq`",
        )
    run = _SequentialRun(ir.to_proto(observed.model), products, text, scratch)
    run.all_pieces()
    return run.codes


def _observe(
    model: ir.Model, rows: Mapping[str, StoredRows], quantized: Mapping[str, QuantizedWeight]
) -> dict[str, Product]:
    """The products by label of their matrix; the squares of their inputs become the only outputs, in place."""
    graph, products, sources = model.graph, dict[str, Product](), dict[ir.Value, int]()
    outputs: list[ir.Value] = []
    for node in list(graph):
        label = label_of(node.inputs[1]) if product_layout(node) is not None else ""
        weight = quantized.get(rows[label].name) if label in rows else None
        left = node.inputs[0]
        if weight is None or left is None or not _is_rounded(weight, rows[label]) or not _is_alone(node):
            continue
        if left not in sources:
            sources[left] = len(sources)
            outputs += _squares(graph, node, left, sources[left])
        products[label] = Product(rows[label], weight, sources[left])
    graph.outputs[:] = outputs
    remove_unused(model)
    return products


def _is_rounded(weight: QuantizedWeight, rows: StoredRows) -> bool:
    """Whether a weight has 4 bits, and the product reads a whole matrix of it."""
    four = isinstance(weight.form, BlockFormat) and weight.form.bits == 4 and weight.kept is None
    return four and len(rows.shape) == 2 and (rows.single or rows.is_whole)


def _is_alone(node: ir.Node) -> bool:
    """Whether no other node reads the matrix, as of a tied embedding or of layers that share a module."""
    value = node.inputs[1]
    while value is not None:
        if len(value.uses()) > 1:
            return False
        before = producer(value, "Cast", "Transpose")
        value = before.inputs[0] if before else None
    return True


def _squares(graph: ir.Graph, node: ir.Node, left: ir.Value, number: int) -> list[ir.Value]:
    editor = NodeEditor(graph, node, f"squares/{number}")
    matrix = as_matrix(editor, left)
    squares = editor.one("MatMul", [editor.one("Transpose", [matrix], {"perm": [1, 0]}), matrix])
    count = editor.one("Shape", [matrix], {"start": 0, "end": 1})
    for value, prefix, dtype, rank in ((squares, SQUARES, ir.DataType.FLOAT, 2), (count, COUNT, ir.DataType.INT64, 1)):
        value.name, value.type, value.shape = f"{prefix}{number}", ir.TensorType(dtype), ir.Shape([None] * rank)
    return [squares, count]


class _SequentialRun:
    """The state between pieces of a graph with squares as outputs; `codes` are those so far, by name of the tensor."""

    def __init__(
        self, model: onnx.ModelProto, products: Mapping[str, Product], text: TextRun, scratch: Scratch
    ) -> None:
        self.codes: dict[str, RoundedCodes] = {}
        self._model, self._products, self._text, self._scratch = model, products, text, scratch
        self._values: dict[str, Array] = {}
        self._squares = {one.source: _Squares() for one in products.values()}

    def all_pieces(self) -> None:
        """Runs each piece with the rounded values of the matrices that are rounded already."""
        most = max(4 * prod(one.rows.shape) for one in self._products.values())
        for step in self._text.steps(self._model, most):
            seen = [name for name in step.piece.outputs if name.startswith((SQUARES, COUNT))]
            for made in step.run(seen, self._values) if seen else ():
                for name, value in made.items():
                    squares = self._squares[int(name.partition(":")[2])]
                    if name.startswith(COUNT):
                        squares.count += int(value.numpy()[0])
                    else:
                        squares.total = squares.total + value.numpy().astype(np.float64)
            self._round({int(name.partition(":")[2]) for name in seen})
            passed = [name for name in step.piece.outputs if name in step.later]
            results = step.run(passed, self._values) if passed else iter([{}] * len(step.states))
            for state, made in zip(step.states, results, strict=True):
                step.pass_on(state, made)
            for tensor in step.piece.build(step.types).graph.initializer:
                self._values.pop(tensor.name, None)

    def _round(self, sources: set[int]) -> None:
        for source in sorted(sources):
            squares = self._squares.pop(source)
            products = {label: one for label, one in self._products.items() if one.source == source}
            columns = next(iter(products.values())).columns
            hessian = np.asarray(squares.total, np.float64)
            require_finite(next(iter(products)), hessian)
            form = next(iter(products.values())).weight.form
            assert isinstance(form, BlockFormat)
            padding = -columns % form.size
            hessian = np.pad(hessian, (0, padding)) if hessian.ndim else np.zeros((columns + padding,) * 2)
            factor = inverse_factor(hessian) if squares.count >= LEAST * columns else np.eye(len(hessian), dtype="f4")
            for label, product in products.items():
                self._values[label] = self._rounded(product, factor, scaled(hessian.diagonal()))

    def _rounded(self, product: Product, factor: Array, importance: Array) -> Array:
        """Keeps the codes of a matrix, and returns its values as the checkpoint has them, [N, K] or [K, N]."""
        name, form, weight = product.rows.name, product.weight.form, product.weight
        assert isinstance(form, BlockFormat)
        rows, tensor = product.rows, self._text.tensors[name]
        stored_rows = tensor.rows(rows.first, rows.first + 1)[0] if rows.single else tensor.read()
        wide = stored_rows.astype(np.float32)
        matrix = np.ascontiguousarray(wide.T) if weight.transposed else wide  # [N, K]
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % form.size)))
        dtype = weight.scale_dtype
        squares: list[Array] = []

        def stored(chosen: Array) -> Array:
            found = stored_scales(chosen, dtype, name)
            squares.append(squares_lost(chosen[:, None], found[:, None]))
            return found.astype(np.float32)

        codes, scales, zeros = rounded_with_feedback(padded, factor, importance, form, stored)
        require_kept(np.concatenate(squares), dtype, name)
        if name not in self.codes:
            stack = rows.stored[:1] if rows.single else ()
            self.codes[name] = self._scratch.codes((*stack, len(matrix)), matrix.shape[1], form, dtype)
        self.codes[name].put(rows.first if rows.single else None, form, codes, scales, zeros)
        wide = (codes - zeros.repeat(form.size, 1).astype(np.float32)) * scales.repeat(form.size, 1)
        values = wide[:, : matrix.shape[1]]
        return np.ascontiguousarray(values.T if weight.transposed else values)


DAMPING = 0.1
"""Share of the mean of the diagonal of H that is added to it; less overfits texts below 100 tokens per column."""


def inverse_factor(hessian: Array) -> Array:
    """The upper Cholesky factor of the inverse of H + DAMPING * mean(diagonal), float32 [K, K].

    Computed in float64 by one thread, so that the bits do not depend on the number of threads. `hessian`: X^T X [K, K],
    finite; a column that is always zero gets the damping alone.
    """
    wide = torch.from_numpy(hessian.astype(np.float64))
    mean = float(wide.diagonal().mean())
    wide.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    with single_torch_thread():
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
        factor: Array = torch.linalg.cholesky(inverse, upper=True).float().numpy()
    return factor


def rounded_with_feedback(
    weights: Array, factor: Array, importance: Array, form: BlockFormat, stored: Callable[[Array], Array] = np.asarray
) -> tuple[Array, Array, Array]:
    """Codes uint8 [N, K], scales float32 [N, blocks] and zero points uint8 [N, blocks] of weights float32 [N, K].

    K is a multiple of the block size; `factor` [K, K] is from `inverse_factor`, `importance` [K] as in `block_scales`.
    `stored` rounds scales float32 [N] to the values that a file can hold.
    """
    rows, columns = weights.shape
    blocks = form.blocks(columns)
    left = np.ascontiguousarray(weights.T)  # [K, N], changed in place
    codes = np.empty((columns, rows), np.uint8)
    scales, zeros = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.uint8)
    for at in range(blocks):
        block = slice(at * form.size, (at + 1) * form.size)
        values = np.ascontiguousarray(left[block].T)
        chosen, zeros[:, at] = block_scales(values, form, importance[block])
        scales[:, at] = stored(chosen)
        codes[block], errors = _round_block(left[block], factor[block, block], scales[:, at], zeros[:, at], form)
        rest = torch.from_numpy(factor[block, block.stop :])
        with single_torch_thread():
            left[block.stop :] -= (rest.T @ torch.from_numpy(errors)).numpy()
    return np.ascontiguousarray(codes.T), scales, zeros


def _round_block(left: Array, factor: Array, scales: Array, zeros: Array, form: BlockFormat) -> tuple[Array, Array]:
    """Codes of a block [size, N], and the errors [size, N] in units of the factor's diagonal."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    points, codes, errors = zeros.astype(np.float32), np.empty(left.shape, np.uint8), np.empty_like(left)
    for column, values in enumerate(left):
        inside = np.clip(values * inverse + points, np.float32(0), np.float32(form.largest))
        code = np.trunc(inside + HALF)
        codes[column] = code
        errors[column] = (values - (code - points) * scales) / factor[column, column]
        left[column + 1 :] -= factor[column, column + 1 :, None] * errors[column]
    return codes, errors
