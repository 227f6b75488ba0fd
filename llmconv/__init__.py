"""llmconv: training checkpoint -> Hugging Face folder -> merged adapter -> verified ONNX graphs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmconv.generation.pipeline import pipeline as pipeline

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`llmconv.pipeline`, loaded when it is asked for."""
    if name != "pipeline":
        raise AttributeError(f"module `llmconv` has no attribute `{name}`")
    from llmconv.generation.pipeline import pipeline  # noqa: PLC0415 - the other commands do not pay for it

    return pipeline
