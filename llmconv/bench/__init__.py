"""Benchmarks: prefill and decode speed over prompt lengths and batch sizes, compared with other runtimes."""

from __future__ import annotations

from llmconv.bench.bench import BenchCandidate, BenchResult, Measurement, bench

__all__ = ["BenchCandidate", "Measurement", "BenchResult", "bench"]


def __dir__() -> list[str]:
    return __all__
