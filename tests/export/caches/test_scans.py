"""The ONNX functions of the scans: equal to the recurrence one token at a time, for any length and from any state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from llmconv.export.caches import CACHE_KINDS, cache_kind
from llmconv.export.caches.traced_layers import function_proto
from llmconv.export.rewrite.fused_operators import use_linear_attention
from llmconv.runtime.extra_inputs import SCAN

Arrays = dict[str, NDArray[Any]]

TEXTS = {name: text for kind in map(cache_kind, CACHE_KINDS) for name, text in kind.functions.items()}
LENGTHS = (1, 2, 63, 64, 65, 130)
"""Around the chunks of 64 and of 16 tokens."""

BATCH, HEADS, GROUPS, KEYS, VALUES = 2, 4, 2, 5, 3


def numbers(*shape: int) -> NDArray[Any]:
    """Float32 numbers of a normal distribution, the same for one shape each time."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def inputs(name: str, length: int) -> Arrays:
    """Inputs of a function; decays are negative logarithms, keys have length one."""
    if name == "SelectiveScan":
        x = {"x": numbers(BATCH, HEADS, length), "dt": np.abs(numbers(BATCH, HEADS, length))}
        rest = {
            "A": -np.abs(numbers(HEADS, KEYS)),
            "B": numbers(BATCH, length, KEYS),
            "C": numbers(BATCH, length, KEYS),
        }
        return {**x, **rest, "past": numbers(BATCH, HEADS, KEYS)}
    if name == "StateSpace":
        x = {"x": numbers(BATCH, length, HEADS, VALUES), "dt": np.abs(numbers(BATCH, length, HEADS))}
        B, C = numbers(BATCH, length, GROUPS, KEYS), numbers(BATCH, length, GROUPS, KEYS) + 1
        return {**x, "A": -np.abs(numbers(HEADS)), "B": B, "C": C, "past": numbers(BATCH, HEADS, VALUES, KEYS)}
    key = numbers(BATCH, length, HEADS, KEYS)
    heads = (BATCH, length, HEADS)
    return {
        "x": numbers(*heads, VALUES),
        "q": numbers(*heads, KEYS),
        "k": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "decay": -np.abs(numbers(*heads, *([KEYS] if name == "ChannelDeltaRule" else []))),
        "beta": 1 / (1 + np.exp(numbers(*heads))),
        "past": numbers(BATCH, HEADS, KEYS, VALUES),
    }


def calling(name: str, shapes: Mapping[str, Sequence[int | None]]) -> onnx.ModelProto:
    """A graph of one call, whose inputs have these shapes."""
    ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, shape) for port, shape in shapes.items()]
    results = [helper.make_tensor_value_info(port, TensorProto.FLOAT, None) for port in ("y", "present")]
    node = helper.make_node(name, list(shapes), ["y", "present"], domain=SCAN)
    return helper.make_model(
        helper.make_graph([node], "g", ports, results),
        functions=[function_proto(TEXTS[name])],
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(SCAN, 1)],
        ir_version=10,
    )


def run(name: str, feeds: Arrays, *, fused: bool = False) -> list[NDArray[Any]]:
    """Output and state of one call; `fused`: of onnxruntime's own operator."""
    model = calling(name, {port: a.shape if port == "past" else [None] * a.ndim for port, a in feeds.items()})
    if fused:
        changed = ir.from_proto(model)
        use_linear_attention(changed)
        for number, made in enumerate(changed.graph):
            for value in made.outputs:
                value.name = value.name or f"{number}"
        model = ir.to_proto(changed)
        assert not model.functions
        assert [node.op_type for node in model.graph.node].count("LinearAttention") == 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(["y", "present"], feeds)
    return found


def token_by_token(name: str, feeds: Arrays) -> list[NDArray[Any]]:
    """The same in float64, one token after another."""
    given = {port: array.astype(np.float64) for port, array in feeds.items()}
    state, axis = given["past"], 2 if name == "SelectiveScan" else 1
    outputs = []
    for t in range(feeds["x"].shape[axis]):
        at = {
            port: a if port in {"A", "past"} else np.asarray(a.take(t, axis if port in {"x", "dt"} else 1))
            for port, a in given.items()
        }
        state, y = STEPS[name](state, at)
        outputs.append(y)
    return [np.stack(outputs, axis), state]


def selective_scan(state: NDArray[Any], at: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
    dt, x = at["dt"][..., None], at["x"][..., None]
    state = np.exp(dt * at["A"]) * state + dt * x * at["B"][:, None]
    return state, (state @ at["C"][..., None])[..., 0]


def state_space(state: NDArray[Any], at: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
    B, C = (at[name].repeat(HEADS // GROUPS, axis=1) for name in ("B", "C"))
    dt = at["dt"][..., None, None]
    state = np.exp(dt * at["A"][:, None, None]) * state + dt * at["x"][..., None] * B[:, :, None]
    return state, (state @ C[..., None])[..., 0]


def delta_rule(state: NDArray[Any], at: Arrays) -> tuple[NDArray[Any], NDArray[Any]]:
    decay = at["decay"][..., None] if at["decay"].ndim == 3 else at["decay"][..., None, None]
    state = state * np.exp(decay)
    change = at["beta"][..., None] * (at["x"] - (at["k"][:, :, None] @ state)[:, :, 0])
    state = state + at["k"][..., None] * change[:, :, None]
    return state, (at["q"][:, :, None] @ state)[:, :, 0]


STEPS = {
    "SelectiveScan": selective_scan,
    "StateSpace": state_space,
    "DeltaRule": delta_rule,
    "ChannelDeltaRule": delta_rule,
}


@pytest.mark.slow_rows("65-DeltaRule")
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_scan_equals_its_recurrence(name: str, length: int) -> None:
    feeds = inputs(name, length)
    for found, expected in zip(run(name, feeds), token_by_token(name, feeds), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["DeltaRule", "ChannelDeltaRule"])
@pytest.mark.parametrize("length", [1, 3, 65])
def test_linear_attention_equals_the_recurrence(name: str, length: int) -> None:
    feeds = inputs(name, length)
    for found, expected in zip(run(name, feeds, fused=True), token_by_token(name, feeds), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("case", ["unknown sizes", "a missing input", "another function"])
def test_a_call_that_the_operator_does_not_fit_stays(case: str) -> None:
    feeds = inputs("DeltaRule", 1)
    sizes = {port: [None] * a.ndim if case == "unknown sizes" else a.shape for port, a in feeds.items()}
    model = calling("DeltaRule", sizes)
    if case == "a missing input":
        model.graph.node[0].input[4] = ""
    elif case == "another function":
        model.functions[0].input[:] = ["x", "k", "q", *model.functions[0].input[3:]]
    changed = ir.from_proto(model)
    use_linear_attention(changed)
    assert [node.op_type for node in changed.graph] == ["DeltaRule"]
    assert len(changed.functions) == 1


def test_equal_keys_without_decay_stay_exact() -> None:
    feeds = inputs("DeltaRule", 64)
    feeds["k"] = np.zeros_like(feeds["k"])
    feeds["k"][..., 0] = 1
    feeds["decay"], feeds["beta"] = np.zeros_like(feeds["decay"]), np.ones_like(feeds["beta"])
    for found, expected in zip(run("DeltaRule", feeds), token_by_token("DeltaRule", feeds), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
