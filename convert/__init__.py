"""Training checkpoints, Hugging Face folders, adapters and deltas: one function per command."""

import sys

if __name__ != "llmconv.convert":
    raise ImportError("import llmconv.convert: `convert` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

from llmconv.convert.delta import Applied, Extracted, apply_delta, extract_delta
from llmconv.convert.from_hf import from_hf
from llmconv.convert.inspect import Inspection, inspect
from llmconv.convert.merge_lora import Merge, merge_lora
from llmconv.convert.onnx_adapter import AdapterFile, onnx_adapter
from llmconv.convert.to_hf import to_hf
from llmconv.output.plan import Plan

__all__ = [
    "AdapterFile",
    "Applied",
    "Extracted",
    "Inspection",
    "Merge",
    "Plan",
    "apply_delta",
    "extract_delta",
    "from_hf",
    "inspect",
    "merge_lora",
    "onnx_adapter",
    "to_hf",
]


def __dir__() -> list[str]:
    return __all__
