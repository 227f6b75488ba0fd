"""Lightning checkpoints: genuine ones give the module's logits; the model is found behind any prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.torch_states import FIXTURES, GPT2, gpt2_base_state, llama_state, prefixed, save

CASES = {"gpt2": {}, "llama_nested": {"drop": True}}


def path_of(case: str) -> Path:
    return FIXTURES / "lightning" / case / "last-run.ckpt"


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_trained_module(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(path_of(case), tmp_path / "hf", drop=bool(CASES[case]))
    with np.load(path_of(case).parent / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_only_this_format_claims_the_file(case: str) -> None:
    assert [name for name, found in formats().items() if found.detect(path_of(case))] == ["lightning"]


def test_the_writer_and_the_dropped_parts_are_reported() -> None:
    found = open_training(path_of("gpt2"))
    assert found.version == "lightning 2.6.6"
    assert {"the optimizer's state", "the callbacks' state", "the hyper-parameters"} <= set(found.dropped)


def test_a_head_of_the_module_is_refused_or_dropped() -> None:
    with pytest.raises(UnsupportedInput, match=r"value_head\.weight"):
        open_training(path_of("llama_nested"))
    found = open_training(path_of("llama_nested"), options={"drop": True})
    assert any("value_head.weight" in phrase for phrase in found.dropped)


def checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": 1, "pytorch-lightning_version": "2.0.0", "state_dict": state}


@pytest.mark.parametrize("prefix", ["", "model.", "net.", "model.model.", "_forward_module.lm.", "a.b.c."])
def test_the_model_is_found_after_any_prefix(tmp_path: Path, prefix: str) -> None:
    found = open_training(save(tmp_path / "x.ckpt", checkpoint(prefixed(llama_state(), prefix))))
    assert set(found) == set(llama_state())


def test_a_model_without_its_head_is_found_after_a_prefix(tmp_path: Path) -> None:
    found = open_training(save(tmp_path / "x.ckpt", checkpoint(prefixed(gpt2_base_state(), "net.")), GPT2))
    assert set(found) == set(prefixed(gpt2_base_state(), "transformer."))


def test_two_models_are_refused_with_their_prefixes(tmp_path: Path) -> None:
    state = prefixed(llama_state(), "student.") | prefixed(llama_state(), "teacher.")
    with pytest.raises(UnsupportedInput, match=r"`student\.`, `teacher\.`"):
        open_training(save(tmp_path / "x.ckpt", checkpoint(state)))


def test_a_model_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="missing key `transformer.wte.weight`"):
        open_training(save(tmp_path / "x.ckpt", checkpoint(prefixed(llama_state(), "lm.")), GPT2))


@pytest.mark.parametrize("state", [{}, 3, [], {"lm.weight": 3}], ids=str)
def test_a_checkpoint_without_weights_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(InputRefused):
        open_training(save(tmp_path / "x.ckpt", checkpoint(state)))


def test_a_folder_that_deepspeed_wrote_names_the_folder_inside(tmp_path: Path) -> None:
    (tmp_path / "epoch=0.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "epoch=0.ckpt" / "latest").write_text("checkpoint")
    with pytest.raises(UnsupportedInput) as caught:
        open_training(tmp_path / "epoch=0.ckpt")
    assert str(tmp_path / "epoch=0.ckpt" / "checkpoint") in caught.value.hint
