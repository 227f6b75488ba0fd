"""The rule of a model's position ids, from the registry that the export reads, too."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.generation.past import PositionRule
from llmconv.runtime.runner import default_positions

REGISTRY = "llmconv.export.input_maps"
ENTRY_POINTS = "llmconv.input_maps"


def positions_of(folder: Path) -> PositionRule:
    """What the input map of a folder's `model_type` says; the usual rule where it has none.

    The rows that llmconv brings along all count alike, so the registry (and torch with it) is loaded only where
    somebody has added to it.
    """
    if REGISTRY not in sys.modules and not entry_points(group=ENTRY_POINTS):
        return default_positions
    path = folder / "config.json"
    model_type = read_json(path).get("model_type") if path.is_file() else None
    row = importlib.import_module(REGISTRY).known_input_maps().get(model_type)
    return row.positions if row else default_positions
