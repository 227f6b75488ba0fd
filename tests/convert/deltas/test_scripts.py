"""Deltas for FastChat's and Stanford Alpaca's scripts, whose sums are computed here with torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmconv.convert import apply_delta, extract_delta, to_hf
from llmconv.errors import OutputFailed, UnsupportedInput, UsageProblem
from tests.builders.tiny_models import save_tiny
from tests.convert.deltas.test_alpaca import recovered, tune
from tests.convert.deltas.test_difference import as_fastchat_applies, moved, state_of

State = dict[str, torch.Tensor]


def pair(folder: Path, dtype: str = "float16", tokens: int = 0) -> tuple[Path, Path]:
    """A base and a model tuned from it, both with a tokenizer."""
    base = save_tiny(folder / "base", "llama", dtype)
    tuned = moved(base, folder / "tuned", getattr(torch, dtype), tokens, scale=-0.1)
    for side in (base, tuned):
        (side / "tokenizer.json").write_text("{}")
    return base, tuned


def count_unlike(found: State, tuned: State) -> int:
    return sum(int((found[name].view(torch.int32) != tuned[name].view(torch.int32)).sum()) for name in tuned)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_fastchats_script_makes_is_counted_and_made_by_apply(dtype: str, tmp_path: Path) -> None:
    base, tuned = pair(tmp_path, dtype)
    done = extract_delta(base, tuned, tmp_path / "delta", to="fastchat")
    expected = as_fastchat_applies(base, tmp_path / "delta")
    assert done.inexact == count_unlike(expected, state_of(tuned)) > 0
    assert sum(done.inexact_tensors.values()) == done.inexact
    assert done.elements == sum(value.numel() for value in expected.values())
    assert apply_delta(base, tmp_path / "delta", tmp_path / "out", dtype="float16").kind == "difference"
    found = state_of(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_fastchats_delta_has_the_files_that_its_low_memory_way_reads(tmp_path: Path) -> None:
    base, tuned = pair(tmp_path)
    extract_delta(base, tuned, tmp_path / "delta", to="fastchat", max_shard_size="10KB")
    files = sorted((tmp_path / "delta").glob("pytorch_model-*.bin"))
    state: State = {name: value for file in files for name, value in torch.load(file).items()}
    below = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).state_dict()
    assert len(files) > 1
    assert state.keys() == below.keys()
    assert {value.dtype for value in state.values()} == {torch.float16}
    assert json.loads((tmp_path / "delta/config.json").read_text())["dtype"] == "float16"


def test_one_file_has_the_name_of_a_shard_too(tmp_path: Path) -> None:
    extract_delta(*pair(tmp_path), tmp_path / "delta", to="fastchat")
    assert [file.name for file in (tmp_path / "delta").glob("*.bin")] == ["pytorch_model-00001-of-00001.bin"]


def test_a_token_that_fastchats_first_version_adds_counts_from_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = pair(tmp_path, tokens=1)
    extract_delta(base, tuned, tmp_path / "delta", to="fastchat")
    assert "only FastChat before 0.2" in capsys.readouterr().err
    apply_delta(base, tmp_path / "delta", tmp_path / "out")
    name = "model.embed_tokens.weight"
    assert torch.equal(state_of(tmp_path / "out")[name][24:], state_of(tuned)[name][24:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_stanfords_script_recovers_is_counted_and_made_by_apply(dtype: str, tmp_path: Path) -> None:
    base, tuned = pair(tmp_path, dtype)
    done = extract_delta(base, tuned, tmp_path / "delta", to="alpaca")
    expected = recovered(base, tmp_path / "delta", tokens=0)
    assert done.inexact == count_unlike(expected, state_of(tuned))
    assert (done.inexact > 0) is (dtype == "float32")
    apply_delta(base, tmp_path / "delta", tmp_path / "out")
    found = state_of(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_stanfords_new_token_is_the_difference_from_the_mean(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float32")
    tuned = tune(base, tmp_path / "tuned")
    extract_delta(base, tuned, tmp_path / "delta", to="alpaca")
    expected = recovered(base, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", tmp_path / "out")
    found, wanted = state_of(tmp_path / "out"), state_of(tuned)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)  # the order of the mean's sum
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)


def test_a_trained_new_token_is_refused_for_alpaca(tmp_path: Path) -> None:
    base, tuned = pair(tmp_path, "float32", tokens=1)
    with pytest.raises(UnsupportedInput, match="is not near the mean"):
        extract_delta(base, tuned, tmp_path / "delta", to="alpaca")


@pytest.mark.slow
def test_the_tokenizer_of_the_delta_is_the_tuned_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = pair(tmp_path)
    (tuned / "tokenizer.json").write_text('{"of": "tuned"}')
    extract_delta(base, tuned, tmp_path / "delta", to="alpaca")
    assert (tmp_path / "delta/tokenizer.json").read_text() == '{"of": "tuned"}'
    assert "expects one token more, `[PAD]`" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = pair(tmp_path)
    (tuned / "tokenizer.json").unlink()
    extract_delta(base, tuned, tmp_path / "delta", to="fastchat")
    assert "FastChat's script loads that of the delta" in capsys.readouterr().err


def test_fastchat_keeps_the_configuration_of_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = pair(tmp_path)
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    for to in ("fastchat", "alpaca"):
        extract_delta(base, tuned, tmp_path / to, to=to)
    assert capsys.readouterr().err.count("the models differ in `rms_norm_eps`") == 1


def test_a_tied_head_is_refused_since_the_scripts_add_to_it_twice(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=True)
    for to in ("fastchat", "alpaca"):
        with pytest.raises(UnsupportedInput, match="is tied to its embedding"):
            extract_delta(base, base, tmp_path / "delta", to=to)


@pytest.mark.parametrize("to", ["fastchat", "alpaca"])
def test_models_that_the_scripts_cannot_join_are_refused(to: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    others = {
        "2 more tokens": save_tiny(tmp_path / "a", "llama", vocab_size=26),
        "1 fewer tokens": save_tiny(tmp_path / "b", "llama", vocab_size=23),
        "shape mismatch for 6": save_tiny(tmp_path / "c", "llama", intermediate_size=40),
        "only one of the two": save_tiny(tmp_path / "d", "qwen2"),
    }
    for reason, other in others.items():
        with pytest.raises(UnsupportedInput, match=reason):
            extract_delta(base, other, tmp_path / "delta", to=to)
    assert not (tmp_path / "delta").exists()


def test_a_weight_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    base, tuned = pair(tmp_path, "float32")
    state = {name: value.contiguous() for name, value in state_of(tuned).items()}
    save_file(state | {"model.norm.weight": torch.full((32,), 1e6)}, tuned / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedInput, match=r"`model\.norm\.weight` has a value too large for float16"):
        extract_delta(base, tuned, tmp_path / "delta", to="fastchat")
    assert not (tmp_path / "delta").exists()


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Lets the fourth file fail."""
    count, sync = iter(range(100)), os.fsync

    def fsync(fd: int) -> None:
        if next(count) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(fd)

    patch.setattr(os, "fsync", fsync)


@pytest.mark.slow
def test_a_resumed_run_does_not_report_a_partial_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair(tmp_path)
    options: dict[str, Any] = {"to": "fastchat", "max_shard_size": "10KB"}
    whole = extract_delta(base, tuned, tmp_path / "whole", **options)
    with monkeypatch.context() as patch, pytest.raises(OutputFailed):
        fill_disk(patch)
        extract_delta(base, tuned, tmp_path / "delta", **options)
    done = extract_delta(base, tuned, tmp_path / "delta", **options, resume=True)
    assert done.inexact is None
    assert "was not counted, because the run was resumed" in capsys.readouterr().err
    for shard in whole.plan.shards:
        assert (tmp_path / "whole" / shard.name).read_bytes() == (tmp_path / "delta" / shard.name).read_bytes()


@pytest.mark.quick_rows("alpaca")
@pytest.mark.parametrize("to", ["fastchat", "alpaca", "accessory"])
def test_a_delta_is_not_converted_as_a_model(to: str, tmp_path: Path) -> None:
    extract_delta(*pair(tmp_path), tmp_path / "delta", to=to)
    with pytest.raises(UnsupportedInput, match="is a delta, not a model"):
        to_hf(tmp_path / "delta", tmp_path / "out")


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path) -> None:
    done = extract_delta(*pair(tmp_path), tmp_path / "delta", to="fastchat", dry_run=True)
    assert (done.inexact, done.nbytes) == (None, None)
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"to": "vicuna"}, "deltas of `vicuna` cannot be written"),
        ({"to": "fastchat", "rank": 4}, "exclude each other"),
        ({"to": "alpaca", "dtype": "float16"}, "own element type"),
        ({"to": "alpaca", "shards": 2}, "only a delta with model-parallel parts"),
        ({"shards": 2}, "only a delta with model-parallel parts"),
        ({"to": "accessory", "shards": 0}, "0 shards are not possible"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=reason):
        extract_delta(tmp_path, tmp_path, tmp_path / "delta", **options)
