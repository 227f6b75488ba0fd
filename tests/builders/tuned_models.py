"""Adapters of every kind that PEFT has a merge for, random, and PEFT's own merge of each in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

UNKNOWN = 2.0**-53
"""How far a sum in float64 may be off, of numbers below 1."""

State = dict[str, torch.Tensor]

OPT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 64,
}


class Layers(torch.nn.Module):
    """One layer of each kind, named so that base names are as in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 36)
        self.square = torch.nn.Linear(24, 24, bias=False)
        self.conv = torch.nn.Conv2d(6, 8, 3)
        self.conv1 = torch.nn.Conv1d(6, 8, 3)
        self.embedding = torch.nn.Embedding(10, 24)
        self.norm = torch.nn.LayerNorm(24)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Never run; PEFT asks for it."""
        return values


@contextmanager
def in_float64() -> Iterator[None]:
    """What PEFT's merges make in float32 on the way, of the default type or by a cast, is float64 too."""
    cast, convert = torch.Tensor.float, torch.Tensor.to
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.Tensor.to = _wide(convert)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float, torch.Tensor.to = cast, convert  # type: ignore[method-assign]


def _wide(convert: Any) -> Any:
    """`Tensor.to` with float64 for float32."""

    def to(tensor: torch.Tensor, *where: Any, **named: Any) -> Any:
        return convert(tensor, *(torch.float64 if one is torch.float32 else one for one in where), **named)

    return to


def merged_by_peft(model: torch.nn.Module, adapter: Path) -> State:
    """PEFT's merge of an adapter into a model of float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(model, adapter).double()
        with in_float64():
            return dict(adapted.merge_and_unload().state_dict())


def train(model: torch.nn.Module, folder: Path, config: peft.PeftConfig, seed: int = 0) -> Path:
    """Saves an adapter of `model` whose every learned tensor is random."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(folder)
    return folder


def train_layers(folder: Path, config: peft.PeftConfig, dtype: torch.dtype = torch.float32) -> tuple[Path, Path, State]:
    """Base, adapter and PEFT's merge in float64, of `Layers`."""
    base, adapter = folder / "base", folder / "adapter"
    torch.manual_seed(1)
    model = Layers().to(dtype)
    base.mkdir()
    save_file(model.state_dict(), base / "model.safetensors")
    (base / "config.json").write_text('{"model_type": "layers"}')
    train(model, adapter, config)
    return base, adapter, merged_by_peft(layers_of(base).double(), adapter)


def layers_of(base: Path) -> Layers:
    """The `Layers` of a base that `train_layers` saved."""
    model = Layers()
    model.load_state_dict(load_file(base / "model.safetensors"))
    return model


def train_causal(
    source: Path, folder: Path, config: peft.PeftConfig, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path, State]:
    """Base, adapter and PEFT's merge in float64, of the causal language model in `source`."""
    base, adapter = folder / "base", folder / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(base)
    train(model, adapter, config)
    exact = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return base, adapter, merged_by_peft(exact, adapter)


def wrong(output: Path, exact: State) -> dict[str, Any]:
    """How many elements of each tensor differ from the exact value rounded once; empty when none does.

    What float64 does not know (weights here are below 1) may decide the rounding.
    """
    found: State = load_file(output / "model.safetensors")
    counts = {}
    for name, value in found.items():
        near = [(exact[name] + unknown).to(value.dtype) for unknown in (0, -UNKNOWN, UNKNOWN)]
        counts[name] = int(torch.stack([value != candidate for candidate in near]).all(dim=0).sum())
    return {name: count for name, count in counts.items() if count}
