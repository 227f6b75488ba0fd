"""HF folder -> ONNX graphs."""

import sys
from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if __name__ != "llmconv.export":
    raise ImportError("import llmconv.export: `export` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

if TYPE_CHECKING:  # at run time each is loaded when it is first used: an early refusal needs none of torch
    from llmconv.export.export_options import Exported
    from llmconv.export.exporter import export
    from llmconv.export.families import INPUT_MAPS, register_input_map
    from llmconv.export.input_map import InputMap
    from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, TOTAL, ExtraInput, ModelCall

__all__ = ["BATCH", "INPUT_MAPS", "PAST", "SEQUENCE", "TOTAL", "Exported"]
__all__ += ["ExtraInput", "InputMap", "ModelCall", "export", "register_input_map"]

__getattr__, __dir__ = lazily(__name__)
