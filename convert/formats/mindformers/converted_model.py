"""What the model families of MindFormers share: LoRA merged, fused matrices taken apart, results checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.convert.algebra.operations import equal, listing, require
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.models.settings import Settings
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Heads:
    """Sizes of the attention: queries, keys/values, and elements of each head."""

    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class ConvertedModel:
    """A converted model: tensors in Hugging Face names, their config, and what a user should know."""

    tensors: dict[str, LazyTensor]
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MindFormersModel:
    """A model as MindFormers has it: tensors under its names, its class, and the fields of its `model_config`."""

    tensors: dict[str, LazyTensor]
    arch: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class MindFormersFamily:
    """One kind of model.

    Attributes:
        sign: a tensor name that only this kind has.
        build: makes the model, or raises where transformers has no exact equal.
        store: the way back, by `model_type`: `store(settings, tensors, source)`; a ValueError tells of an odd shape.
    """

    sign: re.Pattern[str]
    build: Callable[[RunConfig, dict[str, LazyTensor]], ConvertedModel]
    store: Mapping[str, Callable[[Settings, dict[str, LazyTensor], str], MindFormersModel]] = field(
        default_factory=dict
    )


def heads_of(run: RunConfig, hidden: int) -> Heads:
    """The head sizes that the configuration says.

    Raises:
        MalformedInput: they do not fit the hidden size.
    """
    queries = run.integer("num_heads", "num_attention_heads")
    keys = run.integer(
        "n_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_query_groups", default=queries
    )
    dim = run.integer("head_dim", "kv_channels", default=max(1, hidden // queries))
    if queries % keys or ("head_dim" not in run.fields and "kv_channels" not in run.fields and queries * dim != hidden):
        raise MalformedInput(
            f"{queries} heads and {keys} key/value heads do not fit the hidden size {hidden} of `{run.source}`",
            hint="the configuration is of another model; give the YAML file of the run with `--config`",
        )
    return Heads(queries, keys, dim)


def finish(
    run: RunConfig,
    tensors: dict[str, LazyTensor],
    shapes: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    head: str,
    embedding: str,
) -> ConvertedModel:
    """Checks the tensors against `shapes`, in whose order they are written, and ties an output head that is shared.

    Args:
        run: for messages, and whether the run ties them.
        tensors: by Hugging Face name.
        shapes: all that the model has.
        config: the content of `config.json`; `tie_word_embeddings` is added.
        head: name of the output head.
        embedding: name of the input embedding.

    Raises:
        MalformedInput: a tensor is missing, left over or of another shape.
    """
    tied = head not in tensors
    if tied and not run.flag("tie_word_embeddings"):
        raise MalformedInput(
            f"`{run.source}` has no output head, and its configuration does not tie it to the embedding",
            hint="if it was trained so, give a configuration with `tie_word_embeddings: True`",
        )
    wanted = {name: shape for name, shape in shapes.items() if name != head or not tied}
    require(wanted, tensors, run.source)
    over = [name for name in tensors if name not in wanted]
    odd = [name for name, shape in wanted.items() if tensors[name].shape != shape]
    if over or odd:
        found = f"has {list(tensors[odd[0]].shape)}, not {list(wanted[odd[0]])}" if odd else "has no place in the model"
        raise MalformedInput(
            f"{len(over + odd)} tensors of `{run.source}` do not fit its configuration: {listing(odd + over)} {found}",
            hint="the configuration is of another model, or these are the shards of one rank",
        )
    if not tied and equal(tensors[head], tensors[embedding]):
        del wanted[head]
        tied = True
    return ConvertedModel({name: tensors[name] for name in wanted}, {**config, "tie_word_embeddings": tied})


def refuse_model(run: RunConfig, what: str, reason: str) -> UnsupportedInput:
    """The error for a model that transformers cannot express exactly."""
    return UnsupportedInput(
        f"`{run.source}` is {what}, which has no exact equal in transformers: {reason}",
        hint="convert it with MindFormers' own `convert_weight.py --reversed` and run it with the model's own code",
    )
