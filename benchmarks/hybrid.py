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
SHAPES = {
    "layers of Qwen3.5-0.8B": {"hidden_size": 1024, "intermediate_size": 3584},
    "narrow layers": {"hidden_size": 256, "intermediate_size": 768},
}
"""A third as many layers as the model has; in the second shape, weights take less time than states."""
VOCABULARY, LAYERS = 8192, 8
PACKED, MAPPED = ("no options", "`--form file --prepack`"), ("`--form mapped`", "`--form file`")
"""The form, and the graph of the file with weights held in the same way."""
HOW = {  # `--backend`, `--form` and `--prepack`
    PACKED[0]: ("onnx", "auto", False),
    PACKED[1]: ("onnx", "file", True),
    MAPPED[0]: ("onnx", "mapped", False),
    MAPPED[1]: ("onnx", "file", False),
    "transformers": ("torch", "auto", False),
}


def timed(model: TextModel, prompt: list[int]) -> tuple[float, float]:
    """Seconds until the first token, and per token after it, of one greedy text without an end."""
    settings = model.defaults.but(max_new_tokens=NEW, eos_token_id=())
    started, times = time.perf_counter(), []
    for piece in model.stream([prompt], settings):
        times += [time.perf_counter()] if piece.token is not None else []
    return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)


def measured(number: int, sizes: dict[str, int]) -> dict[str, list[float]]:
    """Medians of milliseconds until the first token, and per token, of one model run in all ways."""
    folder = FOLDER / f"hybrid-{number}"
    if not (folder / "decode.onnx").exists():
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **sizes,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        add_tokenizer(folder)
        run(llmconv("export", folder, "--prefill", "--incremental"))
    models = {}
    for name, (backend, form, prepack) in HOW.items():
        settings = SessionSettings(threads=THREADS, prepack=prepack)
        models[name] = TextModel.open(folder, settings=settings, speculate="off", backend=backend, form=form)
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, PROMPT).tolist()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            seconds = timed(model, prompt)
            found[name] += [seconds] if turn else []  # the first is a warm-up
    return {name: [1000 * statistics.median(one) for one in zip(*runs, strict=True)] for name, runs in found.items()}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    lines, targets = [], []
    for number, (shape, sizes) in enumerate(SHAPES.items()):
        medians = measured(number, sizes)
        lines += [f"| {shape} | {name} | {first:.0f} | {step:.2f} |" for name, (first, step) in medians.items()]
        for form, file in (PACKED, MAPPED):
            for what, before, after in zip(("prompt", "step"), medians[file], medians[form], strict=True):
                text = f"{shape}, {what}: {form}, times as fast as {file}"
                targets.append(Target(text, before / after, 2.0, at_least=True))
        print(*lines[-len(HOW) :], sep="\n", file=sys.stderr)
    body = "\n".join(
        [
            f"Qwen3.5 with random float32 weights: {LAYERS} layers, 16 heads of the delta rule of 128 x 128, a",
            f"vocabulary of {VOCABULARY}; {THREADS} threads, medians of {ROUNDS} rounds in turn.",
            "",
            f"| shape | how it runs | prompt of {PROMPT}, ms | ms per token |",
            "| --- | --- | --- | --- |",
            *lines,
        ]
    )
    return report("hybrid", "Delta rule layers", body, targets)


if __name__ == "__main__":
    sys.exit(main())
