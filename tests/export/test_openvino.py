"""OpenVINO runs graphs of `--opset 21`: prompt and steps give the model's logits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import environments
from llmconv.export import export
from tests.builders.exact_logits import exact_logits
from tests.conftest import save_tiny

PYTHON = Path(__file__).parents[2] / environments.folder("openvino") / "bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON.parents[1] / "complete").exists(), reason="`make clients` makes the environment"),
]

STEPS = 5

RUN = """
import json, sys
import numpy as np
import openvino
folder, prompt, steps = sys.argv[1], np.array(json.loads(sys.argv[2])), int(sys.argv[3])
core = openvino.Core()
exact = {"INFERENCE_PRECISION_HINT": "f32"}


def empty(port, batch):
    sizes = [0 if size.is_dynamic else size.get_length() for size in port.partial_shape]
    return np.zeros([batch, *sizes[1:]], port.element_type.to_dtype())


prefill, decode = (core.compile_model(f"{folder}/{name}.onnx", "CPU", exact) for name in ("prefill", "decode"))
logits, past = [], {}
tokens, total = prompt, 0
for step in range(steps + 1):
    model = decode if step else prefill
    batch, new = tokens.shape
    total += new
    feed = {"input_ids": tokens, "attention_mask": np.ones((batch, total), np.int64)}
    feed["position_ids"] = np.tile(np.arange(total - new, total), (batch, 1))
    ports = {port.get_any_name(): port for port in model.inputs}
    past = past or {name: empty(port, batch) for name, port in ports.items() if name not in feed}
    found = model({**{name: value for name, value in feed.items() if name in ports}, **past})
    out = {name: found[port] for port in model.outputs for name in port.get_names()}  # of the node and of the output
    present = {name: value.copy() for name, value in out.items() if name.startswith("present")}
    past = {name.replace("present", "past_key_values"): value for name, value in present.items()}
    logits.append(out["logits"][:, -1].astype(np.float32).tolist())
    tokens = out["logits"][:, -1].argmax(axis=-1)[:, None]
print(json.dumps(logits))
"""


PROMPT = (np.arange(2 * 12).reshape(2, 12) * 7 % 90 + 3).tolist()


def openvino_problem(out: Path, model: Path, limit: float = 1e-4) -> str:
    """OpenVINO's own error, or how far its logits of a prompt of two rows and of steps are off; empty if it is right.

    Args:
        out: a folder with `prefill.onnx` and `decode.onnx`.
        model: what they were exported from.
        limit: how far logits may be off, in standard deviations of all of them.
    """
    line = [str(PYTHON), "-c", RUN, str(out), json.dumps(PROMPT), str(STEPS)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    found = np.array(json.loads(done.stdout.splitlines()[-1]))  # [steps, rows, vocabulary]
    for row, prompt in enumerate(PROMPT):
        tokens: list[Any] = [*prompt, *found[:-1, row].argmax(axis=-1).tolist()]
        expected = exact_logits(out / "prefill.onnx", model, tokens)
        off = float(np.abs(found[:, row] - expected[len(prompt) - 1 :]).max() / expected.std())
        if off > limit:
            return f"logits are off by {off:.1g} of their standard deviation"
    return ""


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "qwen3_moe", "gpt2", "bloom"])
def test_prompt_and_steps_are_the_eager_model(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny(model_type, tmp_path / model_type)
    export(folder, prefill=True, incremental=True, opset=21)
    assert openvino_problem(folder, folder) == ""
