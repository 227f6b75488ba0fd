"""Folders of graphs with quantized weights, as `llmconv export --quant` writes them, and the model they were made of.

Uses only file names and the manifest's bytes, as `not_a_model_folder` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.errors import UnsupportedInput

MANIFEST, MANIFEST_BYTES = "llmconv.json", 8 << 20
SINGLE = "quantized.safetensors"
MODEL_WEIGHTS = {"model.safetensors", "model.safetensors.index.json"}
CODES = re.compile(r"quantized(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
"""Names of files with quantized weights and with the index of several."""

NAME = re.compile(r"\w[\w.+-]{0,199}")
"""A folder's name that a command line can contain as it is."""

PRESET = re.compile(r"int[48](?:-[a-z]{1,20})?|a8w8")
"""Values of `--quant`; the manifest has the name of a method instead where the codes are those of the model."""


def is_quantized_export(folder: Path) -> bool:
    """Whether a folder has quantized graphs of llmconv, and not the weights of a model."""
    if not (folder / MANIFEST).is_file():
        return False
    names = {entry.name for entry in folder.iterdir()}
    return not names & MODEL_WEIGHTS and any(map(CODES.fullmatch, names))


def source_of(folder: Path) -> str:
    """The name of the folder that the graphs were exported from; empty if the manifest has none."""
    source = _export_step(folder).get("source")
    return source if isinstance(source, str) and NAME.fullmatch(source) else ""


def export_again(folder: Path, more: str = "") -> str:
    """The command that makes a folder of quantized graphs again, with the options `more` that it lacks."""
    options = _export_step(folder).get("options")
    quant = options.get("quant") if isinstance(options, dict) else None
    preset = f"--quant {quant}" if isinstance(quant, str) and PRESET.fullmatch(quant) else ""
    return " ".join(["llmconv export", source_of(folder) or "MODEL", "-o OUT", *filter(None, [preset, more])])


def refused_export(folder: Path, more: str = "") -> UnsupportedInput:
    """The error for a folder of quantized graphs in place of a model; `more` has options for the hint's command."""
    source = source_of(folder)
    named = f" (its manifest names `{source}`)" if source else ""
    return UnsupportedInput(
        f"`{folder}` contains graphs with quantized weights, not a model",
        hint=f"give the model that they were exported from{named}: `{export_again(folder, more)}`",
    )


def _export_step(folder: Path) -> dict[str, Any]:
    """The last export in the manifest; empty if there is none, or the file is invalid."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= MANIFEST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    steps = content.get("steps") if isinstance(content, dict) else None
    found = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return next((step for step in reversed(found) if step.get("command") == "export"), {})


def described(matrices: Mapping[tuple[int, int], int]) -> str:
    """Quantized matrices, such as `43 matrices (42 of 4 bits in blocks of 32, 1 of 8 bits in blocks of 32)`.

    `matrices` are their numbers by bits and size of a block, which is 0 for one scale per column.
    """
    total = sum(matrices.values())
    kinds = [
        f"{count:,} of {bits} bits {f'in blocks of {size}' if size else 'by column'}"
        for (bits, size), count in matrices.items()
    ]
    return f"{total:,} {'matrix' if total == 1 else 'matrices'}" + (f" ({', '.join(kinds)})" if kinds else "")
