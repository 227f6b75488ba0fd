"""generation_config.json counts, under what is given."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.causal_lm import GENERATION
from llmconv.errors import LlmconvError, MalformedInput
from llmconv.generation import GenerationSettings
from llmconv.generation.sampling import EXTRA, settings_line


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


LEGACY: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "max_length": 25,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 7,
    "num_beams": 3,
    "min_length": 30,
    "bad_words_ids": [[7]],
    "suppress_tokens": [9, 10],
}


def of_transformers(folder: Path) -> Any:
    """The settings that transformers generates with, without a model."""
    from transformers import GenerationConfig  # noqa: PLC0415

    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def test_end_tokens_of_a_config_and_its_text_config_are_those_of_transformers(tmp_path: Path) -> None:
    found: list[object] = []
    for top, inner, own in product((None, 5, [1, 5]), (None, 1, [1, 7]), (None, [9, 1])):
        text = {"model_type": "gemma3_text", "eos_token_id": inner}
        config = {"model_type": "gemma3", "eos_token_id": top, "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if own:
            with_config(tmp_path, eos_token_id=own)
        wanted = of_transformers(tmp_path).eos_token_id or []
        ends = GenerationSettings.of(tmp_path).eos_token_id
        found += [(config, own)] * (ends != {*(wanted if isinstance(wanted, list) else [wanted])})
    assert found == []


@pytest.mark.parametrize("place", ["config", "text_config"])
def test_without_the_file_generation_fields_of_the_config_count(tmp_path: Path, place: str) -> None:
    config = {"model_type": "llama", **LEGACY} if place == "config" else {"model_type": "gemma3", place: LEGACY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings, wanted = GenerationSettings.of(tmp_path), of_transformers(tmp_path)
    assert {name: getattr(settings, name, settings.extra.get(name)) for name in LEGACY} == {
        name: getattr(wanted, name) for name in LEGACY
    }
    assert GenerationSettings.of(with_config(tmp_path, top_k=3)).repetition_penalty == 1.0


FIELDS: dict[str, Any] = {
    "min_length": 9,
    "min_new_tokens": 4,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.05,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "bad_words_ids": [[7]],
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "sequence_bias": [[[7], 4.0]],
    "exponential_decay_length_penalty": [0, 1.5],
    "top_h": 0.3,
    "guidance_scale": 1.5,
    "diversity_penalty": 0.5,
    "penalty_alpha": 0.5,
    "renormalize_logits": True,
    "watermarking_config": {"bias": 3.0, "greenlist_ratio": 0.4},
    "max_time": 1.0,
    "dola_layers": "high",
    "token_healing": True,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[7]],
}
NEVER_HERE = {"early_stopping", "length_penalty", "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id"}
"""Without an effect on these prompts: of beams, of scores that are no numbers, of the first and of the last token."""


def test_the_fields_are_all_that_change_a_text() -> None:
    assert FIELDS.keys() | NEVER_HERE == EXTRA.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_taken_has_an_effect_or_is_refused(name: str) -> None:
    from llmconv.generation.logits_processors import processor  # noqa: PLC0415 - imports torch

    settings = GenerationSettings(do_sample=True, eos_token_id=frozenset({2}), top_k=0).but(**{name: FIELDS[name]})
    plain = GenerationSettings(do_sample=True, eos_token_id=frozenset({2}), top_k=0)
    prompt, logits = np.array([3, 4, 3, 4, 5, 4, 3]), np.random.default_rng(0).normal(size=12) * 2
    try:
        scores, without = (processor(one, len(prompt), 8) for one in (settings, plain))
    except LlmconvError as error:
        assert name in error.message
        return
    for ids in (prompt, np.array([*prompt, 3])):
        if not np.array_equal(scores(ids, logits), without(ids, logits)):
            return
    pytest.fail(f"`{name}` has no effect")


@pytest.mark.parametrize(("name", "neutral"), [("no_repeat_ngram_size", 0), ("typical_p", 1.0), ("min_length", 0)])
def test_a_neutral_value_takes_back_that_of_the_file(tmp_path: Path, name: str, neutral: object) -> None:
    folder = with_config(tmp_path, no_repeat_ngram_size=3, typical_p=0.5, min_length=7)
    given = GenerationSettings.of(folder, **{name: neutral})
    assert given.extra.keys() == {"no_repeat_ngram_size", "typical_p", "min_length"} - {name}
    assert GenerationSettings.of(folder).but(**{name: neutral}) == given


def test_neutral_values_are_those_of_transformers() -> None:
    from transformers import GenerationConfig  # noqa: PLC0415

    theirs = GenerationConfig._get_default_generation_params()
    stated = {name: one for name, one in GENERATION.items() if one is not None}
    assert stated == {name: theirs.get(name, one) for name, one in stated.items()}
    assert GENERATION.keys() <= GenerationConfig().to_dict().keys() | {"stop_strings", "token_healing"}


IDLE = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind cache_config
    cache_implementation compile_config continuous_batching_config decoder_start_token_id disable_compile is_assistant
    low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    num_return_sequences output_attentions output_hidden_states output_logits output_scores prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache
    use_mtp
""".split()  # noqa: SIM905 - thirty lines otherwise
"""Fields that change no token: of caches, speculation, compiling, and what is returned; or of encoders' decoders."""


def test_every_field_of_transformers_is_known_to_change_tokens_or_not() -> None:
    from transformers import GenerationConfig  # noqa: PLC0415

    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= {*GENERATION, *IDLE}
