"""How fast exports are: prompts and steps over lengths and batch sizes, beside other runtimes of the same model."""

from __future__ import annotations

from llmconv.bench.bench import bench
from llmconv.bench.candidate import Candidate
from llmconv.bench.result import Cell, Comparison

__all__ = ["Candidate", "Cell", "Comparison", "bench"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
