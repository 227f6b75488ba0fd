"""Window sizes of a model, from the fields of its config that families use for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

WINDOW = re.compile(r"^(?!max_)\w*(window(s|_size|_sizes|_len)?|attention_chunk_size|local_attention)$")
"""Names of config fields that contain a window size in tokens.

`sliding_window` in most families, `window_size` in GPT-Neo, `attention_chunk_size` in Llama 4, `attention_window_size`
in RecurrentGemma, `sliding_window_size` in Inkling, `local_attention` in ModernBERT's decoder.
"""

MOST = 6
"""Maximum number of windows that are crossed; no known family has more than two."""


def windows_of(config: Any) -> tuple[int, ...]:
    """Sizes in tokens of all sliding windows and attention chunks that a config declares, smallest first.

    A size that no layer uses is included as well: crossing it only costs time.

    Args:
        config: transformers config of the language model; layers may have their own configs.
    """
    fields = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    sizes = {*_sizes(config.to_dict()), *_sizes(fields)}
    for layer in getattr(config, "per_layer_config", None) or ():
        sizes |= set(_sizes({name: getattr(layer, name, None) for name in fields}))
    return tuple(sorted(sizes)[:MOST])


def _sizes(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if WINDOW.match(name):
            numbers = value if isinstance(value, list | tuple) else [value]
            yield from (n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n > 1)
