"""OrtRunner and its sessions: which graph runs what, and the order of the caches of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import helper

from llmconv.output.manifest import GraphEntry
from llmconv.runtime.onnxruntime.graph import SessionChain
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings


class Recorder:
    """A graph that records that it ran."""

    entry, sizes = GraphEntry("prefill", ("prefill.onnx",)), None

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def run_call(self, *given: Any) -> None:
        self.ran.append(self.name)


def test_prompts_run_on_the_prefill_graph_and_steps_on_the_decode_graph() -> None:
    ran: list[str] = []
    runner = OrtRunner(cast(Any, Recorder("prefill", ran)), cast(Any, Recorder("decode", ran)))
    ids = np.ones((1, 1), dtype=np.int64)
    runner.prefill(ids, ids, ids)
    runner.decode(ids, ids, ids)
    assert ran == ["prefill", "decode"]


def stage(path: Path, number: int, given: str, made: str) -> Path:
    """A graph that passes its first input and its past on."""
    names = [given, "attention_mask", f"past_key_values.{number}.key"]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, "n"]) for name in names]
    results = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (made, f"present.{number}.key")
    ]
    nodes = [helper.make_node("Add", names[:2], [made]), helper.make_node("Identity", names[2:], [results[1].name])]
    graph = helper.make_graph(nodes, "stage", ports, results)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_the_caches_of_stages_are_in_the_order_of_the_stages(tmp_path: Path) -> None:
    paths = [stage(tmp_path / "1.onnx", 0, "input_ids", "hidden"), stage(tmp_path / "2.onnx", 1, "hidden", "logits")]
    chain = SessionChain(paths, SessionSettings())
    past = ["past_key_values.0.key", "past_key_values.1.key"]
    assert [one.name for one in chain.get_inputs()] == ["input_ids", "attention_mask", *past]
    assert [one.name for one in chain.get_outputs()] == ["logits", "present.0.key", "present.1.key"]
