"""LLaMA2-Accessory checkpoints made here: one whole model, cut as fairscale cuts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from llmconv.convert.opening import open_training

FIXTURES = Path(__file__).parents[1] / "fixtures" / "accessory"
DELTA = FIXTURES / "delta_full_mp2"

ARGS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "multiple_of": 16,
    "ffn_dim_multiplier": None,
    "norm_eps": 1e-5,
    "vocab_size": 24,
    "rope_theta": 10000,
    "max_seq_len": 128,
    "rope_scaling": None,
}
MIXTURE: dict[str, Any] = {**ARGS, "hidden_dim": 48, "moe": {"num_experts": 4, "num_experts_per_tok": 2}}
ROWS = {"wq": 32, "wk": 16, "wv": 16, "wo": 32, "w1": 96, "w3": 96, "w2": 32}
COLUMNS = {"w2": 96}
Model = dict[str, torch.Tensor]


def llama(*, rank: int = 0, biases: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> Model:
    """A seeded llama in Accessory's names, not split; with LoRA of a rank and biases of some layers."""
    torch.manual_seed(0)
    model = {"tok_embeddings.weight": torch.randn(24, 32)}
    for block in (f"layers.{number}" for number in range(2)):
        for layer, rows in ROWS.items():
            name = f"{block}.{'feed_forward' if layer in ('w1', 'w2', 'w3') else 'attention'}.{layer}"
            model[f"{name}.weight"] = torch.randn(rows, COLUMNS.get(layer, 32))
            if rank:
                model[f"{name}.lora_a.weight"] = torch.randn(rank, COLUMNS.get(layer, 32))
                model[f"{name}.lora_b.weight"] = torch.randn(rows, rank)
            if layer in biases:
                model[f"{name}.bias"] = torch.randn(rows)
        model |= {f"{block}.attention_norm.weight": torch.randn(32), f"{block}.ffn_norm.weight": torch.randn(32)}
    model |= {"norm.weight": torch.randn(32), "output.weight": torch.randn(24, 32)}
    return {name: tensor.to(dtype) for name, tensor in model.items()}


def mixtral() -> Model:
    """The llama with four experts for each feed-forward layer."""
    model = {name: tensor for name, tensor in llama().items() if "feed_forward" not in name}
    for block in (f"layers.{number}.feed_forward" for number in range(2)):
        model[f"{block}.gate.weight"] = torch.randn(4, 32)
        for expert in range(4):
            shapes = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
            model |= {f"{block}.experts.{expert}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    return model


def cut(name: str, tensor: torch.Tensor, count: int, number: int) -> torch.Tensor | None:
    """The part of one tensor that a rank holds; None where another rank has that expert."""
    if ".experts." in name:
        return tensor if int(name.split(".")[4]) // (4 // count) == number else None
    if re.search(r"\.(w[qkv13]\.(weight|bias|lora_b\.weight)|output\.weight)$", f".{name}"):
        return tensor.chunk(count, 0)[number].clone()
    if re.search(r"\.(w[o2]\.(weight|lora_a\.weight)|tok_embeddings\.weight)$", f".{name}"):
        return tensor.chunk(count, 1)[number].clone()
    return tensor


def save(folder: Path, model: Model, count: int = 1, plugin: str = "llama_peft", **changes: Any) -> Path:
    """Writes `model` as upstream would."""
    folder.mkdir(parents=True)
    args = {**(MIXTURE if plugin.startswith("mixtral") else ARGS), **changes}
    (folder / "config.json").write_text(json.dumps(args))
    (folder / "meta.json").write_text(json.dumps({"llama_type": plugin}))
    for number in range(count):
        parts = {f"llma.{name}": cut(name, tensor, count, number) for name, tensor in model.items()}
        kept = {name: part for name, part in parts.items() if part is not None}
        torch.save({"model": kept}, folder / f"consolidated.{number:02}-of-{count:02}.model.pth")
    return folder


def contents(path: Path, **options: Any) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in open_training(path, options=options).items()}


def trained(model: Model) -> Model:
    return {name: tensor for name, tensor in model.items() if "lora" in name or "norm" in name or "bias" in name}


def write_whole(folder: Path, model: Model, plugin: str) -> Path:
    save(folder, {}, 0, plugin)
    torch.save(
        {"model": {f"llma.{name}": part for name, part in model.items()}}, folder / "consolidated.00-of-01.model.pth"
    )
    return folder


def change(file: Path, **tensors: torch.Tensor) -> None:
    torch.save({"model": torch.load(file)["model"] | tensors}, file)
