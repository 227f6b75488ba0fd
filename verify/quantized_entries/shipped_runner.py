"""Runners of a folder's graphs as they were exported, and of copies with plainly rounded codes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace

from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.other_exporters.quantized.plain_rounding import plainly_rounded
from llmconv.verify.other_exporters.quantized.smoothing import StoredSmoothing
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.quantized_entries.logits_output import with_logits


def shipped_runner(verified: VerifiedFolder) -> tuple[str, OrtRunner]:
    """Name and runner of the prefill and decode graph, or of the only one; all return logits.

    Raises:
        MalformedInput: onnxruntime cannot open a graph.
    """
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
    """The graph of prompts with plainly rounded codes; None if all its codes are such already.

    Args:
        verified: the folder.
        graphs: its audited files, and the tensors of the model with factors applied.
        smoothing: the factors.
        stack: keeps the copy.
    """
    entry = _pair(verified)[0]
    file = next(file for file in graphs.files if file.name == entry.name)
    rounded = plainly_rounded(file.path, file.model, file.quantized_weights, graphs.tensors, smoothing)
    if (copy := stack.enter_context(rounded)) is None:
        return None
    for path in [*entry.paths(verified.path), verified.path / EMBEDDINGS]:
        if path.is_file() and not (copy.parent / path.name).exists():
            shutil.copyfile(path, copy.parent / path.name)
    return shipped_runner(replace(verified, path=copy.parent, entries=[entry]))[1]
