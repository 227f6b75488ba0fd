"""optimum's `ORTModelForCausalLM`: model.onnx for both stages, with a cache input that accepts the client's guess.

The first call of the client feeds an empty cache whose shape it guesses from the config, incorrectly for some families
(optimum-onnx 0.1.0, `optimum/onnxruntime/modeling_decoder.py`). If the guess is wrong, the graph declares heads and
head size as symbols and reshapes the cache itself, which copies nothing and is correct for an empty cache of any shape.
The config needs no change: transformers 4.57 reads those of version 5, and `rope_parameters`, which it ignores, is part
of the graph.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from llmconv.export.clients import Client, ClientModel, EncodedGraphs
from llmconv.export.input_map import Port
from llmconv.runtime.onnxruntime.guard import refill

OWN_HEAD_DIM = {"gemma", "gemma3_text", "gpt_oss", "nemotron"}
"""Families for which optimum reads `head_dim`; for others it divides `hidden_size`."""

OWN_KV_HEADS = {  # families for which optimum reads `num_key_value_heads`; for others it assumes one per query head
    *("arcee", "cohere", "gemma", "gemma3_text", "glm", "granite", "gpt_oss", "helium", "mistral", "llama"),
    *("nemotron", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm"),
}

KV_HEADS, HEAD_DIM = "kv_heads", "head_dim"


def files(model: ClientModel, graphs: EncodedGraphs) -> dict[str, bytes]:
    """A variant of model.onnx, if the graph would refuse the guess."""
    past = graphs.past()
    if all(guess(model.config, port) == (port.axes[1], port.axes[3]) for port in past):
        return {}
    return {graphs.files["unified"]: accept_any_empty_past(graphs.encoded["unified"], past)}


def guess(config: Any, port: Port) -> tuple[int, int]:
    """Number of heads and head size of the empty cache that optimum feeds into `port`."""
    kind = config.model_type
    if kind == "deepseek_v3":
        is_key = port.name.endswith(".key")
        size = config.qk_rope_head_dim + config.qk_nope_head_dim if is_key else config.v_head_dim
        return config.num_key_value_heads, size
    size = config.head_dim if kind in OWN_HEAD_DIM else config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads if kind in OWN_KV_HEADS else config.num_attention_heads
    if kind == "falcon":
        heads = 1 if config.multi_query and not config.new_decoder_architecture else config.num_kv_heads
    return 1 if kind == "gpt_bigcode" and config.multi_query else int(heads), size


def accept_any_empty_past(encoded: bytes, past: list[Port]) -> bytes:
    """The graph with `Reshape(past, [0, kv_heads, 0, head_dim])` before every use of its cache inputs `past`."""
    model = onnx.load_from_string(encoded)
    graph = model.graph
    renamed = {port.name: f"{port.name}/Reshape:0" for port in past}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    for value in graph.input:
        if value.name in renamed:
            axes = value.type.tensor_type.shape.dim
            axes[1].dim_param, axes[3].dim_param = KV_HEADS, HEAD_DIM
    reshapes = []
    for port in past:
        heads, size = int(port.axes[1]), int(port.axes[3])
        shape = f"past_shape_{heads}_{size}"
        if shape not in {tensor.name for tensor in graph.initializer}:
            graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [4], [0, heads, 0, size]))
        node_name = f"{port.name}/Reshape"
        reshapes.append(helper.make_node("Reshape", [port.name, shape], [renamed[port.name]], name=node_name))
    refill(graph.node, [*reshapes, *graph.node])
    return bytes(model.SerializeToString(deterministic=True))


CLIENT = Client(
    name="optimum",
    title="optimum's ORTModelForCausalLM: model.onnx",
    roles=("unified",),
    supports=(frozenset({"unified"}),),
    adds_graphs=True,
    files=files,
)
