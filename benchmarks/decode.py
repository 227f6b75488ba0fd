"""One decode step at past 2048: our graph against optimum-onnx's of the same model, same onnxruntime and threads.

optimum-onnx needs an older transformers, so it exports in an environment of its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks import environments
from benchmarks.measure import FOLDER, Target, llmconv, remove, report, run
from llmconv.checkpoint import Checkpoint
from llmconv.plan import plan_checkpoint
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.writer import write_checkpoint

PAST, STEPS, THREADS = 2048, 30, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The shape of a 135 M Llama."""


def model() -> Path:
    """A random model of that shape in float32 (540 MB), made on first use."""
    folder = FOLDER / "decode"
    if not folder.exists():
        tensors = {name: _random(shape) for name, shape in _shapes().items()}
        write_checkpoint(plan_checkpoint(Checkpoint(folder, "random", tensors, CONFIG)), folder, steps=[], sources=[])
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 3 * 64
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = range(CONFIG["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), **shapes, "model.norm.weight": (hidden,)}


def _random(shape: tuple[int, ...]) -> LazyTensor:
    def load(start: int, stop: int) -> Array:
        values = np.random.default_rng(start).standard_normal((stop - start, *shape[1:]), dtype=np.float32)
        return values * np.float32(0.02) + np.float32(len(shape) == 1)

    return LazyTensor(BY_NAME["float32"], shape, load)


def exports() -> dict[str, Path]:
    """The two graphs; both are exported now."""
    folder = model()
    run(llmconv("export", folder, "--overwrite"))
    rival = FOLDER / "optimum"
    remove(rival)
    command = [
        str(environments.python("optimum")),
        "-m",
        "optimum.commands.optimum_cli",
        "export",
        "onnx",
        "--model",
        str(folder),
        str(rival),
    ]
    subprocess.run([*command, "--task", "text-generation-with-past"], check=True, capture_output=True)
    return {"llmconv": folder / "decode.onnx", "optimum-onnx": rival / "model.onnx"}


class Step:
    """A session with a random past, ready to decode one token."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        generator = np.random.default_rng(0)
        self._feeds = {
            port.name: onnxruntime.OrtValue.ortvalue_from_numpy(self._feed(port.name, generator))
            for port in self._session.get_inputs()
        }
        self._outputs = [port.name for port in self._session.get_outputs()]

    def _feed(self, name: str, generator: np.random.Generator) -> Array:
        if name.startswith("past_key_values"):
            return generator.standard_normal((1, 3, PAST, 64), dtype=np.float32)
        plain = {
            "input_ids": np.array([[5]]),
            "attention_mask": np.ones((1, PAST + 1), np.int64),
            "position_ids": np.array([[PAST]]),
        }
        return plain[name]

    def logits(self) -> Array:
        """Runs one step."""
        result: Array = self._session.run_with_ort_values(self._outputs, self._feeds)[0].numpy()
        return result


def main() -> int:
    """Measures, prints the table, and returns 1 where the target is missed."""
    steps = {name: Step(path) for name, path in exports().items()}
    ours, theirs = (step.logits() for step in steps.values())
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            started = time.perf_counter()
            step.logits()
            times[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rows = [f"| {name} | {medians[name]:.1f} | {min(taken):.1f} to {max(taken):.1f} |" for name, taken in times.items()]
    body = "\n".join(
        [
            f"A 135 M Llama in float32, one token at past {PAST}, onnxruntime {onnxruntime.__version__},",
            f"{THREADS} threads, median of {STEPS} steps taken in turn.\n",
            "| exported by | ms per step | range |",
            "| --- | --- | --- |",
            *rows,
        ]
    )
    targets = [
        Target("times faster than optimum-onnx", medians["optimum-onnx"] / medians["llmconv"], 1.2, at_least=True)
    ]
    return report("decode", "Decode step", body, targets)


if __name__ == "__main__":
    sys.exit(main())
