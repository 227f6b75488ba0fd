"""HF folder -> ONNX graphs."""

import sys

if __name__ != "llmconv.export":
    raise ImportError("import llmconv.export: `export` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

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


def __dir__() -> list[str]:
    """The public names."""
    return __all__
