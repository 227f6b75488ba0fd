"""Training checkpoints, Hugging Face folders, adapters and deltas: one function per command."""

import sys
from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if __name__ != "llmconv.convert":
    raise ImportError("import llmconv.convert: `convert` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

if TYPE_CHECKING:  # at run time each is loaded when it is first used: a command needs the modules of one
    from llmconv.convert.adapter_file import AdapterFile, onnx_adapter
    from llmconv.convert.delta import Applied, Extracted, apply_delta, extract_delta
    from llmconv.convert.from_hugging_face import from_hf
    from llmconv.convert.inspection import Inspection, inspect
    from llmconv.convert.merge import Merge, merge_lora
    from llmconv.convert.to_hugging_face import to_hf
    from llmconv.output.plan import Plan

__all__ = ["AdapterFile", "Applied", "Extracted", "Inspection", "Merge", "Plan", "apply_delta"]
__all__ += ["extract_delta", "from_hf", "inspect", "merge_lora", "onnx_adapter", "to_hf"]

__getattr__, __dir__ = lazily(__name__)
