"""The tensors of a model by its config, as transformers would build them, without importing torch.

transformers' own constructors run with modules that record names and shapes in place of torch's, so every model type
of the installed transformers is known exactly, without a table to maintain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.convert.models.blueprint.names import causal_lm_classes, model_folder
from llmconv.convert.models.blueprint.torch_stand_ins import Buffer, Module, Tensor, Unreadable
from llmconv.convert.models.blueprint.transformers_source import (
    ConfigStandIn,
    PreTrainedModel,
    SourceFile,
    bounded,
    remap_layer_types,
    source,
)

Shape = tuple[int, ...] | None
"""None where only running the model's arithmetic would tell."""


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
        model = _modeling(name, folder)[name](settings)
        return _described(model, kind)
    except Exception:
        return None


def _modeling(name: str, folder: Path) -> SourceFile:
    """The source of the class `name`, which may be that of another model type."""
    kinds = [kind for kind, other in causal_lm_classes().items() if other == name]
    folders = [folder, *(found for kind in kinds if (found := model_folder(kind)))]
    sources = (source(found / f"modeling_{found.name}.py") for found in folders)
    return next(found for found in sources if name in found.classes)


def constructor_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` for the constructor of its class, with no number larger than `LARGEST`."""
    left_out = ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "quantization_config")
    fields = {name: value for name, value in config.items() if name not in left_out}
    return dict(bounded(fields))


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
    shared = _same_objects(tensors)
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


def _same_objects(tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {name: groups[id(tensor)] for name, tensor in tensors.items()}


def _tie(module: PreTrainedModel, prefix: str, tensors: Mapping[str, Tensor], shared: dict[str, set[str]]) -> None:
    """Adds what `_tied_weights_keys` (patterns) ties where the config ties (`get_expanded_tied_weights_keys`)."""
    pairs = module._tied_weights_keys
    if not isinstance(pairs, dict) or not getattr(module.config, "tie_word_embeddings", False):
        return
    own = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    for target, origin in pairs.items():
        targets = [name for name in own if re.search(f"^{target}", name)]
        origins = [name for name in own if re.search(f"^{origin}", name)]
        many = zip(targets, origins * (len(targets) // max(1, len(origins))), strict=False)
        for one, other in many:
            shared[prefix + one] = shared[prefix + one] | shared[prefix + other] | {prefix + other}
