"""Running a model: the Runner protocol, and runners for graphs (onnxruntime) and for the eager model (torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if TYPE_CHECKING:  # at run time each is loaded when it is first used: names and tables need no onnxruntime
    from llmconv.runtime.onnxruntime.graph import OrtGraph
    from llmconv.runtime.onnxruntime.runner import OrtRunner
    from llmconv.runtime.onnxruntime.session_settings import SessionSettings
    from llmconv.runtime.runner import Cache, Runner, Step, default_positions

__all__ = ["Cache", "OrtGraph", "OrtRunner", "Runner", "SessionSettings", "Step", "default_positions"]

__getattr__, __dir__ = lazily(__name__)
