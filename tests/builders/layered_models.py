"""Tiny models of several kinds of layers, and changes of graphs that change no number."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onnx

from llmconv.export.exporter import export
from tests.builders.mutants.surgery import users
from tests.conftest import CONFIGS, DECODER, save_tiny

LAYERED: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "gpt2": CONFIGS["gpt2"],
    "olmo2": DECODER,
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8},
    "lfm2": {**DECODER, "layer_types": ["full_attention", "conv"] * 2},
    "gemma3_text": {
        **DECODER,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma3n_text": {
        **DECODER,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
}
"""Layers alike, with biases, norms after the layers' parts, states, convolutions, sliding windows, shared caches."""

CLASSES = {
    "llama": [[0, 1, 2, 3]],
    "gpt2": [[0, 1, 2, 3]],
    "olmo2": [[0, 1, 2, 3]],
    "mamba": [[0, 1, 2, 3]],
    "lfm2": [[0, 2], [1, 3]],
    "gemma3_text": [[0, 1, 3, 4], [2, 5]],
}


def save_layered(model_type: str, folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """A tiny model in a folder with one graph, `model.onnx`."""
    save_tiny(model_type, folder, **(config or LAYERED[model_type]))
    export(folder, unified=True, **options)
    return folder


def load(folder: Path) -> onnx.ModelProto:
    """The graph without its weights."""
    return onnx.load(folder / "model.onnx", load_external_data=False)


def save(model: onnx.ModelProto, folder: Path) -> None:
    """Replaces the graph of a folder."""
    onnx.save(model, folder / "model.onnx")


def rename(model: onnx.ModelProto, seed: int) -> None:
    """Renames all nodes and values at random, except weights, inputs and outputs."""
    rng, graph = random.Random(seed), model.graph
    kept = {port.name for port in (*graph.input, *graph.output)}
    values = [name for node in graph.node for name in node.output if name and name not in kept]
    values += [tensor.name for tensor in graph.initializer if not tensor.external_data and "." not in tensor.name]
    numbers = rng.sample(range(10**6), len(values))
    names = {name: f"v{number}" for name, number in zip(values, numbers, strict=True)}
    for node in graph.node:
        node.name = f"n{rng.randrange(10**9)}"
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for named in (*graph.initializer, *graph.value_info):
        named.name = names.get(named.name, named.name)


def shuffle(model: onnx.ModelProto, seed: int) -> None:
    """Puts the nodes into another topological order, at random."""
    rng, graph = random.Random(seed), model.graph
    waiting, made = list(graph.node), set[str]()
    computed = {name for node in waiting for name in node.output}
    nodes = []
    while waiting:
        ready = [at for at, node in enumerate(waiting) if not (set(node.input) & computed) - made]
        nodes.append(waiting.pop(rng.choice(ready)))
        made |= set(nodes[-1].output)
    del graph.node[:]
    graph.node.extend(nodes)


def change_layer(model: onnx.ModelProto, layer: int) -> str:
    """Doubles the epsilon or replaces the activation of one layer; the name of the changed node."""
    number = f".{layer}."
    for node in users(model, "RMSNormalization") + users(model, "LayerNormalization"):
        if any(number in name for name in node.input):
            next(one for one in node.attribute if one.name == "epsilon").f *= 2
            return node.name
    raise AssertionError("the graph has no such node")
