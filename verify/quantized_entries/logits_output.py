"""Graphs that choose tokens, with the logits that they choose from as output instead."""

from __future__ import annotations

from dataclasses import replace

import onnx

from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.verify.bisect.replay import VerifiedFolder

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
