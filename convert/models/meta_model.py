"""The model that transformers itself builds from a `config.json`, on the meta device: names and shapes, no memory.

Only where the blueprint does not know a model, or adapters have its names in memory, since torch takes seconds to
import. Stored tensors are compared by loading empty ones of their shapes, so that transformers' own conversion mapping
renames, stacks, joins, splits, permutes and transposes them; it saves them under the old names again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, core_model_loading, logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llmconv.convert.algebra import Lines, Origin
from llmconv.convert.models.blueprint import constructor_fields
from llmconv.convert.models.torch_stand_ins import MODULE_LIMIT
from llmconv.errors import first_line
from llmconv.runtime.eager.stored_tensors import copies_of, kept_in_float32

# Fields by which a configuration could have transformers load code or weights from elsewhere; never passed on
FETCHING = re.compile(r"^_|_implementation$|backbone|^auto_map$|^trust_remote_code$|^custom_pipelines$|name_or_path$")
CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]{1,100}", re.ASCII)

Shape = tuple[int, ...]


class NotBuildable(Exception):
    """transformers cannot build the model, or cannot load tensors into it; the message is the reason."""


@dataclass(frozen=True)
class LoadingGaps:
    """The differences between stored tensors and a model, by the model's names."""

    missing: list[str]  # parameters and persistent buffers that no stored tensor fills
    unexpected: list[str]  # stored tensors that the model does not have
    mismatched: dict[str, tuple[Shape, Shape]]  # name to the stored shape and the model's
    ignored: list[str]  # stored tensors that the model does not have, and that its class ignores
    copies: Mapping[str, str] = field(default_factory=dict)  # stored tensor to another that fills the same one


def meta_model(config: Mapping[str, Any], class_name: str = "", dtype: str = "float32") -> Any:
    """The model of `config` as transformers builds it, on the meta device; by default the causal language model.

    `dtype` is that of the parameters, except those that the class makes in float32. Raises NotBuildable if transformers
    refuses the config or has no such class, or the model has far more modules than any real one.
    """
    if class_name:
        return model_of_class(config, class_name, dtype)
    fields = without_fetching(constructor_fields(config))
    with building():
        settings = AutoConfig.for_model(str(config.get("model_type")), **fields)
        return AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=getattr(torch, dtype))


def code_model(config_class: Any, model_class: Any, config: Mapping[str, Any]) -> Any:
    """The model of a folder's own code on the meta device; NotBuildable if it fails, or has far too many modules."""
    fields = {name: value for name, value in without_fetching(dict(config)).items() if name != "model_type"}
    with building(), meta_device_safe_creation_ops():
        return model_class._from_config(config_class(**fields), attn_implementation="eager", dtype=torch.float32)


def float32_names(config: Mapping[str, Any], class_name: str, names: Iterable[str], dtype: str) -> frozenset[str]:
    """Stored names of tensors that are float32 in a model loaded in `dtype`; NotBuildable as `meta_model`."""
    model = meta_model(config, class_name, dtype)
    pattern, known = kept_in_float32(model, getattr(torch, dtype)), model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, core_model_loading.WeightConverter)]
    with _failing():
        new = {
            name: core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0]
            for name in names
        }
    made = {name for name, tensor in known.items() if tensor.dtype == torch.float32}
    return frozenset(name for name, now in new.items() if now in made or (pattern and pattern.search(now)))


def gaps_of(model: Any, shapes: Mapping[str, Shape]) -> LoadingGaps:
    """What transformers would report after loading these shapes into a meta model; NotBuildable: a conversion fails."""
    mapping = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(dtype=torch.float32, device_map={"": "meta"}, weight_mapping=mapping)
    with _failing(), quiet():
        copies = copies_of(model, shapes)
        stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in copies}
        report, _ = core_model_loading.convert_and_load_state_dict_in_model(model, stored, options)
        if report.conversion_errors:
            raise NotBuildable(first_line(next(iter(report.conversion_errors.values())), 120))
        unexpected = {*report.unexpected_keys}
        model._adjust_missing_and_unexpected_keys(report)
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair if not {*pair} <= report.missing_keys}
    mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in report.mismatched_keys}
    missing = [name for name in model.state_dict() if name in report.missing_keys - tied - mismatched.keys()]
    ignored = sorted(unexpected - {*report.unexpected_keys})
    return LoadingGaps(missing, sorted(report.unexpected_keys), mismatched, ignored, copies)


def model_of_class(config: Mapping[str, Any], name: str, dtype: str = "float32") -> Any:
    """A model of one of transformers' own classes, on the meta device; `dtype` as in `meta_model`.

    Of a model with several towers, a class of its language model takes that part of the config. Raises NotBuildable if
    the class does not exist, or refuses the config.
    """
    fields = without_fetching(constructor_fields(config))
    with building():
        kind: Any = getattr(transformers, name, None) if CLASS_NAME.fullmatch(name) else None
        is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        if not is_model:
            raise NotBuildable(f"transformers has no model `{name}`")
        settings = AutoConfig.for_model(str(config.get("model_type")), **fields)
        part = settings.get_text_config()
        if kind.config_class and isinstance(part, kind.config_class):
            settings = part
        with meta_device_safe_creation_ops():
            return kind._from_config(settings, attn_implementation="eager", dtype=getattr(torch, dtype))


def without_fetching(value: Any) -> Any:
    """A value without `FETCHING`; transformers writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: without_fetching(item) for name, item in value.items() if not FETCHING.search(name)}
    return [without_fetching(item) for item in value] if isinstance(value, list) else value


@contextmanager
def building() -> Iterator[None]:
    """On the meta device, quietly, and with a bound; any exception is a `NotBuildable`."""
    with quiet(), _bounded_building(), torch.device("meta"), _failing():
        yield


@contextmanager
def _failing() -> Iterator[None]:
    """Any exception is a `NotBuildable`: transformers and torch promise no class of error."""
    try:
        yield
    except NotBuildable:
        raise
    except Exception as error:
        raise NotBuildable(f"{type(error).__name__}: {first_line(error, 120)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and advice on stderr, which are about loading a model for use."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _bounded_building() -> Iterator[None]:
    """Ends the building of a model whose configuration asks for an absurd number of modules."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > 2 * MODULE_LIMIT:  # a module, or a parameter
            raise NotBuildable("more modules than any model has")

    hooks = [
        torch_module.register_module_module_registration_hook(counted),
        torch_module.register_module_parameter_registration_hook(counted),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Joint:
    """Tensors of a model in memory that together have the lines of some stored ones."""

    # name of each stored tensor to the location of its lines in `origins`, whose order is that of the sources
    stored: Mapping[str, Origin]
    origins: Mapping[str, Origin]  # name in memory to the location of its lines in the stored tensors


class NamesInMemory:
    """The names of a model in memory, as its class loads some stored tensors."""

    def __init__(self, shapes: Mapping[str, Shape], config: Mapping[str, Any], class_name: str) -> None:
        """Finds the names for stored tensors of these shapes; NotBuildable if transformers cannot build the model."""
        self._model = model_of_class(config, class_name)
        self._stored = shapes
        self.shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        self.shared: Mapping[str, str] = self._model.all_tied_weights_keys  # name in memory to that it is tied to
        # stored name to the name in memory: of tensors that are only renamed, and (the first of the stack) of experts
        self.renamed: dict[str, str] = {}
        self.parts: dict[str, str] = {}
        self._sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._rules: dict[str, Any] = {}
        self._joints: dict[str, Joint] = {}
        renamings, self._converters = _kinds(get_model_conversion_mapping(self._model))
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        for name in sorted(shapes, key=core_model_loading.dot_natural_key):
            self._find(name, renamings)
        self._spellings, _ = _kinds(get_model_conversion_mapping(self._model))  # apart: rules note their use
        self._back = [rule.reverse_transform() for rule in renamings[::-1] if rule.was_used()]
        pairs = (
            (key, rule.target_patterns, each) for key, rule in self._rules.items() for each in rule.target_patterns
        )
        self._keys = {key.replace(patterns[0], target): key for key, patterns, target in pairs}

    def _find(self, name: str, renamings: list[Any]) -> None:
        """Notes where transformers puts one stored tensor."""
        prefix, there = self._model.base_model_prefix, self.shapes
        new, pattern = core_model_loading.rename_source_key(name, renamings, self._converters, prefix, there)
        if new not in there and name in there:
            new, pattern = core_model_loading.rename_source_key(name, [], [], prefix, there)
        if new not in there:
            return
        rule = self._by_pattern.get(str(pattern))
        if rule is None or all(
            isinstance(each, core_model_loading.Transpose) and each.check_dims for each in rule.operations
        ):
            self.renamed[name] = new  # a stack of experts in either order, which its shape tells
            return
        self._sources[new][str(pattern)].append(name)
        self._rules[new] = rule
        self.parts[name] = core_model_loading.apply_renamings(name, renamings)

    def spelled(self, name: str) -> str:
        """The name in memory of what an adapter of another version of transformers calls `name`."""
        if name in self.shapes:
            return name
        prefix = self._model.base_model_prefix
        return str(core_model_loading.rename_source_key(name, self._spellings, [], prefix, self.shapes)[0])

    def stored_name(self, name: str) -> str:
        """The name under which transformers stores a tensor that the files do not have yet."""
        return str(core_model_loading.apply_renamings(name, self._back))

    def stack(self, name: str) -> tuple[tuple[str, ...], ...] | None:
        """The stored matrices of each expert, joined by rows, that `name` stacks; None if it is made in another way."""
        if (key := self._keys.get(name)) is None:
            return None
        rule, groups = self._rules[key], self._sources[key]
        steps = [(type(each), getattr(each, "dim", None)) for each in rule.operations]
        joined = [(core_model_loading.MergeModulelist, 0), (core_model_loading.Concatenate, 1)]
        if steps != joined[: 1 + (len(rule.source_patterns) > 1)]:
            return None
        parts = [groups.get(pattern, []) for pattern in rule.source_patterns]
        return tuple(zip(*parts, strict=True)) if len({len(each) for each in parts}) == 1 else None

    def joint(self, name: str) -> Joint | None:
        """What one tensor in memory consists of; None: a stored one. NotBuildable: more than whole lines are moved."""
        if (key := self._keys.get(name)) is None:
            return None
        if key not in self._joints:
            with _failing():
                self._joints[key] = self._converted(key)
        return self._joints[key]

    def _converted(self, key: str) -> Joint:
        """Has transformers convert the numbers of the lines in place of the values."""
        rule, names = deepcopy(self._rules[key]), [name for group in self._sources[key].values() for name in group]
        layouts = [Lines(self._stored[name]) for name in names]
        starts = np.cumsum([0, *(each.count for each in layouts)])
        numbers = {name: _numbered(*pair) for name, *pair in zip(names, layouts, starts.tolist(), strict=False)}
        for pattern, group in self._sources[key].items():
            for name in group:
                rule.add_tensor(key, name, pattern, numbers[name])
        with quiet():
            made = rule.convert(key, model=self._model, config=self._model.config)
        origins = {name: self._origin(name, value, names, starts) for name, value in made.items()}
        # the location of the stored tensors' lines in those in memory; NotBuildable if a line is in none of them
        result = {}
        for number, (name, layout) in enumerate(zip(names, layouts, strict=True)):
            owner, line = (np.full(layout.count, -1, np.int64) for _ in range(2))
            for place, origin in enumerate(origins.values()):
                mine = np.flatnonzero(origin.owner == number)
                owner[origin.line[mine]], line[origin.line[mine]] = place, mine
            if (owner < 0).any():
                raise NotBuildable(f"`{name}` is only partly in the model")
            result[name] = Origin(layout, tuple(origins), owner, line)
        return Joint(result, origins)

    def _origin(self, name: str, made: Any, names: list[str], starts: Any) -> Origin:
        made = made[0] if isinstance(made, list) else made
        shape, found = self.shapes[name], tuple(made.shape)
        if len(shape) == 1 or found == (*shape[:-1], 1) or (len(shape) > 3 and found == (shape[0], 1)):
            lines = Lines(shape)
        elif found == (*shape[:-2], 1, shape[-1]):
            lines = Lines(shape, swapped=True)
        else:
            raise NotBuildable(f"`{name}` is made of more than whole lines")
        flat = made.reshape(-1).numpy()
        owner = np.searchsorted(starts, flat, side="right") - 1
        return Origin(lines, tuple(names), owner, flat - starts[owner])


def _kinds(rules: list[Any]) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters of a mapping, which transformers applies in this order."""
    return (
        [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)],
        [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)],
    )


def _numbered(lines: Lines, start: int) -> Any:
    """The numbers of a tensor's lines from `start`, in its shape but for the last dimension, which is 1."""
    shape = lines.shape if len(lines.shape) == 1 else (*lines.shape[:-1], 1)
    shape = (lines.shape[0], 1) if len(lines.shape) > 3 else shape
    return torch.arange(start, start + lines.count).reshape(shape)


def classes(config: Mapping[str, Any], others: Collection[str]) -> list[str]:
    """Names of the classes of transformers that an adapter's model may have: that of the files first, then `others`."""
    own, kind = config.get("architectures"), str(config.get("model_type"))
    tables = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = [*(own if isinstance(own, list) else ()), *others, *(table.get(kind) for table in tables)]
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and name.isidentifier()))
