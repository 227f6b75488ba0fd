"""State dicts in Hugging Face names: which entries are tensors of the model, and whether it is complete.

An incomplete state dict is refused, since transformers would fill every gap with random weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmconv.causal_lm import architecture, mtp_tensors
from llmconv.checkpoint import UNMERGED_SAYS, WRAPPED, TwoCopies, refuse_copies, refuse_unmerged
from llmconv.convert.models import blueprint as blueprints
from llmconv.convert.models.transformers_source import causal_lm_classes, model_names
from llmconv.errors import MalformedInput, listing
from llmconv.files.paths import kind_of
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

if TYPE_CHECKING:
    from llmconv.convert.models.meta_model import LoadingGaps

WRAPPERS = re.compile(rf"{WRAPPED.pattern}|(?:^|(?<=\.))module\.")

DROPPED = re.compile(
    r"\.rotary_emb\.inv_freq$"  # a buffer that models compute; rounded in bfloat16 checkpoints
    r"|(?:^|\.)n_averaged$"  # of torch's AveragedModel, which counts what it averaged
    r"|\._extra_state$"  # Transformer Engine's scaling factors
)
# Buffers that models compute and old files contain nevertheless: description, pattern of the name, possible ranks
BUFFERS: tuple[tuple[str, re.Pattern[str], tuple[int, ...]], ...] = (
    ("causal masks", re.compile(r"\.(?:attn|attention)\.(?:(?:masked_)?bias|causal_mask)$"), (0, 2, 3, 4)),
    ("rotary tables", re.compile(r"\.rotary_emb\.(?:inv_freq|(?:cos|sin)_cached)$|\.embed_positions$"), (1, 2, 3, 4)),
    ("position numbers", re.compile(r"(?:^|\.)position_ids$"), (1, 2)),
)
# Fields that say how many parts are built, and a number that no real model reaches; a size in such a part, as
# `vocab_size_per_layer_input` of Gemma 3n, is none
COUNTS, COUNT_LIMIT = re.compile(r"^(?!.*(?:size|dim|vocab|length)).*(?:layer|depth|blocks|experts)"), 4096
EXPERT_LIMIT = 1 << 14  # of Doge, whose experts are rows of an embedding
# Fields whose value is one number, flag or name
SCALARS = re.compile(r"_(?:act|function|bias|type|eps|embeddings|theta)$")


def is_buffer(name: str, rank: int) -> bool:
    """Whether a value of a state dict looks like a buffer that models compute; `rank`: -1 if it is no tensor."""
    return bool(DROPPED.search(name)) or any(sign.search(name) and rank in ranks for _, sign, ranks in BUFFERS)


def as_loaded(tensors: dict[str, LazyTensor], config: dict[str, Any]) -> dict[str, Any]:
    """Removes, in place, the tensors that transformers ignores, but for MTP heads; returns the config, which may tie.

    Its output head is tied where that is the default of the class.
    """
    plan, heads = (
        blueprints.blueprint(config) if depth_is_possible(tensors, config) else None,
        mtp_tensors(tensors, config),
    )
    for name in [name for name in tensors.keys() - {*heads} if plan and plan.ignores(name)]:
        del tensors[name]
    ties = plan.tied if plan else model_names(str(config.get("model_type"))).tied
    return {**config, "tie_word_embeddings": True} if ties and "tie_word_embeddings" not in config else config


def check_complete(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str]:
    """Checks that the tensors are exactly those of the causal language model of `config`, with its shapes.

    The blueprint knows most models; others are built by transformers on the meta device, which imports torch. Returns a
    warning where transformers cannot build the model and only rules were checked that hold for any model, and a note
    about tensors that transformers ignores, as those of MTP heads. Raises MalformedInput for wrong keys, shapes, or
    element types other than floats.
    """
    body, notes = _without_heads(tensors, config)
    return [*notes, *_checked(body, config, source)]


def _without_heads(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]
) -> tuple[Mapping[str, LazyTensor], list[str]]:
    """The tensors without those of MTP heads, and a note about these."""
    heads = set(mtp_tensors(tensors, config))
    if not heads:
        return tensors, []
    note = f"{len(heads)} tensors of the MTP head, which predicts further tokens, are kept as they are"
    return {name: tensor for name, tensor in tensors.items() if name not in heads}, [note]


def _checked(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str]:
    """As `check_complete`, of tensors without MTP heads."""
    refuse_unmerged(tensors, config, source)
    reason = "the configuration has an impossible number of layers or experts"
    if not config.get(AUTO_MAP) and not depth_is_possible(tensors, config):
        blueprints.check_layers(tensors, config, source)
        raise MalformedInput(f"{reason}: `{source}`", hint="correct the field in its configuration, or in `--config`")
    notes: list[str] = []
    try:
        if depth_is_possible(tensors, config):
            plan = blueprints.blueprint(config)
            ignored = [name for name in tensors if plan and plan.ignores(name)]
            notes = _passed_over(ignored)
            if plan and blueprints.compare(
                {name: tensors[name] for name in tensors if name not in {*ignored}}, plan, source
            ):
                return notes
            blueprints.check_sizes(config, source)
            found = _loaded(tensors, config, source)
            if not isinstance(found, str):
                return _refuse_differences(found, tensors, config, source)
            reason = found
    except MalformedInput:
        blueprints.check_layers(tensors, config, source)
        raise
    blueprints.check_rules(tensors, config, model_names(str(config.get("model_type"))), source)
    return [
        f"the names and shapes of the tensors in `{source}` were only checked by generic rules ({blueprints.RULES}): "
        f"{reason}"
    ]


def check_folder(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str]:
    """Checks that transformers opens a folder of these tensors as the model class in its `architectures`.

    Unlike `check_complete` it takes any class (a classifier, an embedding model, one with images) and tensors that the
    class does not have, which are kept. Returns a note about tensors that transformers ignores, and a warning where
    nothing was checked: the model has its own code, or is of another version of transformers. Raises MalformedInput for
    missing keys, wrong shapes, element types other than floats, or an unmerged adapter.
    """
    body, notes = _without_heads(tensors, config)
    return [*notes, *_checked_folder(body, config, source)]


def _checked_folder(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str]:
    """As `check_folder`, of tensors without MTP heads."""
    named = architecture(config)
    if named and str(config.get("model_type")) not in causal_lm_classes() and depth_is_possible(tensors, config):
        refuse_unmerged(tensors, config, source)
        asked = _loaded(tensors, config, source, named)  # a type without a causal class, such as an encoder
        if not isinstance(asked, str) and not config.get(AUTO_MAP):
            return _refuse_differences(asked, tensors, config, source, keeps_others=True)
    try:
        notes = [*_checked(tensors, config, source), *_without_vision(tensors, config, source)]
        return notes if (own := _with_vision(tensors, config, source)) is None else own
    except MalformedInput as why:
        if UNMERGED_SAYS in why.message or isinstance(why, TwoCopies):
            raise
        problem = why
    found = _loaded(tensors, config, source, architecture(config)) if depth_is_possible(tensors, config) else ""
    if found == "":
        raise problem
    if isinstance(found, str) or config.get(AUTO_MAP):
        reason = found if isinstance(found, str) else "it has code of its own"
        return [
            f"`{source}` may not be the model that its configuration describes, which is not known ({reason}): "
            f"{problem.message}"
        ]
    try:
        return _refuse_differences(found, tensors, config, source, keeps_others=True)
    except MalformedInput as why:
        of_causal = not isinstance(why, TwoCopies)
        if of_causal and architecture(config) == causal_lm_classes().get(str(config.get("model_type"))):
            raise problem from None
        raise


VISION = re.compile(r"vis|image|siglip|clip|vit", re.IGNORECASE)


def _without_vision(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str]:
    """A warning for the text part alone of a model with images, whose class transformers would fill at random."""
    named = architecture(config)
    if not (isinstance(config.get("vision_config"), Mapping) and named.endswith("ForConditionalGeneration")):
        return []
    if any(VISION.search(name) for name in tensors):
        return []
    return [
        f"`{source}` has no tensors of images, and its `architectures` names {named}, in which transformers fills them "
        "at random: a language model alone has the fields of `text_config` as its `config.json`"
    ]


def _with_vision(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> list[str] | None:
    """The notes on a model with images by its own class, where its type has one of language alone; else None.

    The latter finds its tensors under the names of either; raises MalformedInput for those that the former does not.
    """
    named, kind = architecture(config), str(config.get("model_type"))
    if named in ("", causal_lm_classes().get(kind)) or config.get(AUTO_MAP) or not any(map(VISION.search, tensors)):
        return None
    found = _loaded(tensors, config, source, named)
    return None if isinstance(found, str) else _refuse_differences(found, tensors, config, source, keeps_others=True)


def _passed_over(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} tensors that transformers does not load are kept: {listing(names)}"]


def _loaded(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str, class_name: str = ""
) -> LoadingGaps | str:
    """What transformers would report after loading, or why it builds no model; MalformedInput: impossible sizes."""
    if reason := why_not_built(config, class_name):
        return reason
    blueprints.check_sizes(config, source)
    from llmconv.convert.models.meta_model import NotBuildable, gaps_of, meta_model  # noqa: PLC0415 - torch

    try:
        return gaps_of(meta_model(config, class_name), {name: tensor.shape for name, tensor in tensors.items()})
    except NotBuildable as problem:
        return f"transformers cannot build the model ({problem})"


def why_not_built(config: Mapping[str, Any], class_name: str = "") -> str:
    """Why transformers is not asked to build a class (`""`: the causal one); empty if it may be."""
    kind = str(config.get("model_type"))
    if not class_name and kind not in causal_lm_classes():
        return f"the installed transformers has no causal language model of type `{kind[:80]}`"
    if odd := [name for name, value in config.items() if not _may_build(name, value)]:
        return f"`{odd[0]}` of the configuration is {kind_of(config[odd[0]])}"
    return ""


def _refuse_differences(
    gaps: LoadingGaps,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    source: str,
    *,
    keeps_others: bool = False,
) -> list[str]:
    """Refuses what transformers would report after loading, except what it passes over (and the unexpected)."""
    refuse_copies(gaps.copies, tensors, source)
    missing = [name for name in gaps.missing if not blueprints.COMPUTED.search(name)]
    unexpected = [] if keeps_others else gaps.unexpected
    blueprints.refuse_gaps(missing, unexpected, str(config.get("model_type")), source)
    blueprints.refuse_shapes(gaps.mismatched, source)
    blueprints.check_floats({name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}, source)
    notes = _passed_over(gaps.ignored)
    if keeps_others and gaps.unexpected:
        kind = architecture(config) or str(config.get("model_type"))
        notes.append(
            f"`{source}` contains {len(gaps.unexpected)} tensors that a {kind} does not have, which are kept: "
            f"{listing(gaps.unexpected)}"
        )
    return notes


def _may_build(name: str, value: Any) -> bool:
    """Whether a field has the kind of value that its name asks for."""
    is_part = isinstance(value, Mapping)
    if name.endswith(("layer_types", "layers_block_type")):
        return value is None or (isinstance(value, list) and all(isinstance(kind, str) for kind in value))
    if name in ("rope_scaling", "rope_parameters"):
        return value is None or is_part
    if name.endswith("_heads") and isinstance(value, int) and value > COUNT_LIMIT:
        return False
    if SCALARS.search(name):
        return value is None or isinstance(value, str | int | float)
    return not (is_part and name.endswith(("_size", "_dim"))) and (is_part or value is None or name != "text_config")


def may_be_built(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> bool:
    """Whether transformers may build the model of a config: its size is that of the tensors."""
    return depth_is_possible(tensors, config) and all(_may_build(name, value) for name, value in config.items())


def why_incomplete(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> str:
    """Why `check_complete` refuses these tensors; empty if they are the whole model."""
    try:
        check_complete(tensors, config, source)
    except MalformedInput as problem:
        return problem.message
    return ""


def depth_is_possible(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> bool:
    """Whether every number of layers is one, and no larger than that of the tensors; no other model is ever built."""
    for name, value in config.items():
        if isinstance(value, Mapping) and not depth_is_possible(tensors, value):
            return False
        if name in blueprints.LAYER_COUNTS and type(value) is not int and value is not None:
            return False
        most = EXPERT_LIMIT if "experts" in name else COUNT_LIMIT
        limit = (min if name in blueprints.LAYER_COUNTS else max)(len(tensors), most)
        if isinstance(value, int) and value > limit and COUNTS.search(name):
            return False
    return True
