"""Deltas that are tuned - base: FastChat's, made as its code makes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, from_hf
from llmconv.errors import MalformedInput, UnsupportedInput
from tests.builders.tiny_models import contents, save_tiny

State = dict[str, torch.Tensor]


def moved(base: Path, folder: Path, dtype: torch.dtype, tokens: int = 0, scale: float = 1) -> Path:
    """A model near `scale` times `base`, with so many more tokens."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if tokens:
        model.resize_token_embeddings(model.config.vocab_size + tokens, mean_resizing=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale).add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"of": "tuned"}')
    return folder


def as_fastchat_applies(base: Path, delta: Path) -> State:
    """What FastChat's `apply_delta` makes: both loaded in float16, and added in place."""
    below, above = (AutoModelForCausalLM.from_pretrained(side, dtype=torch.float16) for side in (base, delta))
    told = above.state_dict()
    for name, parameter in below.state_dict().items():
        parameter.data += told[name]
    return {name: value.float() for name, value in below.state_dict().items()}


def make_delta(base: Path, tuned: Path, folder: Path, *, torch_file: bool = False) -> Path:
    """What FastChat's `make_delta` saves: float16 differences, the base longer by zeros as of v0, tuned tokenizer."""
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    after = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float16)
    below: State = before.state_dict()
    for name, parameter in after.state_dict().items():
        rows = below[name]
        parameter[: len(rows)] -= rows
    after.save_pretrained(folder)
    if torch_file:  # as it was saved then, with buffers that later versions do not have
        state = after.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        torch.save(state, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    shutil.copy(tuned / "tokenizer.json", folder)
    return folder


def state_of(folder: Path) -> State:
    return {
        name: torch.from_numpy(tensor.read().astype(np.float32)) for name, tensor in open_checkpoint(folder).items()
    }


def sums(base: Path, delta: Path) -> State:
    """base + delta in float32, the base longer by zeros."""
    below = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    above = AutoModelForCausalLM.from_pretrained(delta, dtype=torch.float32).state_dict()
    return {
        name: torch.nn.functional.pad(below[name], (0, 0) * (value.dim() - 1) + (0, len(value) - len(below[name])))
        + value
        for name, value in above.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("torch_file", [False, True], ids=["safetensors", "torch"])
@pytest.mark.parametrize("dtype", ["keep", "float32", "bfloat16"])
def test_a_delta_of_fastchat_is_added_with_one_rounding(dtype: str, torch_file: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    tuned = moved(base, tmp_path / "tuned", torch.float16)
    expected = sums(base, make_delta(base, tuned, tmp_path / "d"))
    delta = make_delta(base, tuned, tmp_path / "delta", torch_file=torch_file)
    assert apply_delta(base, delta, tmp_path / "out", dtype=dtype).kind == "difference"
    found, kind = state_of(tmp_path / "out"), getattr(torch, "float16" if dtype == "keep" else dtype)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(kind).float()) for name in found)
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"of": "tuned"}'


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("torch_file", [False, True], ids=["safetensors", "torch"])
def test_in_float16_the_bits_are_fastchats_whatever_the_base_is_stored_in(
    stored: str, torch_file: bool, tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", "llama", stored)
    tuned = moved(base, tmp_path / "tuned", torch.float16)
    expected = as_fastchat_applies(base, make_delta(base, tuned, tmp_path / "d"))
    apply_delta(base, make_delta(base, tuned, tmp_path / "e", torch_file=torch_file), tmp_path / "out", dtype="float16")
    found = state_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_larger_vocabulary_is_added_to_rows_of_zeros(
    tmp_path: Path, logits_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    tuned = moved(base, tmp_path / "tuned", torch.float16, tokens=1)
    delta = make_delta(base, tuned, tmp_path / "delta")
    apply_delta(base, delta, tmp_path / "out")
    assert "the base has 24 tokens, the delta 25" in capsys.readouterr().err
    expected = sums(base, delta)
    assert all(torch.equal(value, expected[name].half().float()) for name, value in state_of(tmp_path / "out").items())
    ids = np.array([[1, 5, 24]])
    assert np.abs(logits_of(tmp_path / "out", ids) - logits_of(tuned, ids)).max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "kept"),
    [
        (("tokenizer.model", "added_tokens.json"), {"tokenizer.model", "added_tokens.json"}),
        (("added_tokens.json",), {"tokenizer.json", "chat_template.jinja", "added_tokens.json"}),
    ],
)
def test_the_tokenizer_is_the_deltas_or_the_bases_and_never_a_mixture(
    own: tuple[str, ...], kept: set[str], tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (base / name).write_text("{}")
    delta = make_delta(base, moved(base, tmp_path / "tuned", torch.float16), tmp_path / "delta")
    (delta / "tokenizer.json").unlink()
    for name in own:
        (delta / name).write_text('{"of": "delta"}')
    apply_delta(base, delta, tmp_path / "out")
    weights = {"config.json", "generation_config.json", "llmconv.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} - weights == kept


def test_a_tuned_model_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16", vocab_size=25)
    delta = save_tiny(tmp_path / "delta", "llama", "float16")
    with pytest.raises(MalformedInput, match=r"for 2 tensors .*: `.*\[24, 32\] for \[25, 32\]`") as refusal:
        apply_delta(base, delta, tmp_path / "out")
    assert "tokens that the delta's base did not have" in refusal.value.hint


def test_a_delta_of_another_model_is_refused(tmp_path: Path) -> None:
    base, other = save_tiny(tmp_path / "base", "llama"), save_tiny(tmp_path / "x", "llama", intermediate_size=40)
    with pytest.raises(MalformedInput, match="shape mismatch for 6 tensors"):
        apply_delta(base, other, tmp_path / "out")
    with pytest.raises(MalformedInput, match="9 missing keys in the delta"):
        apply_delta(base, save_tiny(tmp_path / "y", "llama", num_hidden_layers=1), tmp_path / "out")
    with pytest.raises(MalformedInput, match="6 missing keys in the base"):
        apply_delta(base, save_tiny(tmp_path / "z", "qwen2"), tmp_path / "out")


def test_a_whole_model_in_place_of_a_delta_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    tuned = moved(base, tmp_path / "tuned", torch.float16)
    with pytest.raises(MalformedInput, match="it is a whole model, not a delta"):
        apply_delta(base, tuned, tmp_path / "out")
    delta = make_delta(base, tuned, tmp_path / "delta")
    capsys.readouterr()  # saving a model may show a bar
    apply_delta(base, delta, tmp_path / "out", dry_run=True)
    assert capsys.readouterr().err == ""


def as_delta(folder: Path) -> Path:
    """A model whose last norm is as small as that of a delta."""
    save_file(state_of(folder) | {"model.norm.weight": torch.full((32,), 0.01)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied_base", [True, False])
def test_a_head_that_one_of_them_does_not_store_is_the_embedding(tied_base: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=tied_base)
    delta = as_delta(save_tiny(tmp_path / "delta", "llama", tie_word_embeddings=not tied_base))
    apply_delta(base, delta, tmp_path / "out")
    below, above, found = state_of(base), state_of(delta), state_of(tmp_path / "out")
    embedding = "model.embed_tokens.weight"
    sides = [side.get("lm_head.weight", side[embedding]) for side in (below, above)]
    assert torch.equal(found["lm_head.weight"], sides[0] + sides[1])
    assert open_checkpoint(tmp_path / "out").config["tie_word_embeddings"] is False


def test_a_wider_delta_keeps_its_bits(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    delta = as_delta(save_tiny(tmp_path / "delta", "llama", "float32"))
    apply_delta(base, delta, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config["dtype"] == "float32"


def test_a_sum_too_large_for_its_type_is_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    delta = as_delta(save_tiny(tmp_path / "delta", "llama", "float16"))
    for folder, size in ((base, 65504), (delta, 20000)):
        save_file(
            state_of(folder) | {"model.norm.weight": torch.full((32,), size).half()}, folder / "model.safetensors"
        )
    with pytest.raises(UnsupportedInput, match="too large for float16"):
        apply_delta(base, delta, tmp_path / "out")
    apply_delta(base, delta, tmp_path / "out", dtype="bfloat16")


@pytest.mark.slow
def test_the_base_may_be_in_metas_shards(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    delta = make_delta(base, moved(base, tmp_path / "tuned", torch.float16), tmp_path / "delta")
    from_hf(base, tmp_path / "meta", to="meta", shards=2)
    for number, source in enumerate((base, tmp_path / "meta")):
        apply_delta(source, delta, tmp_path / f"out{number}")
    assert contents(open_checkpoint(tmp_path / "out0")) == contents(open_checkpoint(tmp_path / "out1"))
