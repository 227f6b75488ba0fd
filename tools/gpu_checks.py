"""What graphs do on another provider: `build` makes tiny models and their graphs, `run` verifies them there.

    python -m tools.gpu_checks build FOLDER
    python -m tools.gpu_checks run FOLDER --provider cuda --minutes 6 --output gpu.json

`build` needs no GPU. `run` goes down a list in the order of worth: `llmconv verify` on every folder, then the nodes
that the provider leaves to the CPU, as it says itself. Every result is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig

from llmconv.cli import main as llmconv
from tools.tiny_models import cast_weights, depth, save_tiny

FAMILIES = ("llama", "qwen3", "gemma2", "mixtral", "gpt2", "qwen3_5_text", "mamba2", "llama-64")
"""Model types; `llama-64` is a llama whose heads have the size 64, for which GPUs have their fastest kernels."""

CUDA, QUANT = ("--target", "ort-cuda"), ("--target", "ort-cuda", "--precision", "float16", "--quant")
EXPORTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "f32": ("float32", ()),
    "f16": ("float16", ("--precision", "float16")),
    "bf16": ("bfloat16", ("--precision", "bfloat16")),
    "int4": ("float32", ("--quant", "int4")),
    **{f"{name}-cuda": (dtype, CUDA) for name, dtype in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"))},
    **{f"{name}-cuda": ("float32", (*QUANT, name)) for name in ("int4", "int8")},
}
"""Name to the dtype of the weights and the options of `export`."""

MORE: dict[str, tuple[str, tuple[str, ...]]] = {
    "static": ("float16", ("--precision", "float16", "--shapes", "static", "--max-seq-len", "256")),
    "unified": ("float16", (*CUDA, "--unified")),
    "stages": ("float16", ("--precision", "float16", "--stages", "2")),
    "argmax": ("float16", (*CUDA, "--postprocess", "argmax")),
    "last": ("bfloat16", (*CUDA, "--last-logits")),
    "embeds": ("bfloat16", (*CUDA, "--embeds")),
    "from-bf16": ("bfloat16", ()),
}
"""The same, for `llama-64` alone."""

ROWS = {
    **{f"{family}.{name}": (family, *row) for name, row in EXPORTS.items() for family in FAMILIES},
    **{f"llama-64.{name}": ("llama-64", *row) for name, row in MORE.items()},
}
"""By folder, in the order of worth: the family, the dtype of the weights, and the options of `export`."""


def build(folder: Path) -> None:
    """Makes the models and exports them; what exists stays."""
    for name, (family, dtype, options) in ROWS.items():
        target, quantized = folder / name, "--quant" in options
        model = folder / f"{family}.weights" if quantized else target
        if not (model / "config.json").exists():
            _save(family, model)
            if dtype != "float32":
                cast_weights(model, dtype)
        if not (target / "llmconv.json").exists():
            where = ("-o", str(target)) if quantized else ()
            result = CliRunner().invoke(llmconv, ["export", str(model), *where, *options, "-q"])
            print(name, result.exit_code, result.output.strip()[:300], flush=True)


def _save(family: str, folder: Path) -> None:
    if family != "llama-64":
        save_tiny(family, folder, depth(family))
        return
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=211, num_hidden_layers=5, max_position_embeddings=512, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def verified(folder: Path, provider: str) -> dict[str, Any]:
    """The result of `llmconv verify` on a folder."""
    reference = ("--reference", str(folder.with_name(folder.name.split(".")[0] + ".weights")))
    given = ("--provider", provider, *(reference if "int" in folder.name else ()))
    command = [sys.executable, "-m", "llmconv", "verify", str(folder), *given, "--json", "-q"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    result: dict[str, Any] = {"exit": done.returncode, "stderr": done.stderr[-1500:]}
    if done.stdout.startswith("{"):
        report = json.loads(done.stdout)
        result["failed"] = [check for check in report["checks"] if check["verdict"] == "fail"][:20]
        result["worst"] = max(report["checks"], key=lambda check: check["row_sigma"])
    return result


def placed(folder: Path, provider: str) -> dict[str, Any]:
    """Operators of each graph that the provider leaves to the CPU, with their number, as onnxruntime says it."""
    result: dict[str, Any] = {}
    wanted = next(name for name in ort.get_available_providers() if name.lower().startswith(provider))
    for path in sorted(folder.glob("*.onnx")):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        session = ort.InferenceSession(str(path), options, providers=[wanted, "CPUExecutionProvider"])
        parts = session.get_provider_graph_assignment_info()
        left = (node for part in parts if part.ep_name != wanted for node in part.get_nodes())
        result[path.name] = Counter(f"{node.domain}:{node.op_type}" for node in left)
    return result


def run(folder: Path, provider: str, minutes: float, output: Path, only: str) -> None:
    """Checks every folder whose name contains `only`, and writes the results to a JSON file."""
    end, results = time.monotonic() + 60 * minutes, dict[str, dict[str, Any]]()
    folders = [folder / name for name in ROWS if (folder / name / "llmconv.json").exists() and only in name]
    for check in (verified, placed):
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) * 3 // 4)) as pool:
            waiting = {pool.submit(check, path, provider): path.name for path in folders}
            for done in as_completed(waiting):
                error = done.exception()
                value = {"error": str(error)[:600]} if error else done.result()
                results.setdefault(check.__name__, {})[waiting[done]] = value
                output.write_text(json.dumps(results, indent=1))
                print(waiting[done], str(value)[:400], flush=True)
                if time.monotonic() > end:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default="", help="part of the names of folders")
    given = parser.parse_args()
    if given.what == "build":
        build(given.folder)
    else:
        run(given.folder, given.provider, given.minutes, given.output, given.only)


if __name__ == "__main__":
    main()
