"""Runs in the environment of ONNX Runtime GenAI; `client.Client.generate` describes what it reads and writes.

Prompts are padded on the right, where the client's own mask leaves out the padding token.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

DEFAULT_PAD = 0  # the client's padding token where its configuration has none (0.18, `src/config.h`)


def main() -> None:
    """Answers the request on stdin; stdout is only for the answer, output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        library, numpy = importlib.import_module("onnxruntime_genai"), importlib.import_module("numpy")
        versions = {"onnxruntime-genai": importlib.metadata.version("onnxruntime-genai")}
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}))
        return
    answer: dict[str, Any] = {"versions": versions}
    if request["folder"]:
        model = library.Model(request["folder"])
        section = json.loads((Path(request["folder"]) / "genai_config.json").read_text(encoding="utf-8"))["model"]
        pad = section.get("pad_token_id", DEFAULT_PAD)
        ends = section.get("eos_token_id", [])
        answer["ends"] = (ends if isinstance(ends, list) else [ends]) or [pad]  # as the client itself
        answer["rows"] = [batch(library, numpy, model, prompts, pad, request["new"]) for prompts in request["batches"]]
    answers.write(json.dumps(answer))


def batch(library: Any, numpy: Any, model: Any, prompts: list[list[int]], pad: int, new: int) -> list[list[int]]:
    """New tokens of greedy search, [prompts, at most `new`]; `prompts` are token ids."""
    longest = max(map(len, prompts))
    params = library.GeneratorParams(model)
    # other values may be in the folder's configuration
    greedy = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "min_length": 0}
    penalties = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    params.set_search_options(max_length=longest + new, batch_size=len(prompts), **greedy, **penalties)
    generator = library.Generator(model, params)
    padded = [[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts]
    generator.append_tokens(numpy.array(padded if len(padded) > 1 else padded[0], dtype="int32"))
    rows: list[list[int]] = [[] for _ in prompts]
    while not generator.is_done():
        generator.generate_next_token()
        for row, token in zip(rows, generator.get_next_tokens(), strict=True):  # a single sequence lacks its end token
            row.append(int(token))
    return rows


if __name__ == "__main__":
    main()
