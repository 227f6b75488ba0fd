"""Comparing a state dict with a blueprint: missing and unexpected keys, shape mismatches, element types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from llmconv.convert.algebra.operations import require
from llmconv.convert.models.blueprint.blueprint import Blueprint, Shape
from llmconv.convert.models.blueprint.conversions import conversions, experts, is_known, new_names
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS, ModelNames
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import FLOATS, LazyTensor

COMPUTED = re.compile(
    r"\.(?:attn|attention|self_attn)\.(?:(?:masked_)?bias|causal_mask)$"
    r"|inv_freq$|(?:cos|sin)_cached$|\.embed_positions$|(?:^|\.)(?:position_ids|token_type_ids)$"
)
"""Buffers that a state dict may have or not."""

ANOTHER = "the configuration is of another model; give the right one with `--config`"
PARTIAL = "the checkpoint is partial, or the configuration is of another model"


def compare(tensors: Mapping[str, LazyTensor], plan: Blueprint, source: str) -> bool:
    """Compares names (of any transformers version), shapes, and element types with the blueprint's.

    Returns whether everything could be compared: True means that this is the whole model and nothing else. Raises
    MalformedInput for missing or unexpected keys, another shape, or an element type that is not a float.
    """
    names, shapes = dict(zip(tensors, tensors, strict=True)), dict(plan.shapes)
    missing, unexpected = _gaps(names.values(), plan, shapes)
    if missing or unexpected:
        rules = conversions(plan.class_name, plan.model_type)
        if rules is None:
            return False
        names = new_names(tensors, rules, shapes)
        shapes = _as_stored(set(names.values()), shapes, rules)
        missing, unexpected = _gaps(names.values(), plan, shapes)
        if (missing or unexpected) and not all(is_known(rule) for rule in rules):
            return False
    refuse_gaps(missing, unexpected, plan.model_type, source)
    if len(set(names.values())) < len(names):
        raise MalformedInput(
            f"duplicate keys: `{source}` contains tensors under two names", hint="save the `state_dict()` of one model"
        )
    wanted = {name: shapes.get(target) for name, target in names.items()}
    pairs = {name: (tensor.shape, shape) for name, tensor in tensors.items() if (shape := wanted[name]) is not None}
    refuse_shapes({name: pair for name, pair in pairs.items() if pair[0] != pair[1]}, source)
    check_floats({name: tensors[name] for name, target in names.items() if target not in plan.buffers}, source)
    return None not in wanted.values()


def _as_stored(names: set[str], shapes: dict[str, Shape], rules: list[object]) -> dict[str, Shape]:
    """The shapes with a stacked tensor's parts in its place, where it is not there itself."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        stored |= (name not in names and experts(name, shape, rules)) or {name: shape}
    return stored


def _gaps(names: Iterable[str], plan: Blueprint, shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """The missing and the unexpected keys."""
    found = set(names)
    optional = {name for name in plan.buffers if COMPUTED.search(name)}
    missing = [name for name in shapes if name not in found and name not in optional]
    missing = [name for name in missing if not found & plan.shared.get(name, frozenset())]
    return missing, [name for name in names if name not in shapes]


def refuse_gaps(missing: Sequence[str], unexpected: Sequence[str], model_type: str, source: str) -> None:
    """Raises MalformedInput, which lists missing and unexpected keys, if there are any."""
    if missing and not unexpected and all(name in HEADS for name in missing):
        raise MalformedInput(
            f"`{source}` has no output head (`{missing[0]}`), and its configuration does not tie it to the embedding",
            hint="give a configuration with `tie_word_embeddings` true, if that is how it was trained",
        )
    if missing:
        raise MalformedInput(
            f"`{source}` lacks {len(missing)} tensors of the {model_type} of its configuration; missing keys: "
            f"{listing(missing)}" + (f"; unexpected keys: {listing(unexpected)}" if unexpected else ""),
            hint=PARTIAL,
        )
    if unexpected:
        raise MalformedInput(
            f"`{source}` contains {len(unexpected)} tensors that a {model_type} of its configuration does not have; "
            f"unexpected keys: {listing(unexpected)}",
            hint=ANOTHER,
        )


def refuse_shapes(wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], source: str) -> None:
    """Raises MalformedInput, which lists names with the actual and the expected shape, if there are any."""
    if wrong:
        name, (found, wanted) = next(iter(wrong.items()))
        raise MalformedInput(
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration; shape mismatch for "
            f"`{name}`: expected {list(wanted)}, got {list(found)}",
            hint=ANOTHER,
        )


def check_floats(tensors: Mapping[str, LazyTensor], source: str) -> None:
    """Refuses (MalformedInput) weights that are not floats of 16 bits or more: they are quantized, or not weights."""
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    odd = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in (*FLOATS, "float64")]
    if odd:
        raise MalformedInput(
            f"`{source}` has {len(odd)} weights that are not floats: {listing(odd)}",
            hint="give the weights from before quantization",
        )


RULES = "number of layers, the same tensors in each, embedding, last norm, output head"
"""What `check_rules` looks at, for a message."""

LAYER = re.compile(r"\.(\d+)\.")
DIGITS = 9
"""No model has layers with longer numbers; the first digits show that already."""

LACKING_LIMIT = 1000
"""Maximum number of missing names that are collected for a message."""

UNEVEN_FIELDS = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "layers_block_type", "moe_layers")
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_type_list")
"""Configuration fields of models whose layers do not all have the same weights."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size", "embedding_dim")
"""Fields of models whose embedding is not as wide as the model."""

SIZES = (*LAYER_COUNTS, *WIDTHS, "vocab_size", "num_attention_heads", "n_head", "n_heads")
FINAL_NORM = ("norm", "ln_f")
EMBEDDING = re.compile(r"emb|wte")


def check_layers(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> dict[int, set[str]]:
    """The names of each layer's tensors, by layer number; MalformedInput if the config has more or fewer layers."""
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
    return layers


def check_rules(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], model: ModelNames, source: str) -> None:
    """Checks sizes, equal layers, embedding, last norm, head, floats; MalformedInput if one is not the model's."""
    layers = check_layers(tensors, config, source)
    check_sizes(config, source)
    every = set[str]().union(*layers.values())
    uneven = (f"{number}.{rest}" for number, found in layers.items() for rest in every - found)
    lacking = [] if _has_kinds(config) else sorted(islice(uneven, LACKING_LIMIT))
    if lacking:
        raise MalformedInput(
            f"`{source}` lacks tensors that other layers have: {listing(lacking)}",
            hint="the checkpoint is partial; transformers would fill the gaps with random weights",
        )
    outside = [name for name in tensors if not LAYER.search(name)]
    require([model.embedding] if model.embedding else [], tensors, source)
    if not any(EMBEDDING.search(name) for name in outside):
        raise MalformedInput(f"`{source}` has no embedding", hint=PARTIAL)
    _check_embedding(tensors, config, source)
    inner = any(end in part for rests in layers.values() for part in rests for end in FINAL_NORM)
    if inner and not any(end in name for name in outside for end in FINAL_NORM):
        raise MalformedInput(f"`{source}` has no norm after its last layer", hint=PARTIAL)
    if config.get("tie_word_embeddings") is False and not any(head in tensors for head in model_heads(model)):
        raise MalformedInput(
            f"`{source}` has no output head, and its configuration does not tie it to the embedding",
            hint="give a configuration with `tie_word_embeddings` true, if that is how it was trained",
        )
    check_floats({name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}, source)


def _has_kinds(config: Mapping[str, Any]) -> bool:
    kinds = [value for field in KINDS_OF_LAYERS if isinstance(value := config.get(field), list)]
    return any(field in config for field in UNEVEN_FIELDS) or any(value[1:] != value[:-1] for value in kinds)


def model_heads(model: ModelNames) -> tuple[str, ...]:
    """How the output head may be called."""
    return tuple(dict.fromkeys((*HEADS, *([model.head] if model.head else []))))


def check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Refuses (MalformedInput) sizes in a config that are not positive numbers; `source` names the file in messages."""
    odd = [f"{name} {str(config[name])[:40]}" for name in SIZES if name in config and not _is_size(config[name])]
    if odd:
        raise MalformedInput(
            f"the configuration of `{source}` has sizes that are not positive numbers: {listing(odd)}",
            hint="give the model's own `config.json` with `--config`",
        )


def _is_size(value: Any) -> bool:
    """Also of a list, where layers differ."""
    return all(type(one) is int and one > 0 for one in (value if isinstance(value, list) else [value]))


def _check_embedding(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    embedding = next((tensors[name] for name in tensors if name.endswith(EMBEDDINGS)), None)
    vocabulary = config.get("vocab_size")
    if embedding is not None and vocabulary is not None and embedding.shape[:1] != (vocabulary,):
        raise MalformedInput(
            f"the embedding in `{source}` has {list(embedding.shape)[:1]} rows, `vocab_size` is {vocabulary}",
            hint="the configuration is of another model; give the right one with `--config`",
        )
    width = next((config[field] for field in WIDTHS if type(config.get(field)) is int), None)
    if any(config.get(field) for field in OTHER_WIDTHS) or embedding is None or width is None:
        return
    if embedding.shape[1:] != (width,):
        raise MalformedInput(
            f"the embedding in `{source}` has the shape {list(embedding.shape)}, the model's width is {width}",
            hint="the configuration is of another model; give the right one with `--config`",
        )
