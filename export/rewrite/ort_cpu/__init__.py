"""`--target ort-cpu`: what the exporter writes in many nodes, in few that onnxruntime's CPU provider has.

One pass per file; each rewrites what it recognises and leaves the rest alone. Figures: docs/benchmarks.md.
"""

from __future__ import annotations

from llmconv.export.rewrite.ort_cpu.heads import flatten_heads
from llmconv.export.rewrite.ort_cpu.linear import fuse_linear_layers
from llmconv.export.rewrite.ort_cpu.norms import fuse_norms
from llmconv.export.rewrite.ort_cpu.rotary import fuse_rotary
from llmconv.export.rewrite.ort_cpu.rotating_attention import rotate_in_attention
from llmconv.export.traced_graph import TracedGraph

PASSES = (fuse_rotary, flatten_heads, rotate_in_attention, fuse_linear_layers, fuse_norms)
"""In this order: a rotation becomes one node, around which heads are flattened, and then a part of the attention."""


def fuse(traced: TracedGraph) -> None:
    """Runs all passes, in place."""
    for rewrite in PASSES:
        rewrite(traced)
