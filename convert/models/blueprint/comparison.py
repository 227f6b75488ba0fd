"""Comparing a state dict with a blueprint: missing and unexpected keys, shape mismatches, element types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from llmconv.convert.models.blueprint.blueprint import Blueprint, Shape
from llmconv.convert.models.blueprint.conversions import conversions, experts, is_known, new_names
from llmconv.convert.models.blueprint.names import HEADS
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
    """Compares names, shapes, and element types with the blueprint's.

    Args:
        tensors: by the names of any version of transformers.
        plan: the blueprint of the configuration.
        source: file name for messages.

    Returns:
        Whether everything could be compared: True means that this is the whole model and nothing else.

    Raises:
        MalformedInput: missing or unexpected keys, another shape, or an element type that is not a float.
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
    """Refuses a state dict with missing or unexpected keys.

    Args:
        missing, unexpected: names of tensors.
        model_type: of the configuration.
        source: file name for messages.

    Raises:
        MalformedInput: lists them.
    """
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
    """Refuses tensors of another shape than the configuration gives them.

    Args:
        wrong: name to the shape that was found and the one that is expected.
        source: file name for messages.

    Raises:
        MalformedInput: lists them.
    """
    if wrong:
        name, (found, wanted) = next(iter(wrong.items()))
        raise MalformedInput(
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration; shape mismatch for "
            f"`{name}`: expected {list(wanted)}, got {list(found)}",
            hint=ANOTHER,
        )


def check_floats(tensors: Mapping[str, LazyTensor], source: str) -> None:
    """Refuses weights that are not floats of 16 bits or more: they are quantized, or not weights.

    Raises:
        MalformedInput: lists them.
    """
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    odd = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in (*FLOATS, "float64")]
    if odd:
        raise MalformedInput(
            f"`{source}` has {len(odd)} weights that are not floats: {listing(odd)}",
            hint="give the weights from before quantization",
        )
