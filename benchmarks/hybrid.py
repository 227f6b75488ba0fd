"""A model of delta rule and attention layers: the form that runs against the graph as in the file, and transformers."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.exporters import add_tokenizer
from benchmarks.measure import FOLDER, Target, llmconv, report, run
from llmconv.generation import TextModel
from llmconv.runtime import SessionSettings

THREADS, ROUNDS, PROMPT, NEW = 2, 5, 512, 32
CONFIG = Qwen3_5TextConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""Layers of Qwen3.5-0.8B, a third as many, and a small vocabulary."""
HOW = {  # `--backend` and `--form`
    "no options": ("onnx", "auto"),
    "`--form mapped`": ("onnx", "mapped"),
    "`--form file`": ("onnx", "file"),
    "transformers": ("torch", "auto"),
}


def timed(model: TextModel, prompt: list[int]) -> tuple[float, float]:
    """Seconds until the first token, and per token after it, of one greedy text without an end."""
    settings = model.defaults.but(max_new_tokens=NEW, eos_token_id=())
    started, times = time.perf_counter(), []
    for piece in model.stream([prompt], settings):
        times += [time.perf_counter()] if piece.token is not None else []
    return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "hybrid"
    if not (folder / "decode.onnx").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder)
        run(llmconv("export", folder, "--prefill", "--incremental"))
        add_tokenizer(folder)
    settings = SessionSettings(threads=THREADS)
    models = {
        name: TextModel.open(folder, settings=settings, speculate="off", backend=backend, form=form)
        for name, (backend, form) in HOW.items()
    }
    prompt = np.random.default_rng(0).integers(3, CONFIG.vocab_size, PROMPT).tolist()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            seconds = timed(model, prompt)
            found[name] += [seconds] if number else []  # the first is a warm-up
    medians = {
        name: [1000 * statistics.median(kind) for kind in zip(*runs, strict=True)] for name, runs in found.items()
    }
    base = medians["`--form file`"]
    rows = [
        f"| {name} | {first:.0f} | {base[0] / first:.2f} | {step:.2f} | {base[1] / step:.2f} |"
        for name, (first, step) in medians.items()
    ]
    body = "\n".join(
        [
            f"Random float32 weights with the shapes of Qwen3.5-0.8B, {CONFIG.num_hidden_layers} layers,",
            f"a vocabulary of {CONFIG.vocab_size}; {THREADS} threads, {ROUNDS} rounds in turn.",
            "",
            f"| how it runs | prompt of {PROMPT}, ms | times `--form file` | ms per token | times `--form file` |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    targets = [
        Target(f"{what}: times as fast as the file's graph", before / after, 2.0, at_least=True)
        for what, before, after in zip(("prompt", "step"), base, medians["no options"], strict=True)
    ]
    return report("hybrid", "Delta rule layers", body, targets)


if __name__ == "__main__":
    sys.exit(main())
