"""A state dict in Hugging Face names, as training leaves it: wrappers in the names, buffers, a tied head stored twice.

What is left of it is the whole model, or it is refused: transformers would fill every gap with random weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from llmconv.convert.algebra.operations import equal, listing
from llmconv.convert.models.blueprint.blueprint import Blueprint, blueprint
from llmconv.convert.models.blueprint.comparison import compare
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS, model_names
from llmconv.convert.models.blueprint.rules import LAYER_COUNTS, check_layers, check_rules
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickles.machine import Stub
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import LazyTensor

WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\."
)

DROPPED = re.compile(
    r"\.rotary_emb\.inv_freq$"  # a buffer that models compute; rounded in bfloat16 checkpoints
    r"|\._extra_state$"  # Transformer Engine's scaling factors
)
BUFFERS: tuple[tuple[str, re.Pattern[str], tuple[int, ...]], ...] = (
    ("causal masks", re.compile(r"\.(?:attn|attention)\.(?:(?:masked_)?bias|causal_mask)$"), (0, 2, 3, 4)),
    ("rotary tables", re.compile(r"\.rotary_emb\.(?:inv_freq|(?:cos|sin)_cached)$|\.embed_positions$"), (1, 2, 3, 4)),
    ("position numbers", re.compile(r"(?:^|\.)position_ids$"), (1, 2)),
)
"""What models compute for themselves and old files hold nevertheless: what it is, its name, its possible ranks."""

Leaf = TensorRef | LazyTensor
"""What stands for a tensor: a reference into a torch file, or a tensor that is already lazy."""


def select(
    state: Mapping[Any, Any],
    tensor: Callable[[str, Any], LazyTensor],
    source: str,
    warnings: list[str],
    prefix: str = "",
) -> dict[str, LazyTensor]:
    """Hugging Face name to tensor, without wrappers, buffers and whatever is no tensor.

    Args:
        state: the state dict; its tensors are `Leaf`.
        tensor: `tensor(name, leaf)` gives the LazyTensor.
        source: file name for messages.
        warnings: gets a line for what is skipped.
        prefix: what the trainer's module puts in front of every name; left alone unless all names have it.

    Raises:
        UnsupportedInput: two tensors with one name, or an object that stands where a tensor should.
    """
    names = {key: WRAPPERS.sub("", str(key)) for key in state}
    prefix = prefix if all(name.startswith(prefix) for name in names.values()) else ""
    tensors: dict[str, LazyTensor] = {}
    skipped: list[str] = []
    for key, value in state.items():
        name = names[key].removeprefix(prefix)
        if DROPPED.search(name) or _is_buffer(name, value):
            continue
        if isinstance(value, Stub) or name in tensors:
            problem = "is doubled" if name in tensors else "is an object that was not rebuilt, no plain tensor"
            raise UnsupportedInput(
                f"`{name}` in `{source}` {problem}", hint="save a full (unsharded, unquantized) state dict"
            )
        if isinstance(value, Leaf):
            tensors[name] = tensor(name, value)
        else:
            skipped.append(name)
    if skipped:
        warnings.append(f"skipped {len(skipped)} values that are no tensors: {listing(skipped)}")
    return tensors


def _is_buffer(name: str, value: Any) -> bool:
    rank = len(value.shape) if isinstance(value, Leaf) else -1
    return any(sign.search(name) and rank in ranks for _, sign, ranks in BUFFERS)


def untie(tensors: dict[str, LazyTensor], config: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Drops an output head that is the embedding, as transformers stores tied weights; the config then says so."""
    head = next((name for name in HEADS if name in tensors), None)
    embedding = next((name for name in tensors if name.endswith(EMBEDDINGS)), None)
    if head is None or embedding is None:
        return config
    same_place = _same_place(tensors[head], tensors[embedding])
    if not same_place and not config.get("tie_word_embeddings"):
        return config
    if same_place or equal(tensors[head], tensors[embedding]):
        del tensors[head]
        return {**config, "tie_word_embeddings": True}
    warnings.append(f"the configuration ties `{head}` to `{embedding}`, but they differ; both are kept")
    return {**config, "tie_word_embeddings": False}


def _same_place(one: LazyTensor, other: LazyTensor) -> bool:
    if one is other:
        return True
    if not (isinstance(one, FileTensor) and isinstance(other, FileTensor)):
        return False
    return (one.path, one.offset, one.shape, one.dtype) == (other.path, other.offset, other.shape, other.dtype)


def whole(tensors: dict[str, LazyTensor], config: dict[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The configuration, which then says whether the head is tied; the tensors are the whole of its model.

    Args:
        tensors: by Hugging Face name; what transformers passes over, and a head that is the embedding, is taken out.
        config: content of `config.json`.
        source: file name for messages.
        warnings: gets a line where configuration and tensors disagree about the head.

    Raises:
        MalformedInput: see `check_complete`.
    """
    plan = _plan(tensors, config)
    if plan:
        for name in [name for name in tensors if plan.ignores(name)]:
            del tensors[name]
    if config.get("tie_word_embeddings") is None:
        ties = plan.tied if plan else model_names(str(config.get("model_type"))).tied
        config = {**config, "tie_word_embeddings": True} if ties else config
    config = untie(tensors, config, warnings)
    check_complete(tensors, config, source)
    return config


def check_complete(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    """The tensors are exactly those of the model of `config`, in its shapes, so that nothing is left to chance.

    Where the installed transformers does not tell them one by one, rules are checked that hold for any model.

    Raises:
        MalformedInput: tensors are missing, or of another model, or no floats.
    """
    plan = _plan(tensors, config)
    try:
        known = plan is not None and compare(tensors, plan, source)
    except MalformedInput:
        check_layers(tensors, config, source)
        raise
    if not known:
        check_rules(tensors, config, model_names(str(config.get("model_type"))), source)


def why_incomplete(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> str:
    """What `check_complete` refuses these tensors for; empty where they are the whole model."""
    try:
        check_complete(tensors, config, source)
    except MalformedInput as problem:
        return problem.message
    return ""


def _plan(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> Blueprint | None:
    """The blueprint, unless the configuration says more layers than there are tensors."""
    counts = [value for field in LAYER_COUNTS if isinstance(value := config.get(field), int)]
    return blueprint(config) if all(count <= len(tensors) for count in counts) else None
