"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from llmconv.version import __version__

if TYPE_CHECKING:  # at run time each is loaded when it is first used
    from llmconv import (
        bench,
        compressed,
        convert,
        embedding,
        errors,
        export,
        generation,
        output,
        push,
        runtime,
        serve,
        verify,
    )
    from llmconv.compressed import quantize, to_gguf
    from llmconv.generation.pipeline import (
        check_task,
        get_task,
        pipeline,
        register_model,
        register_task,
        supported_tasks,
    )

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime's wheels report to Microsoft, from the import on

__all__ = [
    "__version__",
    "bench",
    "compressed",
    "convert",
    "embedding",
    "errors",
    "export",
    "generation",
    "output",
    "push",
]
__all__ += ["quantize", "runtime", "serve", "to_gguf", "verify"]
__all__ += ["pipeline", "check_task", "get_task", "register_model", "register_task", "supported_tasks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `llmconv` has no attribute `{name}`")
    if "task" in name or name in ("pipeline", "register_model"):
        return getattr(importlib.import_module("llmconv.generation.pipeline"), name)
    if name in ("to_gguf", "quantize"):
        return getattr(importlib.import_module("llmconv.compressed"), name)
    return importlib.import_module(f"llmconv.{name}")


def __dir__() -> list[str]:
    return __all__
