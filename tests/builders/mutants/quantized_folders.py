"""Mutants of folders of `llmconv export --quant`: faults in stored codes, scales and zero points, or in the graph."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from llmconv.tensors import Array

STORED = "quantized*.safetensors"
"""Graphs in stages have a file for each."""

Tensors = dict[str, Array]


@dataclass(frozen=True)
class FolderMutant:
    """A fault.

    Attributes:
        name: for people.
        store: changes the stored tensors; returns whether there is such a place.
        graph: the same for the graph.
    """

    name: str
    store: Callable[[Tensors], bool] | None = None
    graph: Callable[[onnx.ModelProto], bool] | None = None

    def apply(self, folder: Path, target: Path) -> bool:
        """Makes a copy with the fault and without checksums; False where there is no place for it."""
        shutil.copytree(folder, target)
        done = True
        if self.store:
            done = any(_change_file(path, self.store) for path in sorted(target.glob(STORED)))
        if self.graph:
            model = onnx.load(target / "decode.onnx", load_external_data=False)
            done = self.graph(model)
            onnx.save(model, target / "decode.onnx")
        manifest = json.loads((target / "llmconv.json").read_text())
        (target / "llmconv.json").write_text(json.dumps({**manifest, "files": {}}))
        return done


def _change_file(path: Path, store: Callable[[Tensors], bool]) -> bool:
    """Changes the tensors of a file in place; returns whether `store` found what it changes."""
    tensors = load_file(path)
    done = store(tensors)
    other = path.with_name("other.safetensors")
    save_file(tensors, other)
    _keep_layout(other, path)
    return done


def _keep_layout(changed: Path, stored: Path) -> None:
    """Writes the values of one file into another, whose offsets the graph knows."""
    content = bytearray(stored.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, values in load_file(changed).items():
        start, end = (8 + length + at for at in header[name]["data_offsets"])
        content[start:end] = values.tobytes()
    stored.write_bytes(content)
    changed.unlink()


def _is_in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _layers(tensors: Tensors, suffix: str) -> list[str]:
    """Names of the first matrix in each layer that is stored in this way, all of one shape."""
    names = [
        name for name in sorted(tensors) if name.endswith(suffix) and any(part.isdigit() for part in name.split("."))
    ]
    last = names[0].split(".", 3)[-1] if names else ""
    first = [name for name in names if name.endswith(last)]
    return [name for name in first if tensors[name].shape == tensors[first[0]].shape]


def _change(suffix: str, change: Callable[[Array], Array]) -> Callable[[Tensors], bool]:
    """Changes one matrix of the second layer."""

    def store(tensors: Tensors) -> bool:
        names = _layers(tensors, suffix)
        if len(names) < 2:
            return False
        before = tensors[names[1]].copy()
        tensors[names[1]] = np.ascontiguousarray(change(before.copy()))
        return not np.array_equal(before, tensors[names[1]])

    return store


def _of_another_layer(*suffixes: str) -> Callable[[Tensors], bool]:
    def store(tensors: Tensors) -> bool:
        names = [_layers(tensors, suffix) for suffix in suffixes]
        for found in names:
            if len(found) > 1:
                tensors[found[1]] = tensors[found[0]]
        return len(names[0]) > 1

    return store


def _one_code(codes: Array) -> Array:
    flat = codes.reshape(-1)
    flat[len(flat) // 2] ^= 0x08
    return codes


def _nibbles(values: Array) -> Array:
    exchanged: Array = values << 4 | values >> 4
    return exchanged


def _one_pair(zeros: Array) -> Array:
    """The zero points of the first two blocks that differ are exchanged."""
    flat = zeros.reshape(-1)
    at = int(np.argmax((flat >> 4) != (flat & 15)))
    flat[at] = _nibbles(flat[at : at + 1])[0]
    return zeros


def _next_block(scales: Array) -> Array:
    return np.roll(scales, 1, axis=-1)


def _head_by_a_row(tensors: Tensors) -> bool:
    """The codes of the head, or of the embedding tied to it, are one row further on."""
    heads = [
        name for name in tensors if name.endswith(".codes") and not any(part.isdigit() for part in name.split("."))
    ]
    for name in heads:
        tensors[name] = np.ascontiguousarray(np.roll(tensors[name], 1, axis=0))
    return bool(heads)


def _without_bias(model: onnx.ModelProto) -> bool:
    node = next((node for node in model.graph.node if node.op_type == "MatMulNBits" and len(node.input) == 6), None)
    if node is not None:
        del node.input[4:]
    return node is not None


def _fewer_columns(model: onnx.ModelProto) -> bool:
    """A product ends one block early, as if its last columns were padding."""
    for node in model.graph.node:
        sizes = {one.name: one for one in node.attribute}
        if node.op_type == "MatMulNBits" and sizes["K"].i % sizes["block_size"].i == 0:
            sizes["K"].i -= 1
            return True
    return False


def _codes_exchanged(model: onnx.ModelProto) -> bool:
    """Two products of one shape read each other's codes."""
    found: dict[tuple[int, ...], onnx.NodeProto] = {}
    for node in (node for node in model.graph.node if node.op_type == "MatMulNBits"):
        other = found.setdefault(tuple(one.i for one in node.attribute), node)
        if other is not node:
            node.input[1], other.input[1] = other.input[1], node.input[1]
            return True
    return False


def _joined(model: onnx.ModelProto) -> tuple[onnx.NodeProto, onnx.TensorProto] | None:
    """The first `Split` of a joined product, and its sizes."""
    products = {node.output[0] for node in model.graph.node if node.op_type == "MatMulNBits"}
    sizes = {tensor.name: tensor for tensor in model.graph.initializer}
    splits = [node for node in model.graph.node if node.op_type == "Split" and node.input[0] in products]
    return next(((node, sizes[node.input[1]]) for node in splits if len(node.input) > 1), None)


def _parts_exchanged(model: onnx.ModelProto) -> bool:
    """The last two parts of a joined product, such as keys and values, are taken for each other."""
    if (found := _joined(model)) is None:
        return False
    outputs = found[0].output
    outputs[-2], outputs[-1] = outputs[-1], outputs[-2]
    return True


def _other_sizes(model: onnx.ModelProto) -> bool:
    """The sizes of the first and the last part of a joined product are exchanged."""
    if (found := _joined(model)) is None:
        return False
    node, tensor = found
    sizes = numpy_helper.to_array(tensor)[::-1].copy()
    changed = not np.array_equal(sizes, sizes[::-1])
    model.graph.initializer.append(numpy_helper.from_array(sizes, "other_sizes"))
    node.input[1] = "other_sizes"
    return changed


def _scales_of_a_neighbor(tensors: Tensors) -> bool:
    """The scales of values are those of keys."""
    name = next((name for name in sorted(tensors) if name.endswith("k_proj.weight.scales")), "")
    other = name.replace("k_proj", "v_proj")
    if not name or tensors[name].shape != tensors[other].shape:
        return False
    tensors[other] = tensors[name]
    return True


def _erased_row(tensors: Tensors) -> bool:
    """All codes of a row are its zero points, of scales so coarse that they are the nearest."""
    names = [name.removesuffix(".zeros") for name in _layers(tensors, ".zeros")]
    if len(names) < 2:
        return False
    codes, zeros, scales = (tensors[names[1] + suffix].copy() for suffix in (".codes", ".zeros", ".scales"))
    row = (0,) * (zeros.ndim - 1)
    points = np.stack([zeros[row] & 15, zeros[row] >> 4], axis=-1).ravel()[: scales.shape[-1]]
    codes[row], scales[row] = (points | points << 4)[:, None], scales[row] * np.float32(32)
    tensors[names[1] + ".codes"], tensors[names[1] + ".scales"] = codes, scales
    return True


FOLDER_MUTANTS = [
    FolderMutant("zero points of two blocks exchanged", _change(".zeros", _one_pair)),
    FolderMutant("nibbles exchanged", _change(".codes", _nibbles)),
    FolderMutant("scales of the next block", _change(".scales", _next_block)),
    FolderMutant("one bit of one code flipped", _change(".codes", _one_code)),
    FolderMutant("codes of another layer", _of_another_layer(".codes")),
    FolderMutant("scales of another layer", _of_another_layer(".scales")),
    FolderMutant("a matrix of another layer", _of_another_layer(".codes", ".scales", ".zeros")),
    FolderMutant("codes of the head one row further on", _head_by_a_row),
    FolderMutant("a row erased by coarse scales", _erased_row),
    FolderMutant("a bias dropped", graph=_without_bias),
    FolderMutant("a product without its last column", graph=_fewer_columns),
    FolderMutant("two products read each other's codes", graph=_codes_exchanged),
    FolderMutant("parts of a joined product exchanged", graph=_parts_exchanged),
    FolderMutant("a joined product cut elsewhere", graph=_other_sizes),
    FolderMutant("scales of another part of a joined product", _scales_of_a_neighbor),
]
