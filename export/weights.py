"""Parameters of the model as expressions over the tensors that a checkpoint stores, bound to byte ranges of its files.

transformers keeps experts stacked and some projections fused, while checkpoints store them one by one (or the reverse),
as its conversion mapping declares (`transformers.conversion_mapping`). This module turns that mapping into expressions
over stored tensors, so that a graph can map the stored bytes instead of a converted copy.

An ONNX initializer may refer to any byte range of a file in the graph's folder (`location`, `offset`, `length`), and
the data of a safetensors file are raw little-endian rows. Where the graph computes in another dtype, it casts them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import onnx_ir as ir
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import HEADS, NO_HEAD, refuse_second_names
from llmconv.convert.models.blueprint import NOT_GATHERED, is_ungathered, other_rows
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, replace_uses, scalar, static_shape
from llmconv.files.weight_ranges import AdjustedTensor, Mapped
from llmconv.runtime.eager.stored_tensors import BUFFERS
from llmconv.tensors import LazyTensor, as_bytes


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored tensor, which are adjacent bytes of its file."""

    name: str
    stored: tuple[int, ...]  # its whole shape
    first: int = 0
    count: int = -1  # -1 for all rows
    single: bool = False  # the first axis of one row is dropped

    @property
    def is_whole(self) -> bool:
        return self.count in (-1, self.stored[0] if self.stored else -1) and not self.single

    @property
    def shape(self) -> tuple[int, ...]:
        if self.single:
            return self.stored[1:]
        return self.stored if self.is_whole else (self.count, *self.stored[1:])

    @property
    def label(self) -> str:
        """The tensor's name, followed by `[row]` or `[first:stop]` for a part of it."""
        if self.is_whole:
            return self.name
        return f"{self.name}[{self.first}]" if self.single else f"{self.name}[{self.first}:{self.first + self.count}]"


@dataclass(frozen=True)
class Concatenation:
    """Expressions joined in order along `axis`; with `stack`, along a new first axis instead."""

    parts: tuple[WeightSource, ...]
    axis: int
    stack: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        part = self.parts[0].shape
        if self.stack:
            return (len(self.parts), *part)
        size = sum(each.shape[self.axis] for each in self.parts)
        return (*part[: self.axis], size, *part[self.axis + 1 :])


@dataclass(frozen=True)
class Transposition:
    """An expression with two axes exchanged."""

    whole: WeightSource
    axes: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        a, b = self.axes
        sizes = list(self.whole.shape)
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return tuple(sizes)


@dataclass(frozen=True)
class Deinterleaved:
    """An axis reordered: first all even entries, then all odd entries."""

    whole: WeightSource
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape


@dataclass(frozen=True)
class AxisSlice:
    """The entries `first` to `first + count` of an axis of an expression."""

    whole: WeightSource
    axis: int
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.whole.shape)
        sizes[self.axis] = self.count
        return tuple(sizes)


WeightSource = StoredRows | Concatenation | Transposition | Deinterleaved | AxisSlice


def leaves(whole: WeightSource) -> Iterator[StoredRows]:
    if isinstance(whole, StoredRows):
        yield whole
    elif isinstance(whole, Concatenation):
        for part in whole.parts:
            yield from leaves(part)
    else:
        yield from leaves(whole.whole)


def element(whole: WeightSource, index: int) -> WeightSource:
    """Entry `index` of the first axis, without that axis."""
    if isinstance(whole, StoredRows):
        assert not whole.single
        return replace(whole, first=whole.first + index, count=1, single=True)
    if isinstance(whole, Concatenation) and whole.stack:
        return whole.parts[index]
    if isinstance(whole, Concatenation) and whole.axis > 0:
        return Concatenation(tuple(element(part, index) for part in whole.parts), whole.axis - 1)
    if isinstance(whole, Transposition) and 0 not in whole.axes:
        return Transposition(element(whole.whole, index), (whole.axes[0] - 1, whole.axes[1] - 1))
    if isinstance(whole, Deinterleaved) and whole.axis > 0:
        return Deinterleaved(element(whole.whole, index), whole.axis - 1)
    if isinstance(whole, AxisSlice) and whole.axis > 0:
        return replace(whole, whole=element(whole.whole, index), axis=whole.axis - 1)
    raise UnsupportedInput(
        "unsupported layout of stored experts: they cannot be separated", hint="report the model type"
    )


def sliced(whole: WeightSource, axis: int, first: int, count: int) -> WeightSource:
    """The entries `first` to `first + count` of an axis; for rows of a stored tensor again `StoredRows`."""
    if isinstance(whole, StoredRows) and axis == 0 and not whole.single:
        return replace(whole, first=whole.first + first, count=count)
    return AxisSlice(whole, axis, first, count)


def expressions(
    shapes: Mapping[str, tuple[int, ...]],  # of the model's parameters, by name
    stored: Mapping[str, tuple[int, ...]],  # of the checkpoint's tensors, by name
    transforms: Sequence[Any],  # transformers' conversion mapping of the model
    base_prefix: str,  # name of the inner model (`transformer`), which tensor names may lack or have in addition
) -> dict[str, WeightSource]:
    """Expressions by parameter name, for every parameter that the mapping or its own name finds.

    Raises UnsupportedInput: the mapping contains an unsupported operation.
    """
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    found: dict[str, WeightSource] = {}
    collected: dict[str, dict[str, list[WeightSource]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, base_prefix, dict.fromkeys(shapes, True))
        if pattern is None or renamed not in shapes and name in shapes:
            # with or without the inner model's name
            spellings = (renamed, name, name.removeprefix(f"{base_prefix}."), f"{base_prefix}.{name}")
            target = next((spelling for spelling in spellings if spelling in shapes), None)
            if target is not None:
                found.setdefault(target, StoredRows(name, stored[name]))
        else:
            collected[renamed][pattern].append(StoredRows(name, stored[name]))
    for renamed, sources in collected.items():
        converter = next(c for c in converters if set(sources) <= set(c.source_patterns))
        found.update(_convert(converter, renamed, sources, shapes))
    return found


def _convert(
    converter: Any, renamed: str, sources: Mapping[str, list[WeightSource]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, WeightSource]:
    first = converter.target_patterns[0]
    targets = [renamed.replace(first, target, 1) for target in converter.target_patterns]
    lists = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
    for operation in converter.operations:
        lists = _apply(operation, lists, [shapes.get(target, ()) for target in targets])
    made = [expression for several in lists for expression in several]
    return dict(zip(targets, made, strict=False))


def _apply(
    operation: Any, lists: list[list[WeightSource]], targets: Sequence[tuple[int, ...]]
) -> list[list[WeightSource]]:
    """One operation of transformers' `core_model_loading`, on lists of expressions by source pattern."""
    kind = type(operation).__name__
    if kind == "MergeModulelist" and operation.dim == 0:
        return [[Concatenation(tuple(parts), 0, stack=True)] for parts in lists]
    if kind == "Concatenate":
        return [[Concatenation(tuple(part for parts in lists for part in parts), operation.dim)]]
    whole = lists[0][0]
    if kind == "Transpose":
        axes = (operation.dim0, operation.dim1)
        return [[whole if operation.check_dims and whole.shape == targets[0] else Transposition(whole, axes)]]
    if kind == "Interleave" and not operation.inverse:
        return [[Deinterleaved(whole, operation.dim)]]
    if kind in ("Chunk", "Split"):
        pieces = [whole.shape[operation.dim] // len(targets)] * len(targets)
        sizes = pieces if kind == "Chunk" else [shape[operation.dim] for shape in targets]
        starts = accumulate(sizes, initial=0)
        return [[sliced(whole, operation.dim, first, size) for first, size in zip(starts, sizes, strict=False)]]
    raise UnsupportedInput(
        f"unsupported conversion of stored weights: `{kind}`",
        hint="load it with transformers and save it with `save_pretrained(…, save_original_format=False)`",
    )


# inserts the product of rows with a stored matrix, which is transposed if the number is 1, in a dtype
Multiply = Callable[[NodeEditor, ir.Value, WeightSource, int, ir.DataType], ir.Value]
DOMAIN, GROUPED = "llmconv", "GroupedMatMul"


def expand_experts(model: ir.Model, stacks: Mapping[ir.Value, WeightSource], multiply: Multiply) -> None:
    """Replaces every `GroupedMatMul`, in place, with products that `multiply` inserts on the stored stacks."""
    for node in list(model.graph):
        if (node.domain, node.op_type) == (DOMAIN, GROUPED):
            weight = node.inputs[1]
            assert weight is not None
            _expand(model.graph, node, stacks[weight], multiply, dtype_of(weight))
    model.opset_imports.pop(DOMAIN, None)


def dtype_of(weight: ir.Value) -> ir.DataType:
    return weight.dtype or ir.DataType.FLOAT


def _expand(graph: ir.Graph, node: ir.Node, stack: WeightSource, multiply: Multiply, dtype: ir.DataType) -> None:
    """Replaces a node by Split, one product per expert (and per stored part of it), Concat."""
    rows, _, counts = node.inputs
    experts = range(stack.shape[0])
    transposed = not node.attributes["transB"].as_int()
    editor = NodeEditor(graph, node, scope=node.name or "")
    groups = editor.add("Split", [rows, counts], {"axis": 0}, outputs=len(experts)) if len(experts) > 1 else [rows]
    parts = [output_parts(element(stack, expert), transposed) for expert in experts]
    columns = []
    for column in range(len(parts[0])):
        products: list[ir.Value] = []
        for group, matrices in zip(groups, parts, strict=True):
            matrix, transB = matrices[column]
            assert group is not None
            products.append(multiply(editor, group, matrix, transB, dtype))
        columns.append(editor.one("Concat", products, {"axis": 0}))
    result = columns[0] if len(columns) == 1 else editor.one("Concat", columns, {"axis": 1})
    node.outputs[0].replace_all_uses_with(result)
    graph.remove(node, safe=True)


def output_parts(matrix: WeightSource, transposed: bool) -> list[tuple[WeightSource, int]]:
    """The stored parts of a matrix along its output features, each with the `transB` of its Gemm."""
    if isinstance(matrix, Transposition) and set(matrix.axes) == {0, 1}:
        return output_parts(matrix.whole, not transposed)
    if isinstance(matrix, Concatenation) and not matrix.stack and matrix.axis == int(transposed):
        return [part for each in matrix.parts for part in output_parts(each, transposed)]
    return [(matrix, int(not transposed))]


ONNX_TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
CODE_TYPES = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8, "int32": ir.DataType.INT32}
"""Of codes, and of the order of columns."""
NAMES = {dtype: name for name, dtype in ONNX_TYPES.items()}


class StoredValues:
    """Creates the graph values of stored tensors, each once per dtype.

    Values are rounded to the dtypes of `rounded`, by name of the tensor, before they are used.
    """

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, Mapped], rounded: Mapping[str, LazyTensor]) -> None:
        self._graph, self._tensors, self._rounded = graph, tensors, rounded
        self._values: dict[tuple[WeightSource, ir.DataType], ir.Value] = {}

    def value(self, expression: WeightSource, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        key = expression, dtype
        if key not in self._values:
            if isinstance(expression, StoredRows):
                self._values[key] = self._rows(expression, dtype)
            else:
                self._values[key] = self._computed(expression, dtype)
        return self._values[key]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored(self, rows: StoredRows, shape: tuple[int, ...] | None = None) -> ir.Value:
        """An initializer over the bytes of these rows, named after the tensor; `shape` may differ from theirs."""
        tensor = self._tensors[rows.name]
        dtype = {**CODE_TYPES, **ONNX_TYPES}[tensor.dtype.name]
        row = tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes
        length = tensor.nbytes if rows.is_whole else row * rows.count
        place = (tensor.location, tensor.offset + row * rows.first, length)
        label = rows.label if shape in (None, rows.shape) else f"{rows.label}:{'x'.join(map(str, shape or ()))}"
        label += ":stored" if isinstance(tensor, AdjustedTensor) else ""
        if label not in self._graph.initializers:
            content = ir.ExternalTensor(*place, dtype, shape=ir.Shape(shape or rows.shape), name=label)
            self._graph.initializers[label] = ir.val(label, dtype, shape or rows.shape, const_value=content)
        return self._graph.initializers[label]

    def look_up(self, node: ir.Node, rows: StoredRows, dtype: ir.DataType) -> None:
        """Makes a Gather read stored rows, and casts what it finds: runtimes would keep a whole table in `dtype`."""
        uses, last = tuple(node.outputs[0].uses()), node
        node.replace_input_with(0, self.stored(rows))
        for kind in self._dtypes(rows, dtype):
            cast = ir.node("Cast", [last.outputs[0]], {"to": kind}, name=f"{node.name}_{NAMES[kind]}")  # in its module
            cast.outputs[0].name = f"{cast.name}:0"
            cast.metadata_props.update(node.metadata_props)
            self._graph.insert_after(last, cast)
            last = cast
        replace_uses(uses, last.outputs[0])

    def is_adjusted(self, rows: StoredRows) -> bool:
        """Whether the values of a tensor are not the bytes of its file."""
        return isinstance(self._tensors.get(rows.name), AdjustedTensor)

    def _rows(self, rows: StoredRows, wanted: ir.DataType) -> ir.Value:
        tensor, value = self._tensors[rows.name], self.stored(rows)
        pairs, added = (tensor.pairs, tensor.added) if isinstance(tensor, AdjustedTensor) else (0, 0.0)
        if added:  # in float32, as stored
            value = self._node("Add", [value, scalar(self._graph, added)], {}, f"{rows.label}.added")
        for dtype in self._dtypes(rows, wanted):
            value = self._node(
                "Cast", [value], {"to": dtype}, rows.label if dtype == wanted else f"{rows.label}/rounded"
            )
            value.name = f"{rows.label}:{NAMES[dtype]}" if dtype == wanted else value.name
        return self._with_halves(value, rows, pairs) if pairs else value

    def _with_halves(self, value: ir.Value, rows: StoredRows, pairs: int) -> ir.Value:
        """Rows of a whole tensor in the order of `AdjustedTensor`."""
        if not rows.is_whole:
            raise UnsupportedInput(
                f"graphs cannot map a part of `{rows.name}`", hint="give `-o OUT`: the weights are converted there once"
            )
        shape = rows.shape
        split, whole = integers(self._graph, -1, pairs // 2, 2, *shape[1:]), integers(self._graph, *shape)
        apart = self._node("Reshape", [value, split], {}, f"{rows.label}.pairs")
        order = [0, 2, 1, *range(3, len(shape) + 2)]
        turned = self._node("Transpose", [apart], {"perm": order}, f"{rows.label}.halves")
        return self._node("Reshape", [turned, whole], {}, f"{rows.label}.rows")

    def _dtypes(self, rows: StoredRows, wanted: ir.DataType) -> list[ir.DataType]:
        stored, rounded = (ONNX_TYPES[tensors[rows.name].dtype.name] for tensors in (self._tensors, self._rounded))
        steps = [wanted] if rounded == ir.DataType.FLOAT else [rounded, wanted]
        return [after for before, after in pairwise([stored, *steps]) if before != after]

    def _computed(self, made: WeightSource, dtype: ir.DataType) -> ir.Value:
        """Nodes that a runtime evaluates once, when it loads the graph."""
        name = f"{next(iter(leaves(made))).label}.{len(self._values)}"
        if isinstance(made, Concatenation):
            parts = [self.value(part, dtype) for part in made.parts]
            if made.stack:
                axis = integers(self._graph, made.axis)
                parts = [self._node("Unsqueeze", [part, axis], {}, f"{name}.{i}") for i, part in enumerate(parts)]
            return self._node("Concat", parts, {"axis": made.axis}, name)
        assert not isinstance(made, StoredRows)
        whole = self.value(made.whole, dtype)
        if isinstance(made, AxisSlice):
            ends = [integers(self._graph, size) for size in (made.first, made.first + made.count, made.axis)]
            return self._node("Slice", [whole, *ends], {}, name)
        if isinstance(made, Transposition):
            order = list(range(len(made.shape)))
            a, b = made.axes
            order[a], order[b] = b, a
            return self._node("Transpose", [whole], {"perm": order}, name)
        bounds = [[integers(self._graph, number) for number in (start, 1 << 62, made.axis, 2)] for start in (0, 1)]
        halves = [self._node("Slice", [whole, *ends], {}, f"{name}.{i}") for i, ends in enumerate(bounds)]
        return self._node("Concat", halves, {"axis": made.axis}, name)

    def _node(self, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any], scope: str) -> ir.Value:
        return NodeEditor(self._graph, self._graph[0], scope).one(op_type, inputs, attributes)


class Quantized(Protocol):
    """Writes products with quantized weights into a graph, see `quantization.products`."""

    def __contains__(self, source: WeightSource) -> bool:
        """Whether a matrix is stored as codes."""

    def multiply(self, editor: NodeEditor, left: ir.Value, rows: Any, values: StoredValues) -> ir.Value:
        """Inserts a product."""

    def rewrite(self, traced: TracedGraph, matches: Mapping[str, WeightSource], values: StoredValues) -> None:
        """Replaces the products of a graph."""


VALUE_HEADS = ("v_head.", "value_head.", "score.")
"""What reinforcement learning trains on top of a language model."""


def match_weights(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> dict[str, WeightSource]:
    """The stored tensors that each weight of the graph consists of, by parameter name (tied parameters share one).

    Tensors outside of `traced.own` are ignored. Raises InputRefused: missing keys, unexpected keys, a shape mismatch,
    or an unsupported dtype.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(traced.own)}
    shapes = {name: static_shape(value) for name, value in traced.weights.items()}
    names = {name: _tied_to(name, traced.tied) for name in shapes}
    wanted = {**{tied: shapes[name] for name, others in names.items() for tied in others}, **shapes}
    stored = {name: tensor.shape for name, tensor in own.items()}
    found = expressions({**wanted, **traced.unused}, stored, traced.transforms, traced.base_prefix)
    matches: dict[str, WeightSource] = {}
    for name in traced.weights:
        own_or_tied = [one for one in (traced.tied.get(name, name), name, *names[name]) if one in found]
        if not own_or_tied:
            raise missing_key(name)
        matches[name] = found[own_or_tied[0]]
    for name, expression in matches.items():
        require_shape(name, shapes[name], expression)
        for source in leaves(expression):
            require_dtype(source.name, own[source.name])
    used = {leaf.name for expression in found.values() for leaf in leaves(expression)}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in traced.ignored) or "(?!)")
    used |= set(mtp_tensors(own, {"num_hidden_layers": traced.num_layers}))
    left = [name for name in own if not ignored.search(name) and name not in used and not name.endswith(BUFFERS)]
    if left:
        refuse_second_names(left, own.keys() - {*left}, "the model")
        listed = ", ".join(f"`{name}`" for name in left[:5])
        hint = "`config.json` describes another model, or another number of layers"
        if all(name.startswith(VALUE_HEADS) for name in left):
            hint = "`llmconv to-hf MODEL --drop -o OUT` writes the language model without its value head"
        elif all("_quantizer." in name for name in left):
            hint = "they are state of ModelOpt's quantizers, which its export should have left out; export it again"
        raise InputRefused(f"{len(left)} unexpected keys: {listed}", hint=hint)
    return matches


def _tied_to(name: str, tied: Mapping[str, str]) -> list[str]:
    """The other names of a parameter: safetensors' `save_model` keeps the first of them by the alphabet, as lm_head."""
    first = tied.get(name, name)
    return [one for one in (first, *(one for one, other in tied.items() if other == first)) if one != name]


def require_one_copy(traced: TracedGraph, tensors: Mapping[str, LazyTensor]) -> None:
    """Raises InputRefused for stored tensors that differ where the config ties them: the graph would read only one.

    transformers 5 then ties nothing, older versions use the embedding; no graph is right for both.
    """
    own = {name: tensor.shape for name, tensor in tensors.items() if name.startswith(traced.own)}
    for name, tied in traced.tied.items():
        value = traced.weights.get(name)
        if value is None:
            continue
        wanted = dict.fromkeys((name, tied), static_shape(value))
        found = expressions(wanted, own, traced.transforms, traced.base_prefix)
        sides = [[leaf.name for leaf in leaves(expression)] for expression in found.values()]
        if [len(side) for side in sides] != [1, 1]:
            continue
        (one,), (other,) = sides
        if one == other:
            continue
        pair = tensors[one], tensors[other]
        alike = pair[0].dtype == pair[1].dtype and pair[0].shape == pair[1].shape
        blocks = ([as_bytes(side.rows(*block)) for side in pair] for block in pair[0].blocks())
        if not alike or any(left != right for left, right in blocks):
            raise InputRefused(
                f"`config.json` ties `{one}` and `{other}`, and the stored weights differ",
                hint="an output head of its own has `tie_word_embeddings` false in `config.json`; else remove one",
            )


def bind(
    traced: TracedGraph,
    matches: Mapping[str, WeightSource],  # from `match_weights`
    tensors: Mapping[str, Mapped],  # of the checkpoint by name, in files that will be in the folder of the graph
    rounded: Mapping[str, LazyTensor] | None = None,  # with the dtypes to round values to first, if not as stored
    quantized: Quantized | None = None,  # multiplies with the tensors that are stored as codes
) -> None:
    """Turns every weight input of the graph into an initializer over the bytes of its tensors, in place."""
    graph = traced.model.graph
    reader = StoredValues(graph, tensors, rounded or tensors)

    def multiply(editor: NodeEditor, left: ir.Value, matrix: WeightSource, transB: int, dtype: ir.DataType) -> ir.Value:
        if quantized and matrix in quantized:
            return quantized.multiply(editor, left, matrix, reader)
        return editor.one("Gemm", [left, reader.value(matrix, dtype)], {"transB": transB})

    expand_experts(traced.model, {traced.weights[name]: made for name, made in matches.items()}, multiply)
    if quantized:
        quantized.rewrite(traced, matches, reader)
    for value in (value for node in graph for value in node.outputs if not value.is_graph_output()):
        value.shape = value.type = None  # runtimes infer them from the file
    multiplied = {
        expression
        for name, expression in matches.items()
        if not all(_looks_up(*use) for use in traced.weights[name].uses())
    }
    for name, expression in matches.items():
        dtype, uses = dtype_of(traced.weights[name]), tuple(traced.weights[name].uses())
        if isinstance(expression, StoredRows) and expression not in multiplied and not reader.is_adjusted(expression):
            for node, _ in uses:
                reader.look_up(node, expression, dtype)
        elif uses:
            traced.weights[name].replace_all_uses_with(reader.value(expression, dtype))
    weights = set(traced.weights.values())
    graph.inputs[:] = [value for value in graph.inputs if value not in weights]
    graph.sort()


def mapped_bytes(graphs: Iterable[TracedGraph]) -> int:
    """Number of bytes of weight files that bound graphs map; bytes that several weights share count once."""
    ranges = {
        (str(tensor.location), tensor.offset or 0, (tensor.offset or 0) + tensor.nbytes)
        for traced in graphs
        for value in traced.model.graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    total, place, end = 0, "", 0
    for file, first, stop in sorted(ranges):
        start = first if file != place else max(first, end)
        total += max(stop - start, 0)
        place, end = file, stop if file != place else max(stop, end)
    return total


def _looks_up(node: ir.Node, index: int) -> bool:
    """Whether a node picks rows of the table that is its input `index`; not if they are an output of the graph."""
    return node.op_type == "Gather" and not node.domain and index == 0 and not node.outputs[0].is_graph_output()


def require_shape(name: str, shape: tuple[int, ...], source: WeightSource) -> None:
    """Raises MalformedInput if the shape of a source is not that of the parameter `name`."""
    if source.shape != shape:
        raise MalformedInput(
            f"shape mismatch for `{name}`: expected {list(shape)} by `config.json`, "
            f"got {list(source.shape)} from `{next(iter(leaves(source))).name}`",
            hint=_shape_hint(name, shape, source.shape),
        )


def _shape_hint(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> str:
    if is_ungathered(found, wanted):
        return NOT_GATHERED
    if name.endswith((*EMBEDDINGS, *HEADS)) and len(found) == len(wanted) == 2 and found[1] == wanted[1]:
        return other_rows(found[0], wanted[0])
    return "the weights and the config are of different models"


def missing_key(name: str) -> InputRefused:
    if name in HEADS:
        problem = f"missing keys: the output head, `{name}`, which `config.json` does not tie to the embedding"
        return InputRefused(problem, hint=NO_HEAD)
    return InputRefused(
        f"missing keys: `{name}`",
        hint="the weights are not of the model that `config.json` describes; convert the folder again",
    )


def require_dtype(name: str, tensor: LazyTensor) -> None:
    """Refuses a tensor of a dtype that graphs cannot map."""
    if tensor.dtype.name not in ONNX_TYPES:
        hint = "convert it: `llmconv export MODEL --dtype float32 -o OUT`"
        if tensor.dtype.name.startswith("float8"):  # codes, and no number without their scales
            hint = (
                "`config.json` has no `quantization_config`, which says what scales they have; give the original model"
            )
        raise InputRefused(f"`{name}` has the unsupported dtype {tensor.dtype.name}", hint=hint)
