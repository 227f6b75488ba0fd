"""`--target ort-cpu`: replaces groups of nodes by single operators of onnxruntime's CPU provider.

One pass per file; each rewrites the patterns that it recognizes and leaves other nodes unchanged. Measurements:
docs/benchmarks.md.
"""

from __future__ import annotations

from llmconv.export.rewrite.ort_cpu.heads import flatten_heads
from llmconv.export.rewrite.ort_cpu.linear import fuse_linear_layers
from llmconv.export.rewrite.ort_cpu.norms import fuse_sums_before_norms
from llmconv.export.rewrite.ort_cpu.rotary import fuse_rotary
from llmconv.export.rewrite.ort_cpu.rotating_attention import rotate_in_attention
from llmconv.export.traced_graph import TracedGraph

PASSES = (fuse_rotary, flatten_heads, rotate_in_attention, fuse_linear_layers, fuse_sums_before_norms)
"""In order: a rotation becomes one node, then heads are flattened around it, then attention includes it."""


def fuse_for_cpu(traced: TracedGraph) -> None:
    """Runs all passes, in place."""
    for rewrite in PASSES:
        rewrite(traced)
