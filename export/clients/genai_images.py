"""ONNX Runtime GenAI and images: the two graphs before the decoder, and how `genai_config.json` describes them.

GenAI has no type for LLaVA and its relatives. But it runs every type alike except for the Qwen and Pixtral families
(onnxruntime-genai 0.18, `src/models/multi_modal.cpp`): the vision tower once per prompt, then the embedding graph with
its features, then the decoder. Only the processor of a type is special, so the caller prepares prompts instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from llmconv.export.clients.image_parts import flatten_features, place_features, take_float32_pixels
from llmconv.runtime.images.family import IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.runtime.onnxruntime.shared_buffers import INPUTS_EMBEDS

IMAGE_MODELS = frozenset({"aya_vision", "got_ocr2", "internvl", "llava", "vipllava"})
"""Types whose decoder takes embeddings, mask and positions alone, whether there are images or not."""

IMAGE_TYPE = "gemma3"
"""GenAI's type with one vision graph and nothing else of its own outside of its processor."""

VISION_GRAPH, EMBEDDING_GRAPH = "genai-vision.graph", "genai-embeddings.graph"
"""Not `.onnx`: llmconv runs the graphs that these are variants of."""

IMAGE_FILES = (VISION_GRAPH, EMBEDDING_GRAPH)

SECTIONS: dict[str, Any] = {
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
"""The sections of `model` besides `decoder`."""


def image_graphs(token: int, encoded: Mapping[str, bytes]) -> dict[str, bytes]:
    """The vision tower with one row per feature, and the embedding table that places these rows, by file name."""
    vision = onnx.load_from_string(encoded[VISION_ROLE])
    take_float32_pixels(vision)
    flatten_features(vision)
    table = onnx.load_from_string(encoded[EMBEDDINGS_ROLE])
    place_features(table, token)
    graphs = {VISION_GRAPH: vision, EMBEDDING_GRAPH: table}
    return {name: bytes(graph.SerializeToString(deterministic=True)) for name, graph in graphs.items()}
