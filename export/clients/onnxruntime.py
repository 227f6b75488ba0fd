"""Plain onnxruntime: the graphs alone."""

from __future__ import annotations

from llmconv.export.clients import Client

CLIENT = Client(
    name="onnxruntime",
    title="onnxruntime, and `llmconv generate`: prefill.onnx and decode.onnx",
    roles=("prefill", "decode"),
)
