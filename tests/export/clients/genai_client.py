"""Runs in the environment of ONNX Runtime GenAI: jobs as JSON on stdin, their tokens as JSON on stdout.

A job is `{"folder": …, "turns": [prompt, …], "new": n}`: the tokens after each turn, in one generator; or
`{"folder": …, "batch": [prompt, …], "new": n, "pad": id}`: prompts padded on the right; or
`{"folder": …, "prompt": tokens, "pixels": floats, "features": count, "new": n}`: with placeholders.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnxruntime_genai as og


def start(folder: str, length: int, batch: int = 1) -> Any:
    model = og.Model(folder)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=length, batch_size=batch)
    return og.Generator(model, params)


def take_turns(folder: str, turns: list[list[int]], new: int) -> list[int]:
    generator = start(folder, 100)
    tokens: list[int] = []
    for turn in turns:
        if tokens:
            generator.rewind_to(len(tokens) - 2)
        generator.append_tokens(np.array([*tokens[-2:], *turn], dtype=np.int32))
        for _ in range(new):
            if not generator.is_done():
                generator.generate_next_token()
        tokens = generator.get_sequence(0).tolist()
    return tokens


def run_batch(folder: str, prompts: list[list[int]], new: int, pad: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    generator = start(folder, longest + new, len(prompts))
    generator.append_tokens(np.array([[*p, *[pad] * (longest - len(p))] for p in prompts], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row).tolist()[longest:] for row in range(len(prompts))]


def see(folder: str, prompt: list[int], pixels: list[Any], features: int, new: int) -> list[int]:
    generator = start(folder, len(prompt) + new)
    inputs = og.NamedTensors()
    inputs["input_ids"] = np.array([prompt], dtype=np.int32)
    inputs["pixel_values"] = np.array(pixels, dtype=np.float32)
    inputs["num_image_tokens"] = np.array([features], dtype=np.int64)
    generator.set_inputs(inputs)
    while not generator.is_done():
        generator.generate_next_token()
    tokens: list[int] = generator.get_sequence(0).tolist()[len(prompt) :]
    return tokens


def run(job: dict[str, Any]) -> list[Any]:
    try:
        if "turns" in job:
            return take_turns(job["folder"], job["turns"], job["new"])
        if "pixels" in job:
            return see(job["folder"], job["prompt"], job["pixels"], job["features"], job["new"])
        return run_batch(job["folder"], job["batch"], job["new"], job["pad"])
    except Exception as error:
        return [str(error)]


print(json.dumps([run(job) for job in json.load(sys.stdin)]))
