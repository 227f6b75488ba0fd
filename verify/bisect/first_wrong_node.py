"""Bisection: searches for the first node of a graph that differs from the eager model, after a check failed.

Keys and values of layer k depend only on the layers before k and on the first part of layer k, so the first cache that
differs, or else a binary search over the layers' outputs, shows between which layers the fault is. There, every value
is compared with the model's in the same module, and the smallest failing piece (`suspect`) with the modules
(`findings`).

Nodes whose values the eager model does not compute in the same module are listed: steps that an exporter writes
differently, or faults that no scenario reaches. `--minimize DIR` writes the smallest failing piece: `piece.onnx` with
its weights, `inputs.npz`, `expected.npz` (of the eager model in float64), `found.npz`, `piece.json` and `README.md`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO

import numpy as np
import onnx

from llmconv.errors import OutputFailed, UsageProblem, first_line
from llmconv.files.safe_folder import Folder, WritableContent, parents_made, require_parents, write_fully
from llmconv.runtime.extra_inputs import is_state, layer_of
from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.tensors import Array, lists_by_key
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.bisect.findings import Suspect, find
from llmconv.verify.bisect.replay import (
    ANYWHERE,
    OUT,
    ModuleScopes,
    RecordedValue,
    Replayable,
    ReplayedCall,
    layer_of_scope,
)
from llmconv.verify.bisect.suspect import (
    ARITHMETIC,
    CHOICES,
    LAYOUT_OPS,
    AgreementTrace,
    FailingPiece,
    GraphIndex,
    TargetValue,
    ValueComparison,
    smallest_piece,
)
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check, Report, UnmatchedNode, Where
from llmconv.verify.sigma import GATES, ULP_SHARE, ULPS, rms

NOTHING = "nothing to find: every check passed"


def name_node(report: Report, verified: Replayable, eager: Eager | None, minimize: Path | None = None) -> None:
    """Sets the first node that differs in `report.where`; any other result is a note, also that nothing failed.

    `eager` is None if no graph could be run. `minimize` is a new folder for the smallest failing piece; None for none.
    Raises OutputFailed: the piece cannot be written.
    """
    if report.where is None:
        report.notes.append(NOTHING if report.verdict == "pass" else "nothing to find: no check failed")
        return
    if eager is None:
        report.notes.append("no node named: only a graph with a cache that runs is searched")
        return
    written = ""
    try:
        with verified.replayed(report.where, eager) as replay:
            if replay:
                search = NodeSearch(replay, report.where, report.checks)
                report.where = search.run()
                written = search.write(report.where, minimize)
    except OutputFailed:
        raise
    except Exception as error:  # an error in the search must not change the verdict
        report.notes.append(f"no node named: {first_line(error)}")
    if not report.where.node and not report.where.finding:
        report.notes.append("no node named: the values of no module could be compared")
    if minimize:
        report.notes.append(written or f"nothing written to `{minimize}`: no piece of the graph fails by itself")


@dataclass(frozen=True)
class LayerRange:
    """Layers whose values are compared one by one, and a wrong value; nodes outside the layers are always included."""

    first: int
    last: int
    output: str


class NodeSearch:
    """Searches for the first node that differs in a replayed call, with the weight audit in `checks`."""

    def __init__(self, replay: ReplayedCall, where: Where, checks: Sequence[Check]) -> None:
        self.replay, self.where, self.checks = replay, where, checks
        self.index = GraphIndex(replay.probe.model)
        self.scopes = ModuleScopes(name for name, _ in replay.model.named_modules())
        self.layers = {id(node): layer_of_scope(self.scopes.of(node)) for node in self.index.nodes}
        self.comparison = ValueComparison(replay.dtype, replay.call, replay.virtual)
        self._found: tuple[AgreementTrace, FailingPiece | None] | None = None

    def run(self) -> Where:
        if all(self.scopes.of(node) == ANYWHERE for node in self.index.nodes):
            return replace(self.where, text=f"{self.where.text}; no node is named after a module of the model")
        layers = self._layer_range()
        trace = self._trace(layers)
        piece = None
        if trace.back_from(layers.output):
            target = TargetValue(layers.output, self._expected(layers, trace))
            piece = smallest_piece(trace, self.replay.probe, self.replay.feeds, target)
        self._found = (trace, piece)
        finding = find(Suspect(self.replay, self.where, self.checks, trace, piece))
        node = (finding.node if finding else None) or (piece.node if piece else None)
        return self._text(finding.text if finding else "", node, trace.scope(node) if node is not None else "")

    def write(self, where: Where, folder: Path | None) -> str:
        """Writes and describes the piece, see `write_piece`; empty without a folder, or without a piece."""
        trace, piece = self._found or (None, None)
        return write_piece(folder, piece, trace, self.replay, where) if folder and trace and piece else ""

    def _layer_range(self) -> LayerRange:
        """The layers of the fault, from the compared outputs or by binary search."""
        last = max((layer for layer in self.layers.values() if layer is not None), default=0)
        cached = {layer for name in self.index.outputs if (layer := layer_of(name)) is not None}
        reached = self.where.layer
        if reached is None:
            first, layers_last = max(cached, default=last + 1), last
        else:
            first, layers_last = max((layer for layer in cached if layer < reached), default=0), reached
        if first == 0 or self._agrees_after(first - 1):
            return LayerRange(first, layers_last, self.where.output)
        low, high = 0, first - 1  # the first layer with a wrong output is between `low` and `high`
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._agrees_after(middle) else (low, middle)
        return LayerRange(low, low, self._crossing(low)[-1])

    def _crossing(self, layer: int) -> list[str]:
        """Values of a layer that are used after it."""
        return [
            name
            for node in self.index.nodes
            if self.layers[id(node)] == layer and not self.index.is_shape(node)
            for name in node.output
            if any((at := self.layers[id(user)]) is None or at > layer for user in self.index.users[name])
        ]

    def _agrees_after(self, layer: int) -> bool:
        """Whether the layer's output agrees, also if it cannot be determined.

        A fused norm may add the residual, so that the output is computed in the next layer.
        """
        found = self.replay.record(lambda scope: layer_of_scope(scope) == layer and scope.endswith(f".{layer}"))
        records = [record for record in found if record.op == OUT]
        handed = self._read_like(records, self._crossing(layer))
        if not handed or self._any_agrees(records, handed):
            return True
        following = [node for node in self.index.nodes if self.layers[id(node)] in (layer + 1, None)]
        fused = [name for node in following if "Norm" in node.op_type for name in node.output if name]
        return self._any_agrees(records, self._read_like(records, fused))

    def _read_like(self, records: Sequence[RecordedValue], names: Sequence[str]) -> dict[str, Array]:
        """The values of these names that have as many elements as one of the records."""
        values = self.replay.probe.read(self.replay.feeds, names)
        sizes = {record.exact.size for record in records}
        return {name: value for name, value in values.items() if value.size in sizes}

    def _any_agrees(self, records: Sequence[RecordedValue], values: Mapping[str, Array]) -> bool:
        return any(self.comparison.agrees(record, value) for record in records for value in values.values())

    def _trace(self, layers: LayerRange) -> AgreementTrace:

        def is_before(layer: int | None, first: int) -> bool:
            return layer is not None and layer < first

        before = [node for node in self.index.nodes if is_before(self.layers[id(node)], layers.first)]
        trusted = [name for node in before for name in node.output if name]
        nodes = [node for node in self.index.before(layers.output, trusted) if not self.index.is_shape(node)]
        read = {name for node in nodes for name in node.input if name in self.index.maker}
        names = list(dict.fromkeys([*(name for node in nodes for name in node.output if name), *sorted(read)]))
        values = self.replay.probe.read(self.replay.feeds, names)
        # with a fused norm, nodes of the first layer compute the output of the layer before
        records = self.replay.record(lambda scope: not is_before(layer_of_scope(scope), layers.first - 1))
        return AgreementTrace(self.index, self.scopes, values, records, self.comparison, trusted)

    def _expected(self, layers: LayerRange, trace: AgreementTrace) -> RecordedValue | None:
        """The model's value at the end of the range: an output of the graph or of a layer; None for other values."""
        if layers.output not in self.index.outputs:
            return next((r for r in trace.ports if r.op == OUT and r.scope.endswith(f".{layers.last}")), None)
        return self.replay.outputs().get(layers.output)

    def _text(self, finding: str, node: onnx.NodeProto | None, scope: str) -> Where:
        place = f"{self.where.scenario}, {self.where.graph}, step {self.where.step}"
        if node is None:
            text = f"{finding} ({place})" if finding else self.where.text
            return replace(self.where, finding=finding, text=text)
        text = finding or f"first node that differs: `{node.name}` ({node.op_type})"
        text = f"{short(scope) or node.name}: {text} ({place})"
        layer = layer_of_scope(scope)
        return replace(self.where, layer=layer, node=node.name, scope=scope, finding=finding, text=text)


def short(scope: str) -> str:
    """A scope without the model's prefix: `layers.7.mlp` of `model.layers.7.mlp`."""
    first, _, rest = scope.partition(".")
    return rest if rest and first in {"model", "transformer", "gpt_neox", "backbone"} else scope


CALLS = (("chunked prefill, pieces of 1 to 48 tokens", 1), ("decode chain, 16 steps", 1), ("prefill, 7 tokens", 0))
"""Scenarios and steps to compare values of; the first that a graph ran is used."""

MOVES = LAYOUT_OPS | {"Concat", "Slice", "Split"}  # operators that compute no new number
SHOWN = 4  # maximum number of kinds of nodes in a note
NOT_LISTED = "nodes without a counterpart in the model are not listed for graphs that update fixed buffers in place"


def list_unmatched(report: Report, verified: Replayable, eager: Eager | None) -> None:
    """Fills `report.unmatched` by graph, with a note for each; a graph that cannot be probed only gets a note.

    `eager` is None if no graph could be run.
    """
    if eager is None or eager.is_layered or report.quantization:
        return
    for name, where in _calls(report):
        try:
            with verified.replayed(where, eager) as replay, np.errstate(all="ignore"):  # masks overflow when squared
                text = NOT_LISTED
                if replay:
                    report.unmatched[name] = unmatched_nodes(replay)
                    text = _unmatched_text(report.unmatched[name], len(replay.probe.model.graph.node))
        except Exception as error:  # an error in the search must not change the verdict
            text = f"nodes without a counterpart in the model are not listed: {first_line(error)}"
        after = ", including those after the fault" if report.where and name in report.where.graph else ""
        report.notes.append(f"`{name}`: {text}{after}")


def _calls(report: Report) -> Iterator[tuple[str, Where]]:
    for name in dict.fromkeys(check.graph for check in report.checks if check.name == "structure"):
        if name in report.copies:
            continue
        for scenario, step in CALLS:
            graphs = {check.graph for check in report.checks if check.name == scenario and check.output}
            of_step = [graph for graph in graphs if graph.split("+")[-1 if step else 0] == name]
            if of_step:
                yield name, Where(scenario, min(of_step, key=len), step, None, "logits", "")
                break


def unmatched_nodes(replay: ReplayedCall) -> list[UnmatchedNode]:
    """The unmatched nodes of one graph, in order; nodes that only change the layout are left out."""
    index = GraphIndex(replay.probe.model)
    scopes = ModuleScopes(name for name, _ in replay.model.named_modules())
    values = replay.probe.read(replay.feeds, [name for node in index.nodes for name in node.output])
    comparison = ValueComparison(replay.dtype, replay.call, replay.virtual)
    trace = AgreementTrace(
        index, scopes, values, replay.record(lambda scope: True), comparison, (), ARITHMETIC | CHOICES
    )
    return [
        UnmatchedNode(node.name, node.op_type, trace.scope(node))
        for node in index.nodes
        if not index.is_shape(node) and node.op_type not in MOVES and not trace.matched.intersection(node.output)
    ]


def _unmatched_text(nodes: Sequence[UnmatchedNode], of: int) -> str:
    """`17 of 357 nodes compute what the model does not: 5 Sqrt in layers.#.input_layernorm, …`."""
    if not nodes:
        return f"each of {of} nodes has a counterpart in the model"
    kinds = Counter((node.operator, re.sub(r"\d+", "#", node.scope)) for node in nodes)
    listed = [f"{count} {operator} in `{scope or '?'}`" for (operator, scope), count in kinds.most_common(SHOWN)]
    more = [f"{len(kinds) - SHOWN} more kinds"] if len(kinds) > SHOWN else []
    return f"{len(nodes)} of {of} nodes have no counterpart in the model: {', '.join([*listed, *more])}"


def localize(checks: Sequence[Check]) -> Where | None:
    """The first failing scenario, its first failing step, and its first differing layer; None if all passed.

    A scenario in which a layer's cache fails comes before those in which only the logits do: the fault of an early
    layer may be within the gate in the caches of a short scenario, and past it in the logits.
    """
    failed = [check for check in checks if check.verdict == "fail"]
    if not failed:
        return None
    unrun = _layers_text([check for check in failed if not check.output])
    audited = [check for check in failed if check.name == "weights"]
    failed = [check for check in failed if check.output]
    if not failed:
        return _of_weights(audited[0], unrun) if audited else Where("", "", 0, None, "", unrun)
    first = next((check for check in failed if layer_of(check.output) is not None), failed[0])
    place = (first.name, first.graph)
    same = [check for check in failed if (check.name, check.graph) == place]
    step = min(check.step for check in same)
    here = [check for check in same if check.step == step]
    first = min(here, key=lambda check: (layer_of(check.output) is None, layer_of(check.output) or 0))
    layer = layer_of(first.output)
    outputs = {check.output for check in here if layer_of(check.output) == layer}
    cached = any(layer_of(check.output) is not None for check in checks if (check.name, check.graph) == place)
    place_text = _place(layer, outputs) if cached else "the logits differ" if first.sigma else ""
    text = "; ".join(part for part in (place_text, first.detail, unrun) if part)
    text = f"{first.name}, {first.graph}, step {step}: {text}"
    return Where(first.name, first.graph, step, layer, first.output, text)


def _layers_text(checks: Sequence[Check]) -> str:
    """The details of checks that run no graph; equal details of several graphs once."""
    graphs = lists_by_key(((check.name, check.detail), check.graph) for check in checks)
    return "; ".join(f"{name}, {' and '.join(files)}: {detail}" for (name, detail), files in graphs.items())


def _of_weights(check: Check, unrun: str) -> Where:
    tensor = next(iter(re.findall(r"`([^`]+)`", check.detail)), "")
    scope = tensor.rpartition(".")[0]
    found = re.search(r"(?:^|\.)(\d+)\.", tensor)
    layer = int(found[1]) if found else None
    return Where("", check.graph, 0, layer, "", unrun, scope=scope, finding=check.detail)


def _place(layer: int | None, outputs: set[str]) -> str:
    if layer is None:
        return "the whole cache agrees, the logits differ: last layer's attention or MLP, final norm, or head"
    if any(is_state(name) for name in outputs):
        return _state_place(layer, outputs)
    kinds = {name.rsplit(".", 1)[1] for name in outputs}
    if kinds == {"key"}:
        return f"layer {layer}, keys only: its key projection, key norm or position encoding"
    if kinds == {"value"}:
        return f"layer {layer}, values only: its value projection"
    if layer == 0:
        return "layer 0, keys and values: the embedding, the first norm or the first projections"
    return (
        f"layer {layer}, keys and values: the attention or MLP of layer {layer - 1}, or the first norm of layer {layer}"
    )


def _state_place(layer: int, outputs: set[str]) -> str:
    if all(name.startswith("present_recurrent.") for name in outputs):
        return f"layer {layer}, recurrent state only: its convolution, its time step or its scan"
    before = "the embedding" if layer == 0 else f"layer {layer - 1} after its scan or attention"
    return (
        f"layer {layer}, {' and '.join(sorted(outputs))}: {before}, or the first norm or projections of layer {layer}"
    )


INLINE_LIMIT = 512 << 20  # maximum bytes of weights inside piece.onnx; protobuf is limited to 2 GiB
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


def require_new(folder: Path) -> None:
    """Refuses a folder that is not empty.

    Raises UsageProblem: the path is a file or a folder with files; InputRefused: it is below a file.
    """
    require_parents(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageProblem(f"`{folder}` is not empty", hint="give a new folder to `--minimize`")


def write_piece(folder: Path, piece: FailingPiece, trace: AgreementTrace, replay: ReplayedCall, where: Where) -> str:
    """Writes the piece, and describes it and its error; empty if it agrees with the model when it runs by itself.

    `folder` is new or empty, and renamed into place when it is complete. Raises OutputFailed: a file cannot be written.
    """
    record, values = piece.expected, {**replay.feeds, **trace.values}
    if record is None:
        return ""
    found = replay.probe.run_piece(piece.nodes, values, piece.output)
    if found is None or trace.comparison.agrees(record, found):
        return ""
    made = {name for node in piece.nodes for name in node.output}
    read = {name for node in piece.nodes for name in values_read_by(node)} - made
    inputs = {name: array for name, array in values.items() if name in read}
    model = replay.probe.piece(piece.nodes, inputs, piece.output)
    parts = {"expected": record.exact, "rounded": record.rounded, "found": found}
    parts["counts"] = trace.comparison.counted(record)  # the elements that are compared
    arrays = {name: np.ascontiguousarray(array.reshape(found.shape)) for name, array in parts.items()}
    content, sigma = _content(piece, record, arrays, where, replay.dtype)
    title = where.node or piece.node.name
    readme = README.format(
        title=title,
        count=len(piece.nodes),
        **{**vars(where), "finding": where.finding or f"the first node that differs is `{title}`"},
    )
    files = {
        "inputs.npz": archive(inputs),
        "expected.npz": archive({key: arrays[key] for key in ("expected", "counts")}),
        "found.npz": archive({"found": found}),
        "piece.json": (json.dumps(content, indent=2) + "\n").encode(),
        "README.md": readme.encode(),
    }
    try:
        _write(folder, files, model, replay.probe.folder)
    except OSError as error:
        raise OutputFailed(
            f"cannot write the piece to `{folder}`: {error.strerror}", hint="give another folder to `--minimize`"
        ) from error
    wrong = int((arrays["expected"] != found)[arrays["counts"]].sum())
    off = f"sigma {sigma:.4g}" if record.exact.dtype.kind == "f" else f"{wrong} of {found.size} values wrong"
    return f"{len(piece.nodes)} node{'s' * (len(piece.nodes) > 1)} with inputs in `{folder}`, {off}"


def _content(
    piece: FailingPiece, record: RecordedValue, arrays: Mapping[str, Array], where: Where, dtype: str
) -> tuple[dict[str, object], float]:
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


def archive(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of an .npz file; unlike `numpy.savez`, any name is allowed and no time is stored."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _write(folder: Path, files: Mapping[str, bytes], model: onnx.ModelProto, weights: Path) -> None:
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
