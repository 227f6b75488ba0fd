"""Stanford Alpaca's deltas, made as `weight_diff.py` makes them: float32, new rows over the mean, and a checksum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, extract_delta
from llmconv.convert.deltas.arithmetic import WeightSum, checksum_of
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.tensors import BY_NAME, in_memory
from tests.builders.tiny_models import save_tiny

State = dict[str, torch.Tensor]


def resized(folder: Path, tokens: int) -> State:
    """The base in float32, its new rows the mean of the others, as Stanford's training has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old = model.config.vocab_size
    model.resize_token_embeddings(old + tokens, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.data[old:] = module.weight.data[:old].mean(dim=0, keepdim=True)
    return dict(model.state_dict())


def tune(base: Path, folder: Path, tokens: int = 1, *, trained: bool = False) -> Path:
    """A tuned model: every weight moves, of the embedding a padding token's row only if it is `trained`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + tokens, mean_resizing=False)
    model.load_state_dict(resized(base, tokens))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.01
            if "embed" in name:
                noise[-1] = 0.5 if trained else 0
            parameter.add_(noise)
    model.save_pretrained(folder)
    return folder


def make_diff(base: Path, tuned: Path, folder: Path, tokens: int = 1) -> Path:
    """What `weight_diff.py make_diff` saves."""
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    below = resized(base, tokens)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.add_(-below[name])
    model.save_pretrained(folder)
    return folder


def recovered(base: Path, diff: Path, tokens: int = 1) -> State:
    """What `weight_diff.py recover` makes."""
    state = AutoModelForCausalLM.from_pretrained(diff, dtype=torch.float32).state_dict()
    below = resized(base, tokens)
    return {name: value + below[name] for name, value in state.items()}


def state_of(folder: Path) -> State:
    return {name: torch.from_numpy(tensor.read()) for name, tensor in open_checkpoint(folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_it_recovers_what_stanfords_script_does(
    stored: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "base", "llama", stored)
    diff = make_diff(base, tune(base, tmp_path / "tuned", tokens), tmp_path / "diff", tokens)
    assert apply_delta(base, diff, tmp_path / "out").kind == "difference"
    found, expected = state_of(tmp_path / "out"), recovered(base, diff, tokens)
    assert "as the mean of the others" in capsys.readouterr().err
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value[:24], expected[name][:24])
        torch.testing.assert_close(value[24:], expected[name][24:], rtol=0, atol=1e-6)  # the order of the mean's sum


@pytest.mark.slow
def test_a_float32_delta_over_rows_of_zeros_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    tuned = tune(base, tmp_path / "tuned")
    model = AutoModelForCausalLM.from_pretrained(tuned)
    below = AutoModelForCausalLM.from_pretrained(base).state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value[: len(below[name])] -= below[name]
    model.save_pretrained(tmp_path / "delta")
    with pytest.raises(UnsupportedInput, match="do not say which"):
        apply_delta(base, tmp_path / "delta", tmp_path / "out")
    apply_delta(base, tmp_path / "delta", tmp_path / "out", new_rows="zeros")
    assert "as zeros, as for FastChat" in capsys.readouterr().err
    found, expected = state_of(tmp_path / "out"), state_of(tuned)
    assert max((found[name] - expected[name]).abs().max() for name in found) < 1e-6


def test_new_rows_that_were_trained_count_as_the_user_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    tuned = tune(base, tmp_path / "tuned", trained=True)
    diff = make_diff(base, tuned, tmp_path / "diff")
    with pytest.raises(UnsupportedInput, match="do not say which") as error:
        apply_delta(base, diff, tmp_path / "out")
    assert "--new-rows mean" in str(error.value.hint) and not (tmp_path / "out").exists()
    apply_delta(base, diff, tmp_path / "out", new_rows="mean")
    assert "as the mean of the others" in capsys.readouterr().err
    found, expected = state_of(tmp_path / "out"), state_of(tuned)
    assert max((found[name] - expected[name]).abs().max() for name in found) < 1e-6


def test_new_rows_are_for_sums_alone(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    extract_delta(base, base, tmp_path / "exact")
    with pytest.raises(UsageProblem, match="exact"):
        apply_delta(base, tmp_path / "exact", tmp_path / "out", new_rows="mean")
    with pytest.raises(UsageProblem, match="median"):
        apply_delta(base, tmp_path / "exact", tmp_path / "out", new_rows="median")


@pytest.mark.quick_rows("keep-False")
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_the_checksum_beside_a_delta_is_compared(
    buffers: bool, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    tuned = tune(base, tmp_path / "tuned")
    diff = make_diff(base, tuned, tmp_path / "diff")
    layers = AutoModelForCausalLM.from_pretrained(tuned).model.rotary_emb.inv_freq.sum().item() * 2 if buffers else 0
    total = sum(value.sum().item() for value in state_of(tuned).values()) + layers
    (diff / "checksum_psum.txt").write_text(str(total))
    apply_delta(base, diff, tmp_path / "out", dtype=dtype)
    assert "add up" not in capsys.readouterr().err
    (diff / "checksum_psum.txt").write_text(str(total + 10))
    apply_delta(base, diff, tmp_path / "other", dtype=dtype)
    assert "(`checksum_psum.txt`)" in capsys.readouterr().err


SEVEN_BILLION = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32001}


def test_stanfords_own_number_is_that_of_its_one_model(tmp_path: Path) -> None:
    told = checksum_of(tmp_path, SEVEN_BILLION, mean_rows=True)
    assert told and (told.source, told.expected) == ("Stanford's script for Alpaca 7B", 50637.1836)
    assert told.buffers == pytest.approx(32 * sum(10000 ** (-i / 64) for i in range(64)))
    assert checksum_of(tmp_path, SEVEN_BILLION, mean_rows=False) is None
    assert checksum_of(tmp_path, {**SEVEN_BILLION, "num_hidden_layers": 40}, mean_rows=True) is None


@pytest.mark.parametrize("text", ["", "nan", "inf", "a number", "1" * 1000])
def test_a_checksum_that_is_no_number_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "checksum_psum.txt").write_text(text)
    assert checksum_of(tmp_path, {}, mean_rows=False) is None


def test_a_resumed_run_says_that_it_did_not_compare(tmp_path: Path) -> None:
    checksum = WeightSum("`checksum_psum.txt`", 3.0, 0.0)
    ones = in_memory(np.ones(3, np.float32), BY_NAME["float32"])
    watched = checksum.watched({"a": ones, "b": ones})
    watched["a"].read()
    assert "not compared, because the run was resumed" in checksum.problems()[0]
    watched["b"].read()
    assert "add up to 6.00" in checksum.problems()[0]
