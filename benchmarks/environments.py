"""Environments of their own for tools that pin other versions than llmconv; each made once and kept in build/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
"""Installed first, and named in every step, so that no other build is pulled in."""

Steps = tuple[tuple[str, ...], ...]

ENVIRONMENTS: dict[str, Steps] = {
    "optimum": (
        (
            *("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime==1.31.1", "onnxscript==0.7.2"),
            "accelerate==1.15.0",
        ),
    ),
    "mergekit": (("mergekit==0.1.5", "transformers==5.23.0", "peft==0.21.2"),),
    "transformers-4.47": (
        ("transformers==4.47.1", "accelerate==1.2.1", "sentencepiece==0.2.0", "tiktoken", "blobfile", "protobuf"),
    ),
    "llm-foundry": (
        (
            *("transformers==4.51.3", "accelerate==1.8.1", "datasets==3.6.0", "sentencepiece==0.2.0", "einops", "onnx"),
            *("omegaconf", "boto3", "catalogue", "typer", "tenacity", "beautifulsoup4", "slack-sdk", "GitPython"),
            *("torchmetrics", "torch-optimizer", "py-cpuinfo", "coolname", "tabulate", "mlflow==2.22.0"),
            *("mosaicml-cli", "brotli", "python-snappy", "zstd", "matplotlib", "paramiko", "xxhash", "setuptools<80"),
        ),
        (
            *("--no-deps", "mosaicml==0.32.1", "llm-foundry==0.22.0", "mosaicml-streaming==0.12.0"),
            *("pytorch-ranger", "torchvision==0.28.0"),
        ),
    ),
}
"""Name to the arguments of each `pip install` after torch; LLM Foundry's own pins of torch are passed over."""


def python(name: str) -> Path:
    """The interpreter of the environment `name`; it is created on first use (minutes)."""
    folder = Path("build") / f"{name}-env"
    interpreter = folder / "bin" / "python"
    if (folder / "complete").exists():
        return interpreter
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for packages in ((TORCH,), *((TORCH, *step) for step in ENVIRONMENTS[name])):
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *packages], check=True)
    (folder / "complete").touch()
    return interpreter
