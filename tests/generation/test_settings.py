"""generation_config.json counts, under what is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmconv.errors import MalformedInput
from llmconv.generation import GenerationSettings
from llmconv.generation.sampling import settings_line


def with_config(folder: Path, **fields: object) -> Path:
    """A folder whose generation_config.json says `fields`."""
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_file_gives_the_defaults(tmp_path: Path) -> None:
    folder = with_config(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[3, 4], max_length=4096)
    settings = GenerationSettings.of(folder, top_p=0.5)
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.6, 0.5, 50)
    assert settings.eos_token_id == {3, 4} and not settings.is_greedy
    assert settings.new_tokens(96) == 4000


def test_a_temperature_of_zero_is_greedy_whatever_the_file_has(tmp_path: Path) -> None:
    assert GenerationSettings.of(with_config(tmp_path, do_sample=True), temperature=0.0).is_greedy


def test_max_new_tokens_takes_precedence_over_max_length(tmp_path: Path) -> None:
    assert GenerationSettings.of(with_config(tmp_path, max_length=100, max_new_tokens=7)).new_tokens(90) == 7


def test_a_given_length_replaces_max_new_tokens_of_the_file(tmp_path: Path) -> None:
    assert GenerationSettings.of(with_config(tmp_path, max_new_tokens=7), max_length=100).new_tokens(90) == 10


def test_neutral_fields_need_no_processors(tmp_path: Path) -> None:
    folder = with_config(tmp_path, transformers_version="5", typical_p=1.0, no_repeat_ngram_size=0, length_penalty=2.0)
    assert not GenerationSettings.of(folder).needs_processors
    assert GenerationSettings.of(with_config(tmp_path, no_repeat_ngram_size=3)).needs_processors


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"top_p": 7}, {"eos_token_id": "x"}])
def test_a_file_with_an_invalid_value_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(MalformedInput, match=r"generation_config\.json"):
        GenerationSettings.of(with_config(tmp_path, **fields))


def test_a_long_list_of_a_model_folder_is_cut_on_the_line_of_settings() -> None:
    settings = GenerationSettings(extra={"bad_words_ids": [[at] * 50 for at in range(10_000)]})
    assert "bad_words_ids [[0, 0" in settings_line(settings) and len(settings_line(settings)) < 1000
