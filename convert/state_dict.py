"""A state dict in Hugging Face names, as training leaves it: wrappers in the names, buffers, a tied head stored twice.

What is left of it is the whole model, or it is refused: transformers would fill every gap with random weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from llmconv.convert.composer import mpt_tensors
from llmconv.convert.mapping import equal, listing
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.pickles.data import TensorRef
from llmconv.pickles.machine import Stub
from llmconv.safetensors_io import FileTensor
from llmconv.tensors import LazyTensor

WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\."
)

DROPPED = re.compile(
    r"\.rotary_emb\.inv_freq$"  # a buffer that models compute; rounded in bfloat16 checkpoints
    r"|\._extra_state$"  # Transformer Engine's scaling factors
)
CAUSAL_MASK = re.compile(r"\.(?:attn|attention)\.(?:masked_)?bias$")
"""Buffers of GPT-2 and its kin in old files: rank 4, and a scalar."""

LAYER = re.compile(r"\.(\d+)\.")
DIGITS = 9
"""No model has layers with longer numbers; the first digits show that already."""

LACKING_LIMIT = 1000
"""Names that are counted before it is said that they lack."""

UNEVEN_FIELDS = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "layers_block_type", "moe_layers")
"""Configuration fields of models whose layers do not all have the same weights."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

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
        if DROPPED.search(name) or _is_mask(name, value):
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


def _is_mask(name: str, value: Any) -> bool:
    return bool(CAUSAL_MASK.search(name)) and isinstance(value, Leaf) and len(value.shape) in (0, 4)


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


def check_complete(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    """Every layer of the config is there and no other, so that nothing is left to random initialisation.

    Raises:
        MalformedInput: a layer, the head or part of a layer is missing, or the sizes are of another model.
    """
    wanted = next((config[field] for field in LAYER_COUNTS if field in config), None)
    layers: dict[int, set[str]] = {}
    for name in tensors:
        if number := LAYER.search(name):
            layers.setdefault(int(number[1][:DIGITS]), set()).add(name[number.end() :])
    if wanted is not None and (type(wanted) is not int or wanted != len(layers) or max(layers, default=-1) >= wanted):
        raise MalformedInput(
            f"`{source}` has {len(layers)} layers, its configuration says {str(wanted)[:40]}",
            hint="the configuration is of another model, or the checkpoint is partial",
        )
    known = set[str]().union(*layers.values())
    uneven = (f"{number}.{rest}" for number, parts in layers.items() for rest in known - parts)
    lacking = [] if any(field in config for field in UNEVEN_FIELDS) else sorted(islice(uneven, LACKING_LIMIT))
    if lacking:
        raise MalformedInput(
            f"`{source}` lacks tensors that other layers have: {listing(lacking)}",
            hint="the checkpoint is partial; transformers would fill the gaps with random weights",
        )
    _check_ends(tensors, config, source)
    if config.get("model_type") == "mpt":
        mpt_tensors.check_tensors(tensors, config, source)


def _check_ends(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    """The embedding fits the vocabulary, and there is an output head where it is not tied."""
    embedding = next((tensors[name] for name in tensors if name.endswith(EMBEDDINGS)), None)
    vocabulary = config.get("vocab_size")
    if embedding is not None and vocabulary is not None and embedding.shape[:1] != (vocabulary,):
        rows = embedding.shape[0] if embedding.shape else "no"
        raise MalformedInput(
            f"the embedding in `{source}` has {rows} rows, `vocab_size` is {str(vocabulary)[:40]}",
            hint="the configuration is of another model; give the right one with `--config`",
        )
    if config.get("tie_word_embeddings") is False and not any(head in tensors for head in HEADS):
        raise MalformedInput(
            f"`{source}` has no output head, and its configuration does not tie it to the embedding",
            hint="give a configuration with `tie_word_embeddings` true, if that is how it was trained",
        )
