"""ONNX Runtime GenAI: `genai_config.json` for model.onnx, or else for the pair prefill.onnx and decode.onnx.

One graph is preferred: a pipeline of two does not support `rewind_to`, which a second turn needs. GenAI's parser
refuses unknown keys, and `pad_token_id` must be one number; its keys are in `src/config.cpp` (onnxruntime-genai 0.18).
A model with images has two more graphs. GenAI has no type for LLaVA and its relatives, but runs every type alike
except for the Qwen and Pixtral families (`src/models/multi_modal.cpp`): the vision tower once per prompt, then the
embedding graph with its features, then the decoder. Only the processor of a type is special, so the caller prepares
prompts instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import onnx

from llmconv.causal_lm import length_of
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export.clients import Client, ClientModel, EncodedGraphs, warn_of_settings
from llmconv.export.clients.image_parts import flatten_features, place_features, take_float32_pixels
from llmconv.export.input_map import Port
from llmconv.output.manifest import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.output.plan import json_bytes
from llmconv.runtime.extra_inputs import IMAGE_FEATURES, INPUTS_EMBEDS, PIXEL_VALUES

IMAGE_MODELS = frozenset({"aya_vision", "got_ocr2", "internvl", "llava", "vipllava"})
"""Types whose decoder takes embeddings, mask and positions alone, whether there are images or not."""

IMAGE_TYPE = "gemma3"  # GenAI's type with one vision graph and nothing else of its own outside of its processor
VISION_GRAPH, EMBEDDING_GRAPH = "genai-vision.graph", "genai-embeddings.graph"
"""Not `.onnx`: llmconv runs the graphs that these are variants of."""

SECTIONS: dict[str, Any] = {  # the sections of `model` besides `decoder`
    "vision": {
        "filename": VISION_GRAPH,
        "inputs": {PIXEL_VALUES: PIXEL_VALUES},
        "outputs": {IMAGE_FEATURES: IMAGE_FEATURES},
    },
    "embedding": {
        "filename": EMBEDDING_GRAPH,
        "inputs": {"input_ids": "input_ids", IMAGE_FEATURES: IMAGE_FEATURES},
        "outputs": {INPUTS_EMBEDS: INPUTS_EMBEDS},
    },
}


def image_graphs(token: int, encoded: Mapping[str, bytes]) -> dict[str, bytes]:
    """The vision tower with one row per feature, and the embedding table that places these rows, by file name."""
    vision = onnx.load_from_string(encoded[VISION_ROLE])
    take_float32_pixels(vision)
    flatten_features(vision)
    table = onnx.load_from_string(encoded[EMBEDDINGS_ROLE])
    place_features(table, token)
    graphs = {VISION_GRAPH: vision, EMBEDDING_GRAPH: table}
    return {name: bytes(graph.SerializeToString(deterministic=True)) for name, graph in graphs.items()}


FILE = "genai_config.json"
UNBOUNDED = 2048
"""Context length for configs without one, such as BLOOM, whose ALiBi has no limit and which was trained with it."""

SEARCH = {  # fields with the same name in `generation_config.json` and in genai's `search`, and their types
    "do_sample": bool,
    "top_k": int,
    "top_p": float,
    "temperature": float,
    "repetition_penalty": float,
    "no_repeat_ngram_size": int,
    "min_length": int,
}


def check(model: ClientModel) -> None:
    """Refuses models that `genai_config.json` cannot describe.

    Raises MalformedInput: a special token is not a token id; UnsupportedInput: a cache of several head sizes;
    UsageProblem: a model with images as a pair of graphs.
    """
    special_tokens(model.settings, int(model.config.vocab_size))
    if model.images and model.roles and "unified" not in model.roles:
        raise UsageProblem(
            "ONNX Runtime GenAI runs a model with images as one decoder graph", hint="give `--unified`, or no graph"
        )
    keys = _past(model)
    names = {f"past_key_values.{layer}.{part}" for layer in range(len(keys) // 2) for part in ("key", "value")}
    if {port.name for port in keys} != names or len({port.axes for port in keys}) > 1:
        raise UnsupportedInput(
            "ONNX Runtime GenAI supports only one number of heads and one head size, and this model has several",
            hint="leave out `--layout genai`",
        )


def files(model: ClientModel, graphs: EncodedGraphs) -> dict[str, bytes]:
    made = image_graphs(model.images.token, graphs.encoded) if model.images else {}
    is_pipeline = "unified" not in graphs.files
    described = {
        "type": IMAGE_TYPE if model.images else "decoder-pipeline" if is_pipeline else "decoder",
        "vocab_size": int(model.config.vocab_size),
        "context_length": context_length(model.config),
        **special_tokens(model.settings, int(model.config.vocab_size)),
        "decoder": _decoder(model, graphs, is_pipeline),
        **(SECTIONS if model.images else {}),
    }
    return {FILE: json_bytes({"model": described, "search": _search(model)}), **made}


def _decoder(model: ClientModel, graphs: EncodedGraphs, is_pipeline: bool) -> dict[str, Any]:
    config, past = model.config, graphs.past() or _past(model)
    _, kv_heads, _, head_size = past[0].axes
    # Two sessions share one mapped file only where neither packs the weights; codes must be packed.
    packing = {"session.disable_prepacking": "1"} if is_pipeline and not model.quant else {}
    providers: list[Any] = [{PROVIDERS[model.target]: {}}] if model.target in PROVIDERS else []
    names = [port.name for port in model.input_map.inputs(config)[: -len(past)]]  # without its cache at the end
    fed = [INPUTS_EMBEDS if name == "input_ids" and model.images else name for name in names]
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", **packing, "provider_options": providers},
        "hidden_size": int(config.hidden_size),
        "num_attention_heads": int(config.num_attention_heads),
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": len(past) // 2,
        "head_size": head_size,
        "inputs": {
            **{name: name for name in fed},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    if not is_pipeline:
        return {"filename": graphs.files["unified"], **decoder}
    stages = {  # `prompt` means calls with several tokens, `token_gen` calls with one
        role: {
            "filename": graphs.files[role],
            "inputs": [port.name for port in model.input_map.inputs(config)],
            "outputs": [port.name for port in model.input_map.outputs(config)],
            "run_on_prompt": role == "prefill",
            "run_on_token_gen": role == "decode",
        }
        for role in ("prefill", "decode")
    }
    return {**decoder, "pipeline": [stages]}


PROVIDERS = {"ort-cuda": "cuda", "ort-webgpu": "webgpu", "ort-dml": "dml"}
"""GenAI's name of the provider of a target; without one it runs on the CPU."""


def _past(model: ClientModel) -> list[Port]:
    return [port for port in model.input_map.inputs(model.config) if port.name.startswith("past_key_values.")]


def context_length(config: Any) -> int:
    return length_of(config.to_dict()) or UNBOUNDED


def special_tokens(settings: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Special tokens of `generation_settings`, like transformers' `generate`; `vocabulary` is the number of tokens.

    The client requires an end token, and otherwise uses the padding token: a model without one gets the last token of
    its vocabulary, which is most likely unused. A model without a padding token gets its first end token. Raises
    MalformedInput: one is not a token id.
    """
    ends = _ids(settings, "eos_token_id") or [vocabulary - 1]
    pads = _ids(settings, "pad_token_id") or ends
    starts = _ids(settings, "bos_token_id")
    return {"eos_token_id": ends, "pad_token_id": pads[0], **({"bos_token_id": starts[0]} if starts else {})}


def _ids(settings: Mapping[str, Any], name: str) -> list[int]:
    given = settings.get(name, [])
    tokens = list(given) if isinstance(given, list | tuple) else [given]
    if not all(type(token) is int for token in tokens):
        raise MalformedInput(
            f"`{name}` is {given!r:.80}, which is not a token id or a list of them",
            hint="correct `generation_config.json` or `config.json`",
        )
    return tokens


def _search(model: ClientModel) -> Mapping[str, Any]:
    """Sampling options of `generation_config.json`, or without it of `config.json`; greedy without them."""
    given = model.settings
    warn_of_settings(model, "ONNX Runtime GenAI", SEARCH)
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float) and isfinite(value)}
    kept = {name: kind(numbers[name]) for name, kind in SEARCH.items() if name in numbers}
    if kept.get("top_k") == 0:  # all tokens; in GenAI the likeliest alone, unless `top_p` is given
        kept["top_k"] = int(model.config.vocab_size)
    return {
        "do_sample": False,
        **kept,
        "max_length": context_length(model.config),
        "past_present_share_buffer": model.cache == "shared-buffer",
    }


CLIENT = Client(
    name="genai",
    title="onnxruntime_genai.Model: genai_config.json over model.onnx, or over prefill.onnx and decode.onnx",
    roles=("unified",),
    supports=(frozenset({"unified"}), frozenset({"prefill", "decode"})),
    caches=("growing", "shared-buffer"),
    reads_tokenizer_json=True,
    image_models=IMAGE_MODELS,
    check=check,
    file_names=lambda model: (FILE, VISION_GRAPH, EMBEDDING_GRAPH) if model.images else (FILE,),
    files=files,
)
