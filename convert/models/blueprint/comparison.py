"""A state dict against the blueprint of its configuration: missing, foreign and misshapen tensors, and integers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from llmconv.convert.algebra.operations import listing
from llmconv.convert.models.blueprint.blueprint import Blueprint, Shape
from llmconv.convert.models.blueprint.conversions import conversions, new_names, parts, unread
from llmconv.convert.models.blueprint.names import HEADS
from llmconv.errors import MalformedInput
from llmconv.tensors import FLOATS, LazyTensor

COMPUTED = re.compile(
    r"\.(?:attn|attention|self_attn)\.(?:(?:masked_)?bias|causal_mask)$"
    r"|inv_freq$|(?:cos|sin)_cached$|\.embed_positions$|(?:^|\.)(?:position_ids|token_type_ids)$"
)
"""Buffers that a state dict may have or not."""

ANOTHER = "the configuration is of another model; give the right one with `--config`"
PARTIAL = "the checkpoint is partial, or the configuration is of another model"


def compare(tensors: Mapping[str, LazyTensor], plan: Blueprint, source: str) -> bool:
    """Whether the names could be compared; True means that this is the whole model and nothing else.

    Raises:
        MalformedInput: tensors are missing, or have no place, or have another shape, or are no floats.
    """
    names, shapes = dict(zip(tensors, tensors, strict=True)), dict(plan.shapes)
    missing, extra = _gaps(names.values(), plan, shapes)
    if missing or extra:
        rules = conversions(plan.class_name, plan.model_type)
        if rules is None:
            return False
        names = new_names(tensors, rules, shapes)
        shapes = _as_stored(set(names.values()), shapes, rules)
        missing, extra = _gaps(names.values(), plan, shapes)
        others = unread(rules)
        if extra and others is None:
            return False
        used = [rule for rule in others or () if any(rule.uses(name) for name in extra)]
        missing = [name for name in missing if not any(rule.makes(name) for rule in used)]
        extra = [name for name in extra if not any(rule.uses(name) for rule in used)]
    _refuse_gaps(missing, extra, plan, source)
    if len(set(names.values())) < len(names):
        raise MalformedInput(f"`{source}` holds tensors under two names", hint="save the `state_dict()` of one model")
    _check_shapes(tensors, names, shapes, source)
    check_floats({name: tensors[name] for name, target in names.items() if target not in plan.buffers}, source)
    return True


def _as_stored(names: set[str], shapes: dict[str, Shape], rules: list[object]) -> dict[str, Shape]:
    """The shapes with a stacked tensor's parts in its place, where it is not there itself."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        found = {} if name in names else parts(name, shape, rules)
        stored |= found or {name: shape}
    return stored


def _gaps(names: Iterable[str], plan: Blueprint, shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    found = set(names)
    optional = {name for name in plan.buffers if COMPUTED.search(name)}
    missing = [name for name in shapes if name not in found and name not in optional]
    missing = [name for name in missing if not found & plan.shared.get(name, frozenset())]
    return missing, [name for name in names if name not in shapes]


def _refuse_gaps(missing: list[str], extra: list[str], plan: Blueprint, source: str) -> None:
    if missing and not extra and all(name in HEADS for name in missing):
        raise MalformedInput(
            f"`{source}` has no output head (`{missing[0]}`), and its configuration does not tie it to the embedding",
            hint="give a configuration with `tie_word_embeddings` true, if that is how it was trained",
        )
    if missing:
        raise MalformedInput(
            f"`{source}` lacks {len(missing)} tensors of the {plan.model_type} of its configuration: "
            f"{listing(missing)}" + (f"; it has {listing(extra)} instead" if extra else ""),
            hint=PARTIAL,
        )
    if extra:
        raise MalformedInput(
            f"`{source}` holds {len(extra)} tensors that a {plan.model_type} of its configuration does not have: "
            f"{listing(extra)}",
            hint=ANOTHER,
        )


def _check_shapes(
    tensors: Mapping[str, LazyTensor], names: Mapping[str, str], shapes: Mapping[str, Shape], source: str
) -> None:
    wrong = [
        f"{name} {list(tensor.shape)}, not {list(shape)}"
        for name, tensor in tensors.items()
        if (shape := shapes.get(names[name])) is not None and tensor.shape != shape
    ]
    if wrong:
        raise MalformedInput(
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration says: {listing(wrong)}",
            hint=ANOTHER,
        )


def check_floats(tensors: Mapping[str, LazyTensor], source: str) -> None:
    """Refuses weights that are no floats of 16 bits or more: they are quantized, or no weights.

    Raises:
        MalformedInput: lists them.
    """
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    odd = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in (*FLOATS, "float64")]
    if odd:
        raise MalformedInput(
            f"`{source}` has {len(odd)} weights that are no floats: {listing(odd)}",
            hint="give the weights from before quantization",
        )
