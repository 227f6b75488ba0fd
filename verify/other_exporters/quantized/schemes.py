"""How graphs store quantized weights: one row of `SCHEMES` per layout.

`DequantizeLinear` on constants: one scale for the matrix, for every row or column, or for every block.

`y = (x - zero point) * scale` (ONNX, docs/Operators.md, DequantizeLinear; `block_size` since opset 21). The constant
may be the table of a `Gather`, whose rows are dequantized. After a `QuantizeLinear` it restores a rounded activation.

`com.microsoft.GatherBlockQuantized`: an embedding whose rows are quantized in blocks.

Layout (onnxruntime, docs/ContribOperators.md): codes int4 or uint4, or uint8 with several codes of `bits` bits, along
the last axis; scales and zero points per block along `quantize_axis`. Without zero points they are 0, for uint8 codes
`2 ** (bits - 1)`.

Integer products as written by `onnxruntime.quantization.quantize_dynamic`.

`DynamicQuantizeLinear` rounds an activation to uint8, `MatMulInteger` multiplies it by constant integers, `Mul` applies
the scales of both (ONNX, docs/Operators.md); `MatMulIntegerToFloat` and `DynamicQuantizeMatMul` combine these nodes
(onnxruntime, docs/ContribOperators.md). Without rounding, `DynamicQuantizeLinear` returns the activation with the scale
1 and the zero point 0, and the product is one of floats; the graph's scales remain.

`com.microsoft.MatMulNBits`: codes packed along K, in blocks with a scale and possibly a zero point each.

Layout (onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits): B is `[N, blocks, block_size * bits / 8]`,
the first code in the low bits; scales `[N, blocks]`; zero points packed alike, `[N, ceil(blocks * bits / 8)]`, or of
the scales' dtype; default `2 ** (bits - 1)`. With accuracy level 4 the other factor is rounded to int8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from llmconv.errors import UnsupportedInput
from llmconv.runtime.onnxruntime.guard import attributes, nodes
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    Constants,
    QuantizationScheme,
    QuantizedMatrix,
    grids,
    input_name,
    unpacked,
    unreadable,
    with_offsets,
)

LOOKUPS = {"Gather"}
PLACES = (("axis", 1), ("block_size", 0))  # attributes that say which scale belongs to an element, and their default


def _dequantized(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    maker = constants.makers.get(node.input[0])
    lookup = maker is not None and maker.op_type in LOOKUPS
    source = maker.input[0] if maker is not None and lookup else node.input[0]
    data = constants.kind(source)
    if data is None or not constants.initializer(source) or len(constants.shape(source)) < 2:
        return None  # an activation, or a bias, which the audit of floats ignores, too
    fields = {"axis": 1, "block_size": 0, **attributes(node)}
    name, scale, zero = constants.initializer(source), node.input[1], input_name(node, 2)
    shape = constants.shape(source)
    read, repeat = grids(node, constants, scale, zero, shape, fields["axis"], fields["block_size"])
    one = repeat == shape
    if lookup and (not one or attributes(maker).get("axis", 0)):  # type: ignore[arg-type]
        raise unreadable(node, "dequantizes looked-up rows with more than one scale")
    used, block = {other.op_type for other in constants.after(node.output[0])}, fields["block_size"]
    layout = "one scale" if one else f"blocks of {block}" if block else "a scale per row or column"
    return QuantizedMatrix(
        name=name,
        kind=f"DequantizeLinear, {layout}",
        shape=(shape[0], shape[1]),
        codes=constants.rows(source, shape[0]),
        grids=read,
        repeat=repeat,
        scales=constants.initializer(scale),
        looked_up=lookup or bool(used & LOOKUPS),
        multiplied=not lookup and bool(used - LOOKUPS),
        largest=int(np.iinfo(data[0]).max),
        smallest=int(np.iinfo(data[0]).min),
        origin=_origin(constants, (source, scale, zero), repeat),
    )


def _unrounded(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    """Replaces a rounded activation by the activation, if the pair of nodes is no more than a rounding."""
    maker = constants.makers.get(node.input[0])
    if maker is None or maker.op_type != "QuantizeLinear" or constants.array(maker.input[0]) is not None:
        return None
    if not _is_inverse(maker, node, constants):
        return None
    return [onnx.helper.make_node("Identity", [maker.input[0]], list(node.output), name=node.name)]


def _is_inverse(rounding: onnx.NodeProto, restoring: onnx.NodeProto, constants: Constants) -> bool:
    """Whether both nodes have the same constant scales, which are positive, and the same constant zero points."""
    both = rounding, restoring
    scales, zeros = (
        [constants.array(name) if (name := input_name(node, at)) else None for node in both] for at in (1, 2)
    )
    if scales[0] is None or scales[1] is None or not (np.isfinite(scales[0]) & (scales[0] > 0)).all():
        return False
    if any(zero is None and input_name(node, 2) for node, zero in zip(both, zeros, strict=True)):
        return False
    places = [[attributes(node).get(name, default) for name, default in PLACES] for node in both]
    return np.array_equal(scales[0], scales[1]) and _equal(*zeros) and places[0] == places[1]


def _equal(zero: Array | None, other: Array | None) -> bool:
    """Whether two zero points are the same; a missing one is 0."""
    ours, theirs = (np.zeros(()) if one is None else one for one in (zero, other))
    return bool(np.array_equal(ours, theirs) or not (ours.any() or theirs.any()))


def _origin(constants: Constants, names: Sequence[str], *layout: object) -> tuple[object, ...] | None:
    """See `QuantizedMatrix.origin`; `names` are the values of codes, scales and zero points, empty for none."""
    places = [constants.place(name) if name else () for name in names]
    return None if None in places else (*places, *layout)


DEFAULTS = {"bits": 4, "block_size": 128, "gather_axis": 0, "quantize_axis": 1}


def _gathered_blocks(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    fields = {**DEFAULTS, **attributes(node)}
    data, scales = constants.kind(node.input[0]), constants.kind(node.input[2])
    block, bits = fields["block_size"], fields["bits"]
    zeros, middle = input_name(node, 3), sum(1 << bits - 1 << at for at in range(0, 8, bits))
    if zeros and data is not None and data[0] == np.uint8 and constants.filled(zeros)[1].tolist() == [middle]:
        zeros = ""  # as without them
    if data is None or scales is None or not data[1] or not constants.initializer(node.input[0]):
        raise unreadable(node, "gathers rows that are not constant")
    if fields["gather_axis"] or fields["quantize_axis"] not in (1, -1) or not block:
        raise unreadable(
            node, "gathers along an axis other than the first, or has blocks along an axis other than the last"
        )
    rows, (dtype, size), blocks = constants.shape(node.input[0])[0], data, scales[1]
    # bytes contain several codes; INT4 and UINT4 tensors are unpacked already
    packed = dtype == np.uint8 and bits < 8 and -(-(size // rows * 8 // bits) // block) == blocks // rows
    raw, width = constants.rows(node.input[0], rows), size // rows
    columns = width * 8 // bits if packed else width

    def codes(start: int, stop: int) -> Array:
        return unpacked(raw(start, stop), bits) if packed else raw(start, stop)

    raw_zeros, shape = packed or bits == 8, (rows, blocks // rows)
    return QuantizedMatrix(
        name=constants.initializer(node.input[0]),
        kind=f"GatherBlockQuantized, {bits} bits, blocks of {block}",
        shape=(rows, columns),
        codes=codes,
        grids=partial(_block_grids, constants, node.input[2], zeros, bits, shape, raw=raw_zeros),
        repeat=(1, block),
        scales=constants.initializer(node.input[2]),
        looked_up=True,
        multiplied=False,
        largest=(1 << bits) - 1 if packed or dtype == np.uint8 else None,
        symmetric=not zeros,
        origin=_origin(constants, (node.input[0], node.input[2], zeros), bits, block),
    )


def _block_grids(
    constants: Constants, scale: str, zero: str, bits: int, shape: tuple[int, int], *, raw: bool
) -> tuple[Array, Array]:
    """Scales and zero points `[rows, blocks]`; without the latter the middle of `raw` codes, or 0."""
    scales, zeros = constants.array(scale), constants.array(zero) if zero else None
    assert scales is not None
    if zeros is None:
        return scales.reshape(shape), np.full(shape, 1 << (bits - 1) if raw else 0, dtype=np.float32)
    if zeros.size != shape[0] * shape[1]:
        zeros = unpacked(zeros.reshape(shape[0], -1), bits)[:, : shape[1]]
    return scales.reshape(shape), zeros.astype(np.float32).reshape(shape)


ROUNDING, INTEGER = "DynamicQuantizeLinear", "MatMulInteger"
TO_FLOAT, DYNAMIC = "MatMulIntegerToFloat", "DynamicQuantizeMatMul"
SCALE_AT = {TO_FLOAT: 3, DYNAMIC: 2}
ZERO_AT = {INTEGER: 3, TO_FLOAT: 5, DYNAMIC: 3}
ACTIVATION_AT = {INTEGER: {2: 2}, TO_FLOAT: {2: 1, 4: 2}}  # inputs that are outputs of the rounding: its scale and zero
BIAS_AT = {TO_FLOAT: 6, DYNAMIC: 4}
PRODUCTS = {INTEGER, TO_FLOAT}


def _integer_product(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    data = constants.kind(node.input[1])
    if data is None:
        return None
    scale = _scale_after(node, constants) if node.op_type == INTEGER else node.input[SCALE_AT[node.op_type]]
    shape = constants.shape(node.input[1])
    zero = input_name(node, ZERO_AT[node.op_type])
    read, repeat = grids(node, constants, scale, zero, shape, 1, 0)
    scales_text = "one scale" if repeat == shape else "a scale per column"
    return QuantizedMatrix(
        name=constants.initializer(node.input[1]),
        kind=f"{node.op_type}, {scales_text}",
        shape=(shape[0], shape[1]),
        codes=constants.rows(node.input[1], shape[0]),
        grids=read,
        repeat=repeat,
        scales=constants.initializer(scale),
        largest=int(np.iinfo(data[0]).max),
        smallest=int(np.iinfo(data[0]).min),
        origin=_origin(constants, (node.input[1], scale, zero), repeat),
    )


def _scale_after(node: onnx.NodeProto, constants: Constants) -> str:
    """The constant factor of the scale by which the product is multiplied."""
    for scale in _scales_after(node, constants):
        constant: list[str] = [name for name in scale.input if constants.initializer(name)]
        if len(constant) == 1:
            return constant[0]
    raise unreadable(node, "is not followed by a multiplication with its scale")


def _scales_after(node: onnx.NodeProto, constants: Constants) -> Iterator[onnx.NodeProto]:
    """Nodes that multiply the scales of both factors of a product of integers."""
    for product in constants.after(node.output[0]):
        for factor in product.input if product.op_type == "Mul" else ():
            maker = constants.makers.get(factor)
            if maker is not None and maker.op_type == "Mul":
                yield maker


def _is_undone(rounding: onnx.NodeProto, constants: Constants) -> bool:
    """Whether all products of a rounded activation use its scale and zero point, and no other product does."""
    values, scale, zero = rounding.output
    users = [user for name in (values, scale, zero) for user in constants.users.get(name, [])]
    products = [user for user in users if user.op_type in PRODUCTS]
    scaled = [list(_scales_after(user, constants)) for user in products if user.op_type == INTEGER]
    multiplied = [one for each in scaled for one in each]
    own = all(
        input_name(user, at) == rounding.output[which]
        for user in products
        for at, which in {0: 0, **ACTIVATION_AT[user.op_type]}.items()
    )
    return (
        own
        and all(scaled)
        and all(scale in one.input for one in multiplied)
        and all(one in multiplied for one in users if one.op_type == "Mul")
    )


def _unrounded_activation(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    values, scale, zero = node.output
    if any(user.op_type not in PRODUCTS for name in (values, zero) for user in constants.users.get(name, [])):
        raise unreadable(node, "rounds an activation for an unsupported operator")
    if not _is_undone(node, constants):  # numbers of the graph as it is are wrong, and are found so
        return None
    one = helper.make_tensor(scale, TensorProto.FLOAT, [], [1.0])
    zero_point = helper.make_tensor(zero, TensorProto.UINT8, [], [0])
    return [
        helper.make_node("Identity", [node.input[0]], [values], name=node.name),
        helper.make_node("Constant", [], [scale], value=one),
        helper.make_node("Constant", [], [zero], value=zero_point),
    ]


def _float_product(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    kind, out = node.op_type, node.output[0]
    maker = constants.makers.get(node.input[0])
    if kind in PRODUCTS and (maker is None or maker.op_type != ROUNDING):
        raise unreadable(node, f"multiplies integers that are not from {ROUNDING}")
    if kind in PRODUCTS and maker is not None and not _is_undone(maker, constants):
        return None
    nodes = [helper.make_node("Cast", [node.input[1]], [f"{out}:weight"], to=TensorProto.FLOAT)]
    weight = f"{out}:weight"
    if zero := input_name(node, ZERO_AT[kind]):
        nodes.append(helper.make_node("Cast", [zero], [f"{out}:zero"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [weight, f"{out}:zero"], [f"{out}:shifted"]))
        weight = f"{out}:shifted"
    if kind in SCALE_AT:
        nodes.append(helper.make_node("Mul", [weight, node.input[SCALE_AT[kind]]], [f"{out}:scaled"]))
        weight = f"{out}:scaled"
    bias = input_name(node, BIAS_AT.get(kind, len(node.input)))
    product = f"{out}:product" if bias else out
    nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name))
    return [*nodes, helper.make_node("Add", [product, bias], [out])] if bias else nodes


LEVEL, FLOAT32 = "accuracy_level", 1
CODES, SCALES, ZEROS, GROUPS, BIAS = 1, 2, 3, 4, 5  # indices of inputs


def _product_of_codes(node: onnx.NodeProto, constants: Constants) -> QuantizedMatrix | None:
    fields = {"bits": 4, **attributes(node)}
    rows, columns, block, bits = (fields[name] for name in ("N", "K", "block_size", "bits"))
    if input_name(node, GROUPS) or fields.get("weight_prepacked"):
        raise unreadable(node, "has reordered groups, or weights packed for one device")
    found, scales = constants.kind(node.input[CODES]), constants.kind(node.input[SCALES])
    blocks = -(-columns // block)
    if not found or not scales or found[1] * 8 != rows * blocks * block * bits or scales[1] != rows * blocks:
        raise unreadable(node, f"has weights that are not {rows} x {columns} codes of {bits} bits")
    raw, places = constants.rows(node.input[CODES], rows), _places(node, constants, columns)

    def codes(start: int, stop: int) -> Array:
        read = unpacked(raw(start, stop).view(np.uint8), bits)[:, :columns]
        return read if places is None else read[:, places]

    zeros = input_name(node, ZEROS)
    return QuantizedMatrix(
        name=constants.initializer(node.input[CODES]),
        kind=f"MatMulNBits, {bits} bits, blocks of {block}",
        shape=(rows, columns),
        codes=codes,
        grids=partial(_block_grids, constants, node.input[SCALES], zeros, bits, (rows, blocks), raw=True),
        repeat=(1, block),
        scales=constants.initializer(node.input[SCALES]),
        largest=(1 << bits) - 1,
        columns=places,
        symmetric=not zeros,
        origin=_origin(constants, (*node.input[CODES : SCALES + 1], zeros), bits, block) if places is None else None,
    )


def _places(node: onnx.NodeProto, constants: Constants, columns: int) -> Array | None:
    """The place of each column among the codes, where the node multiplies with reordered columns (GPTQ's act-order)."""
    maker = constants.makers.get(node.input[0])
    order = constants.array(maker.input[1]) if maker is not None and maker.op_type == "Gather" else None
    if maker is None or order is None or attributes(maker).get("axis", 0) != -1:
        return None
    is_order = order.shape == (columns,) and np.array_equal(np.sort(order), np.arange(columns))
    return np.argsort(order) if is_order else None


def _unrounded_product(node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto] | None:
    if attributes(node).get(LEVEL, 0) <= FLOAT32:
        return None
    if _has_inexact_kernel(node, constants):
        return _float_product_of_codes(node)
    made = onnx.NodeProto()
    made.CopyFrom(node)
    next(found for found in made.attribute if found.name == LEVEL).i = FLOAT32
    return [made]


def _has_inexact_kernel(node: onnx.NodeProto, constants: Constants) -> bool:
    """Whether the float32 kernel is noisier than a product of floats, which adds up over the layers of a model.

    With packed zero points it rounds `scale * zero point`: 2 to 3 times the noise for two rows or more (4 bits, K = 576
    to 1536). With 8 bits onnxruntime has no kernel of float32 activations, and dequantizes the whole matrix.
    """
    zeros = constants.kind(input_name(node, ZEROS)) if input_name(node, ZEROS) else None
    is_eight = attributes(node).get("bits", 4) == 8
    is_packed = zeros[0] == np.uint8 if zeros is not None else is_eight
    return is_packed and _is_float32(node.input[SCALES], constants)


def _is_float32(name: str, constants: Constants) -> bool:
    if (maker := constants.makers.get(name)) is not None and maker.op_type == "Cast":
        return bool(maker.attribute[0].i == onnx.TensorProto.FLOAT)
    found = constants.kind(name)
    return found is not None and bool(found[0] == np.float32)


PART = 1 << 25
"""Weights that are dequantized at a time; a matrix of no more is dequantized once, when the session opens."""


def _float_product_of_codes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The product with `(code - zero point) * scale` in float32: `GatherBlockQuantized` gathers all rows of the codes.

    Of a large matrix it gathers some rows at a time, in every run: indices that depend on an input are not folded, and
    those that depend on the product before keep onnxruntime from gathering all rows before the first product.
    """
    fields, out, made = {"bits": 4, **attributes(node)}, node.output[0], list[onnx.NodeProto]()
    rows, columns, block, bits = (fields[name] for name in ("N", "K", "block_size", "bits"))
    blocks, bias = -(-columns // block), input_name(node, BIAS)

    def add(operator: str, *inputs: str | Array, domain: str = "", **options: Any) -> str:
        names = []
        for given in inputs:
            if not isinstance(given, str):
                value = onnx.numpy_helper.from_array(given)
                made.append(helper.make_node("Constant", [], [f"{out}:{len(made)}"], value=value))
                given = made[-1].output[0]
            names.append(given)
        made.append(helper.make_node(operator, names, [f"{out}:{len(made)}"], domain=domain, **options))
        return str(made[-1].output[0])

    def shaped(name: str, *shape: int) -> str:
        return add("Reshape", name, np.array(shape))

    # codes stay [N, blocks, bytes], as they are mapped; one scale and one zero point per row and block
    scales, zeros = shaped(node.input[SCALES], rows, blocks, 1), input_name(node, ZEROS)
    if zeros and bits < 8:  # several in a byte, the first in the low bits
        sizes = [(np.array(8 - bits - at, np.uint8), np.array(8 - bits, np.uint8)) for at in range(0, 8, bits)]
        parts = [
            add("BitShift", add("BitShift", zeros, left, direction="LEFT"), right, direction="RIGHT")
            for left, right in sizes
        ]
        whole = add("Concat", *(shaped(part, rows, -1, 1) for part in parts), axis=2)
        zeros = add("Slice", shaped(whole, rows, -1), np.array([0]), np.array([blocks]), np.array([1]))
    given = [scales, shaped(zeros, rows, blocks, 1)] if zeros else [scales]
    layout = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 2}
    step = max(PART // (blocks * block), 1)
    nothing = add("Mul", add("Size", node.input[0]), np.array(0)) if rows > step else ""
    products = []
    for start in range(0, rows, step):
        places = np.arange(start, min(start + step, rows))
        indices = add("Add", places, nothing) if nothing else add("Identity", places)
        found = add("GatherBlockQuantized", node.input[CODES], indices, *given, domain="com.microsoft", **layout)
        weights = shaped(found, len(places), blocks * block)
        if columns < blocks * block:
            weights = add("Slice", weights, np.array([0]), np.array([columns]), np.array([1]))
        products.append(add("MatMul", node.input[0], add("Transpose", weights, perm=[1, 0])))
        if start + step < rows:
            nothing = add("Mul", add("Size", products[-1]), np.array(0))
    whole = add("Concat", *products, axis=-1) if len(products) > 1 else products[0]
    terms = [whole, bias] if bias else [whole]
    return [*made, helper.make_node("Add" if bias else "Identity", terms, [out], name=node.name)]


SCHEMES = (
    QuantizationScheme(frozenset({"DequantizeLinear"}), _dequantized, {"DequantizeLinear": _unrounded}),
    QuantizationScheme(frozenset({"GatherBlockQuantized"}), _gathered_blocks, {}),
    QuantizationScheme(
        frozenset({INTEGER, TO_FLOAT, DYNAMIC}),
        _integer_product,
        {ROUNDING: _unrounded_activation, **dict.fromkeys((INTEGER, TO_FLOAT, DYNAMIC), _float_product)},
    ),
    QuantizationScheme(frozenset({"MatMulNBits"}), _product_of_codes, {"MatMulNBits": _unrounded_product}),
)

UNSUPPORTED = {"MatMulBnb4", "QMoE", "MoE", "QLinearMatMul", "QGemm", "QAttention", "ConvInteger", "QLinearConv"}
"""Operators with quantized weights in layouts that are not supported."""


@cache
def schemes() -> dict[str, QuantizationScheme]:
    return {operator: scheme for scheme in SCHEMES for operator in scheme.operators}


def quantized_operators(model: onnx.ModelProto) -> list[str]:
    found = dict.fromkeys(node.op_type for node in nodes(model))
    return [name for name in found if name in schemes() or name in UNSUPPORTED]


def quantized_matrices(model: onnx.ModelProto, constants: Constants) -> list[QuantizedMatrix]:
    """Every quantized matrix of a graph, each once; UnsupportedInput if its format is not supported."""
    found: dict[str, QuantizedMatrix] = {}
    for node in nodes(model):
        if node.op_type in UNSUPPORTED:
            raise UnsupportedInput(
                f"`{node.op_type}` stores its weights in an unsupported format",
                hint="verify the graph without quantization",
            )
        stored = schemes()[node.op_type].matrix(node, constants) if node.op_type in schemes() else None
        if stored:
            found[f"{stored.name} {stored.looked_up}"] = with_offsets(stored, constants)
    return list(found.values())
