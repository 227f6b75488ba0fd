"""Runs in the environment of optimum-onnx; `client.Client.generate` describes what it reads and writes.

Prompts are padded on the left, with their own mask.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def main() -> None:
    """Answers the request on stdin; stdout is only for the answer, output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        torch, library = importlib.import_module("torch"), importlib.import_module("optimum.onnxruntime")
        packages = ("optimum-onnx", "transformers", "onnxruntime")
        versions = {name: importlib.metadata.version(name) for name in packages}
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}))
        return
    answer: dict[str, Any] = {"versions": versions}
    if request["folder"]:
        model = library.ORTModelForCausalLM.from_pretrained(request["folder"])
        ends, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
        config = importlib.import_module("transformers").GenerationConfig  # greedy, whatever else the folder sets
        model.generation_config = config(eos_token_id=ends, pad_token_id=0 if pad is None else pad)
        answer["ends"] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        answer["rows"] = [batch(torch, model, prompts, request["new"]) for prompts in request["batches"]]
    answers.write(json.dumps(answer))


def batch(torch: Any, model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """New tokens of greedy search, [prompts, at most `new`]; `prompts` are token ids."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new)
    rows: list[list[int]] = found[:, longest:].tolist()
    return rows


if __name__ == "__main__":
    main()
