"""The tensors of a model by its config, as transformers would build them, without importing torch; and what differs.

transformers' own constructors run with modules that record names and shapes in place of torch's, so every model type of
the installed transformers is known exactly, without a table to maintain. Tensors of other versions are renamed by the
tables in transformers `conversion_mapping.py`, by which it renames and joins what it loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from llmconv.checkpoint import HEADS, NO_HEAD, refuse_copies
from llmconv.convert.algebra import require, reshaped, slice_rows
from llmconv.convert.models.torch_stand_ins import Buffer, Module, Tensor, Unreadable
from llmconv.convert.models.transformers_source import (
    EMBEDDINGS,
    STAND_INS,
    ConfigStandIn,
    ModelNames,
    PreTrainedModel,
    SourceFile,
    bounded,
    causal_lm_classes,
    model_folder,
    remap_layer_types,
    source,
    transformers_folder,
)
from llmconv.errors import MalformedInput, listing, short
from llmconv.tensors import FLOATS, LazyTensor

Shape = tuple[int, ...] | None  # none where only running the model's arithmetic would tell


@dataclass(frozen=True)
class Blueprint:
    """The tensors of a model."""

    class_name: str  # transformers' class, such as `LlamaForCausalLM`
    model_type: str
    shapes: Mapping[str, Shape]  # name to shape of everything in its state dict
    buffers: frozenset[str]  # those that are not trained, of any dtype
    # name to the names that may replace it: of the tensor it is tied to, or of the same object
    shared: Mapping[str, frozenset[str]]
    ignored: tuple[re.Pattern[str], ...]  # patterns of names that transformers ignores when it loads
    tied: bool  # whether the config, or else the class, ties the head to the embedding

    def ignores(self, name: str) -> bool:
        """Whether transformers passes over a tensor of this name."""
        return name not in self.shapes and any(pattern.search(name) for pattern in self.ignored)


def blueprint(config: Mapping[str, Any]) -> Blueprint | None:
    """The tensors of the model of `config` (which may tie the head), or None if transformers' source does not tell."""
    try:
        return _blueprint(json.dumps(config, sort_keys=True))
    except (TypeError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=4)
def _blueprint(text: str) -> Blueprint | None:
    config = json.loads(text)
    kind = str(config.get("model_type"))
    name, folder = causal_lm_classes().get(kind), model_folder(kind)
    if name is None or folder is None:
        return None
    Module.count = 0
    try:
        settings = _config_class(source(folder / f"configuration_{folder.name}.py"), kind)(**constructor_fields(config))
        remap_layer_types(config=settings)
        # the source of the class `name`, which may be that of another model type
        kinds = [kind for kind, other in causal_lm_classes().items() if other == name]
        folders = [folder, *(found for kind in kinds if (found := model_folder(kind)))]
        sources = (source(found / f"modeling_{found.name}.py") for found in folders)
        model = next(found for found in sources if name in found.classes)[name](settings)
        return _described(model, kind)
    except Exception:
        return None


def constructor_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` for the constructor of its class, with no number larger than `LARGEST`."""
    left_out = ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "quantization_config")
    return dict(bounded({name: value for name, value in config.items() if name not in left_out}))


def _config_class(configuration: SourceFile, kind: str) -> type[ConfigStandIn]:
    for name in configuration.classes:
        found = configuration[name]
        if isinstance(found, type) and issubclass(found, ConfigStandIn) and found.__dict__.get("model_type") == kind:
            return found
    raise Unreadable(f"no configuration of `{kind}`")


def _described(model: Any, kind: str) -> Blueprint:
    if not isinstance(model, PreTrainedModel):
        raise Unreadable("not a model")
    tensors = dict(model.named_tensors())
    groups: dict[int, set[str]] = {}  # names of the same object
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    shared = {name: groups[id(tensor)] for name, tensor in tensors.items()}
    ignored: dict[str, None] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            ignored |= dict.fromkeys(module._keys_to_ignore_on_load_unexpected or ())
            _tie(module, prefix, tensors, shared)
    shared = {name: set().union(others, *(shared[other] for other in others)) for name, others in shared.items()}
    return Blueprint(
        type(model).__name__,
        kind,
        {name: tensor.shape for name, tensor in tensors.items()},
        frozenset(name for name, tensor in tensors.items() if isinstance(tensor, Buffer)),
        {name: frozenset(others - {name}) for name, others in shared.items() if others - {name}},
        tuple(re.compile(pattern) for pattern in ignored),
        bool(getattr(model.config, "tie_word_embeddings", False)),
    )


def _tie(module: PreTrainedModel, prefix: str, tensors: Mapping[str, Tensor], shared: dict[str, set[str]]) -> None:
    """Adds what `_tied_weights_keys` (patterns) ties where the config ties (`get_expanded_tied_weights_keys`)."""
    pairs = module._tied_weights_keys
    if not isinstance(pairs, dict) or not getattr(module.config, "tie_word_embeddings", False):
        return
    own = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    for target, origin in pairs.items():
        targets = [name for name in own if re.search(f"^{target}", name)]
        origins = [name for name in own if re.search(f"^{origin}", name)]
        for one, other in zip(targets, origins * (len(targets) // max(1, len(origins))), strict=False):
            shared[prefix + one] = shared[prefix + one] | shared[prefix + other] | {prefix + other}


EXPERT_LIMIT = 1 << 16


class Renaming:
    """One tensor under another name: what matches one of the sources becomes the target."""

    def __init__(self, source_patterns: Any, target_patterns: Any) -> None:
        self.source_patterns, self.target_patterns = _listed(source_patterns), _listed(target_patterns)

    def new_name(self, name: str) -> str:
        """`name` as this rule changes it, if it does."""
        for pattern in self.source_patterns:
            end = r"(?!\w)" if pattern[-1:].isalnum() else ""
            if match := re.search(pattern + end, name):
                first = match[1] if match.re.groups else ""
                return name.replace(match[0], _plain(self.target_patterns[0]).replace(r"\1", first or ""), 1)
        return name

    def old_name(self, name: str) -> str:
        """The name that this rule makes `name` of; `name` itself where that is not known."""
        before, after = _plain(self.source_patterns[0]), _plain(self.target_patterns[0])
        old = name.replace(after, before, 1)
        return old if self.new_name(old) == name else name


class PrefixChange(Renaming):
    """A part of every name that is added, where it is not there yet, or taken away."""

    def __init__(self, prefix_to_add: Any = None, prefix_to_remove: Any = None, model_prefix: Any = None) -> None:
        start = rf"{model_prefix}\." if model_prefix else ""
        if prefix_to_add is not None:
            super().__init__(rf"^{start}(?!{prefix_to_add}\.)(.+)", rf"{start}{prefix_to_add}\.\1")
        else:
            super().__init__(rf"^{start}{prefix_to_remove}\.(.+)", rf"{start}\1")


class Converter(Renaming):
    """Several tensors that are joined into one, or one that is split."""

    def __init__(self, source_patterns: Any, target_patterns: Any, operations: Any = (), **kwargs: Any) -> None:
        super().__init__(source_patterns, target_patterns)
        self.steps = [(type(one).__name__, getattr(one, "dim", None)) for one in operations]

    @property
    def stacks_experts(self) -> bool:
        """Whether it stacks one matrix per expert, after joining the rows of several of the same expert."""
        joined = [("MergeModulelist", 0), ("Concatenate", 1)]
        return self.steps == joined[: 1 + (len(self.source_patterns) > 1)] and len(self.target_patterns) == 1


class MergeModulelist:
    """Stacks tensors in a new dimension."""

    def __init__(self, dim: int = 0, **kwargs: Any) -> None:
        self.dim = dim


class Concatenate(MergeModulelist):
    """Joins tensors along a dimension."""


STAND_INS |= {
    "PrefixChange": PrefixChange,
    "WeightRenaming": Renaming,
    "WeightConverter": Converter,
    "MergeModulelist": MergeModulelist,
    "Concatenate": Concatenate,
}


def _plain(pattern: str) -> str:
    """The text that a pattern of names stands for."""
    return re.sub(r"\\(?=[.])|[$^]|\(\?.*?\)", "", pattern)


def _listed(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else [str(one) for one in patterns]


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    """transformers' table of rules by model type or class; empty where its source cannot be run."""
    root = transformers_folder()
    try:
        table = source(root / "conversion_mapping.py")["_build_checkpoint_conversion_mapping"]() if root else {}
    except Exception:
        return {}
    return table if isinstance(table, dict) else {}


def conversions(class_name: str, model_type: str) -> list[Any] | None:
    """The rules for a model, in order, those of its class where it has some; None where the table cannot be read."""
    found = _table().get(class_name) or _table().get(model_type)
    return (found if isinstance(found, list) else []) if _table() else None


def is_known(rule: object) -> bool:
    """Whether a rule only renames, or stacks experts; any other needs transformers itself."""
    return type(rule) in (Renaming, PrefixChange) or (isinstance(rule, Converter) and rule.stacks_experts)


def experts(name: str, shape: Shape, rules: list[Any]) -> dict[str, Shape]:
    """Name to shape of the single experts' tensors in a stacked one (experts first); empty if there are none."""
    for rule in rules:
        is_stack = isinstance(rule, Converter) and rule.stacks_experts
        if shape and is_stack and name.endswith(target := _plain(rule.target_patterns[0])):
            start, sources = name.removesuffix(target), [_plain(one) for one in rule.source_patterns]
            part = (shape[1] // len(sources), *shape[2:])
            numbers = map(str, range(min(shape[0], EXPERT_LIMIT)))
            return {start + one.replace("*", number): part for number in numbers for one in sources}
    return {}


def released(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> Mapping[str, LazyTensor]:
    """The tensors under the names of released files, where stacks of experts have those of a model in memory.

    So transformers 5 saves with `save_original_format=False`, and so a trainer's `state_dict` is. Each expert becomes a
    tensor of its own, as transformers' `revert_weight_conversion` does; other tensors are only renamed. They stay as
    they are without such stacks, where a rule does more than stack and rename, or where two would have one name.
    """
    kind = str(config.get("model_type"))
    deep = {name: one.shape for name, one in tensors.items() if len(one.shape) == 3}
    rules = (conversions(causal_lm_classes().get(kind, ""), kind) or []) if deep else []
    stacks = {name: parts for name, shape in deep.items() if (parts := experts(name, shape, rules))}
    if not stacks or not all(is_known(rule) for rule in rules):
        return tensors
    found: list[tuple[str, LazyTensor]] = []
    for name, tensor in tensors.items():
        if name not in stacks:
            found.append((name, tensor))
            continue
        count, rows, columns = tensor.shape
        matrix, row = reshaped(tensor, (count * rows, columns)), 0
        for part, shape in stacks[name].items():
            height = shape[0] if shape else 0
            found.append((part, slice_rows(matrix, row, row + height)))
            row += height
    for rule in (rule for rule in reversed(rules) if type(rule) is Renaming):
        found = [(rule.old_name(name), tensor) for name, tensor in found]
    by_name = dict(found)
    return by_name if len(by_name) == len(found) else tensors


COMPUTED = re.compile(  # buffers that a state dict may have or not
    r"\.(?:attn|attention|self_attn)\.(?:(?:masked_)?bias|causal_mask)$"
    r"|inv_freq$|(?:cos|sin)_cached$|\.embed_positions$|(?:^|\.)(?:position_ids|token_type_ids)$"
)

ANOTHER = "the configuration is of another model; give the right one with `--config`"
NOT_GATHERED = "the run sharded it and saved it without gathering it (ZeRO-3, FSDP); convert the run's own checkpoint"
PARTIAL = "the checkpoint is partial, or the configuration is of another model"


def compare(tensors: Mapping[str, LazyTensor], plan: Blueprint, source: str) -> bool:
    """Compares names (of any transformers version), shapes, and element types with the blueprint's.

    Returns whether everything could be compared: True means that this is the whole model and nothing else. Raises
    MalformedInput for missing or unexpected keys, another shape, or an element type that is not a float.
    """
    names, shapes = dict(zip(tensors, tensors, strict=True)), dict(plan.shapes)
    missing, unexpected = _gaps(names.values(), plan, shapes)
    if missing or unexpected:
        if (rules := conversions(plan.class_name, plan.model_type)) is None:
            return False
        # stored name to that in the installed transformers; names in `known` stay. `rules` are from `conversions`
        for rule in (rule for rule in rules if type(rule) in (Renaming, PrefixChange)):
            names = {name: now if name in shapes else rule.new_name(now) for name, now in names.items()}
        # a stacked tensor's parts in its place, where it is not there itself
        there, stored = set(names.values()), dict[str, Shape]()
        for name, shape in shapes.items():
            stored |= (name not in there and experts(name, shape, rules)) or {name: shape}
        shapes = stored
        missing, unexpected = _gaps(names.values(), plan, shapes)
        refuse_copies(_stacked_too(unexpected, names, shapes, rules), tensors, source)
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


def _stacked_too(
    unexpected: Iterable[str], names: Mapping[str, str], shapes: Mapping[str, Shape], rules: list[Any]
) -> dict[str, str]:
    """Stored experts of a stack that is also there, with its stored name; `names`: stored name to that in memory."""
    stored = {now: name for name, now in names.items()}
    parts = {part: stored.get(name) for name, shape in shapes.items() for part in experts(name, shape, rules)}
    return {stored[name]: stack for name in unexpected if (stack := parts.get(name))}


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
            hint=NO_HEAD,
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


MLLAMA_ROWS = 8  # of the embedding after the vocabulary (`MllamaTextModel`)


def _shape_hint(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    if is_ungathered(found, wanted):
        return NOT_GATHERED
    if name.endswith(EMBEDDINGS) and len(found) == 2 and [found[0] + MLLAMA_ROWS, found[1]] == [*wanted]:
        return (
            f"`resize_token_embeddings` drops the {MLLAMA_ROWS} rows that a mllama's embedding has after its words, "
            f"and transformers cannot load it either; copy its rows into one of {wanted[0]}, and save the model again"
        )
    if name.endswith((*EMBEDDINGS, *HEADS)) and len(found) == len(wanted) == 2 and found[1] == wanted[1]:
        return other_rows(found[0], wanted[0])
    return ANOTHER


def is_ungathered(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is that of nothing, or of a part of FSDP's flat parameter, in the place of a matrix."""
    return 0 in found or len(found) == 1 < len(wanted)


def other_rows(found: int, wanted: int) -> str:
    """The hint for an embedding or a head with more or fewer rows than `vocab_size`."""
    to_keep = f'`llmconv to-hf FOLDER --config FILE -o OUT` with FILE of `{{"vocab_size": {found}}}`'
    if found < wanted:
        return (
            f"{wanted - found} rows fewer than `vocab_size`: the configuration is from before the vocabulary was cut, "
            f"or files of ranks are missing; if the rows are all, {to_keep}"
        )
    return (
        f"{found - wanted} rows more than `vocab_size`: added tokens, or padding (Megatron's), which is better saved "
        f"without; to keep all rows, {to_keep}"
    )


def refuse_shapes(wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], source: str) -> None:
    """Raises MalformedInput, which lists names with the actual and the expected shape, if there are any."""
    if wrong:
        name, (found, wanted) = next(iter(wrong.items()))
        raise MalformedInput(
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration; shape mismatch for "
            f"`{name}`: expected {list(wanted)}, got {list(found)}",
            hint=_shape_hint(name, found, wanted),
        )


def check_floats(tensors: Mapping[str, LazyTensor], source: str) -> None:
    """Refuses (MalformedInput) weights that are not floats of 16 bits or more: they are quantized, or not weights."""
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    if odd := [f"{name} ({kind})" for name, kind in kinds.items() if kind not in (*FLOATS, "float64")]:
        raise MalformedInput(
            f"`{source}` has {len(odd)} weights that are not floats: {listing(odd)}",
            hint="give the weights from before quantization",
        )


# What `check_rules` looks at, for a message
RULES = "number of layers, the same tensors in each, embedding, last norm, output head"
LAYER = re.compile(r"\.(\d+)\.")
DIGITS = 9  # no model has layers with longer numbers; the first digits show that already
LACKING_LIMIT = 1000  # maximum number of missing names that are collected for a message
UNEVEN_FIELDS = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "layers_block_type", "moe_layers")
# Configuration fields of models whose layers do not all have the same weights
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_type_list")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
# Fields of models whose embedding is not as wide as the model
OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size", "embedding_dim")
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
            f"`{source}` has {len(layers)} layers, its configuration says {short(wanted)}",
            hint="the configuration is of another model, or the checkpoint is partial",
        )
    return layers


def check_rules(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], model: ModelNames, source: str) -> None:
    """Checks sizes, equal layers, embedding, last norm, head, floats; MalformedInput if one is not the model's."""
    layers = check_layers(tensors, config, source)
    check_sizes(config, source)
    every = set[str]().union(*layers.values())
    uneven = (f"{number}.{rest}" for number, found in layers.items() for rest in every - found)
    kinds = [value for field in KINDS_OF_LAYERS if isinstance(value := config.get(field), list)]
    has_kinds = any(field in config for field in UNEVEN_FIELDS) or any(value[1:] != value[:-1] for value in kinds)
    if lacking := [] if has_kinds else sorted(islice(uneven, LACKING_LIMIT)):
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
    if config.get("tie_word_embeddings") is False and not any(head in tensors for head in (*HEADS, model.head)):
        raise MalformedInput(
            f"`{source}` has no output head, and its configuration does not tie it to the embedding",
            hint=NO_HEAD,
        )
    check_floats({name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}, source)


def check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Refuses (MalformedInput) sizes in a config that are not positive numbers; `source` names the file in messages."""
    sizes = {
        name: config[name] if isinstance(config[name], list) else [config[name]] for name in SIZES if name in config
    }
    odd = [name for name, ones in sizes.items() if not all(type(one) is int and one > 0 for one in ones)]
    if odd := [f"{name} {short(config[name])}" for name in odd]:
        raise MalformedInput(
            f"the configuration of `{source}` has sizes that are not positive numbers: {listing(odd)}",
            hint="give the model's own `config.json` with `--config`",
        )


def _check_embedding(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    embedding = next((tensors[name] for name in tensors if name.endswith(EMBEDDINGS)), None)
    vocabulary = config.get("vocab_size")
    if embedding is not None and vocabulary is not None and embedding.shape[:1] != (vocabulary,):
        raise MalformedInput(
            f"the embedding in `{source}` has {list(embedding.shape)[:1]} rows, `vocab_size` is {vocabulary}",
            hint=NOT_GATHERED if 0 in embedding.shape else ANOTHER,
        )
    width = next((config[field] for field in WIDTHS if type(config.get(field)) is int), None)
    if any(config.get(field) for field in OTHER_WIDTHS) or embedding is None or width is None:
        return
    if embedding.shape[1:] != (width,):
        raise MalformedInput(
            f"the embedding in `{source}` has the shape {list(embedding.shape)}, the model's width is {width}",
            hint=ANOTHER,
        )
