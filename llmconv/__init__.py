"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

import importlib
from typing import Any

__version__ = "0.1.0"

ROOMS = ("bench", "convert", "errors", "export", "generation", "serve", "verify")

__all__ = ["__version__", "pipeline", *ROOMS]


def __getattr__(name: str) -> Any:
    """`llmconv.pipeline` and the rooms, loaded by name when asked for: this module lies below all others."""
    if name in ROOMS:
        return importlib.import_module(f"llmconv.{name}")
    if name != "pipeline":
        raise AttributeError(f"module `llmconv` has no attribute `{name}`")
    return importlib.import_module("llmconv.generation.pipeline").pipeline


def __dir__() -> list[str]:
    """The public names."""
    return __all__
