"""Several continuations per prompt: samples that differ and can be repeated, or the best beams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import llmconv
from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.generation import TextModel, generate

SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 4}


@pytest.fixture(scope="module")
def model(talking: Path) -> TextModel:
    """An open model."""
    return TextModel.open(talking)


def texts(model: TextModel, prompts: list[str], **options: Any) -> list[str]:
    """The new texts."""
    return [one.text for one in generate(model, prompts, **{**SAMPLED, **options}).completions]


def test_samples_of_a_prompt_differ_and_the_first_is_that_of_the_seed(model: TextModel) -> None:
    several = texts(model, ["Once"], num_return_sequences=3)
    assert len(set(several)) == 3 and several[0] == texts(model, ["Once"])[0]


def test_equal_prompts_get_different_samples(model: TextModel) -> None:
    assert len(set(texts(model, ["Once", "Once", "Once"]))) == 3


@pytest.mark.slow
def test_neither_order_nor_batches_change_a_text(model: TextModel) -> None:
    first = dict(zip("abc", texts(model, ["a", "b", "c"], num_return_sequences=1), strict=True))
    again = dict(zip("cab", texts(model, ["c", "a", "b"], batch_size=1), strict=True))
    assert first == again
    pairs = texts(model, ["a", "b"], num_return_sequences=2)
    assert pairs[:2] == texts(model, ["b", "a"], num_return_sequences=2, batch_size=3)[2:]


def test_samples_of_neighboring_seeds_have_nothing_in_common(model: TextModel) -> None:
    found = [text for seed in range(3) for text in texts(model, ["Once"], seed=seed, num_return_sequences=3)]
    assert len(set(found)) == 9


def test_greedy_texts_of_equal_prompts_are_equal(model: TextModel) -> None:
    assert len(set(texts(model, ["Once", "Once"], do_sample=False))) == 1


@pytest.mark.parametrize(("options", "problem"), [({}, "would be the same"), ({"num_beams": 2}, "has no 3 sequences")])
def test_sequences_that_cannot_differ_are_refused(model: TextModel, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        generate(model, "Once", num_return_sequences=3, **options)


def test_beams_are_the_best_ones_also_of_equal_prompts_and_small_batches(model: TextModel) -> None:
    options = {"do_sample": False, "num_beams": 3, "max_new_tokens": 5, "num_return_sequences": 2}
    pipe = llmconv.pipeline(model=model)
    best = [one["generated_text"] for one in pipe("Once", return_full_text=False, **options)]
    assert texts(model, ["Once", "Once"], batch_size=1, **options) == [*best, *best] and best[0] != best[1]


@pytest.mark.slow
def test_the_output_file_has_a_line_per_text_and_continues_inside_a_prompt(talking: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--temperature", "1", "--num-return-sequences", "2", "--max-new-tokens", "6", "--output-file", str(out)]
    call = ["generate", str(talking), "ab", "c", *options]
    assert CliRunner().invoke(main, call).exit_code == 0
    whole = out.read_bytes()
    assert [(line["prompt"], line["sequence"]) for line in map(json.loads, whole.splitlines())] == [
        ("ab", 0),
        ("ab", 1),
        ("c", 0),
        ("c", 1),
    ]
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    assert CliRunner().invoke(main, call).exit_code == 0 and out.read_bytes() == whole
    assert CliRunner().invoke(main, [*call, "--num-return-sequences", "3"]).exit_code == 3
