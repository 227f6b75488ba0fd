"""Logits without a runtime's own rounding, and what they say of tokens that a runtime chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from transformers import AutoModelForCausalLM


def exact_logits(graph: Path, model: Path, tokens: list[int]) -> Any:
    """Logits at every token, `[tokens, vocabulary]`, float32.

    Of the eager model; of codes those of the graph, with activations that are not rounded to 8 bits, as only
    onnxruntime's CPU does it.
    """
    if not (graph.parent / "quantized.safetensors").exists():
        eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.no_grad():
            return eager(torch.tensor([tokens])).logits[0].numpy()
    content = onnx.load(graph, load_external_data=False)
    for node in content.graph.node:
        for attribute in (one for one in node.attribute if one.name == "accuracy_level"):
            attribute.i = 1
    copy = graph.with_name(f"exact-{graph.name}")  # in the folder of its weights
    onnx.save(content, copy)
    session = ort.InferenceSession(copy)
    feeds: dict[str, Any] = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for port in session.get_inputs():
        if port.name == "position_ids":
            feeds[port.name] = np.arange(len(tokens))[None]
        elif port.name.startswith("past"):
            dtype = np.float16 if port.type == "tensor(float16)" else np.float32
            feeds[port.name] = np.zeros((1, port.shape[1], 0, port.shape[3]), dtype)
    return session.run(["logits"], feeds)[0][0].astype(np.float32)


def wrong_token(logits: Any, prompt: list[int], new: list[int], near: float) -> str:
    """The first token that is not the likeliest, nor has a logit within `near` of the largest; empty if none.

    Args:
        logits: `[tokens, vocabulary]` of prompt and new tokens.
        prompt: ids.
        new: ids that a runtime chose after them.
        near: how far two logits may be moved by rounding.
    """
    for at, token in enumerate(new):
        row = logits[len(prompt) + at - 1]
        if row.max() - row[token] > near:
            return f"after {len(prompt)} + {at} tokens: {token} in place of {row.argmax()}"
    return ""
