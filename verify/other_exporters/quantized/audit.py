"""The audit of quantized weights: every matrix must equal a tensor of the model up to rounding.

Matrices of zeros, which have no direction to compare, are matched by their names, else by exclusion: tensors of zeros
of one shape are equal. Layouts that are correct, but slow or large in onnxruntime, are notes (1.31, x86-64, one token,
2048 x 2048: 4 bits take 0.11 ms at accuracy level 4, 0.27 ms at level 0, 15 to 30 ms where a kernel dequantizes the
matrix at every call).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from llmconv.runtime.onnxruntime.guard import attributes, nodes
from llmconv.tensors import LazyTensor
from llmconv.verify.other_exporters.quantized.quantized_matrix import CODES, Constants, input_name, is_zero
from llmconv.verify.other_exporters.quantized.rounding_error import (
    ANY_ROUNDING,
    ExpectedCodes,
    RoundingError,
    rounding_errors,
)
from llmconv.verify.other_exporters.quantized.tensor_matching import (
    FLOATS,
    InitializerContent,
    MatchedMatrix,
    TensorMatch,
    named_tensors,
)
from llmconv.verify.results import Check, audited

SHOWN = 4
READERS = 2  # matrices that are compared at a time
KnownErrors = dict[object, list[RoundingError]]
CHANGED = "weights that were changed before quantization (AWQ, rotations) need a folder with them as `--reference`"


def audit_quantized(
    graph: str,
    quantized: Sequence[MatchedMatrix],
    reference: Mapping[str, LazyTensor],
    expected: ExpectedCodes = ANY_ROUNDING,
    errors: KnownErrors | None = None,
) -> tuple[Check, list[dict[str, Any]]]:
    """One check of the quantized matrices by `expected`, and a row of the report for every tensor in one.

    `errors` are those of matrices of other graphs, which may be the same bytes of the same files; it receives more.
    """
    problems, rows, errors = [], [], {} if errors is None else errors
    seen = {name for found in quantized for name in found.names}
    free = {name: tensor.shape for name, tensor in reference.items() if name not in seen}
    keys = [(one.stored.origin, tuple(one.matches)) if one.stored.origin else id(one) for one in quantized]
    new = {key: one for key, one in zip(keys, quantized, strict=True) if key not in errors}
    with ThreadPoolExecutor(READERS) as pool:  # reading and numpy's loops run without the interpreter's lock
        errors |= zip(new, pool.map(lambda one: rounding_errors(one, reference, expected), new.values()), strict=True)
    for key, found in zip(keys, quantized, strict=True):
        known = errors[key]
        problems += [problem] if (problem := _match_problem(found, free, reference)) else []
        problems += [f"`{one.name}` in `{found.stored.name}`: {one.problem}" for one in known if one.problem]
        rows += [
            {"graph": graph, "tensor": one.name, "stored": found.stored.kind, "relative_error": one.relative_error}
            for one in known
        ]
    problems += _duplicates(quantized)
    kinds = Counter(found.stored.kind for found in quantized)
    count = len({row["tensor"] for row in rows})
    summary = f"{count} quantized matrices in {len(quantized)} operators are the model's up to rounding"
    passed = f"{summary} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    check = audited("weights", graph, problems, passed)
    changed = problems and len(problems) >= len(quantized)
    return (replace(check, detail=f"{check.detail}; {CHANGED}") if changed else check), rows


def _match_problem(
    found: MatchedMatrix, free: Mapping[str, tuple[int, ...]], reference: Mapping[str, LazyTensor]
) -> str:
    """The problem of a matrix without a complete match, or with that of another tensor than its name says.

    `free` has the shapes of tensors without a matrix.
    """
    name, shape = f"`{found.stored.name}`", found.stored.shape
    named = named_tensors(found.stored, reference) if CODES in found.stored.name else []
    if found.matches and named and found.names != set(named):
        return f"{name} contains {' and '.join(f'`{one}`' for one in sorted(found.names))}"
    if not found.matches:
        left = [f"`{tensor}`" for tensor, size in free.items() if size in (shape, shape[::-1])]
        rest = f"; {' and '.join(left)} of that shape are in no graph" if 0 < len(left) < SHOWN else ""
        return f"{name} {found.problem or f'matches no tensor of the model{rest}'}"
    return "" if found.whole else f"{name} contains more than {', '.join(f'`{one}`' for one in sorted(found.names))}"


def _duplicates(quantized: Sequence[MatchedMatrix]) -> list[str]:
    """Problems of tensors with two multiplied matrices, one of which must belong to another tensor."""
    parts = [any(match.first_row or match.first_column for match in found.matches) for found in quantized]
    whole = [one for one, is_part in zip(quantized, parts, strict=True) if one.stored.multiplied and not is_part]
    uses = Counter(name for found in whole for name in found.names)
    return [f"`{name}` occurs {count} times" for name, count in uses.items() if count > 1]


def match_zeros(found: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]) -> None:
    """Adds matches of tensors of zeros, in place, to rows that have none by their direction."""
    open_ones = [one for one in found if not one.whole]
    taken = {(name, one.stored.looked_up) for one in found for name in one.names}
    zeros = _zero_tensors(open_ones, reference)
    for by_name in (True, False):
        for one in open_ones:
            named = named_tensors(one.stored, reference)
            names = [name for name in (named if by_name else zeros) if name in zeros]
            for gap in list(_gaps(one)):
                free = [name for name in names if (name, one.stored.looked_up) not in taken]
                if by_name or is_zero(one.stored.rows(gap.start, gap.stop)):
                    made = _filled(gap, one.stored.shape[1], {name: zeros[name] for name in free})
                    one.matches += made
                    taken |= {(match.name, one.stored.looked_up) for match in made}


def _zero_tensors(
    open_ones: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]
) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors of zeros, of those that have as many columns or rows as one of the matrices."""
    sizes = {size for one in open_ones for size in one.stored.shape}
    matrices = {name: tensor for name, tensor in reference.items() if len(tensor.shape) == 2}
    return {
        name: (tensor.shape[0], tensor.shape[1])
        for name, tensor in matrices.items()
        if tensor.dtype.name in FLOATS and sizes & {*tensor.shape} and _is_zero(tensor)
    }


def _is_zero(tensor: LazyTensor) -> bool:
    return is_zero(tensor.rows(0, min(1, tensor.shape[0]))) and all(is_zero(tensor.rows(*at)) for at in tensor.blocks())


def _gaps(one: MatchedMatrix) -> Iterator[range]:
    known = np.zeros(one.stored.shape[0] + 2, dtype=bool)
    known[[0, -1]] = True
    for match in one.matches:
        known[match.rows.start + 1 : match.rows.stop + 1] = True
    edges = np.flatnonzero(np.diff(known))
    for start, stop in edges.reshape(-1, 2):
        yield range(int(start), int(stop))


def _filled(gap: range, columns: int, free: Mapping[str, tuple[int, int]]) -> list[TensorMatch]:
    made, start = list[TensorMatch](), gap.start
    for name, (rows, width) in free.items():
        transposed = width != columns or rows > gap.stop - start
        rows, width = (width, rows) if transposed else (rows, width)
        if width == columns and 0 < rows <= gap.stop - start:
            made.append(TensorMatch(name, transposed, range(start, start + rows), range(columns)))
            start += rows
    return made


EVERY_CALL = "so onnxruntime's CPU dequantizes the whole matrix at every call"
LEVEL, INT8 = "accuracy_level", 4
ZEROS, GROUPS = 3, 4  # indices of inputs of MatMulNBits
PRODUCTS = {"MatMul", "Gemm", "FusedMatMul"}


def slow_layouts(model: onnx.ModelProto, constants: Constants) -> list[str]:
    """A note for every kind of slow or large layout, with the number of its nodes."""
    found = Counter(note for node in nodes(model) for note in _notes(node, constants))
    return [f"{count} {note}" for note, count in found.items()]


def _notes(node: onnx.NodeProto, constants: Constants) -> Iterator[str]:
    if node.op_type == "MatMulNBits":
        yield from _block_product_notes(node, constants)
    elif node.op_type == "GatherBlockQuantized":
        maker = constants.makers.get(node.input[0])
        if maker is not None and maker.op_type == "Reshape":
            yield "GatherBlockQuantized read a reshaped initializer, of which onnxruntime makes a copy in memory"
        kind = constants.kind(node.input[0])
        if kind and kind[0] == np.uint8 and not input_name(node, 3):
            yield "GatherBlockQuantized have no zero points, for which kernels of CUDA took 0 (onnxruntime issue 31692)"
    elif node.op_type == "DequantizeLinear" and not _is_fused(node, constants):
        yield (
            f"DequantizeLinear are in a layout that onnxruntime does not fuse with the product, {EVERY_CALL}; "
            "it fuses [K, N] weights with blocks along K or a scale per column, directly before MatMul"
        )


def _block_product_notes(node: onnx.NodeProto, constants: Constants) -> Iterator[str]:
    fields = attributes(node)
    level, bits = fields.get(LEVEL, 0), fields.get("bits", 4)
    zeros = constants.kind(input_name(node, ZEROS)) if input_name(node, ZEROS) else None
    if input_name(node, GROUPS):
        yield f"MatMulNBits have `g_idx`, {EVERY_CALL}"
    if zeros is not None and zeros[0] != np.uint8:
        yield f"MatMulNBits have zero points of floats, {EVERY_CALL}"
    if bits == 8 and level < INT8:
        yield f"MatMulNBits of 8 bits have {LEVEL} {level}, {EVERY_CALL}; give them {INT8}"
    elif level < INT8:
        yield f"MatMulNBits have {LEVEL} {level}, and take 2 to 3 times as long for one token as with {INT8} on CPUs"


def _is_fused(node: onnx.NodeProto, constants: Constants) -> bool:
    """Whether onnxruntime fuses a dequantized matrix with the products that use it; True for anything else."""
    data, scale = node.input[0], constants.initializer(node.input[1])
    users = constants.users.get(node.output[0], [])
    multiplies = any(user.op_type in PRODUCTS for user in constants.after(node.output[0]))
    if not constants.initializer(data) or not scale or len(constants.shape(data)) != 2 or not multiplies:
        return True
    fields = {"axis": 1, "block_size": 0, **attributes(node)}
    if not constants.shape(scale):
        return True  # one scale for the matrix, which other fusions handle
    directly = all(
        (user.op_type == "MatMul" or (user.op_type == "Gemm" and not attributes(user).get("transB", 0)))
        and user.input[1] == node.output[0]
        for user in users
    )
    return directly and fields["axis"] % 2 == (0 if fields["block_size"] else 1)


def float_copies(
    contents: Mapping[str, InitializerContent],
    quantized: Sequence[MatchedMatrix],
    model: onnx.ModelProto,
    *,
    tied: bool,
) -> list[str]:
    """Notes on an embedding or head in floats (`contents`), in a model where both are one matrix (`tied`)."""
    if not tied or not quantized:
        return []
    codes = {name for one in quantized for name in one.names}
    found = []
    for name, content in contents.items():
        kinds = {node.op_type for node in nodes(model) if name in node.input}
        if content.whole in codes:
            found.append(f"`{content.whole}`, the embedding and the head, is stored as codes and again as floats")
        elif content.whole and "Gather" in kinds and len(content.shape) > 1 and kinds & {*PRODUCTS, "Transpose"}:
            found.append(f"`{content.whole}`, the embedding and the head, is stored as floats, which each token reads")
    return found
