"""`--target ort-cpu`: what the exporter writes in many nodes, in few that onnxruntime's CPU provider has.

One pass per file; each rewrites what it recognises and leaves the rest alone. Figures: docs/benchmarks.md.
"""

from __future__ import annotations

from llmconv.export.ort_cpu.heads import flatten_heads
from llmconv.export.ort_cpu.linear import fuse_linear_layers
from llmconv.export.ort_cpu.norms import fuse_norms
from llmconv.export.ort_cpu.rotary import fuse_rotary
from llmconv.export.trace import TracedGraph

PASSES = (fuse_rotary, flatten_heads, fuse_linear_layers, fuse_norms)
"""In this order: heads are flattened around rotations that are one node."""


def fuse(traced: TracedGraph) -> None:
    """Runs all passes, in place."""
    for rewrite in PASSES:
        rewrite(traced)
