"""Runners of a folder's graphs as they were exported, and of copies with plainly rounded codes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace

import onnx

from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.shared_buffers import EMBEDDINGS
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.other_exporters.quantized.dequantized_reference import StoredSmoothing
from llmconv.verify.other_exporters.quantized.plain_rounding import plainly_rounded
from llmconv.verify.other_exporters.replay import ExternalGraphs


def shipped_runner(verified: VerifiedFolder) -> tuple[str, OrtRunner]:
    """Name and runner of the graphs as shipped, with logits; MalformedInput if onnxruntime cannot open one."""
    verified = with_logits(verified)
    graphs = [open_graph(verified.path, entry, verified.settings) for entry in _pair(verified)]
    return "+".join(graph.name for graph in graphs), OrtRunner(graphs[0], graphs[-1])


def _pair(verified: VerifiedFolder) -> list[GraphEntry]:
    roles = {entry.role: entry for entry in verified.entries}
    pair = [roles[role] for role in ("prefill", "decode") if role in roles]
    return pair if len(pair) > 1 else [verified.entries[-1]]


def plainly_rounded_runner(
    verified: VerifiedFolder, graphs: ExternalGraphs, smoothing: StoredSmoothing, stack: ExitStack
) -> OrtRunner | None:
    """The graph of prompts with plainly rounded codes, a copy on `stack`; None if all its codes are such already."""
    entry = _pair(verified)[0]
    file = next(file for file in graphs.files if file.name == entry.name)
    rounded = plainly_rounded(file.path, file.model, file.quantized_weights, graphs.tensors, smoothing)
    if (copy := stack.enter_context(rounded)) is None:
        return None
    for path in [*entry.paths(verified.path), verified.path / EMBEDDINGS]:
        if path.is_file() and not (copy.parent / path.name).exists():
            shutil.copyfile(path, copy.parent / path.name)
    return shipped_runner(replace(verified, path=copy.parent, entries=[entry]))[1]


CHOSEN = {"tokens", "scores"}
INNER, LOGITS = "postprocess/logits", "logits"
"""Names of the logits before the choice, in these graphs and in those without `--postprocess`."""


def restore_logits(model: onnx.ModelProto) -> None:
    """Returns the logits in place of tokens and scores, in place; other graphs stay as they are."""
    made = {name for node in model.graph.node for name in node.output}
    if INNER not in made or LOGITS in made:
        return
    model.graph.node.append(onnx.helper.make_node("Identity", [INNER], [LOGITS], name=f"{INNER}/restored"))
    kept = [port for port in model.graph.output if port.name not in CHOSEN]
    del model.graph.output[:]
    model.graph.output.extend([onnx.ValueInfoProto(name=LOGITS), *kept])


def with_logits(verified: VerifiedFolder) -> VerifiedFolder:
    """The folder with graphs that are changed in memory; the same one if all of them return logits."""
    if not any(entry.postprocess for entry in verified.entries):
        return verified
    entries: list[GraphEntry] = [replace(entry, postprocess="") for entry in verified.entries]
    return replace(verified.changed(restore_logits, verified.named), entries=entries)
