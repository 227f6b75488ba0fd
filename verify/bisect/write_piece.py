"""Writes the smallest failing piece of a graph to a folder that onnxruntime can run by itself.

DIR/piece.onnx      the nodes with their weights
DIR/inputs.npz      inputs of the piece, by name
DIR/expected.npz    the eager model's value, in float64
DIR/found.npz       output of the piece
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
from llmconv.files.safe_folder import Folder, WritableContent, parents_made, require_parents
from llmconv.output.streaming import write_fully
from llmconv.tensors import Array
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.bisect.agreement import AgreementTrace
from llmconv.verify.bisect.recording import RecordedValue
from llmconv.verify.bisect.replay import ReplayedCall
from llmconv.verify.bisect.suspect import FailingPiece
from llmconv.verify.comparison.graph_probe import inner_inputs
from llmconv.verify.results.report import Where
from llmconv.verify.results.sigma import GATES, ULP_SHARE, ULPS, rms

INLINE_LIMIT = 512 << 20
"""Maximum bytes of weights inside piece.onnx; protobuf is limited to 2 GiB."""

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
class WrittenPiece:
    """The written piece: its number of nodes, and a description of the error of its output."""

    nodes: int
    difference: str


def require_new(folder: Path) -> None:
    """Refuses a folder that is not empty.

    Raises:
        UsageProblem: the path is a file or a folder with files.
        InputRefused: it is below a file.
    """
    require_parents(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(f"`{folder}` is not empty", hint="give a new folder to `--minimize`")


def write_piece(
    folder: Path, piece: FailingPiece, trace: AgreementTrace, replay: ReplayedCall, where: Where
) -> WrittenPiece | None:
    """Writes the piece; None if it agrees with the model when it runs by itself.

    `folder` is new or empty, and renamed into place when it is complete.

    Raises:
        OutputFailed: a file cannot be written.
    """
    record, values = piece.expected, {**replay.feeds, **trace.values}
    if record is None:
        return None
    found = replay.probe.run_piece(piece.nodes, values, piece.output)
    if found is None or trace.comparison.agrees(record, found):
        return None
    made = {name for node in piece.nodes for name in node.output}
    read = {name for node in piece.nodes for name in inner_inputs(node)} - made
    inputs = {name: array for name, array in values.items() if name in read}
    model = replay.probe.piece(piece.nodes, inputs, piece.output)
    arrays = _arrays(record, found, trace)
    content, sigma = _content(piece, record, arrays, where, replay.dtype)
    files = {
        "inputs.npz": archive(inputs),
        "expected.npz": archive({key: arrays[key] for key in ("expected", "counts")}),
        "found.npz": archive({"found": found}),
        "piece.json": (json.dumps(content, indent=2) + "\n").encode(),
        "README.md": _readme(piece, where).encode(),
    }
    try:
        _write(folder, files, model, replay.probe.folder)
    except OSError as error:
        raise OutputFailed(
            f"cannot write the piece to `{folder}`: {error.strerror}", hint="give another folder to `--minimize`"
        ) from error
    wrong = int((arrays["expected"] != found)[arrays["counts"]].sum())
    is_float = record.exact.dtype.kind == "f"
    return WrittenPiece(len(piece.nodes), f"sigma {sigma:.4g}" if is_float else f"{wrong} of {found.size} values wrong")


def _arrays(record: RecordedValue, found: Array, trace: AgreementTrace) -> dict[str, Array]:
    """Expected, rounded and found values and the compared elements, all in the shape of the piece's output."""
    counts = trace.comparison.counted(record)
    parts = {"expected": record.exact, "rounded": record.rounded, "found": found, "counts": counts}
    return {name: np.ascontiguousarray(array.reshape(found.shape)) for name, array in parts.items()}


def _content(
    piece: FailingPiece, record: RecordedValue, arrays: Mapping[str, Array], where: Where, dtype: str
) -> tuple[dict[str, object], float]:
    """The content of `piece.json`, and sigma."""
    counts = arrays["counts"]
    exact, rounded, found = (arrays[name][counts].astype(np.float64) for name in ("expected", "rounded", "found"))
    noise = 1.0  # for integers and booleans
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


def _readme(piece: FailingPiece, where: Where) -> str:
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
    """The bytes of an .npz file; unlike `numpy.savez`, any name is allowed and no time is stored."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _write(folder: Path, files: Mapping[str, bytes], model: onnx.ModelProto, weights: Path) -> None:
    """Writes into a sibling folder, then renames it."""
    with parents_made(folder):
        staged = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            with Folder.open_own(staged) as home:
                home.write_together({**files, **_graph_files(model, weights)})
            staged.chmod(0o777 & ~_umask())
            os.rename(staged, folder)  # also replaces an empty folder
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _graph_files(model: onnx.ModelProto, weights: Path) -> dict[str, WritableContent]:
    """The files of the piece: its weights are inline, or in `weights.bin` if they are large."""
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
