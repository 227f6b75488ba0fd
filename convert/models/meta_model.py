"""The model that transformers itself builds from a `config.json`, on the meta device: names and shapes, no memory.

Only where the blueprint does not know a model, since torch takes seconds to import. Stored tensors are compared by
loading empty ones of their shapes, so that transformers' own conversion mapping renames, joins, and splits them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictConfig

from llmconv.convert.models.blueprint.blueprint import constructor_fields
from llmconv.convert.models.blueprint.torch_stand_ins import MODULE_LIMIT
from llmconv.errors import first_line
from llmconv.runtime.eager.stored_tensors import kept_in_float32

FETCHING = re.compile(r"^_|_implementation$|backbone|^auto_map$|^trust_remote_code$|^custom_pipelines$|name_or_path$")
"""Fields by which a configuration could have transformers load code or weights from elsewhere; never passed on."""

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


def loading_gaps(shapes: Mapping[str, Shape], config: Mapping[str, Any], class_name: str = "") -> LoadingGaps:
    """What transformers would report after loading tensors of these shapes; NotBuildable as `meta_model`."""
    return gaps_of(meta_model(config, class_name), shapes)


def float32_names(config: Mapping[str, Any], class_name: str, names: Iterable[str], dtype: str) -> frozenset[str]:
    """Stored names of tensors that are float32 in a model loaded in `dtype`; NotBuildable as `loading_gaps`."""
    model = meta_model(config, class_name, dtype)
    pattern, known = kept_in_float32(model, getattr(torch, dtype)), model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    try:
        new = {
            name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0] for name in names
        }
    except Exception as error:  # transformers promises no class of error
        raise NotBuildable(f"{type(error).__name__}: {first_line(error, 120)}") from error
    made = {name for name, tensor in known.items() if tensor.dtype == torch.float32}
    return frozenset(name for name, now in new.items() if now in made or (pattern and pattern.search(now)))


def gaps_of(model: Any, shapes: Mapping[str, Shape]) -> LoadingGaps:
    """What transformers would report after loading these shapes into a meta model; NotBuildable: a conversion fails."""
    mapping = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(dtype=torch.float32, device_map={"": "meta"}, weight_mapping=mapping)
    try:
        with quiet():
            stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            report, _ = convert_and_load_state_dict_in_model(model, stored, options)
            if report.conversion_errors:
                raise NotBuildable(first_line(next(iter(report.conversion_errors.values())), 120))
            unexpected = {*report.unexpected_keys}
            model._adjust_missing_and_unexpected_keys(report)
    except NotBuildable:
        raise
    except Exception as error:
        raise NotBuildable(f"{type(error).__name__}: {first_line(error, 120)}") from error
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair if not {*pair} <= report.missing_keys}
    mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in report.mismatched_keys}
    missing = [name for name in model.state_dict() if name in report.missing_keys - tied - mismatched.keys()]
    ignored = sorted(unexpected - {*report.unexpected_keys})
    return LoadingGaps(missing, sorted(report.unexpected_keys), mismatched, ignored)


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
    with quiet(), _bounded_building(), torch.device("meta"):
        try:
            yield
        except NotBuildable:
            raise
        except Exception as error:  # transformers and torch promise no class of error
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
