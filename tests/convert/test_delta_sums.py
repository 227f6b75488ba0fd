"""Deltas of other tools: FastChat's, made as its code makes them, and genuine ones of LLaMA2-Accessory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, from_hf, merge_lora, to_hf
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.convert.accessory_models import DELTA, change
from tests.convert.accessory_models import llama as accessory_llama
from tests.convert.accessory_models import save as save_accessory
from tests.convert.tiny_models import contents, save_tiny

State = dict[str, torch.Tensor]


def moved(base: Path, folder: Path, dtype: torch.dtype, tokens: int = 0) -> Path:
    """A model near `base`, with so many more tokens."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if tokens:
        model.resize_token_embeddings(model.config.vocab_size + tokens, mean_resizing=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"of": "tuned"}')
    return folder


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


def test_a_tuned_model_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16", vocab_size=25)
    delta = save_tiny(tmp_path / "delta", "llama", "float16")
    with pytest.raises(MalformedInput, match=r"in 2 tensors: `.*\[24, 32\] for \[25, 32\]`") as refusal:
        apply_delta(base, delta, tmp_path / "out")
    assert "tokens that the delta's base did not have" in refusal.value.hint


def test_a_delta_of_another_model_is_refused(tmp_path: Path) -> None:
    base, other = save_tiny(tmp_path / "base", "llama"), save_tiny(tmp_path / "x", "llama", intermediate_size=40)
    with pytest.raises(MalformedInput, match="does not fit `base` in 6 tensors"):
        apply_delta(base, other, tmp_path / "out")
    with pytest.raises(MalformedInput, match="the delta lacks 9 tensors"):
        apply_delta(base, save_tiny(tmp_path / "y", "llama", num_hidden_layers=1), tmp_path / "out")
    with pytest.raises(MalformedInput, match="the base lacks 6 tensors"):
        apply_delta(base, save_tiny(tmp_path / "z", "qwen2"), tmp_path / "out")


def test_a_whole_model_in_place_of_a_delta_is_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    tuned = moved(base, tmp_path / "tuned", torch.float16)
    apply_delta(base, tuned, tmp_path / "out", dry_run=True)
    assert "is it a whole model, no delta?" in capsys.readouterr().err
    apply_delta(base, make_delta(base, tuned, tmp_path / "delta"), tmp_path / "out", dry_run=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tied_base", [True, False])
def test_a_head_that_one_of_them_does_not_store_is_the_embedding(tied_base: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", tie_word_embeddings=tied_base)
    delta = save_tiny(tmp_path / "delta", "llama", tie_word_embeddings=not tied_base)
    apply_delta(base, delta, tmp_path / "out")
    below, above, found = state_of(base), state_of(delta), state_of(tmp_path / "out")
    embedding = "model.embed_tokens.weight"
    sides = [side.get("lm_head.weight", side[embedding]) for side in (below, above)]
    assert torch.equal(found["lm_head.weight"], sides[0] + sides[1])
    assert open_checkpoint(tmp_path / "out").config["tie_word_embeddings"] is False


def test_a_wider_delta_keeps_its_bits(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    delta = save_tiny(tmp_path / "delta", "llama", "float32")
    apply_delta(base, delta, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config["dtype"] == "float32"


def test_a_sum_too_large_for_its_type_is_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight.fill_(65504)
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(UnsupportedInput, match="too large for float16"):
        apply_delta(tmp_path / "large", tmp_path / "large", tmp_path / "out")
    apply_delta(tmp_path / "large", tmp_path / "large", tmp_path / "out", dtype="bfloat16")


def test_the_base_may_be_in_metas_shards(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", "float16")
    delta = make_delta(base, moved(base, tmp_path / "tuned", torch.float16), tmp_path / "delta")
    from_hf(base, tmp_path / "meta", to="meta", shards=2)
    for number, source in enumerate((base, tmp_path / "meta")):
        apply_delta(source, delta, tmp_path / f"out{number}")
    assert contents(open_checkpoint(tmp_path / "out0")) == contents(open_checkpoint(tmp_path / "out1"))


# LLaMA2-Accessory


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


def test_float16_is_what_upstreams_own_tool_wrote(tmp_path: Path) -> None:
    apply_delta(DELTA / "base", DELTA / "delta", tmp_path / "out", dtype="float16")
    to_hf(DELTA / "applied", tmp_path / "applied", config=[DELTA / "base" / "params.json"])
    found, applied = (contents(open_checkpoint(tmp_path / name)) for name in ("out", "applied"))
    assert found == applied


def difference(base: Any, tuned: Any) -> Any:
    """What upstream's tool extracts: float16, what the base lacks whole."""
    return {name: (value - base[name] if name in base else value).half() for name, value in tuned.items()}


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


def test_what_a_partial_delta_lacks_stays_as_it_is(tmp_path: Path) -> None:
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
    "another split": (add_to_one, "differ in 1 tensors"),
    "shards of a model": (mix, "mixes shards"),
    "another size": (
        add_to_all("norm.weight", torch.ones(1)),
        r"does not fit the base in 1 tensors: `norm\.weight \[1\] for \[32\]`",
    ),
    "a part for pictures": (
        add_to_all("clip_proj.weight", torch.ones(1)),
        "no language model of transformers holds: `clip_proj`",
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


def test_a_delta_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputRefused):
        merge_lora(save_tiny(tmp_path / "base", "llama"), [DELTA / "delta"], tmp_path / "out")
