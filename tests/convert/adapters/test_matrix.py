"""Every kind of adapter on every family: PEFT's merge in float64 rounded once, and the logits of the trained model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput
from tests.builders.lora_matrix import FAMILIES, KINDS, RESIZED, logits_of, makes_sense, train
from tests.builders.tuned_models import UNKNOWN, State

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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [pair for pair in QUICK if makes_sense(*pair)])
def test_what_is_merged_is_what_was_trained(family: str, kind: str, tmp_path: Path) -> None:
    judge(family, kind, tmp_path, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [pair for pair in WHOLE if pair not in QUICK])
def test_what_is_merged_is_what_was_trained_everywhere(family: str, kind: str, tmp_path: Path) -> None:
    judge(family, kind, tmp_path, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["all", "dora", "head", "tokens", "loha", "oft"])
@pytest.mark.parametrize("family", ["llama, tied", "phi3", "gpt_neox"])
def test_narrow_types_are_rounded_once(family: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    judge(family, kind, tmp_path, dtype)


@pytest.mark.slow
def test_two_adapters_may_both_save_the_embedding_as_it_was(tmp_path: Path) -> None:
    one = train("llama, tied", "embedding", tmp_path / "one", torch.float32)
    two = tmp_path / "two"
    shutil.copytree(one.adapter, two)
    merge_lora(one.base, [one.adapter, two], tmp_path / "twice", weights=[0.25, 0.75])
    merge_lora(one.base, [one.adapter], tmp_path / "once")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "twice")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_what_ties_an_adapter_keeps_the_head_tied(tmp_path: Path) -> None:
    trained = train("llama, tied", "head, tied", tmp_path, torch.float32)
    merge = merge_lora(trained.base, [trained.adapter], tmp_path / "out")
    assert "lm_head.weight" not in merge.plan.checkpoint
    assert merge.plan.checkpoint.config["tie_word_embeddings"] is True


@pytest.mark.slow
def test_half_of_a_resized_vocabulary_is_refused(tmp_path: Path) -> None:
    trained = train("llama", "resized, both", tmp_path, torch.float32)
    file = trained.adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file)
    with pytest.raises(MalformedInput, match="not both embedding and head"):
        merge_lora(trained.base, [trained.adapter], tmp_path / "out")


@pytest.mark.slow
def test_a_base_of_another_family_is_told(tmp_path: Path) -> None:
    trained = train("llama, tied", "plain", tmp_path, torch.float32)
    other = FAMILIES["qwen2"].load(None, torch.float32)
    other.save_pretrained(tmp_path / "other")
    merge = merge_lora(tmp_path / "other", [trained.adapter], tmp_path / "out", dry_run=True)
    assert any("a `LlamaForCausalLM`, the base is a `Qwen2ForCausalLM`" in warning for warning in merge.warnings)
    assert not merge_lora(trained.base, [trained.adapter], tmp_path / "out", dry_run=True).warnings
