"""Every kind of adapter on every family: PEFT's merge in float64 rounded once, and the logits of the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from llmconv.convert import merge_lora
from tests.convert.adapter_matrix import FAMILIES, KINDS, RESIZED, logits_of, makes_sense, train
from tests.convert.tuned_models import UNKNOWN, State

WHOLE = [(family, kind) for family in FAMILIES for kind in KINDS if makes_sense(family, kind)]
TRICKY = ("saved both", "saved norm", "head", "head, tied", "embedding, tied", "tokens of modules", *RESIZED)
QUICK = [
    *((family, kind) for family in ("llama, tied", "gpt2") for kind in TRICKY),
    *((family, kind) for family in ("llava", "gpt_neox", "gemma3") for kind in ("saved both", "saved norm", "head")),
    *(("gpt_oss", kind) for kind in ("experts", "bias of b")),
    *(("qwen2", kind) for kind in ("all biases", "patterns", "adalora", "vera", "fourierft")),
]


def judge(family: str, kind: str, folder: Path, dtype: torch.dtype) -> None:
    """Merges, and asks both judges."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trained = train(family, kind, folder, dtype)
    merge = merge_lora(trained.base, [trained.adapter], folder / "out", check=True)
    assert merge.check and not merge.check.differing
    differing = wrong(load_file(folder / "out" / "model.safetensors"), trained.exact)
    assert not differing
    merge_lora(trained.base, [trained.adapter], folder / "wide", dtype="float32")
    logits = logits_of(FAMILIES[family].load(folder / "wide", torch.float64))
    assert (logits - trained.logits).abs().max() <= 1e-4 * trained.logits.abs().max()


def wrong(found: State, exact: State) -> dict[str, int]:
    """How many elements are not the exact value rounded once, nor what float64 may not know of it."""
    assert exact.keys() <= found.keys()
    counts = {}
    for name, value in exact.items():
        near = [(value.double() + unknown).to(found[name].dtype) for unknown in (0, -UNKNOWN, UNKNOWN)]
        counts[name] = int(torch.stack([found[name] != candidate for candidate in near]).all(dim=0).sum())
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(("family", "kind"), [pair for pair in QUICK if makes_sense(*pair)])
def test_what_is_merged_is_what_was_trained(family: str, kind: str, tmp_path: Path) -> None:
    judge(family, kind, tmp_path, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [pair for pair in WHOLE if pair not in QUICK])
def test_what_is_merged_is_what_was_trained_everywhere(family: str, kind: str, tmp_path: Path) -> None:
    judge(family, kind, tmp_path, torch.float32)
