"""Images in the eager model: features of images, and prompts that contain images."""

from __future__ import annotations

import numpy as np

from llmconv.runtime.eager.cache import EagerCache, to_numpy
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.vision import PIXEL_VALUES
from llmconv.runtime.runner import Step, default_positions
from llmconv.tensors import Array


def image_token(runner: EagerRunner) -> int:
    """The placeholder token whose embeddings the features of images replace."""
    return int(runner.model.config.image_token_id)


WHOLE_IMAGES = {"aya_vision", "got_ocr2", "internvl", "llava", "vipllava"}
"""Types of models whose features depend on the pixels of single images only, and whose language model attends to the
features as it does to tokens."""


def takes_images(runner: EagerRunner) -> bool:
    """Whether the model is of a type whose features of images can be placed in a prompt."""
    return runner.model.config.model_type in WHOLE_IMAGES


def image_features(runner: EagerRunner, pixel_values: Array) -> Array:
    """Features of images, float [images, tokens, hidden].

    Args:
        runner: a multimodal model.
        pixel_values: float [images, channels, height, width].
    """
    with runner.compute_mode():
        found = runner.model.model.get_image_features(**runner.tensors({PIXEL_VALUES: pixel_values}), return_dict=True)
    return np.stack([to_numpy(one) for one in found.pooler_output])


def prefill_images(runner: EagerRunner, input_ids: Array, attention_mask: Array, pixel_values: Array) -> Step:
    """Runs prompts with images as transformers does, in one call of the whole model.

    Args:
        runner: a multimodal model.
        input_ids: int64 [batch, tokens], with a placeholder token for each feature.
        attention_mask: int64 [batch, tokens], 0 for padding.
        pixel_values: float [images, channels, height, width], in the order of the placeholders.
    """
    positions = default_positions(attention_mask, input_ids.shape[1])
    given = {"input_ids": input_ids, "attention_mask": attention_mask, PIXEL_VALUES: pixel_values}
    if runner.takes_positions:
        given["position_ids"] = positions
    cache = runner.cache_of(None)
    return Step(to_numpy(runner.call(given, cache)), EagerCache(cache, input_ids, positions))
