"""Decoding on a GPU: our graphs, those of ONNX Runtime GenAI's builder, and transformers, in turns (`llmconv bench`).

    python -m benchmarks.gpu FOLDER --output gpu.json

Makes random bfloat16 weights in the shapes of TinyLlama (1.1 B), exports them as portable graphs (`plain`) and for
`ort-cuda`, with and without int4, and measures; then lists the kernels that our graphs run, by torch's profiler. Needs
onnxruntime-gpu and onnxruntime-genai-cuda. Every result is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.exporters import add_tokenizer
from benchmarks.measure import llmconv
from benchmarks.models import CONFIG
from llmconv.bench.own_loop import open_text_model
from llmconv.generation import GenerationSettings

LENGTHS, NEW, STEPS = (128, 2048), 64, 17
BUILDER = [sys.executable, "-m", "onnxruntime_genai.models.builder"]


def prepared(folder: Path, provider: str) -> list[Path]:
    """The folders of weights, `base` and `plain` (links to the same file), made once."""
    base, plain = folder / "base", folder / "plain"
    if not (base / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(provider):
            config = LlamaConfig(**{**CONFIG, "max_position_embeddings": 4096})
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(base)
        add_tokenizer(base)
        plain.mkdir()
        for file in base.iterdir():
            os.link(file, plain / file.name)
    return [base, plain]


def commands(folder: Path, provider: str) -> Mapping[Path, Sequence[str]]:
    """What makes each candidate, by its folder."""
    base, plain = prepared(folder, provider)
    int4 = ("--quant", "int4", "--target", "ort-cuda", "--precision", "float16")
    built = {folder / f"genai-{kind}": kind for kind in ("bf16", "int4")}
    return {
        base: llmconv("export", base, "--target", "ort-cuda"),
        plain: llmconv("export", plain, "--precision", "bfloat16", "--cache", "shared-buffer"),
        folder / "int4": llmconv("export", base, "-o", folder / "int4", *int4),
        **{
            path: [*BUILDER, *("-i", str(base), "-o", str(path), "-p", kind, "-e", provider, "-c", str(folder / "hub"))]
            for path, kind in built.items()
        },
    }


def kernels(folder: Path, provider: str) -> dict[str, Any]:
    """The kernels of a prompt and of single steps, with their time on the GPU."""
    opened = open_text_model(str(folder), 8, False, provider)
    result: dict[str, Any] = {}
    for name, length, new in (("prompt", LENGTHS[-1], 1), ("steps", LENGTHS[0], STEPS + 1)):
        prompt, settings = [[3 + at % 400 for at in range(length)]], GenerationSettings(max_new_tokens=new)
        for _ in range(2):
            list(opened.stream(prompt, settings))
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            list(opened.stream(prompt, settings))
        rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:12]
        result[name] = [f"{row.self_device_time_total / 1e3:8.2f} ms {row.count:5} {row.key[:110]}" for row in rows]
    return result


def measured(folder: Path, provider: str) -> dict[str, Any]:
    """The report of `llmconv bench`; exit code 1 says that candidates gave different tokens, as half precision does."""
    own = [f"torch:{folder / 'base'}", *(str(folder / name) for name in ("plain", "int4"))]
    others = [*own, *(f"genai:{folder / name}" for name in ("genai-bf16", "genai-int4"))]
    against = [word for name in others for word in ("--against", name)]
    sizes = ("--lengths", ",".join(map(str, LENGTHS)), "--new-tokens", str(NEW), "--provider", provider)
    command = llmconv("bench", folder / "base", *against, *sizes, "--json")
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return found


def main() -> None:
    """Makes the candidates at once, then measures them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        results[name] = value
        given.output.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(value)[:400], flush=True)

    def make(item: tuple[Path, Sequence[str]]) -> tuple[str, int, float]:
        started = time.perf_counter()
        code = subprocess.run(item[1], capture_output=True, check=False).returncode
        return item[0].name, code, time.perf_counter() - started

    with ThreadPoolExecutor() as pool:
        for name, code, seconds in pool.map(make, commands(given.folder, given.provider).items()):
            note(f"make {name}", {"exit": code, "seconds": round(seconds, 1)})
    note("speed", measured(given.folder, given.provider))
    for name in ("base", "plain", "int4"):
        note(f"kernels {name}", kernels(given.folder / name, given.provider))


if __name__ == "__main__":
    main()
