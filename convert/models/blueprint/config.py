"""Stand-in for transformers' PreTrainedConfig: fields with defaults, other names for them, `__post_init__`.

Source: transformers `configuration_utils.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

LARGEST = 1 << 24
"""No size of a model is larger; a list of that many items would still be built in a moment."""

CLASS_FIELDS = ("attribute_map", "sub_configs", "sub_configs_defaults", "model_type")
HOOKS = ("validate", "convert", "standardize", "remap", "_validate", "_convert")


class ConfigStandIn:
    """A configuration, without the checks of rotary settings, on which no shape depends."""

    attribute_map: dict[str, str] = {}
    is_encoder_decoder = False
    add_cross_attention = False
    chunk_size_feed_forward = 0
    output_attentions = False
    output_hidden_states = False
    use_cache = True
    return_dict = True
    num_labels = 2
    id2label = None
    label2id = None
    dtype = None
    default_theta = 10_000.0
    pruned_heads: dict[Any, Any] = {}
    _attn_implementation = "eager"
    _experts_implementation = "eager"
    _name_or_path = ""

    def __init__(self, **given: Any) -> None:
        fields = self._fields()
        for name, default in fields.items():
            setattr(self, name, copy.deepcopy(given.get(name, default)))
        self.__post_init__(**{name: value for name, value in given.items() if name not in fields})

    def __post_init__(self, **rest: Any) -> None:
        if hasattr(self, "rope_parameters"):
            rest = self.convert_rope_params_to_dict(**rest)
        for name, value in rest.items():
            if not isinstance(getattr(type(self), name, None), property):
                setattr(self, name, value)

    def convert_rope_params_to_dict(self, **rest: Any) -> dict[str, Any]:
        """Rotary settings as one dict under their name of today; source: transformers `modeling_rope_utils.py`."""
        own = getattr(self, "rope_parameters", None)
        found = rest.pop("rope_scaling", None) or own or {}
        usual = {
            "rope_theta": rest.pop("rope_theta", getattr(self, "rope_theta", self.default_theta)),
            "partial_rotary_factor": rest.pop("partial_rotary_factor", getattr(self, "partial_rotary_factor", None)),
            "rope_type": "default",
        }
        usual = {name: value for name, value in usual.items() if value is not None}
        nested = [name for name in found if isinstance(found[name], dict)]
        merged = {name: {**usual, **found[name]} for name in nested} if nested else {**usual, **found}
        object.__setattr__(self, "rope_parameters", merged)
        return rest

    @classmethod
    def _fields(cls) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(ConfigStandIn)]):
            own = base.__dict__
            for name in own.get("__annotations__", {}):
                if name in own and name not in CLASS_FIELDS and "ClassVar" not in str(own["__annotations__"][name]):
                    fields[name] = _default(own[name])
        return fields

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, type(self).attribute_map.get(name, name), value)

    def __getattribute__(self, name: str) -> Any:
        other = object.__getattribute__(self, "attribute_map")
        return object.__getattribute__(self, other.get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(HOOKS):
            return lambda *args, **kwargs: kwargs
        raise AttributeError(name)

    def get_text_config(self, **kwargs: Any) -> ConfigStandIn:
        """As in transformers; a stand-in has no inner configurations."""
        return self


def _default(value: Any) -> Any:
    if not isinstance(value, dataclasses.Field):
        return value
    return value.default_factory() if value.default_factory is not dataclasses.MISSING else value.default


def bounded(value: Any) -> Any:
    """A value of a `config.json` with no number larger than `LARGEST`, so that building from it ends.

    Nothing is ever counted up to `vocab_size`, which messages show.
    """
    if isinstance(value, dict):
        return {name: item if name == "vocab_size" else bounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [bounded(item) for item in value]
    return max(-LARGEST, min(LARGEST, value)) if type(value) is int else value
