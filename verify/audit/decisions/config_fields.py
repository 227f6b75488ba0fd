"""Selects the fields of a `config.json` that its config class knows; other fields affect no model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

ROTARY = frozenset({"rope_scaling", "rope_parameters"})
"""Fields whose inner fields depend on the kind of rotary scaling."""

ROTARY_FIELDS = frozenset({"rope_type", "type", "factor", "original_max_position_embeddings"})
"""Inner fields whose numbers are compared with lengths (transformers modeling_rope_utils.py)."""


def read_fields(fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields that the config's class has, including those of nested configs.

    Args:
        fields: content of `config.json`, or of a nested config.
        config: the transformers config built from it.
    """
    kind = type(config)
    known = {*_defaults(kind), *inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = getattr(config, name, None) if name in kind.sub_configs else None  # some fields warn when they are read
        if name in ROTARY and isinstance(value, Mapping):
            found[name] = _rotary(value)
        elif isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            found[name] = read_fields(value, inner)
        elif name in known:
            found[name] = value
    return found


def _defaults(kind: Any) -> set[str]:
    try:
        return set(kind().to_dict())
    except Exception:  # a config class without defaults
        return set()


def _rotary(value: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a rotary scaling, or of one scaling per layer type."""
    return {
        name: _rotary(content) if isinstance(content, Mapping) else content
        for name, content in value.items()
        if name in ROTARY_FIELDS or isinstance(content, Mapping)
    }
