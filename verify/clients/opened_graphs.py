"""The graph files that each client opens in a folder, by its configuration and its own rules of choice.

Read in onnxruntime-genai 0.18 (`src/config.cpp`), optimum-onnx 0.1 (`optimum/onnxruntime/modeling_decoder.py`) and
@huggingface/transformers 4.3 (`src/models/session.js`, `src/utils/dtypes.js`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, named_files

STANDARD_NAME = "model.onnx"
"""The file that optimum prefers, in the folder and then in any folder inside."""

JS_FOLDER, JS_CONFIG = "onnx", "transformers.js_config"

JS_SUFFIXES = {"fp32": "", "q8": "_quantized"} | {
    name: f"_{name}" for name in ("fp16", "int8", "uint8", "bnb4", "q4", "q2", "q1", "q4f16", "q2f16", "q1f16")
}
"""End of a graph's name by the `dtype` of transformers.js."""


def opened_graphs(client: str, folder: Path) -> list[Path]:
    """The files in a folder that a client opens as graphs; those that are missing are left to the client.

    Args:
        client: name of the client.
        folder: the folder that it is given.

    Raises:
        MalformedInput: the configuration of the client is refused, see `genai_guard`.
    """
    return [path for path in OPENED[client](folder) if path.exists()]


def _genai(folder: Path) -> list[Path]:
    """Every file that `genai_config.json` names, apart from configurations of processors."""
    return [folder / name for name in named_files(folder)] if (folder / CONFIG).is_file() else []


def _optimum(folder: Path) -> list[Path]:
    """`model.onnx`; where there is none, every graph that may be chosen instead."""
    if (folder / STANDARD_NAME).exists():
        return [folder / STANDARD_NAME]
    found = sorted(folder.rglob("*.onnx"))
    return [path for path in found if path.name == STANDARD_NAME] or found


def _transformersjs(folder: Path) -> list[Path]:
    """The graphs in `onnx/` of the variety that `config.json` selects."""
    path = folder / "config.json"
    config = read_json(path).get(JS_CONFIG) if path.is_file() else None
    dtype = _js_dtype(config if isinstance(config, dict) else {})
    return [graph for graph in sorted((folder / JS_FOLDER).glob("*.onnx")) if _is_selected(graph.stem, dtype)]


def _js_dtype(config: Mapping[str, Any]) -> Any:
    """The `dtype` of a configuration, which the section of its device overrides."""
    devices = config.get("device_config")
    own = devices.get(str(config.get("device") or "cpu")) if isinstance(devices, dict) else None
    return {**config, **(own if isinstance(own, dict) else {})}.get("dtype")


def _is_selected(stem: str, dtype: Any) -> bool:
    """Whether a graph is of the selected variety: one for all graphs, or one for each."""
    suffix = max((suffix for suffix in JS_SUFFIXES.values() if stem.endswith(suffix)), key=len)
    wanted = dtype.get(stem.removesuffix(suffix)) if isinstance(dtype, dict) else dtype
    return suffix == JS_SUFFIXES.get(wanted if isinstance(wanted, str) else "", "")


OPENED: Mapping[str, Callable[[Path], list[Path]]] = {
    "genai": _genai,
    "optimum": _optimum,
    "transformersjs": _transformersjs,
}
