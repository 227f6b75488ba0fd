"""HF folder -> ONNX graphs."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "llmconv.export":
    raise ImportError("import llmconv.export: `export` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

if TYPE_CHECKING:  # at run time each is loaded when it is first used: an early refusal needs none of torch
    from llmconv.export.exported import Exported
    from llmconv.export.exporter import export
    from llmconv.export.families import INPUT_MAPS, register_input_map
    from llmconv.export.input_map import InputMap
    from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, TOTAL, ExtraInput, ModelCall

__all__ = [
    "BATCH",
    "INPUT_MAPS",
    "PAST",
    "SEQUENCE",
    "TOTAL",
    "Exported",
    "ExtraInput",
    "InputMap",
    "ModelCall",
    "export",
    "register_input_map",
]

_EXTRA = ("BATCH", "PAST", "SEQUENCE", "TOTAL", "ExtraInput", "ModelCall")
_PLACES = {
    "Exported": "llmconv.export.exported",
    "export": "llmconv.export.exporter",
    "INPUT_MAPS": "llmconv.export.families",
    "register_input_map": "llmconv.export.families",
    "InputMap": "llmconv.export.input_map",
    **dict.fromkeys(_EXTRA, "llmconv.runtime.extra_inputs"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
