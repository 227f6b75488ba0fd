"""transformers.js and images: three graphs, and fields that its processor reads differently from that of transformers.

Sources, @huggingface/transformers 4.3: `src/models/session_config.js` (names of the graphs), `src/models/llava/`,
`src/configs.js`, `src/models/auto/image_processing_auto.js`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from llmconv.export.clients.image_model import CONFIG, PROCESSOR, Edits, ImageModel
from llmconv.export.clients.image_parts import take_float32_pixels
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE, VISION_ROLE

IMAGE_MODELS = frozenset({"llava"})
"""Types that the client has a class for, among those whose vision tower is exported."""

PARTS = {VISION_ROLE: "vision_encoder", EMBEDDINGS_ROLE: "embed_tokens", "unified": "decoder_model_merged"}
"""The client's name of each graph, by role."""

IMAGE_PROCESSORS = {"LlavaImageProcessor": "CLIPImageProcessor"}
"""Image processors that the client has under another name."""

PROCESSOR_CLASS = "LlavaProcessor"
TEXT_FIELDS = ("model_type", "num_hidden_layers")
"""Fields of `text_config` from which the client derives the names of the cache; it has no defaults for them."""


def variant(role: str, encoded: bytes) -> bytes:
    """The encoded graph of a role, a key of `PARTS`, with the inputs that the client feeds."""
    if role != VISION_ROLE:
        return encoded
    model = onnx.load_from_string(encoded)
    take_float32_pixels(model)
    return bytes(model.SerializeToString(deterministic=True))


def weight_files(encoded: bytes) -> Sequence[str]:
    """The weight files that a graph maps, in order; each session of the client loads its own."""
    graph = onnx.load_from_string(encoded).graph
    pairs = (pair for tensor in graph.initializer for pair in tensor.external_data)
    return sorted({pair.value for pair in pairs if pair.key == "location"})


def preprocessor(images: ImageModel) -> dict[str, Any]:
    """The content of the `preprocessor_config.json` that the client requires; empty if there is one, or no processor.

    transformers 5 writes it into `processor_config.json`, and reads it there first.
    """
    fields = images.processor.get("image_processor")
    if images.has_preprocessor or not isinstance(fields, dict):
        return {}
    kind = str(fields.get("image_processor_type", "LlavaImageProcessor"))
    return {
        **fields,
        "image_processor_type": IMAGE_PROCESSORS.get(kind, kind),
        "processor_class": images.processor.get("processor_class", PROCESSOR_CLASS),
    }


def edits(images: ImageModel) -> Edits:
    """Fields that the client needs: it has no defaults, and does not subtract the token of a tower's class.

    transformers reads them with the same result: `num_additional_image_tokens` is counted with the `default` strategy
    less one, which the client's `LlavaProcessor` does not do.
    """
    found: dict[str, dict[str, Any]] = {}
    text = images.fields.get("text_config")
    own = images.config.text_config
    missing = {name: getattr(own, name) for name in TEXT_FIELDS if isinstance(text, dict) and name not in text}
    if missing:
        found[CONFIG] = {"text_config": {**images.fields["text_config"], **missing}}
    if images.processor.get("vision_feature_select_strategy") == "default":
        count = int(images.processor.get("num_additional_image_tokens") or 0)
        found[PROCESSOR] = {"num_additional_image_tokens": count - 1, "vision_feature_select_strategy": "full"}
    return found
