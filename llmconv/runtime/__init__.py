"""Running a model: the Runner protocol, and runners for graphs (onnxruntime) and for the eager model (torch)."""

from __future__ import annotations

from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache, Runner, Step, default_positions

__all__ = [
    "Cache",
    "OrtGraph",
    "OrtRunner",
    "Runner",
    "SessionSettings",
    "Step",
    "default_positions",
]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
