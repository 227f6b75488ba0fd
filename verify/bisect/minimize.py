"""Minimize: the smallest piece of a graph that is wrong, as a folder that onnxruntime can run by itself.

DIR/piece.onnx      the nodes, with the weights that they read
DIR/inputs.npz      what the nodes before gave, by the names of the piece's inputs
DIR/expected.npz    what the eager model has, in float64
DIR/found.npz       what the piece gives
DIR/piece.json      names, noise, gates, finding
DIR/README.md       how to run it
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO

import numpy as np
import onnx

from llmconv.errors import OutputFailed, UsageProblem
from llmconv.files.safe_folder import Folder, WritableContent
from llmconv.output.streaming import write_fully
from llmconv.tensors import Array
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.bisect.agreement_trace import Trail
from llmconv.verify.bisect.recording import Record
from llmconv.verify.bisect.replay import Replay
from llmconv.verify.bisect.smallest_piece import Piece
from llmconv.verify.comparison.graph_probe import inner_inputs
from llmconv.verify.results.measure import GATES, ULP_SHARE, ULPS, rms
from llmconv.verify.results.report import Where

INLINE_LIMIT = 512 << 20
"""Bytes of weights up to which they are put into the graph's own file; protobuf ends at 2 GiB."""

README = """# {title}

`piece.onnx` is the smallest part of `{graph}` that is wrong: {count} of its nodes, with their weights.

* finding: {finding}
* found in: {scenario}, step {step}
* module of the model: `{scope}`
* expected: what the Hugging Face model has in float64; `noise` in `piece.json` is how far its own run in the graph's
  dtype is from that

```python
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession("piece.onnx", options, providers=["CPUExecutionProvider"])
with np.load("inputs.npz") as inputs, np.load("expected.npz") as model:
    (found,) = session.run(None, dict(inputs))
    counts = model["counts"]  # padding and what a mask hides do not count
    error = found[counts].astype(np.float64) - model["expected"][counts]
print("largest difference", np.abs(error).max())
print("sigma", np.sqrt(np.mean(error**2)) / json.loads(Path("piece.json").read_text())["noise"])
```
"""


@dataclass(frozen=True)
class Minimized:
    """What was written.

    Attributes:
        nodes: in the piece.
        difference: how far it is from the model, in words.
    """

    nodes: int
    difference: str


def require_new(folder: Path) -> None:
    """Refuses a folder that holds something.

    Raises:
        UsageProblem: it does.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(f"`{folder}` is not empty", hint="give a new folder to `--minimize`")


def write_piece(folder: Path, piece: Piece, trail: Trail, replay: Replay, where: Where) -> Minimized | None:
    """Writes the piece; None where it is not wrong by itself, so that there is nothing to show.

    Args:
        folder: new or empty; it appears when all is written.
        piece: what is wrong.
        trail: the values of the graph.
        replay: the call.
        where: what is said of it.

    Raises:
        OutputFailed: a file cannot be written.
    """
    record, values = piece.expected, {**replay.feeds, **trail.values}
    if record is None:
        return None
    found = replay.tapped.run_piece(piece.nodes, values, piece.output)
    if found is None or trail.comparison.agrees(record, found):
        return None
    made = {name for node in piece.nodes for name in node.output}
    read = {name for node in piece.nodes for name in inner_inputs(node)} - made
    inputs = {name: array for name, array in values.items() if name in read}
    model = replay.tapped.piece(piece.nodes, inputs, piece.output)
    arrays = _arrays(record, found, trail)
    content, sigma = _content(piece, record, arrays, where, replay.dtype)
    files = {
        "inputs.npz": archive(inputs),
        "expected.npz": archive({key: arrays[key] for key in ("expected", "counts")}),
        "found.npz": archive({"found": found}),
        "piece.json": (json.dumps(content, indent=2) + "\n").encode(),
        "README.md": _readme(piece, where).encode(),
    }
    try:
        _write(folder, files, model, replay.tapped.folder)
    except OSError as error:
        raise OutputFailed(
            f"cannot write the piece to `{folder}`: {error.strerror}", hint="give another folder to `--minimize`"
        ) from error
    wrong = int((arrays["expected"] != found)[arrays["counts"]].sum())
    is_float = record.exact.dtype.kind == "f"
    return Minimized(len(piece.nodes), f"sigma {sigma:.4g}" if is_float else f"{wrong} of {found.size} values wrong")


def _arrays(record: Record, found: Array, trail: Trail) -> dict[str, Array]:
    """Expected, rounded, found, and which elements count, all in the layout of the piece's output."""
    counts = trail.comparison.counted(record)
    parts = {"expected": record.exact, "rounded": record.rounded, "found": found, "counts": counts}
    return {name: np.ascontiguousarray(array.reshape(found.shape)) for name, array in parts.items()}


def _content(
    piece: Piece, record: Record, arrays: Mapping[str, Array], where: Where, dtype: str
) -> tuple[dict[str, object], float]:
    """What `piece.json` says, and sigma."""
    counts = arrays["counts"]
    exact, rounded, found = (arrays[name][counts].astype(np.float64) for name in ("expected", "rounded", "found"))
    noise = 1.0  # of values that are right or wrong
    if record.exact.dtype.kind == "f":
        noise = max(rms(rounded - exact), ULP_SHARE * ULPS[dtype] * rms(exact), 1e-300)
    sigma = rms(found - exact) / noise
    content = {
        "schema": 1,
        "nodes": [node.name for node in piece.nodes],
        "output": piece.output,
        "expected": {"module": record.scope, "operator": record.op},
        "proven": piece.proven,
        "dtype": dtype,
        "noise": noise,
        "sigma": sigma if isfinite(sigma) else str(sigma),
        "gates": asdict(GATES[dtype]),
        "where": asdict(where),
    }
    return content, sigma


def _readme(piece: Piece, where: Where) -> str:
    title = where.node or piece.node.name
    finding = where.finding or f"the first node that differs is `{title}`"
    return README.format(
        title=title,
        graph=where.graph,
        count=len(piece.nodes),
        finding=finding,
        scenario=where.scenario,
        step=where.step,
        scope=where.scope,
    )


def archive(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of an .npz file; unlike `numpy.savez` it takes any name and has no time in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _write(folder: Path, files: Mapping[str, bytes], model: onnx.ModelProto, weights: Path) -> None:
    """Everything beside the folder first, then one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with Folder.open_own(staged) as home:
            home.write_together({**files, **_graph_files(model, weights)})
        staged.chmod(0o777 & ~_umask())
        os.rename(staged, folder)  # onto an empty folder too
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _graph_files(model: onnx.ModelProto, weights: Path) -> dict[str, WritableContent]:
    """The piece with the values of its weights, in its own file or, where they are many, in one beside it."""
    for tensor in model.graph.initializer:
        if tensor.external_data:
            values = initializer_values(tensor, weights)
            assert values is not None
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    blocks = [tensor.raw_data for tensor in model.graph.initializer]
    if sum(map(len, blocks)) <= INLINE_LIMIT:
        return {"piece.onnx": model.SerializeToString()}
    position = 0
    for tensor, block in zip(model.graph.initializer, blocks, strict=True):
        if block:
            onnx.external_data_helper.set_external_data(tensor, "weights.bin", position, len(block))
            tensor.ClearField("raw_data")
            position += len(block)

    def write(file: BinaryIO) -> None:
        for block in blocks:
            write_fully(file.fileno(), memoryview(block))

    return {"piece.onnx": model.SerializeToString(), "weights.bin": write}
