"""Images in the eager model: features of images, and prompts that contain images."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from llmconv.runtime.eager.cache import EagerCache, to_numpy
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.images.families import image_family
from llmconv.runtime.images.family import DEEPSTACK_FEATURES, Features, Given, ImageFamily
from llmconv.runtime.rotary_axes import AXES
from llmconv.runtime.runner import Step, default_positions
from llmconv.tensors import Array


def image_token(config: Any) -> int:
    """The placeholder token whose embeddings the features of images replace."""
    return int(config.image_token_id)


def family_of(runner: EagerRunner) -> ImageFamily | None:
    """The model's family; None if its images do not reach the graphs."""
    return image_family(runner.model.config)


def image_features(runner: EagerRunner, given: Given) -> Features:
    """Features of the images of one prompt, as the whole multimodal model computes them before it places them.

    `given` is what the processor returned; what the model does not take is left out.
    """
    owner = runner.model if hasattr(runner.model, "get_image_features") else runner.model.model
    compute = owner.get_image_features
    taken = inspect.signature(compute).parameters
    with runner.compute_mode():
        found = compute(**runner.tensors({name: one for name, one in given.items() if name in taken}), return_dict=True)
        parts = found.pooler_output
        if parts is None:  # Llama 4 projects where it places them
            parts = owner.multi_modal_projector(found.last_hidden_state)
    deep = [_rows(layer) for layer in getattr(found, "deepstack_features", None) or ()]
    outputs = [{DEEPSTACK_FEATURES: np.concatenate(deep, axis=1)}] if deep else []
    return Features(_rows(parts), outputs)


def _rows(parts: Any) -> Array:
    """Features [tokens, hidden] of all images, which are in one tensor or in one for each image."""
    images = [parts] if isinstance(parts, torch.Tensor) else parts
    return np.concatenate([to_numpy(one).reshape(-1, one.shape[-1]) for one in images])


def prefill_images(runner: EagerRunner, input_ids: Array, attention_mask: Array, given: Given) -> Step:
    """Runs prompts with images as transformers does, in one call of the whole multimodal model.

    `input_ids`, int64 [batch, tokens], have a placeholder for each feature; the mask, of that shape, is 0 for padding;
    `given` is what the processor made of all images, in the order of the placeholders.
    """
    family = family_of(runner)
    assert family
    positions = default_positions(attention_mask, input_ids.shape[1])
    where = input_ids == image_token(runner.model.config)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **family.model_inputs(where, given)}
    if runner.takes_positions and family.counts_positions:
        inputs["position_ids"] = positions
    cache = runner.cache_of(None)
    return Step(to_numpy(runner.call(inputs, cache)), EagerCache(cache, input_ids, positions))


def positions_after_images(runner: EagerRunner, position_ids: Array) -> Array | None:
    """Positions, int64 [3, batch, tokens], of tokens after the prompts of the last `prefill_images`.

    They are as transformers counts them; None in a family without positions on several axes. `position_ids`, int64
    [batch, tokens], are those without images.
    """
    deltas = getattr(getattr(runner.model, "model", None), "rope_deltas", None)
    return None if deltas is None else np.repeat((position_ids + deltas.cpu().numpy())[None], AXES, axis=0)
