"""Adapters of Tinker, in the layout that its cookbook reads: `unembed_tokens`, and factors of all experts in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput
from tests.builders.tiny_models import save_tiny

State = dict[str, torch.Tensor]
R, SCALE, START = 2, 3.0, "base_model.model.model."


def adapter(folder: Path, tensors: State) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": SCALE * R, "r": R}))
    return folder


def plain(folder: Path) -> State:
    return {name: torch.from_numpy(tensor.read()).double() for name, tensor in open_checkpoint(folder).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_lm_head_and_a_tied_embedding_stays(tmp_path: Path, tied: bool) -> None:
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=tied)
    before = plain(base)
    rows, width = before["model.embed_tokens.weight"].shape
    torch.manual_seed(1)
    a, b = torch.randn(R, width), torch.randn(rows, R)
    names = {"unembed_tokens.lora_A.weight": a, "unembed_tokens.lora_B.weight": b}
    merge_lora(base, adapter(tmp_path / "tinker", {START + name: one for name, one in names.items()}), tmp_path / "out")
    after = plain(tmp_path / "out")
    head = before.get("lm_head.weight", before["model.embed_tokens.weight"])
    expected = (head + SCALE * b.double() @ a.double()).float().double()
    assert torch.equal(after["lm_head.weight"], expected)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def mixture(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, vocab_size=24, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def experts(before: State, layer: int) -> tuple[State, State]:
    """Factors of all experts of a layer, each way of sharing one, and the sums by name."""
    prefix, own, sums = f"model.layers.{layer}.mlp.experts", State(), State()
    count = len([name for name in before if name.startswith(f"{prefix}.") and name.endswith(".up_proj.weight")])
    for of, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        out, width = before[f"{prefix}.0.{projection}.weight"].shape
        a = torch.randn(count if of == "w2" else 1, R, width)
        b = torch.randn(1 if of == "w2" else count, out, R)
        own |= {f"base_model.model.{prefix}.{of}.lora_{part}.weight": one for part, one in (("A", a), ("B", b))}
        for number in range(count):
            update = b.expand(count, -1, -1)[number].double() @ a.expand(count, -1, -1)[number].double()
            name = f"{prefix}.{number}.{projection}.weight"
            sums[name] = (before[name] + SCALE * update).float().double()
    return own, sums


def test_experts_share_one_factor(tmp_path: Path) -> None:
    base = mixture(tmp_path / "base")
    before = plain(base)
    torch.manual_seed(2)
    own, sums = experts(before, 0)
    none = {f"{START}layers.1.mlp.experts.w3.lora_{part}.weight": torch.zeros(0, R, 0) for part in "AB"}
    merge_lora(base, adapter(tmp_path / "tinker", own | none), tmp_path / "out")
    after = plain(tmp_path / "out")
    assert sums and all(torch.equal(after[name], expected) for name, expected in sums.items())
    assert all(torch.equal(after[name], one) for name, one in before.items() if name not in sums)


def test_factors_of_different_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    base = mixture(tmp_path / "base")
    own, _ = experts(plain(base), 0)
    name = next(name for name, tensor in own.items() if tensor.shape[0] > 2)
    with pytest.raises(MalformedInput):
        merge_lora(base, adapter(tmp_path / "tinker", own | {name: own[name][:2]}), tmp_path / "out")


def test_the_file_is_that_of_the_archive(tmp_path: Path) -> None:
    own = adapter(tmp_path / "tinker", {f"{START}unembed_tokens.lora_A.weight": torch.ones(R, 4)})
    assert load_file(own / "adapter_model.safetensors").keys() == {f"{START}unembed_tokens.lora_A.weight"}
    with pytest.raises(MalformedInput, match="lacks"):
        merge_lora(save_tiny(tmp_path / "base", "llama"), own, tmp_path / "out")
