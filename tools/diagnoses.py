"""What was found by hand behind each FAIL of `tools/other_exporters.py`: exporter and model to one line."""

from __future__ import annotations

DIAGNOSES: dict[tuple[str, str], str] = {}

NO_GRAPH: dict[tuple[str, str], str] = {}
