"""Runs in the environment of optimum: jobs as JSON on stdin, their tokens as JSON on stdout.

A job is `{"folder": …, "batch": [prompt, …], "new": n}`: prompts padded on the left with their own mask.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForCausalLM


def run(job: dict[str, Any]) -> list[Any]:
    model = ORTModelForCausalLM.from_pretrained(job["folder"])
    longest = max(map(len, job["batch"]))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job["batch"]])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job["batch"]])
    tokens = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=job["new"])
    rows: list[Any] = tokens[:, longest:].tolist()
    return rows


print(json.dumps([run(job) for job in json.load(sys.stdin)]))
