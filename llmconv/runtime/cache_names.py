"""Names of the cache's inputs and outputs, shared by the exporter, the runner and the verifier.

    kept by layer i            input                       output
    keys, values               past_key_values.{i}.key     present.{i}.key
    a convolution's window     past_conv.{i}               present_conv.{i}
    a recurrent state          past_recurrent.{i}          present_recurrent.{i}

Layer i may keep several, numbered after a second dot: `past_conv.{i}.{j}`. These are the names that transformers.js
pairs (its `getPastKeyValues`), and ORT-GenAI takes as templates (`past_conv_names`, `past_recurrent_names`).
"""

from __future__ import annotations

import re

KEY_VALUES, CONVOLUTION, RECURRENT = "key_values", "conv", "recurrent"

CACHE_NAME = re.compile(
    r"(past_key_values|present|past_conv|present_conv|past_recurrent|present_recurrent)\.(\d+)(?=\.|$)"
)
"""Groups: prefix, layer index."""

_PREFIXES = {"past_key_values": "present", "past_conv": "present_conv", "past_recurrent": "present_recurrent"}
_ORDER = ["present", "present_conv", "present_recurrent"]

MAX_LENGTH = "max_sequence_length"
"""Symbol of the length of a shared buffer, in past and present; the caller chooses it."""


def is_past(name: str) -> bool:
    match = CACHE_NAME.match(name)
    return match is not None and match[1] in _PREFIXES


def is_present(name: str) -> bool:
    match = CACHE_NAME.match(name)
    return match is not None and match[1] in _ORDER


def past_of(present: str) -> str:
    """The input of a cache output: `past_conv.3` for `present_conv.3`."""
    prefix, _, rest = present.partition(".")
    past = next(past for past, name in _PREFIXES.items() if name == prefix)
    return f"{past}.{rest}"


def present_of(past: str) -> str:
    """The output of a cache input: `present_conv.3` for `past_conv.3`."""
    prefix, _, rest = past.partition(".")
    return f"{_PREFIXES[prefix]}.{rest}"


def is_state(name: str) -> bool:
    """Whether the name is a state of fixed size, that is, neither keys nor values."""
    return CACHE_NAME.match(name) is not None and not name.startswith(("past_key_values.", "present."))


def is_recurrent(name: str) -> bool:
    return name.startswith(("past_recurrent.", "present_recurrent."))


def layer_of(name: str) -> int | None:
    """Layer index of a cache input or output; None for other names."""
    match = CACHE_NAME.match(name)
    return int(match[2]) if match else None


def cache_order(name: str) -> tuple[int, int, str]:
    """Sort key of cache names: by layer; key, value, convolution, recurrent state."""
    match = CACHE_NAME.match(name)
    if match is None:
        return (-1, 0, "")
    return (int(match[2]), _ORDER.index(_PREFIXES.get(match[1], match[1])), name)
