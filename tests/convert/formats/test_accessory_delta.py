"""Deltas of LLaMA2-Accessory: genuine ones, and small ones made as its tool makes them, over bases of any format."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, extract_delta, merge_lora, to_hf
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from tests.builders.accessory_models import DELTA, change
from tests.builders.accessory_models import llama as accessory_llama
from tests.builders.accessory_models import save as save_accessory
from tests.builders.tiny_models import contents, save_tiny
from tests.convert.deltas.test_difference import moved, state_of


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "key"), [("float32", "logits_base_plus_delta"), ("float16", "logits")])
def test_a_genuine_delta_over_metas_shards_gives_upstreams_logits(
    dtype: str, key: str, tmp_path: Path, logits_of: Callable[..., Any]
) -> None:
    assert apply_delta(DELTA / "base", DELTA / "delta", tmp_path / "out", dtype=dtype).kind == "accessory"
    with np.load(DELTA / "reference.npz") as reference:
        logits = logits_of(tmp_path / "out", reference["tokens"])
        assert np.abs(logits - reference[key]).max() < 1e-5 * np.abs(reference[key]).max()


def test_rounded_to_the_bases_type_a_genuine_delta_gives_the_tuned_model(tmp_path: Path) -> None:
    apply_delta(DELTA / "base", DELTA / "delta", tmp_path / "out")
    to_hf(DELTA / "finetuned", tmp_path / "tuned")
    found, tuned = (contents(open_checkpoint(tmp_path / name)) for name in ("out", "tuned"))
    assert found.keys() == tuned.keys()
    apart = np.concatenate([bits(found[name]) != bits(tuned[name]) for name in tuned])
    assert apart.mean() < 0.005  # what float16 lost of the smallest differences


def bits(content: tuple[str, tuple[int, ...], bytes]) -> Any:
    return np.frombuffer(content[2], np.uint16)


def test_float16_equals_the_output_of_upstreams_own_tool(tmp_path: Path) -> None:
    apply_delta(DELTA / "base", DELTA / "delta", tmp_path / "out", dtype="float16")
    to_hf(DELTA / "applied", tmp_path / "applied", config=[DELTA / "base" / "params.json"])
    found, applied = (contents(open_checkpoint(tmp_path / name)) for name in ("out", "applied"))
    assert found == applied


def difference(base: Any, tuned: Any) -> Any:
    """What upstream's tool extracts: float16, what the base lacks whole."""
    return {name: (value - base[name] if name in base else value).half() for name, value in tuned.items()}


@pytest.mark.slow_rows("4")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_new_lora_and_biases_are_added_to_nothing(count: int, tmp_path: Path) -> None:
    before = accessory_llama()
    after = accessory_llama(rank=2, biases=("wq", "w2"))
    save_accessory(tmp_path / "base", before, 2, "llama")
    delta = difference(before, {name: value + 0.01 for name, value in after.items()})
    save_delta(tmp_path / "delta", delta, count)
    summed = {name: before.get(name, 0) + value.float() for name, value in delta.items()}
    save_accessory(tmp_path / "tuned", summed, 1)
    to_hf(tmp_path / "tuned", tmp_path / "expected")
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    found, expected = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "expected")
    assert contents(found) == contents(expected)
    assert {**expected.config, "max_position_embeddings": 128} == {**found.config, "max_position_embeddings": 128}


def save_delta(folder: Path, model: Any, count: int = 1) -> Path:
    """Shards as upstream's tool names them, without any side files."""
    save_accessory(folder, model, count)
    for shard in folder.glob("*.pth"):
        shard.rename(folder / shard.name.replace("model.pth", "model-diff.pth"))
    for name in ("config.json", "meta.json"):
        (folder / name).unlink()
    return folder


def test_tensors_that_a_partial_delta_lacks_stay_unchanged(tmp_path: Path) -> None:
    before = accessory_llama()
    save_accessory(tmp_path / "base", before, 2, "llama")
    save_delta(tmp_path / "delta", {name: value for name, value in before.items() if "norm" in name}, 2)
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    to_hf(tmp_path / "base", tmp_path / "plain")
    found, plain = (contents(open_checkpoint(tmp_path / name)) for name in ("out", "plain"))
    assert {name for name in plain if found[name] != plain[name]} == {name for name in plain if "norm" in name}


def shard(folder: Path, number: int) -> Path:
    return folder / f"consolidated.{number:02}-of-02.model-diff.pth"


def add_to_all(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for number in range(2):
            change(shard(folder, number), **{f"llma.{name}": value})

    return damage


def add_to_one(folder: Path) -> None:
    change(shard(folder, 1), **{"llma.output.weight": torch.ones(3, 32)})


def mix(folder: Path) -> None:
    shutil.copy(shard(folder, 0), folder / "consolidated.00-of-02.model.pth")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (lambda folder: shard(folder, 0).unlink(), "should have 2 shards, but number 0 is missing"),
    "another split": (add_to_one, "differs from the first shard in 1 tensors"),
    "shards of a model": (mix, "mixes shards"),
    "another size": (
        add_to_all("norm.weight", torch.ones(1)),
        r"shape mismatch between `.*` and the base for 1 tensors: `norm\.weight \[1\] for \[32\]`",
    ),
    "a part for pictures": (
        add_to_all("clip_proj.weight", torch.ones(1)),
        "no language model of transformers has: `clip_proj`",
    ),
    "an unknown part": (add_to_all("router.weight", torch.ones(1)), "no rule places"),
}


@pytest.mark.parametrize(("damage", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_delta_is_refused(damage: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    model = accessory_llama()
    save_accessory(tmp_path / "base", model, 1, "llama")
    damage(save_delta(tmp_path / "delta", model, 2))
    with pytest.raises(InputRefused, match=reason):
        apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_accessory_does_not_have_takes_no_delta_of_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="qwen2"):
        apply_delta(save_tiny(tmp_path / "base", "qwen2"), DELTA / "delta", tmp_path / "out")


def test_a_delta_is_not_a_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputRefused):
        merge_lora(save_tiny(tmp_path / "base", "llama"), [DELTA / "delta"], tmp_path / "out")


def torch_file(folder: Path, number: int = 0) -> Any:
    (file,) = folder.glob(f"consolidated.{number:02}-of-*.model-diff.pth")
    return torch.load(file)["model"]


def test_an_extracted_delta_equals_the_one_of_upstreams_own_tool(tmp_path: Path) -> None:
    done = extract_delta(DELTA / "base", DELTA / "finetuned", tmp_path / "delta", to="accessory")
    assert [shard.name for shard in done.plan.shards] == [shard(tmp_path, number).name for number in range(2)]
    for number in range(2):
        found, genuine = torch_file(tmp_path / "delta", number), torch_file(DELTA / "delta", number)
        genuine = {name: value for name, value in genuine.items() if not name.endswith("rope.freqs")}
        assert found.keys() == genuine.keys()
        assert all(torch.equal(found[name], value) for name, value in genuine.items())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_elements_that_upstreams_sum_loses_are_counted(count: int, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "bfloat16")
    tuned = moved(base, tmp_path / "tuned", torch.bfloat16)
    done = extract_delta(base, tuned, tmp_path / "delta", to="accessory", shards=count)
    apply_delta(base, tmp_path / "delta", tmp_path / "out", dtype="float16")
    below, wanted, found = (state_of(folder) for folder in (base, tuned, tmp_path / "out"))
    expected = {name: (below[name] + (value - below[name]).half().float()).half() for name, value in wanted.items()}
    assert all(torch.equal(found[name], value.float()) for name, value in expected.items())
    lost = sum(int((value.float() != wanted[name]).sum()) for name, value in expected.items())
    assert (done.inexact, done.elements) == (lost, sum(value.numel() for value in wanted.values()))
    assert lost > 0 and sum(done.inexact_tensors.values()) == lost


def test_tensors_that_upstreams_sum_does_not_restore_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "base", "llama", "bfloat16")
    done = extract_delta(base, moved(base, tmp_path / "tuned", torch.bfloat16), tmp_path / "delta", to="accessory")
    messages = capsys.readouterr().err
    assert done.inexact_tensors and all(f"`{name}`" in messages for name in list(done.inexact_tensors)[:5])
    assert "; for a delta that restores all of them, leave out `--to` and use `llmconv delta apply`" in messages


def test_new_biases_are_stored_whole(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    tuned = save_tiny(tmp_path / "tuned", "llama", "float16", attention_bias=True)
    extract_delta(base, tuned, tmp_path / "delta", to="accessory")
    name = "layers.0.self_attn.o_proj.bias"
    stored = torch_file(tmp_path / "delta")["llma.layers.0.attention.wo.bias"]
    assert torch.equal(stored.float(), state_of(tuned)[f"model.{name}"])
    apply_delta(base, tmp_path / "delta", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config["attention_bias"] is True


def test_changes_that_the_format_does_not_contain_are_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    others = {
        "vocab_size": save_tiny(tmp_path / "a", "llama", vocab_size=25),
        "rope_theta": save_tiny(tmp_path / "b", "llama", rope_theta=5e5),
        "no plugin|qwen2": save_tiny(tmp_path / "c", "qwen2"),
    }
    for reason, other in others.items():
        with pytest.raises(UnsupportedInput, match=reason):
            extract_delta(base, other, tmp_path / "delta", to="accessory")
    biased = save_tiny(tmp_path / "d", "llama", attention_bias=True)
    with pytest.raises(UnsupportedInput, match="8 tensors of the base"):
        extract_delta(biased, base, tmp_path / "delta", to="accessory")
    with pytest.raises(UsageProblem, match="3"):
        extract_delta(base, base, tmp_path / "delta", to="accessory", shards=3)
