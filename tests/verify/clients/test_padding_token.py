"""The padding token of GenAI is compared with the one that the export sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmconv.verify.clients.client_files import allowed_tokens, padding_checks
from llmconv.verify.results import Check
from tests.conftest import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pads with 0, begins with 1 and ends with 2, of 96 tokens."""
    return save_tiny("llama", tmp_path_factory.mktemp("padding_token") / "llama")


def check(model: Path, folder: Path, **fields: Any) -> Check:
    (folder / "genai_config.json").write_text(json.dumps({"model": fields}))
    (found,) = padding_checks(folder, model)
    return found


def with_tokens(model: Path, folder: Path, **fields: Any) -> Path:
    """A model whose configuration has these tokens."""
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_the_token_that_the_export_sets_passes(model: Path, tmp_path: Path) -> None:
    found = check(model, tmp_path, pad_token_id=0)
    assert (found.name, found.verdict, found.detail) == ("padding token", "pass", "genai: 0")


@pytest.mark.parametrize("token", [1, 2, 50, 95])
def test_a_token_that_prompts_may_contain_fails(model: Path, tmp_path: Path, token: int) -> None:
    found = check(model, tmp_path, pad_token_id=token)
    assert found.verdict == "fail"
    assert found.detail == (
        f"`pad_token_id` in `genai_config.json` is {token}, while the export sets 0: the client ignores token {token} "
        "wherever a prompt of a batch contains it, and continues that prompt incorrectly"
    )


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_outside_the_vocabulary_is_in_no_prompt(model: Path, tmp_path: Path, token: int) -> None:
    assert check(model, tmp_path, pad_token_id=token).verdict == "pass"


def test_without_a_token_the_client_pads_with_0(model: Path, tmp_path: Path) -> None:
    assert check(model, tmp_path).verdict == "pass"
    other = with_tokens(model, tmp_path, pad_token_id=5)
    found = check(other, tmp_path)
    assert found.verdict == "fail"
    assert found.detail.startswith("`genai_config.json` has no `pad_token_id`, and the client then pads with 0, while")


def test_a_model_without_a_padding_token_may_pad_with_any_of_its_end_tokens(model: Path, tmp_path: Path) -> None:
    other = with_tokens(model, tmp_path, pad_token_id=None, eos_token_id=[7, 8])
    assert {*allowed_tokens(other)} == {7, 8}
    assert check(other, tmp_path, pad_token_id=8).verdict == "pass"
    assert check(other, tmp_path, pad_token_id=9).verdict == "fail"


def test_the_generation_config_comes_first(model: Path, tmp_path: Path) -> None:
    other = with_tokens(model, tmp_path)
    (other / "generation_config.json").write_text(json.dumps({"pad_token_id": 9}))
    assert check(other, tmp_path, pad_token_id=9).verdict == "pass"
    assert check(other, tmp_path, pad_token_id=0).verdict == "fail"


def test_a_folder_without_the_configuration_is_left_to_the_client(model: Path, tmp_path: Path) -> None:
    assert padding_checks(tmp_path, model) == []


def test_a_token_that_only_the_code_of_a_model_defines_is_not_judged(model: Path, tmp_path: Path) -> None:
    other = with_tokens(model, tmp_path, pad_token_id=None, model_type="own")
    assert check(other, tmp_path, pad_token_id=50).verdict == "skip"
    other = with_tokens(model, tmp_path, pad_token_id=0, model_type="own")
    assert check(other, tmp_path, pad_token_id=50).verdict == "fail"
