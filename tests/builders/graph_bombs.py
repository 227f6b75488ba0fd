"""Graphs of a kilobyte that ask for hours or terabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(
    folder: Path, nodes: Sequence[onnx.NodeProto], functions: Sequence[onnx.FunctionProto] = (), **constants: Any
) -> Path:
    """A graph from `input_ids` to `logits`; its constants by name."""
    inits = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    tokens = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT), *nodes], "g", [tokens], [logits], inits
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)
    (folder / "x.onnx").write_bytes(model.SerializeToString())
    return folder / "x.onnx"


def loop(folder: Path, rounds: int) -> Path:
    """A sum over so many rounds."""
    scalar = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("c", 9), ("v", 1))]
    ends = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("d", 9), ("w", 1))]
    steps = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["v", "v"], ["w"])]
    body = helper.make_graph(steps, "body", scalar, ends)
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Loop", ["rounds", "go", "m"], ["logits"], body=body),
    ]
    return save(folder, nodes, rounds=np.int64(rounds), go=True)


def functions(folder: Path, levels: int, each: int, first: str = "Add", domain: str = "") -> Path:
    """A function that calls another so many times, and so on; `first` is what the innermost calls."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    made = []
    for level in range(levels):
        inner, home = (f"f{level - 1}", "f") if level else (first, domain)
        inputs = ["a", "a"] if inner == "Add" else ["a"]
        chain = [f"t{n}" for n in range(each - 1)]
        body = [
            helper.make_node(inner, [before] * len(inputs), [after], domain=home)
            for before, after in zip(["a", *chain], [*chain, "b"], strict=True)
        ]
        made.append(helper.make_function("f", f"f{level}", ["a"], ["b"], body, opsets))
    return save(folder, [helper.make_node(f"f{levels - 1}", ["x"], ["logits"], domain="f")], made)


def doubled(folder: Path, levels: int) -> Path:
    """A constant of eight numbers, doubled so often."""
    nodes = [helper.make_node("Concat", [f"c{n}", f"c{n}"], [f"c{n + 1}"], axis=0) for n in range(levels)]
    nodes += [
        helper.make_node("ReduceMax", [f"c{levels}"], ["m"], keepdims=0),
        helper.make_node("Add", ["x", "m"], ["logits"]),
    ]
    return save(folder, nodes, c0=np.zeros(8, np.float32))


def filled(folder: Path, op: str, *inputs: Any, **attributes: Any) -> Path:
    """A value that an operator makes of constants."""
    names = [f"c{n}" for n in range(len(inputs))]
    nodes = [
        helper.make_node(op, names, ["big"], **attributes),
        helper.make_node("ReduceMax", ["big"], ["m"], keepdims=0),
        helper.make_node("Add", ["x", "m"], ["logits"]),
    ]
    constants: dict[str, Any] = dict(zip(names, inputs, strict=True))
    return save(folder, nodes, (), **constants)
