"""Tiny embedding models, classifiers and rerankers in the layout of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.conftest import CONFIGS, DECODER

IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"

FIELDS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "gemma3_text": {
        **DECODER,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def save_model(folder: Path, kind: str, auto: Any = transformers.AutoModel, **changes: Any) -> Path:
    """A seeded model without a head, or of another auto class; norms and weights are random."""
    config = transformers.AutoConfig.for_model(kind, **(FIELDS[kind] | changes))
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def save_modules(
    folder: Path,
    pooling: str | Sequence[str] = "lasttoken",
    dense: Sequence[tuple[int, str, bool]] = (),
    *,
    normalize: bool = True,
) -> Path:
    """`modules.json` and a folder for each module after the model; `dense` has outputs, activation and bias."""
    made: list[tuple[str, str]] = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = [pooling] if isinstance(pooling, str) else list(pooling)
    size = 64 * len(modes)
    write_config(folder / "1_Pooling", {"embedding_dimension": 64, "pooling_mode": modes, "include_prompt": True})
    for number, (outputs, activation, bias) in enumerate(dense, start=2):
        path = folder / f"{number}_Dense"
        fields = {"in_features": size, "out_features": outputs, "bias": bias, "activation_function": activation}
        write_config(path, fields)
        generator = torch.Generator().manual_seed(number)
        tensors = {"linear.weight": torch.randn(outputs, size, generator=generator)}
        tensors |= {"linear.bias": torch.randn(outputs, generator=generator)} if bias else {}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        made.append((path.name, "Dense"))
        size = outputs
    if normalize:
        made.append((f"{len(made)}_Normalize", "Normalize"))
    write_modules(folder, made)
    return folder


def save_reranker(folder: Path, **score: Any) -> Path:
    """`modules.json` of a reranker that generates."""
    write_config(folder / "1_LogitScore", {"true_token_id": 7, "false_token_id": 9, **score})
    write_modules(folder, [("", "Transformer"), ("1_LogitScore", "LogitScore")])
    return folder


def write_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """The list of modules, by folder and kind."""
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    """The `config.json` of a module or a model; fields of an existing one are kept."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))
