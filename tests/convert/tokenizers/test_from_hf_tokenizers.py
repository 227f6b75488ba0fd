"""The tokenizer, the chat template and the generation config go into a training checkpoint and come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmconv.checkpoint import read_json
from llmconv.convert import from_hf, to_hf

CHECKPOINT = Path(__file__).parents[3] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
SENTENCEPIECE = Path(__file__).parents[2] / "fixtures/meta/llama2_mha_mp2_bf16_ropefreqs/tokenizer.model"
TEMPLATE = b"{% for message in messages %}[{{ message.content }}]{% endfor %}"
GENERATION = {"eos_token_id": 2, "temperature": 0.5, "do_sample": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with all of it; do not write into it."""
    folder = tmp_path_factory.mktemp("models") / "model"
    to_hf(CHECKPOINT, folder)
    (folder / "chat_template.jinja").write_bytes(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.mark.slow_rows("accessory-2")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["mindformers", "accessory", "paddle"])
def test_a_tokenizer_and_its_template_come_back(model: Path, tmp_path: Path, kind: str, shards: int) -> None:
    from_hf(model, tmp_path / "out", to=kind, shards=shards)
    to_hf(tmp_path / "out", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes(), name
    assert read_json(tmp_path / "back/generation_config.json") == GENERATION


def test_the_tokenizer_next_to_a_single_file_is_taken_and_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_hf(model, tmp_path / "out", to="mindformers")
    capsys.readouterr()
    to_hf(tmp_path / "out/model.ckpt", tmp_path / "back")
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    said = capsys.readouterr().err
    assert "which lies next to the checkpoint" in said
    assert "contains no tokenizer" not in said


def test_a_tokenizer_that_is_given_goes_before_the_one_next_to_it(model: Path, tmp_path: Path) -> None:
    from_hf(model, tmp_path / "out", to="mindformers")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text("{}")
    to_hf(tmp_path / "out", tmp_path / "back", tokenizer=tmp_path / "other")
    assert (tmp_path / "back/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "back/chat_template.jinja").exists()
    assert read_json(tmp_path / "back/generation_config.json") == GENERATION


@pytest.mark.slow_rows("accessory")
@pytest.mark.parametrize("kind", ["accessory", "meta", "mindformers", "paddle"])
def test_a_sentencepiece_model_comes_back(model: Path, tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "model"
    to_hf(CHECKPOINT, whole, tokenizer=SENTENCEPIECE)
    (whole / "chat_template.jinja").write_bytes(TEMPLATE)
    from_hf(whole, tmp_path / "out", to=kind)
    to_hf(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/tokenizer.model").read_bytes() == SENTENCEPIECE.read_bytes()
    assert (tmp_path / "back/chat_template.jinja").is_file() is (kind != "meta")


def test_fields_that_metas_folder_cannot_hold_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_hf(model, tmp_path / "out", to="meta")
    said = capsys.readouterr().err
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert f"`{name}`" in said
