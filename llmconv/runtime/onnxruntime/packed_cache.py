"""Packed weights in files: the first session of a graph writes them, later ones map them.

onnxruntime copies weights into the layout of its kernels whenever it opens a graph. Here it saves that layout with the
optimized graph (`session.save_external_prepacked_constant_initializers`), in a folder named after all that it depends
on: the graph, the weights' files, the session's options, onnxruntime and the processor.

A graph with packed weights from a file is checked to compute what it computed when they were packed: onnxruntime (1.31)
saves packed matrices without a warning where it cannot read them back. `MatMulNBits` with codes in the file and scales
in the graph, because they are small, gives NaN.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from llmconv.errors import UsageProblem, first_line
from llmconv.files.safe_folder import unfinished_folder
from llmconv.memory import raise_if_out_of_memory
from llmconv.progress import warn
from llmconv.runtime.extra_inputs import MAX_LENGTH, is_present
from llmconv.runtime.onnxruntime.guard import (
    attribute_values,
    external_fields,
    external_tensors,
    is_external,
    nodes,
    refill,
)
from llmconv.runtime.onnxruntime.session_settings import CPU, INPUT_DTYPES, SessionSettings, provider_name
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.tensors import Array

# option for the weight folder of a model in memory (onnxruntime_session_options_config_keys.h)
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def open_changed(
    path: Path, model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[Any], limit: TimeLimit
) -> LimitedSession:
    """A session of `model`, without its weights, instead of the file at `path`, in whose folder the weights are."""
    model, weights = followed(model, path.parent.absolute())
    folder = str(weights)
    try:
        known = options.get_session_config_entry(WEIGHTS_FOLDER)
    except Exception:  # raised for an unset entry; setting one twice would warn
        known = ""
    if known != folder:
        options.add_session_config_entry(WEIGHTS_FOLDER, folder)
    return LimitedSession(model.SerializeToString(), options, providers, limit)


def join_projections(graph: onnx.GraphProto) -> None:
    """Replaces the three products of query, key and value with the same states by one product.

    `GroupQueryAttention` accepts the three concatenated as its query. onnxruntime concatenates the matrices when it
    opens the graph (constant folding), before it packs them.
    """
    makers = {output: node for node in graph.node for output in node.output}
    uses = Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    joined: set[str] = set()
    for node in graph.node:
        parts = [makers[name] for name in node.input[:3] if name in makers]
        if _can_join(node, parts, uses, shapes):
            joined |= {part.output[0] for part in parts}
            nodes += _join(node, parts)
        nodes.append(node)
    refill(graph.node, [node for node in nodes if node.output[0] not in joined])


def _can_join(
    attention: onnx.NodeProto,
    parts: Sequence[onnx.NodeProto],
    uses: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether `parts` compute query, key and value from the same states, alike, for one head size and no other node."""
    if attention.op_type != "GroupQueryAttention" or [part.op_type for part in parts] != ["FusedMatMul"] * 3:
        return False
    settings, fields = list(map(attribute_values, parts)), attribute_values(attention)
    heads = fields["num_heads"], fields["kv_num_heads"], fields["kv_num_heads"]
    weights = [shapes.get(part.input[1], ()) for part in parts]
    return (
        settings[0] == settings[1] == settings[2]
        and settings[0].get("transB") == 1
        and len({part.input[0] for part in parts}) == 1
        and all(uses[part.output[0]] == 1 for part in parts)
        and all(len(weight) == 2 for weight in weights)
        and len({weight[0] / count for weight, count in zip(weights, heads, strict=True)}) == 1
    )


def _join(attention: onnx.NodeProto, parts: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that replace `parts`; changes the inputs of `attention`."""
    name = parts[0].output[0] + "/joined"
    product = onnx.NodeProto.FromString(parts[0].SerializeToString())
    product.input[1], product.output[0] = name + "/weight", name
    attention.input[0], attention.input[1], attention.input[2] = name, "", ""
    return [helper.make_node("Concat", [part.input[1] for part in parts], [name + "/weight"], axis=0), product]


def followed(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """A graph, or a copy, and the folder of its weights, after following links that all lead into one folder."""
    names = {external_fields(tensor)["location"] for tensor in external_tensors(model)}
    targets = {name: (folder / name).resolve() for name in names if (folder / name).is_symlink()}
    homes = {target.parent for target in targets.values()}
    if len(targets) < len(names) or len(homes) != 1:
        return model, folder
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in external_tensors(copy):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = targets[entry.value].name
    return copy, homes.pop()


# operators that dequantize the whole matrix at every call unless onnxruntime packs it when the graph is opened
PACKED_ONLY = {"MatMulNBits", "QMoE", "DynamicQuantizeMatMul", "QuantizeLinear"}


def is_packed(model: onnx.ModelProto) -> bool:
    """Whether sessions of a graph pack its weights, whatever the settings are."""
    return bool(PACKED_ONLY & {node.op_type for node in nodes(model)})


GRAPH, WEIGHTS = "graph.onnx", "weights.data"
LEAST = "256"
"""Minimum bytes of a tensor in the weights' file: more than a shape, which onnxruntime must read in the graph, and less
than the scales of a matrix, which it must find with the codes."""


def packed_graph(path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit) -> Path | None:
    """The file of the same graph with packed weights, which is written if it is missing; None if it cannot be.

    `model`, the graph to run, is without its weights, which are in the folder of `path`; `settings.packed_cache` is the
    folder of the packed weights. Raises UsageProblem if that belongs to another user, or the provider is not the CPU;
    OutOfMemory.
    """
    cache = settings.packed_cache
    assert cache is not None
    if provider_name(settings.provider) != CPU:
        problem = "packed weights are kept for the CPU's kernels only"
        raise UsageProblem(problem, hint="leave out the provider or `--packed-cache`")
    entry = cache / _digest(str(path.resolve())) / _key(path, model, settings)
    try:
        make_private(cache)
        if not (entry / GRAPH).is_file():
            with unfinished_folder(cache) as made:
                _save(made, path, model, settings, limit)
                entry.parent.mkdir(exist_ok=True)
                for old in entry.parent.iterdir():  # of earlier contents of the same graph
                    shutil.rmtree(old, ignore_errors=True)
                if not entry.exists():  # another process may have been faster
                    made.rename(entry)
    except UsageProblem:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, f"while the weights of `{path.name}` were packed")
        warn(f"packed weights cannot be kept in `{cache}`: {first_line(error)}")
        return None
    return entry / GRAPH


def open_kept(graph: Path, settings: SessionSettings, limit: TimeLimit) -> LimitedSession:
    """A session of a graph that `packed_graph` returned, which is optimized already."""
    return LimitedSession(graph, replace(settings, optimization="disable").options(), settings.providers(), limit)


def make_private(folder: Path) -> None:
    """Makes a folder that only its owner can change: graphs in it are run unseen."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        problem = f"other users can change `{folder}`"
        raise UsageProblem(problem, hint=f"give another XDG_CACHE_HOME, or `chmod 700 {folder}`")


def _save(folder: Path, path: Path, model: onnx.ModelProto, settings: SessionSettings, limit: TimeLimit) -> None:
    options = settings.options()
    options.optimized_model_filepath = str(folder / GRAPH)
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", LEAST)
    packed = open_changed(path, model, options, settings.providers(), limit)
    written = onnx.load(folder / GRAPH, load_external_data=False)
    if is_split(written) or not outputs_are_equal(packed, open_kept(folder / GRAPH, settings, limit)):
        raise ValueError("onnxruntime does not read them back as it wrote them")


def _key(path: Path, model: onnx.ModelProto, settings: SessionSettings) -> str:
    """A digest of all that the packed weights depend on; files by their identity and time of change, as in `make`."""
    names = sorted({external_fields(tensor)["location"] for tensor in external_tensors(model)})
    found = [(path.parent / name).stat() for name in names]
    files = [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]
    chosen = replace(settings, change=None, threads=0, timeout=None, garbage=False, yields=False, packed_cache=None)
    known = repr((names, files, chosen, ort.__version__, _processor()))
    return _digest(known, model.SerializeToString(deterministic=True))


def _processor() -> str:
    """What distinguishes processors with different kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "Features", "CPU ")))


def _digest(text: str, content: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + content).hexdigest()[:32]


COUNTS = (1, 4)  # numbers of tokens: kernels have one way for a step and another one for a prompt
CAPACITY = 8  # length of a shared cache buffer: a decode graph counts one token more than `COUNTS`


def is_split(model: onnx.ModelProto) -> bool:
    """Whether a matrix product has its codes in the weights' file, and scales or zero points in the graph."""
    places = {tensor.name: is_external(tensor) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.domain == "com.microsoft" and "MatMul" in node.op_type]
    return any(len({places[name] for name in node.input[1:] if name in places}) > 1 for node in products)


def outputs_are_equal(one: LimitedSession, other: LimitedSession) -> bool:
    """Whether both sessions give the same bytes for a few tokens after an empty past."""
    names = [output.name for output in one.get_outputs() if not is_present(output.name)]  # buffers may be unset
    feeds = [_feeds(one, count) for count in COUNTS]
    return all(_bytes(one, names, values) == _bytes(other, names, values) for values in feeds)


def _bytes(session: LimitedSession, names: Sequence[str], feeds: Mapping[str, ort.OrtValue]) -> list[bytes]:
    return [value.numpy().tobytes() for value in session.run_with_ort_values(names, feeds)]


def _feeds(session: LimitedSession, count: int) -> dict[str, ort.OrtValue]:
    """One sequence of `count` tokens, without a past."""
    arrays = {
        value.name: _values(value.name, value.type, [_size(axis, count) for axis in value.shape])
        for value in session.get_inputs()
    }
    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}


def _size(axis: int | str, count: int) -> int:
    if isinstance(axis, int):
        return axis
    if axis == MAX_LENGTH:
        return CAPACITY
    return 1 if "batch" in axis else 0 if "past" in axis else count


def _values(name: str, kind: str, shape: list[int]) -> Array:
    """Tokens and positions 0, 1, …, a mask of ones, an empty past, and numbers of about 1 for states."""
    dtype: Any = INPUT_DTYPES[kind]
    if name == "attention_mask":
        return np.ones(shape, dtype)
    if name.startswith("past"):
        return np.zeros(shape, dtype)
    if not shape:
        raise ValueError(f"the shape of `{name}`, which another stage makes, is unknown: they cannot be checked")
    if np.issubdtype(dtype, np.integer):
        return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)
