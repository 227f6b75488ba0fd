"""Exact deltas: extract, then apply, is the tuned model bit for bit, whatever the two models."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, extract_delta, from_hf, to_hf
from llmconv.convert.deltas import exact
from llmconv.errors import UnsupportedInput
from llmconv.tensors import BY_NAME, DTYPES, LazyTensor
from tests.builders.accessory_models import DELTA
from tests.builders.delta_models import same, save, save_pair, there_and_back, weights
from tests.builders.tiny_models import save_tiny


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and what was tuned from it."""
    return save_pair(tmp_path)


def shapes() -> st.SearchStrategy[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Two shapes, often equal, often with more or fewer rows."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    rows = st.tuples(shape, st.integers(0, 9), st.integers(0, 9))
    return st.one_of(
        shape.map(lambda one: (one, one)),
        st.tuples(shape, shape),
        rows.map(lambda one: ((one[1], *one[0]), (one[2], *one[0]))),
    )


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """A tensor of the base and of the tuned model: any types, any shapes, any bits, or few bits apart."""
    kinds = st.sampled_from([dtype.name for dtype in DTYPES])
    before = draw(kinds)
    after = draw(st.one_of(st.just(before), kinds))
    sides = []
    for name, shape in zip((before, after), draw(shapes()), strict=True):
        size = int(np.prod(shape)) * BY_NAME[name].itemsize
        bits: Any = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        bits = bits & 1 if name == "bool" else bits
        sides.append((name, np.ascontiguousarray(bits).view(BY_NAME[name].numpy).reshape(shape)))
    if before == after and sides[0][1].shape == sides[1][1].shape and draw(st.booleans()):
        sides[1] = sides[0]
    return sides[0], sides[1]


MODELS = st.dictionaries(
    st.sampled_from(["model.embed_tokens.weight", "lm_head.weight", "a.weight", "b.bias", "c"]),
    st.tuples(tensors(), st.sampled_from(["both", "both", "added", "removed"])),
    min_size=1,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(MODELS)
def test_any_two_models_have_a_delta_that_leads_from_one_to_the_other(models: Mapping[str, Any]) -> None:
    below = {name: one for name, ((one, _), fate) in models.items() if fate != "added"}
    above = {name: other for name, ((_, other), fate) in models.items() if fate != "removed"}
    few = {"model.norm.weight": ("bfloat16", np.zeros(3, BY_NAME["bfloat16"].numpy))}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTensor.blocks, "__defaults__", (24,))
        patch.setattr(exact, "BLOCK_LEAST", 1)
        base, tuned = save(Path(folder, "base"), below | few), save(Path(folder, "tuned"), above | few)
        assert same(there_and_back(base, tuned, Path(folder), max_shard_size=64), tuned)


@pytest.mark.parametrize("before", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("after", ["float32", "float16", "bfloat16"])
def test_what_is_no_number_comes_back_in_every_type(before: str, after: str, tmp_path: Path) -> None:
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, 65520.0, -1.5], np.float32)
    with np.errstate(all="ignore"):
        sides = [odd.astype(BY_NAME[dtype].numpy) for dtype in (before, after)]
    base = save(tmp_path / "base", {"model.norm.weight": (before, sides[0])})
    tuned = save(tmp_path / "tuned", {"model.norm.weight": (after, np.roll(sides[1], 3))})
    assert same(there_and_back(base, tuned, tmp_path), tuned)


def test_config_tokenizer_and_vocabulary_are_the_tuned_models(tmp_path: Path) -> None:
    base = save(tmp_path / "base", weights(), {"tokenizer.json": b"{}", "vocab.json": b"{}"}, vocab_size=6)
    tuned = save(tmp_path / "tuned", weights(9), {"tokenizer.json": b'{"a": 1}'}, vocab_size=9, rope_theta=1e6)
    back = there_and_back(base, tuned, tmp_path)
    assert same(back, tuned)
    assert (back / "config.json").read_bytes() == (tuned / "config.json").read_bytes()


def test_a_head_that_was_the_embedding_is_told_from_it(tmp_path: Path) -> None:
    tied = {name: one for name, one in weights(2000).items() if name != "lm_head.weight"}
    untied = tied | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    base, tuned = save(tmp_path / "base", tied, tie_word_embeddings=True), save(tmp_path / "tuned", untied)
    extracted = extract_delta(base, tuned, tmp_path / "delta")
    assert extracted.nbytes is not None and extracted.nbytes < 2000
    apply_delta(base, tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", tuned)


def test_what_did_not_change_takes_no_room_and_small_moves_take_little(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kind = BY_NAME["bfloat16"].numpy
    base = (0.02 * rng.standard_normal((400, 256))).astype(kind)
    tuned = (base.astype(np.float32) + 2e-5 * rng.standard_normal(base.shape)).astype(kind)
    sides = {
        name: save(tmp_path / name, {"a.weight": ("bfloat16", one)})
        for name, one in zip("bt", (base, tuned), strict=True)
    }
    moved = extract_delta(sides["b"], sides["t"], tmp_path / "moved").nbytes
    still = extract_delta(sides["b"], sides["b"], tmp_path / "still").nbytes
    assert moved is not None and still is not None
    assert moved < 0.25 * base.nbytes and still < 500


@pytest.mark.slow
def test_the_bases_may_be_of_other_formats(tmp_path: Path) -> None:
    extract_delta(DELTA / "base", DELTA / "finetuned", tmp_path / "delta")
    to_hf(DELTA / "base", tmp_path / "base")
    to_hf(DELTA / "finetuned", tmp_path / "tuned")
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", tmp_path / "tuned")


def test_a_models_own_shards_make_no_difference(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    from_hf(base, tmp_path / "meta", to="meta", shards=2)
    tuned = save_tiny(tmp_path / "tuned", "llama", "bfloat16")
    extract_delta(tmp_path / "meta", tuned, tmp_path / "delta", max_shard_size="4KB")
    apply_delta(base, tmp_path / "delta", tmp_path / "back", max_shard_size="9KB")
    assert same(tmp_path / "back", tuned)
    assert len(list((tmp_path / "delta").glob("*.zst"))) > 3


@pytest.mark.slow
def test_another_dtype_is_a_rounding_of_the_tuned_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", tmp_path / "back", dtype="bfloat16")
    extract_delta(base, tuned, tmp_path / "small", dtype="bfloat16")
    apply_delta(base, tmp_path / "small", tmp_path / "other")
    expected = open_checkpoint(tuned)["model.norm.weight"].read().astype(BY_NAME["bfloat16"].numpy)
    for folder in ("back", "other"):
        checkpoint = open_checkpoint(tmp_path / folder)
        assert checkpoint["model.norm.weight"].read().tobytes() == expected.tobytes()
        assert checkpoint.config["torch_dtype"] == "bfloat16"


def test_quantized_models_have_an_exact_delta_and_no_sum(pair: tuple[Path, Path], tmp_path: Path) -> None:
    packed = {"a.qweight": ("int32", np.arange(6, dtype=np.int32).reshape(2, 3))}
    base = save(tmp_path / "q", packed, quantization_config={"bits": 4})
    tuned = save(tmp_path / "p", {"a.qweight": ("int32", packed["a.qweight"][1] * 7)}, quantization_config={"bits": 4})
    assert same(there_and_back(base, tuned, tmp_path), tuned)
    with pytest.raises(UnsupportedInput, match="quantized"):
        apply_delta(base, tuned, tmp_path / "sum")
