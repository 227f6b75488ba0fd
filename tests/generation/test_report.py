"""What generate reports: settings, latencies, and texts on stdout that can be told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.generation import generate
from llmconv.generation.completions import GenerationCost


def run(*arguments: object) -> Result:
    """`llmconv generate`, four new tokens."""
    return CliRunner().invoke(main, ["generate", *map(str, arguments), "--max-new-tokens", "4"])


@pytest.mark.slow
@pytest.mark.parametrize("way", [(), ("--stream",)])
def test_several_texts_have_headings_and_a_single_one_has_none(talking: Path, way: tuple[str, ...]) -> None:
    first, second = (generate(talking, prompt, max_new_tokens=4).completions[0].text for prompt in ("ab", "c"))
    assert run(talking, "ab", *way).stdout == f"{first}\n"
    assert run(talking, "ab", "c", *way).stdout == f"==> 1 of 2 <==\n{first}\n==> 2 of 2 <==\n{second}\n"
    assert run(talking, "ab", "c", "-0", *way).stdout == f"{first}\0{second}\0"


@pytest.mark.slow
def test_headings_count_the_texts_of_a_prompt(talking: Path) -> None:
    shown = run(talking, "ab", "--temperature", 1, "--num-return-sequences", 2).stdout
    assert "==> 1 of 1, text 1 of 2 <==\n" in shown and "==> 1 of 1, text 2 of 2 <==\n" in shown


@pytest.mark.slow
def test_settings_and_latencies_are_printed(talking: Path) -> None:
    shown = run(talking, "ab", "--temperature", 0.5, "--seed", 3).stderr
    assert "settings: sampling, temperature 0.5, top_k 50, top_p 1.0, seed 3, max_new_tokens 4; onnx" in shown
    assert "encode 0." in shown and "decode 0." in shown and "s; latency p50 0." in shown and "ms/token" not in shown
    assert "settings: greedy, max_new_tokens 4" in run(talking, "ab").stderr
    assert "settings: beam search, num_beams 2, max_new_tokens 4" in run(talking, "ab", "--num-beams", 2).stderr


@pytest.mark.slow
def test_json_has_the_settings_and_the_times_of_every_text(talking: Path) -> None:
    made = json.loads(run(talking, "ab", "cd", "e", "--json", "--batch-size", 2).stdout)
    assert made["settings"]["max_new_tokens"] == 4 and made["settings"]["batch_size"] == 2
    seconds = sorted(one["seconds"] for one in made["completions"])
    assert made["latency_p50"] == pytest.approx(seconds[1], abs=1e-3) and seconds[0] > 0
    assert made["latency_p50"] <= made["latency_p90"] <= seconds[2]
    assert made["decode_seconds"] + made["encode_seconds"] > 0 and made["decode_seconds"] < made["seconds"]
    assert made["ms_per_token"] * made["tokens_per_second"] == pytest.approx(1000, rel=0.01)
    assert len(made["batches"]) == 2 and "latency_p90" in made["batches"][0]


def test_latencies_of_a_sum_are_those_of_all_texts() -> None:
    costs = [GenerationCost(1, 3, 2, 0.1, 0.5, 9, 0.1, (0.5,)), GenerationCost(2, 3, 6, 0.1, 1.5, 9, 0.2, (1.0, 1.5))]
    total = GenerationCost.sum(costs)
    assert (total.latency(50), total.latency(100)) == (1.0, 1.5)
    assert total.decode_seconds == pytest.approx(0.3)


def test_the_time_of_a_token_is_the_inverse_of_the_rate() -> None:
    cost = GenerationCost(2, 3, 8, 0.5, 2.0, 9)
    assert (cost.rate, cost.ms_per_token) == (4, 250)  # the six tokens after the first ones, in 1.5 seconds
    assert GenerationCost(1, 3, 1, 0.5, 0.5, 9).ms_per_token == 500  # a single token has no later time
    assert GenerationCost(1, 3, 0, 0.0, 0.0, 9).ms_per_token == 0
