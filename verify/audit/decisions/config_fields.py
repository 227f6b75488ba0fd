"""Fields of a `config.json` that its model has: numbers of any other field are read by nobody."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

ROTARY = frozenset({"rope_scaling", "rope_parameters"})
"""Fields with a field for each kind of rotary scaling, which few configs have by default."""

ROTARY_FIELDS = frozenset({"rope_type", "type", "factor", "original_max_position_embeddings"})
"""Those whose numbers lengths are compared with (transformers modeling_rope_utils.py)."""


def read_fields(fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """What a config says in fields that its class has, those of the configs inside it too.

    Args:
        fields: content of `config.json`, or of a part of it.
        config: transformers' config made of it.
    """
    kind = type(config)
    known = {*_defaults(kind), *inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = getattr(config, name, None)
        if name in ROTARY and isinstance(value, Mapping):
            found[name] = _rotary(value)
        elif name in kind.sub_configs and isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            found[name] = read_fields(value, inner)
        elif name in known:
            found[name] = value
    return found


def _defaults(kind: Any) -> set[str]:
    try:
        return set(kind().to_dict())
    except Exception:  # a config that cannot be made of nothing
        return set()


def _rotary(value: Mapping[str, Any]) -> dict[str, Any]:
    """Of one kind of scaling, or of one for each kind of layers."""
    return {
        name: _rotary(content) if isinstance(content, Mapping) else content
        for name, content in value.items()
        if name in ROTARY_FIELDS or isinstance(content, Mapping)
    }
