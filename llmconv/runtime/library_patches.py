"""Internals of transformers and torch that running a model depends on, each with the versions it was checked with.

They promise none of these names; `tests/runtime/test_library_patches.py` fails when one of them moves.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # torch 2.2 to 2.13
from torch.utils._python_dispatch import _disable_current_modes
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from llmconv.causal_lm import is_dynamic

# recommends to install compiled kernels (transformers 5.16 to 5.23)
KERNEL_LOGGER = "transformers.integrations.hub_kernels"
# function of those modeling files whose scan continues a recurrent state (5.23; absent before)
CONTINUED_SCAN = "mamba2_chunk_scan"
WITHOUT_ATTENTION = {"linear_attention", "conv"}  # layer types that keep a state alone (5.16 to 5.24)
without_dispatch_modes = _disable_current_modes  # context in which no such mode sees an operator (torch 2.2 to 2.13)
# environment variable: weights are loaded in the calling thread (5.16 to 5.23)
SYNCHRONOUS_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"


def silence_kernel_hints() -> None:
    """Hides the recommendation of compiled kernels, which would not be a reference."""
    logging.getLogger(KERNEL_LOGGER).setLevel(logging.ERROR)


def continues_recurrent_state(model: Any) -> bool:
    """Whether several new tokens continue a recurrent state; else their scan starts from zeros."""
    return hasattr(sys.modules[type(model).__module__], CONTINUED_SCAN)


def cache_parameter(forward: Callable[..., Any]) -> str:
    """The parameter of a model's `forward` that takes its cache.

    `past_key_values`, or `cache_params` in models whose layers have no keys and values; since 5.24 `cache` in both.
    """
    parameters = inspect.signature(forward).parameters
    names = ("cache_params", "past_key_values", "cache")
    return next((name for name in names if name in parameters), "past_key_values")


def masks_new_tokens(model: Any) -> bool:
    """Whether a model expects the mask of the new tokens only, because no layer attends."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    name = cache_parameter(model.forward)
    return name == "cache_params" or (name == "cache" and bool(types) and {*types} <= WITHOUT_ATTENTION)


def use_eager_experts(model: Any) -> None:
    """Replaces fused experts, which do not support float64 (5.16 to 5.23)."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def reset_dynamic_rope(model: Any) -> None:
    """Restores the original frequencies of `dynamic` rotary embeddings, which follow the longest sequence so far.

    transformers 5.16 to 5.23 keeps them in buffers of the module, per layer type where `rope_type` is a dict.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if is_dynamic(kind):
                prefix = f"{layer_type}_" if layer_type else ""
                setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def load_tensors(model: Any, tensors: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Loads some tensors of a checkpoint, by its names, into a model, as `from_pretrained` would (5.16 to 5.23).

    The model may be on the meta device; each tensor is read by `[...]`, for a model of the requested `dtype`.
    """
    config = LoadStateDictConfig(
        dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=get_model_conversion_mapping(model)
    )
    with _synchronous_loading():
        convert_and_load_state_dict_in_model(model, tensors, config)


def loaded_names(model: Any, stored: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How `load_tensors` maps names of a checkpoint's tensors to names of the model (5.16 to 5.23): two dicts.

    The stored names by name of the model (for a converter with several results, only the first), and the stored name by
    each name of the model that is only a renaming.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, list[str]] = defaultdict(list)
    renamed: dict[str, str] = {}
    for source in stored:
        name, pattern = rename_source_key(source, renamings, converters, prefix, known)
        if name not in known and source in known:
            name, pattern = rename_source_key(source, [], [], prefix, known)
        sources[name].append(source)
        if pattern is None:
            renamed[name] = source
    return sources, renamed


@contextmanager
def _synchronous_loading() -> Iterator[None]:
    """Loads in the calling thread: new pool threads for every layer would each leave a heap behind."""
    before = os.environ.get(SYNCHRONOUS_LOADING)
    os.environ[SYNCHRONOUS_LOADING] = "1"
    try:
        yield
    finally:
        os.environ.pop(SYNCHRONOUS_LOADING) if before is None else os.environ.update({SYNCHRONOUS_LOADING: before})
