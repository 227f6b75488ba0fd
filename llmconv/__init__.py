"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`llmconv.pipeline`, loaded by name when it is asked for: this module lies below all others."""
    if name != "pipeline":
        raise AttributeError(f"module `llmconv` has no attribute `{name}`")
    return importlib.import_module("llmconv.generation.pipeline").pipeline
