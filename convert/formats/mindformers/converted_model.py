"""Types and checks that all model families of MindFormers share: head sizes, the converted model, its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.algebra.operations import require
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.models.model_config import ModelSettings
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Heads:
    """Number of query heads and of key/value heads, and the elements of each head."""

    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class ConvertedModel:
    """A model in Hugging Face names: tensors, content of `config.json`, and warnings for the user."""

    tensors: dict[str, LazyTensor]
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MindFormersModel:
    """A model in MindFormers' names: tensors, class of the model, and the fields of its `model_config`."""

    tensors: dict[str, LazyTensor]
    arch: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class MindFormersFamily:
    """The conversion of one model family in both directions.

    Attributes:
        sign: matches a tensor name that only this family has.
        build: MindFormers' tensors to Hugging Face's; raises where transformers has no exact equivalent.
        store: back, by `model_type`: `store(settings, tensors, source)`; raises ValueError for a wrong shape.
    """

    sign: re.Pattern[str]
    build: Callable[[RunConfig, dict[str, LazyTensor]], ConvertedModel]
    store: Mapping[str, Callable[[ModelSettings, dict[str, LazyTensor], str], MindFormersModel]] = field(
        default_factory=dict
    )


def heads_of(run: RunConfig, hidden: int) -> Heads:
    """The head sizes in the configuration; MalformedInput if they contradict the hidden size."""
    queries = run.integer("num_heads", "num_attention_heads")
    keys = run.integer(
        "n_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_query_groups", default=queries
    )
    dim = run.integer("head_dim", "kv_channels", default=max(1, hidden // queries))
    if queries % keys or ("head_dim" not in run.fields and "kv_channels" not in run.fields and queries * dim != hidden):
        raise MalformedInput(
            f"{queries} heads and {keys} key/value heads do not match the hidden size {hidden} of `{run.source}`",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )
    return Heads(queries, keys, dim)


def finish(
    run: RunConfig,
    tensors: dict[str, LazyTensor],
    shapes: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    head: str,
) -> ConvertedModel:
    """Compares the tensors with the expected shapes (MalformedInput), and adds `tie_word_embeddings` to the config.

    The run's `tie_word_embeddings` allows a missing output head (name: `head`). `shapes` has every tensor of the model,
    in the order in which they are written.
    """
    tied = head not in tensors
    if tied and not run.flag("tie_word_embeddings"):
        raise MalformedInput(
            f"`{run.source}` has no output head, and its configuration does not tie it to the embedding",
            hint="if it was trained this way, give a configuration with `tie_word_embeddings: True`",
        )
    expected = {name: shape for name, shape in shapes.items() if name != head or not tied}
    require(expected, tensors, run.source)
    unexpected = [name for name in tensors if name not in expected]
    mismatched = [name for name, shape in expected.items() if tensors[name].shape != shape]
    if unexpected or mismatched:
        raise MalformedInput(
            f"{len(unexpected + mismatched)} tensors of `{run.source}` contradict its configuration: "
            + _contradiction(tensors, expected, unexpected, mismatched),
            hint="the configuration belongs to another model, or these are the shards of one rank",
        )
    settings = {**config, "tie_word_embeddings": tied or None}  # a head may be a second copy: its values decide
    return ConvertedModel({name: tensors[name] for name in expected}, settings)


def _contradiction(
    tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]], unexpected: list[str], wrong: list[str]
) -> str:
    if not wrong:
        return f"unexpected keys: {listing(unexpected)}"
    name = wrong[0]
    return f"shape mismatch for `{name}`: expected {list(expected[name])}, got {list(tensors[name].shape)}"


def refuse_model(run: RunConfig, what: str, reason: str) -> UnsupportedInput:
    """The error for a model (`what`) that transformers cannot express exactly; `reason` is the difference."""
    return UnsupportedInput(
        f"`{run.source}` is {what}, which has no exact equal in transformers: {reason}",
        hint="convert it with MindFormers' own `convert_weight.py --reversed` and run it with the model's own code",
    )


def require_embedding(run: RunConfig, embedding: LazyTensor | None) -> LazyTensor:
    """The word embedding, [vocabulary, hidden]; MalformedInput if there is none, or it is not a matrix."""
    if embedding is None or len(embedding.shape) != 2:
        raise MalformedInput(
            f"`{run.source}` has no embedding", hint="the checkpoint is partial, or of one pipeline stage"
        )
    return embedding


def check_embedding_sizes(run: RunConfig, embedding: LazyTensor) -> dict[str, int]:
    """`vocab_size` and `hidden_size` from the shape of the embedding; MalformedInput if the configuration differs."""
    sizes = dict(zip(("vocab_size", "hidden_size"), embedding.shape, strict=True))
    for name, size in sizes.items():
        if run.integer(name, default=size) != size:
            raise MalformedInput(
                f"shape mismatch for the embedding of `{run.source}`: it is {list(embedding.shape)}, the configuration "
                f"declares `{name}` {run.integer(name)}",
                hint="the configuration belongs to another model, or these are the shards of one rank",
            )
    return sizes


LORA = re.compile(r"(.+)\.(?:mindpet_delta_|tk_delta_)?lora_([ab])(?:\.weight)?", re.IGNORECASE)


IN_OUT = re.compile(r"\.(?:projection|mapping)\.weight$")
"""Weights of gpt2 and bloom that are stored as [in, out]."""


def merge_lora(run: RunConfig, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Adds `B·A·alpha/r` to the weights with LoRA pairs (mindpet `LoRADense`); returns weights, and a warning if any.

    Raises InputRefused for only LoRA parameters or an unknown `lora_alpha`, MalformedInput for mismatched pairs.
    """
    pairs: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := LORA.fullmatch(name):
            pairs.setdefault(match[1] + ".weight", {})[match[2].lower()] = tensor
    plain = {name: tensor for name, tensor in tensors.items() if not LORA.fullmatch(name)}
    if not pairs:
        return plain, ()
    if not pairs.keys() & plain.keys():
        raise InputRefused(
            f"`{run.source}` holds LoRA parameters only ({len(pairs)} pairs), without the base weights",
            hint="convert the full checkpoint of the run, which holds both, or merge them into the converted base: "
            f"`llmconv merge-lora BASE {run.source} --alpha A -o OUT`",
        )
    if run.lora.get("lora_alpha") is None:
        raise InputRefused(
            f"`{run.source}` holds {len(pairs)} LoRA pairs, but its configuration has no `lora_alpha`",
            hint='give the YAML file of the run with its `pet_config`, or a JSON file such as `{"lora_alpha": 16}`',
        )
    alpha = RunConfig(run.source, run.lora, "", {}).number("lora_alpha")
    merged = {name: _merged(run, name, plain.get(name), pair, alpha) for name, pair in pairs.items()}
    return {**plain, **merged}, (f"merged {len(pairs)} LoRA pairs with `lora_alpha` {alpha:g}",)


def _merged(
    run: RunConfig, name: str, base: LazyTensor | None, pair: Mapping[str, LazyTensor], alpha: float
) -> LazyTensor:
    a, b = pair.get("a"), pair.get("b")
    if base is None or a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or IN_OUT.search(name):
        raise MalformedInput(
            f"the LoRA pair of `{name}` in `{run.source}` is incomplete or of an unsupported kind",
            hint="merge it first with MindFormers' `transform_ckpt_lora.py`",
        )
    rank = a.shape[0]
    if base.shape != (b.shape[0], a.shape[1]) or b.shape[1] != rank or run.lora.get("lora_rank") not in (None, rank):
        raise MalformedInput(
            f"shape mismatch for the LoRA pair of `{name}` in `{run.source}`: the weight is {list(base.shape)}, "
            f"B·A is {list(b.shape)}·{list(a.shape)}",
            hint="the pairs, or `lora_rank` of the configuration, belong to another run",
        )
    return add_products(base, [LoraProduct(a, b, alpha / rank)], base.dtype)
