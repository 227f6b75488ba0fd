"""A base whose `config.json` does not name a kind of model is refused by every conversion; an unknown kind is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta, from_hf, merge_lora, to_hf
from llmconv.convert.models.config_file import updated
from llmconv.errors import MalformedInput

MODULE = "model.layers.0.self_attn.q_proj"
UNKNOWN = {"model_type": "of_another_house"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty config": ({}, "has no `model_type`"),
    "null": ({"model_type": None}, "has no `model_type`"),
    "an empty string": ({"model_type": " "}, "has no `model_type`"),
    "a number": ({"model_type": 3}, "has a `model_type` that is an int, not a string"),
    "a list": ({"model_type": ["llama"]}, "has a `model_type` that is a list, not a string"),
}
Folders = Callable[[dict[str, Any]], Path]


@pytest.fixture
def folders(save_tensors: Callable[..., Path], tmp_path: Path) -> Folders:
    """`folders(config)`: `base` and `tuned` of this config, `adapter`, and `good` and `delta` of an unknown kind."""

    def make(config: dict[str, Any]) -> Path:
        weight = f"{MODULE}.weight"
        for name, fill, said in (("base", 1.0, config), ("tuned", 2.0, config), ("good", 1.0, UNKNOWN)):
            save_tensors(name, {weight: torch.full((6, 4), fill)}, {"config.json": said})
        factors = {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(6, 2)}
        pair = {f"base_model.model.{MODULE}.{name}.weight": factor for name, factor in factors.items()}
        files = {"adapter_config.json": {"peft_type": "LORA", "r": 2, "lora_alpha": 4}}
        save_tensors("adapter", pair, files, weights="adapter_model.safetensors")
        extract_delta(tmp_path / "good", tmp_path / "good", tmp_path / "delta")
        return tmp_path

    return make


CALLS: dict[str, Callable[[Path], object]] = {
    "merge_lora": lambda path: merge_lora(path / "base", path / "adapter", path / "out"),
    "apply_delta": lambda path: apply_delta(path / "base", path / "delta", path / "out"),
    "apply_delta, a difference": lambda path: apply_delta(path / "base", path / "good", path / "out"),
    "extract_delta, the base": lambda path: extract_delta(path / "base", path / "good", path / "out"),
    "extract_delta, the tuned model": lambda path: extract_delta(path / "good", path / "tuned", path / "out"),
    "extract_delta, a rank": lambda path: extract_delta(path / "base", path / "tuned", path / "out", rank=1),
    "to_hf": lambda path: to_hf(path / "base", path / "out", dtype="float16"),
    "from_hf": lambda path: from_hf(path / "base", path / "out", to="meta"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("config", "reason"), BAD.values(), ids=BAD)
def test_a_base_without_a_model_type_is_refused(
    config: dict[str, Any], reason: str, call: Callable[[Path], object], folders: Folders
) -> None:
    path = folders(config)
    with pytest.raises(MalformedInput, match=f"is not a usable Hugging Face model folder: .*{reason}") as caught:
        call(path)
    assert "`model_type` is a string such as `llama`" in caught.value.hint
    assert not (path / "out").exists()


def test_a_delta_whose_config_would_spoil_the_result_is_refused(folders: Folders) -> None:
    path = folders({"model_type": 3})
    with pytest.raises(MalformedInput, match="`model_type` that is an int"):
        apply_delta(path / "good", path / "tuned", path / "out")


def test_a_model_type_that_nobody_knows_is_kept(folders: Folders) -> None:
    path = folders(UNKNOWN)
    merge_lora(path / "base", path / "adapter", path / "out")
    extract_delta(path / "base", path / "tuned", path / "new")
    apply_delta(path / "base", path / "new", path / "back")
    assert [open_checkpoint(path / name).config for name in ("out", "back")] == [UNKNOWN] * 2


def test_to_hf_takes_the_model_type_that_the_user_gives(folders: Folders) -> None:
    path = folders({})
    (path / "config.json").write_text(json.dumps(UNKNOWN))
    to_hf(path / "base", path / "out", config=[path / "config.json"])
    assert open_checkpoint(path / "out").config["model_type"] == "of_another_house"


def test_the_command_exits_with_3_one_line_and_a_hint(folders: Folders) -> None:
    path = folders({})
    line = ["merge-lora", f"{path}/base", f"{path}/adapter", "-o", f"{path}/out"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 3
    problem, blank, hint = done.stderr.splitlines()
    assert problem.startswith("error: `") and not blank and hint.startswith("hint: ")


BASES = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"rope_theta": 1e6}, {**BASES, "rope_theta": 1e6}),
        ({"rope_scaling": YARN}, {"rope_type": "yarn", "rope_theta": 5e5, **{k: YARN[k] for k in YARN if k != "type"}}),
        ({"rope_scaling": None, "rope_theta": 5e5}, BASES),
        ({"rope_parameters": {**BASES, "rope_theta": 7.0}, "rope_theta": 9.0}, {**BASES, "rope_theta": 7.0}),
        ({"vocab_size": 8}, BASES),
    ],
)
def test_rotary_fields_of_transformers_4_count_against_those_of_5(given: dict[str, Any], expected: Any) -> None:
    stored = {"model_type": "llama", "rope_parameters": dict(BASES)}
    found = LlamaConfig(**{k: v for k, v in updated(stored, given).items() if k != "model_type"}).rope_parameters
    assert {name: found[name] for name in expected} == expected


NESTED = {"full_attention": BASES, "sliding_attention": {**BASES, "rope_theta": 7.0}}


@pytest.mark.parametrize("inner", ["", "text_config"])
@pytest.mark.parametrize("given", [BASES, {"rope_type": "linear", "factor": 2.0}, NESTED], ids=str)
def test_rotary_fields_of_transformers_5_count_against_those_of_4(given: dict[str, Any], inner: str) -> None:
    stored = {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": YARN}
    found = updated(
        {inner: stored} if inner else stored,
        {inner: {"rope_parameters": given}} if inner else {"rope_parameters": given},
    )
    fields = found[inner] if inner else found
    assert fields["rope_parameters"] == given and "rope_scaling" not in fields
    assert ("rope_theta" in fields) == ("factor" in given)  # which has no base of its own
    assert stored["rope_scaling"] is YARN


PART = {"model_type": "gemma3_text", "vocab_size": 8, "hidden_size": 4}


@pytest.mark.parametrize("name", ["text_config", "llm_config"])
@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"vocab_size": 9}, {**PART, "vocab_size": 9}),
        ({"PART": {"vocab_size": 9}}, {**PART, "vocab_size": 9}),
        ({"PART": {"model_type": "gemma3_text", "vocab_size": 9}}, {"model_type": "gemma3_text", "vocab_size": 9}),
        ({"vocab_size": 7, "PART": {"vocab_size": 9}}, {**PART, "vocab_size": 9}),
        ({"hidden_size": 5}, PART),
    ],
    ids=str,
)
def test_fields_of_a_part_of_the_configuration_count_in_it(given: dict[str, Any], part: Any, name: str) -> None:
    stored = {"model_type": "gemma3", name: PART, "vision_config": {"depth": 1}}
    found = updated(stored, {name if key == "PART" else key: value for key, value in given.items()})
    assert found[name] == part and found["vision_config"] == {"depth": 1}
    assert found.get("vocab_size") == (7 if given.get("vocab_size") == 7 else None)
