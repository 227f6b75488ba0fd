"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from llmconv.version import __version__

if TYPE_CHECKING:  # at run time each is loaded when it is first used
    from llmconv import bench, convert, embedding, errors, export, generation, output, push, runtime, serve, verify
    from llmconv.generation.pipeline import pipeline

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime's wheels report to Microsoft, from the import on

__all__ = [
    "__version__",
    "bench",
    "convert",
    "embedding",
    "errors",
    "export",
    "generation",
    "output",
    "pipeline",
    "push",
    "runtime",
    "serve",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module `llmconv` has no attribute `{name}`")
    if name == "pipeline":
        from llmconv.generation.pipeline import pipeline  # noqa: PLC0415 - loaded when it is first used

        return pipeline
    return importlib.import_module(f"llmconv.{name}")


def __dir__() -> list[str]:
    """The public names."""
    return __all__
