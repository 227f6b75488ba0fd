"""A model's rule for position ids, from the registry that the exporter also uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.runtime.runner import Cache, default_positions
from llmconv.tensors import Array

ENTRY_POINTS = "llmconv.input_maps"

PositionRule = Callable[[Array, int], Array]
"""Attention mask and number of new tokens to position ids, as `default_positions`."""


def positions_of(folder: Path) -> PositionRule:
    """The rule in the input map of the folder's `model_type`; the default rule if there is none.

    All built-in families use the default rule, so the registry (which imports torch) is loaded only where an installed
    package or the calling program may have added a family.
    """
    if "llmconv.export.families" not in sys.modules and not entry_points(group=ENTRY_POINTS):
        return default_positions
    from llmconv.export.families import known_input_maps  # noqa: PLC0415 - imports torch

    path = folder / "config.json"
    row = known_input_maps().get(read_json(path).get("model_type", "") if path.is_file() else "")
    return row.positions if row else default_positions


@dataclass(frozen=True)
class Past:
    """The cache of the first `tokens` columns of a batch, padding included."""

    cache: Cache
    tokens: int
