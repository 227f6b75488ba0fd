"""The dequantized reference: the model with the dequantized weights of a graph, which are computed when they are read.

A folder of llmconv may have factors of smoothing: `X.smoothing` in its files belongs to the tensor `X` of the model. A
norm `y` and a matrix `W` with the same factors `s` are the same function as without: `(y / s) @ (s * W)`. Whether a
norm and the matrices after it have the same factors is decided by the scenarios: their reference has the model's own
norms, and the graph's codes, divided by the factors of the codes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

from llmconv.checkpoint import open_checkpoint, read_json, write_small
from llmconv.files.safetensors_file import read_header
from llmconv.output.plan import json_bytes
from llmconv.quantized_weights.quantized_checkpoint import FIELD, quantized_checkpoint
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, graphs, load_guarded, refill
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory, lists_by_key
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.quantized.expected_scales import in_blocks
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.schemes import schemes
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch
from llmconv.verify.reference.eager import ComputedModel
from llmconv.verify.results import Check, audited

TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class TiedHead:
    """The names, in the checkpoint, of an embedding and of the head that shares its weights.

    `shared` are other parameters that the checkpoint has under the name of another module, such as the head's bias;
    transformers shares them only in a model with a tied head.
    """

    embedding: str
    head: str
    shared: Mapping[str, str] = field(default_factory=dict)


def tied_head(model: Any, reference: Mapping[str, LazyTensor]) -> TiedHead | None:
    """The tied embedding and head of a transformers model; None if the head has its own weights."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {module: f"{name}.weight" for name, module in model.named_modules() if module in (head, embedding)}
    shared = _shared(model, names[head], reference)
    return TiedHead(reference_name(names[embedding], reference) or names[embedding], names[head], shared)


def _shared(model: Any, weight: str, reference: Mapping[str, LazyTensor]) -> dict[str, str]:
    """The parameters, except `weight`, that the checkpoint has under the name of another one, by their own names."""
    every = list(model.named_parameters(remove_duplicate=False))
    names = {name: reference_name(name, reference) for name, _ in every}
    stored = {id(one): names[name] for name, one in every if names[name]}
    return {name: stored[id(one)] for name, one in every if name != weight and not names[name] and id(one) in stored}


Replacements = dict[str, list[tuple[MatchedMatrix, TensorMatch]]]


def _replacements(found: Sequence[MatchedMatrix], tie: TiedHead | None) -> Replacements:
    """The matrices that replace each tensor; with a tied head, lookups replace the embedding and products the head."""
    replacements: Replacements = {}
    for one in found:
        for match in one.matches:
            names = {match.name}
            if tie and names & {tie.embedding, tie.head}:
                names = {tie.embedding} if one.stored.looked_up else set()
                names |= {tie.head} if one.stored.multiplied else set()
            for name in names:
                replacements.setdefault(name, []).append((one, match))
    return replacements


PLAIN = "MatMulNBits, 4 bits"  # how the matrices are stored that plain rounding is compared with


@dataclass(frozen=True)
class QuantizedWeights:
    """The quantized matrices of a graph, and the model that they belong to, whose weights are computed when read.

    `tensors` of the model have the factors of `smoothing`. A head tied to the embedding (`tie`) has weights of its own
    if the graph has codes for it; the configuration that says so is in a temporary folder, which `stack` removes.
    """

    folder: Path
    tensors: Mapping[str, LazyTensor]
    found: Sequence[MatchedMatrix]
    tie: TiedHead | None
    smoothing: StoredSmoothing
    stack: ExitStack

    def dequantized(self) -> ComputedModel:
        """The model with the matrices in place of its tensors, without factors."""
        replacements, tie, folder = _replacements(self.found, self.tie), self.tie, self.folder
        tensors = dict(self.tensors)
        if tie and {tie.embedding, tie.head} & replacements.keys():
            tensors[tie.head] = tensors[tie.embedding]
        for name, windows in replacements.items():
            tensors[name] = _replaced(tensors[name], windows)
        if tie and tie.head in tensors:
            tensors |= {name: tensors[stored] for name, stored in tie.shared.items()}
            config = _untied(read_json(folder / "config.json"))
            folder = Path(self.stack.enter_context(TemporaryDirectory(prefix="llmconv-dequantized-")))
            (folder / "config.json").write_bytes(json_bytes(config))
        return ComputedModel(folder, restacked(self.smoothing.undone(tensors)))

    def plainly_rounded(self) -> ComputedModel | None:
        """The same with plainly rounded codes of 4 bits; None if there are no codes of 4 bits.

        Symmetric, as onnxruntime's `MatMulNBitsQuantizer` by default, in the same matrices and blocks.
        """
        original, tie = self.smoothing.undone(self.tensors), self.tie
        blocks = {
            name: (one.stored, match.transposed)
            for name, several in _replacements(self.found, tie).items()
            for one, match in several
            if one.stored.kind.startswith(PLAIN) and len(match.columns) == one.stored.shape[1]
        }
        if not blocks:
            return None
        model = self.dequantized()
        flat = unstacked(model.tensors)
        for name, (stored, transposed) in blocks.items():
            flat[name] = _plain(original[name if name in original or not tie else tie.embedding], stored, transposed)
        return replace(model, weights=restacked(flat))


def _plain(tensor: LazyTensor, stored: QuantizedMatrix, transposed: bool) -> LazyTensor:
    size, dtype = stored.repeat[1], stored.scale.dtype

    def rounded(rows: Array) -> Array:
        scales = nearest_scales(rows, size).astype(dtype).astype(np.float32)
        return nearest_values(rows, scales, size)

    def whole() -> Array:
        return np.ascontiguousarray(rounded(tensor.read().astype(np.float32).T).T)

    def load(start: int, stop: int) -> Array:
        return _last(whole)[start:stop] if transposed else rounded(tensor.rows(start, stop).astype(np.float32))

    return LazyTensor(FLOAT32, tensor.shape, load)


@lru_cache(maxsize=1)
def _last(read: Callable[[], Any]) -> Any:
    """What a function returns, kept until another is asked: a tensor is read in parts, and then the next one."""
    return read()


def nearest_scales(rows: Array, size: int) -> Array:
    """Scales float32 `[N, blocks]` of rows float32 `[N, K]` in blocks of `size`: `extreme / -8`."""
    blocks = in_blocks(rows, size)
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    scales: Array = np.where(high > -low, high, low) / np.float32(-8)
    return scales


def nearest_values(rows: Array, scales: Array, size: int) -> Array:
    """What the nearest codes of rows float32 `[N, K]` stand for, with scales float32 `[N, blocks]`."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.clip(np.rint(in_blocks(rows, size) * inverse[..., None]), -8, 7)
    values: Array = (codes * scales[..., None]).reshape(len(rows), -1)[:, : rows.shape[1]]
    return np.ascontiguousarray(values, dtype=np.float32)


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: {**value, TIED: False} if isinstance(value, dict) and (key == "text_config" or TIED in value) else value
        for key, value in config.items()
    }
    return {**nested, TIED: False}


def _replaced(tensor: LazyTensor, replacements: Sequence[tuple[MatchedMatrix, TensorMatch]]) -> LazyTensor:
    """A tensor in float32 in which windows are replaced by quantized matrices."""

    def dequantized() -> list[Array]:
        return [found.stored.read() for found, match in replacements if match.transposed]

    def load(start: int, stop: int) -> Array:
        rows = np.array(tensor.rows(start, stop), dtype=np.float32)
        whole = iter(_last(dequantized))
        for found, match in replacements:
            if match.transposed:
                _overwrite_transposed(next(whole), match, rows, start, stop)
            else:
                _overwrite(found, match, rows, start, stop)
        return rows

    (found, match), *rest = replacements
    if not rest and (len(match.rows), len(match.columns)) == tensor.shape and not match.transposed:
        shift = match.rows.start
        part = slice(match.columns.start, match.columns.stop)
        return LazyTensor(
            FLOAT32,
            tensor.shape,
            lambda start, stop: np.ascontiguousarray(found.stored.rows(start + shift, stop + shift)[:, part]),
        )
    return LazyTensor(BY_NAME["float32"], tensor.shape, load)


def _overwrite(found: MatchedMatrix, match: TensorMatch, rows: Array, start: int, stop: int) -> None:
    """Overwrites rows `start:stop` of a tensor with those rows of a matrix that match them."""
    shift = match.rows.start - match.first_row
    first, last = max(start, match.first_row), min(stop, match.first_row + len(match.rows))
    if first < last:
        across = slice(match.first_column, match.first_column + len(match.columns))
        values = found.stored.rows(first + shift, last + shift)
        rows[first - start : last - start, across] = values[:, match.columns.start : match.columns.stop]


def _overwrite_transposed(matrix: Array, match: TensorMatch, rows: Array, start: int, stop: int) -> None:
    """As `_overwrite`, with the values of a transposed matrix."""
    first, last = max(start, match.first_column), min(stop, match.first_column + len(match.columns))
    if first < last:
        shift = match.columns.start - match.first_column
        values = matrix[match.rows.start : match.rows.stop, first + shift : last + shift].T
        rows[first - start : last - start, match.first_row : match.first_row + len(match.rows)] = values


RESTORING = "DequantizeLinear"

Known = Callable[[onnx.ModelProto, Constants], Container[str] | None]


def remove_rounding(model: onnx.ModelProto, constants: Constants, known: Container[str] | None = None) -> list[str]:
    """Removes the rounding of activations in place; returns the operators that did it, each once.

    `known` are values in a fixed range that may be replaced by their unrounded values; None for all. Raises
    UnsupportedInput: the rounding cannot be removed.
    """
    unrounded = {name: make for scheme in schemes().values() for name, make in scheme.unrounded.items()}
    changed: dict[str, None] = {}
    made: set[str] = set()
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            may = node.op_type != RESTORING or known is None or node.output[0] in known
            replacement = unrounded[node.op_type](node, constants) if may and node.op_type in unrounded else None
            nodes += [node] if replacement is None else replacement
            if replacement is not None:
                changed[node.op_type] = None
                made |= set(node.output)
        refill(graph.node, nodes)
        refill(graph.value_info, [value for value in graph.value_info if value.name not in made])
    return list(changed)


@contextmanager
def unrounded_copy(path: Path, known: Known) -> Iterator[tuple[Path, list[str]]]:
    """Context with a copy of a graph without the rounding of activations, and the operators that round.

    If there are none, the result is the file itself, else a temporary copy with its external data. `known` returns that
    argument of `remove_rounding`, given the graph and its constants. Raises UnsupportedInput: the rounding cannot be
    removed.
    """
    model = load_guarded(path)
    constants = Constants(model, path.parent)
    changed = remove_rounding(model, constants, known(model, constants))
    if not changed:
        yield path, changed
        return
    with TemporaryDirectory(prefix="llmconv-unrounded-") as folder:
        for name in {external_fields(tensor)["location"] for tensor in external_tensors(model)}:
            shutil.copyfile(path.parent / name, Path(folder) / name)
        copy = Path(folder) / path.name
        onnx.save(model, copy)
        load_guarded(copy)
        yield copy, changed


def plain_model(folder: Path, stack: ExitStack) -> ComputedModel:
    """The model of a folder with plain weights, in float32 where they are quantized; `stack` keeps its configuration.

    Raises MalformedInput: missing or mismatched parts of a quantized weight; UnsupportedInput: an unknown quantization
    method.
    """
    if not read_json(folder / "config.json").get(FIELD) or not (found := quantized_checkpoint(open_checkpoint(folder))):
        return ComputedModel(folder)
    copy = Path(stack.enter_context(TemporaryDirectory(prefix="llmconv-plain-")))
    write_small(copy, {**found.plain.side_files, "config.json": json_bytes({**found.plain.config, "dtype": "float32"})})
    codes = {name: weight.integers for name, weight in found.weights.items()}
    kept = {name: one.scale_dtype for name, one in codes.items() if one and one.has_operator}  # onnxruntime runs these
    return ComputedModel(copy, dict(found.plain), kept)


def unstacked(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors, each stack of matrices replaced by its matrices."""
    return {key: part for name, tensor in tensors.items() for key, part in _parts(name, tensor).items()}


def restacked(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The reverse of `unstacked`; the matrices may be other ones of the same shape and dtype."""
    stacks = lists_by_key((stack_of(name), tensor) for name, tensor in tensors.items())
    return {name: parts[0] if name in tensors else _stack(parts) for name, parts in stacks.items()}


def stack_of(name: str) -> str:
    """The name of the stack that a matrix is in; of any other tensor its own."""
    return re.sub(r"\[\d+\]$", "", name)


def _parts(name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
    if len(tensor.shape) != 3 or tensor.shape[1] == 1:  # kernels of convolutions are [channels, 1, width]
        return {name: tensor}
    shape = tensor.shape[1:]
    return {
        f"{name}[{index}]": LazyTensor(tensor.dtype, shape, partial(_rows, tensor, index))
        for index in range(tensor.shape[0])
    }


def _stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """The stack in float32 if only some of its matrices are."""
    dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else BY_NAME["float32"]

    def load(start: int, stop: int) -> Array:
        return np.stack([part.read().astype(dtype.numpy, copy=False) for part in parts[start:stop]])

    return LazyTensor(dtype, (len(parts), *parts[0].shape), load)


def _rows(tensor: LazyTensor, index: int, start: int, stop: int) -> Array:
    return np.ascontiguousarray(tensor.rows(index, index + 1)[0, start:stop])


FILES, SUFFIX, OUTPUTS = "quantized*.safetensors", ".smoothing", ".smoothing_outputs"
IMPORTANCE = ".importance"
ENDS = SUFFIX, OUTPUTS, IMPORTANCE
FLOAT32 = BY_NAME["float32"]
LARGEST = 64  # the largest exponent of a factor that float32 weights can be divided by and multiplied with
MATRIX = 2


@dataclass(frozen=True)
class StoredSmoothing:
    """The factors of a folder by name of the model's tensor: [K] of a norm or of a matrix [N, K], [K, 1] of [K, N].

    Those of the outputs of a matrix are [N, 1], or [N] of [K, N]. Matrices of a stack have the names that `unstacked`
    gives them.
    """

    factors: Mapping[str, LazyTensor] = field(default_factory=dict)
    outputs: Mapping[str, LazyTensor] = field(default_factory=dict)
    importance: Mapping[str, LazyTensor] = field(default_factory=dict)  # of the columns of matrices, [K]

    @classmethod
    def of(cls, folder: Path) -> StoredSmoothing:
        """The factors in the files of a folder; reads their headers. MalformedInput if a file is damaged."""
        tensors = {name: found for path in folder.glob(FILES) for name, found in read_header(path).tensors.items()}
        found = ({name.removesuffix(end): one for name, one in tensors.items() if name.endswith(end)} for end in ENDS)
        return cls(
            *({key: part for name, one in kind.items() for key, part in _of_matrices(name, one)} for kind in found)
        )

    def problems(self, reference: Mapping[str, LazyTensor]) -> list[str]:
        every = [(SUFFIX, name, one, self._problem) for name, one in self.factors.items()]
        every += [(OUTPUTS, name, one, self._problem) for name, one in self.outputs.items()]
        every += [(IMPORTANCE, name, one, _importance_problem) for name, one in self.importance.items()]
        return [f"`{name}{end}` {why}" for end, name, one, of in every if (why := of(reference.get(name), one))]

    @staticmethod
    def _problem(tensor: LazyTensor | None, stored: LazyTensor) -> str:
        if tensor is None or len(tensor.shape) not in (1, MATRIX):
            return "belongs to no vector or matrix of the model"
        shapes = [tensor.shape[-1:], *([(tensor.shape[0], 1)] if len(tensor.shape) == MATRIX else [])]
        if stored.dtype != FLOAT32 or stored.shape not in shapes:
            return f"is {stored.dtype.name} of shape {list(stored.shape)}, not float32 of {list(shapes[0])}"
        mantissas, exponents = np.frexp(factors := stored.read())
        if not (np.isfinite(factors) & (mantissas == 0.5) & (np.abs(exponents - 1) <= LARGEST)).all():
            return "has factors that are not powers of two"
        if len(tensor.shape) == 1:
            values = tensor.read().astype(np.float32)
            with np.errstate(all="ignore"):
                if not np.array_equal(values / factors * factors, values):
                    return "has factors by which the norm cannot be divided without rounding"
        return ""

    def check(self, graph: str, reference: Mapping[str, LazyTensor]) -> list[Check]:
        problems = self.problems(reference)
        return [audited("weights", graph, problems)] if problems else []

    def applied(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors that codes and norms of the folder are made of: matrices times factors, norms divided by them."""
        scaled = self._changed(tensors, lambda tensor: np.multiply if len(tensor.shape) == MATRIX else np.divide)
        return scaled | {
            name: _scaled(scaled[name], one.read(), np.multiply) for name, one in self.outputs.items() if name in scaled
        }

    def undone(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The exact inverse of `applied`, also for matrices of codes in place of its results."""
        plain = self._changed(tensors, lambda tensor: np.divide if len(tensor.shape) == MATRIX else np.multiply)
        return plain | {
            name: _scaled(plain[name], one.read(), np.divide) for name, one in self.outputs.items() if name in plain
        }

    def _changed(
        self, tensors: Mapping[str, LazyTensor], operation: Callable[[LazyTensor], np.ufunc]
    ) -> dict[str, LazyTensor]:
        return {
            name: _scaled(tensor, self.factors[name].read(), operation(tensor)) if name in self.factors else tensor
            for name, tensor in tensors.items()
        }


def _importance_problem(tensor: LazyTensor | None, stored: LazyTensor) -> str:
    if tensor is None or len(tensor.shape) != MATRIX:
        return "belongs to no matrix of the model"
    if stored.dtype != FLOAT32 or stored.shape not in {(size,) for size in tensor.shape}:
        return f"is {stored.dtype.name} of shape {list(stored.shape)}, not float32 of {list(tensor.shape[-1:])}"
    values = stored.read()
    usable = np.isfinite(values).all() and (values >= 0).all() and values.any()
    return "" if usable else "has values that are not mean squares: finite, not negative and not all 0"


def _of_matrices(name: str, factors: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """What is stored for each matrix of a stack, as [experts, 1, K] or [experts, K, 1]; or it as it is.

    Importance is [experts, K] of a stack, and factors of outputs of one matrix may be [N, 1].
    """
    if len(factors.shape) < MATRIX or factors.shape[1] == 1 and len(factors.shape) == MATRIX:
        yield name, factors
        return
    for index in range(factors.shape[0]):
        one = factors.rows(index, index + 1)[0]
        one = one[0] if len(one) == 1 and one.ndim > 1 else one
        yield f"{name}[{index}]", in_memory(np.ascontiguousarray(one), factors.dtype)


def _scaled(tensor: LazyTensor, factors: Array, operation: np.ufunc) -> LazyTensor:
    """A tensor in float32, multiplied with factors or divided by them."""
    by_row = len(tensor.shape) == 1 or factors.ndim == MATRIX

    def load(start: int, stop: int) -> Array:
        rows = tensor.rows(start, stop).astype(np.float32)
        result: Array = operation(rows, factors[start:stop] if by_row else factors)
        return result

    return LazyTensor(FLOAT32, tensor.shape, load)
