"""ModuleScopes: names of nodes as five exporters give them, and the module that each means."""

from __future__ import annotations

import onnx
import pytest

from llmconv.verify.bisect.replay import ANYWHERE, ModuleScopes, inside, layer_of_scope

LAYER = "model.layers.1"
MODULES = ["", "model", "model.layers", LAYER, f"{LAYER}.self_attn", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp"]
MODULES += ["model.norm", "lm_head"]


def node(name: str, **metadata: str) -> onnx.NodeProto:
    """A node with metadata."""
    made = onnx.NodeProto(name=name)
    made.metadata_props.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in metadata.items())
    return made


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("model.layers.1.self_attn.q_proj/Gemm", f"{LAYER}.self_attn.q_proj"),
        ("/model/layers.1/self_attn/q_proj/MatMul", f"{LAYER}.self_attn.q_proj"),
        ("/model/layers.1/attn/q_proj/MatMul", f"{LAYER}.self_attn.q_proj"),
        ("/layers.1/mlp/Mul_3", f"{LAYER}.mlp"),
        ("/model/layers.1/mlp/unheard_of/Mul", f"{LAYER}.mlp"),
        ("/model/layernorm/SkipLayerNorm", "model.norm"),
        ("lm_head/MatMul", "lm_head"),
        ("node_Gemm_123", ANYWHERE),
        ("", ANYWHERE),
    ],
)
def test_a_node_belongs_to_the_module_in_its_name(name: str, scope: str) -> None:
    assert ModuleScopes(MODULES).of(node(name)) == scope


@pytest.mark.parametrize(
    ("key", "recorded"),
    [
        ("pkg.torch.onnx.name_scopes", "['', 'model', 'model.layers.1', 'model.layers.1.mlp', 'mul_3']"),
        ("pkg.onnxscript.name_scopes", "['', 'model', 'layers.1', 'mlp']"),
    ],
)
def test_metadata_of_a_node_contain_its_module(key: str, recorded: str) -> None:
    assert ModuleScopes(MODULES).of(node("node_Mul_7", **{key: recorded})) == f"{LAYER}.mlp"


def test_the_layer_is_the_first_number() -> None:
    assert [layer_of_scope(scope) for scope in ("h.3.moe.experts.5", "model.norm", "12")] == [3, None, 12]


def test_a_module_contains_itself_and_its_children() -> None:
    assert inside(f"{LAYER}.mlp", LAYER) and inside(LAYER, LAYER) and not inside("model.layers.10", LAYER)
