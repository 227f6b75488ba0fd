"""llmconv bench: candidates in turn, their figures, and whether their tokens agree."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from benchmarks import environments
from llmconv.bench import BenchCandidate, BenchResult, Measurement, bench
from llmconv.bench.bench import first_difference, lengths_within, table, write_csv, write_plot
from llmconv.cli import main
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.runtime.tokenizer import random_prompts

ROOT = Path(__file__).parents[2]


def cell(name: str, length: int, factor: float = 1.0) -> Measurement:
    """A prompt of 0.5 s and steps of 10, 20 and 40 ms, times a factor."""
    made = Measurement(name, 2, length)
    for step in (0.01, 0.02, 0.04):
        times = [factor * (0.5 + step * number) for number in range(5)]
        made.take({"times": times, "peak": 7_000_000})
    return made


def comparison(*cells: Measurement) -> BenchResult:
    names = list(dict.fromkeys(made.candidate for made in cells))
    return BenchResult(names, {name: {"onnxruntime": "1.31"} for name in names}, list(cells), 5, 3, 2)


def test_speeds_count_all_rows_and_leave_the_first_token_out_of_the_steps() -> None:
    figures = cell("a", 128).as_dict()

    assert figures["prefill_tokens_per_second"] == pytest.approx(2 * 128 / 0.5)
    assert figures["decode_tokens_per_second"] == pytest.approx(2 / 0.02)
    assert figures["decode_tokens_per_second_min"] == pytest.approx(2 / 0.04)
    assert figures["decode_tokens_per_second_max"] == pytest.approx(2 / 0.01)


def test_the_earliest_different_token_of_all_rows_is_reported() -> None:
    assert first_difference([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 8, 6]]) == (1, 1)
    assert first_difference([[1, 2]], [[1, 2]]) is None
    assert first_difference([[1, 2]], [[1]]) == (0, 1)


def test_the_table_compares_with_the_first_candidate_and_reports_differences() -> None:
    slow, broken = cell("slow", 128, 2), Measurement("broken", 2, 128, error="no room")
    slow.differs = (1, 3)

    text = table(comparison(cell("fast", 128), slow, broken))

    line = next(line for line in text.splitlines() if "slow" in line)
    assert "0.50" in line
    assert line.endswith("differ from 3 on")
    assert "failed: no room" in text
    assert "DIFFERENT TOKENS: slow at batch 2, length 128: row 1" in text


@pytest.mark.parametrize(
    ("number", "line"),
    [(1, "1 new token, greedy, 1 thread, 1 round in turn"), (2, "2 new tokens, greedy, 2 threads, 2 rounds in turn")],
)
def test_the_setting_has_nouns_in_the_right_number(number: int, line: str) -> None:
    assert line in table(BenchResult(["a"], {}, [cell("a", 128)], number, number, number))


def test_a_candidate_is_a_folder_or_a_runtime_with_or_without_one(tmp_path: Path) -> None:
    assert BenchCandidate.parse(str(tmp_path), None).name == str(tmp_path)
    assert BenchCandidate.parse("torch", tmp_path) == BenchCandidate("torch", tmp_path)
    assert BenchCandidate.parse(f"genai:{tmp_path}", None, {"genai": "/py"}).interpreter == "/py"
    with pytest.raises(UsageProblem, match="no/such/folder"):
        BenchCandidate.parse("optimum:no/such/folder", tmp_path)


@pytest.mark.slow
def test_lengths_leave_room_for_the_new_tokens(talking: Path) -> None:
    assert lengths_within(talking, (96,), 32) == [96]
    with pytest.raises(UsageProblem, match="context of 128"):
        lengths_within(talking, (97,), 32)


def test_without_lengths_a_short_context_is_used_in_full(talking: Path) -> None:
    assert lengths_within(talking, (), 32) == [96]
    with pytest.raises(UsageProblem, match="128 tokens and a prompt are more than the model's context of 128"):
        lengths_within(talking, (), 128)


def test_prompts_are_the_same_every_time() -> None:
    assert random_prompts(range(9), 2, 5) == random_prompts(range(9), 2, 5)


def test_an_unsupported_picture_format_is_refused_before_anything_runs(talking: Path) -> None:
    result = CliRunner().invoke(main, ["bench", str(talking), "--plot", "curves.txt"])

    assert result.exit_code == 2
    assert ".png" in result.stderr


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_a_link_is_refused_as_an_output_file_before_anything_runs(talking: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "curves.svg").symlink_to(tmp_path / "other.svg")
    result = CliRunner().invoke(main, ["bench", str(talking), option, str(tmp_path / "curves.svg")])
    assert result.exit_code == 3
    assert "a symbolic link" in result.stderr


def test_without_matplotlib_the_hint_has_its_package(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["bench", str(talking), "--plot", "curves.png"])

    assert result.exit_code == 3
    assert "pip install matplotlib" in result.stderr


@pytest.mark.slow
def test_curves_are_drawn(tmp_path: Path) -> None:
    result = comparison(cell("a", 128), cell("b", 128), cell("a", 512), Measurement("b", 2, 512, error="no room"))

    for kind, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        write_plot(result, tmp_path / f"curves{kind}")
        assert (tmp_path / f"curves{kind}").read_bytes().startswith(start)


@pytest.mark.slow_rows("b.png-write_plot")
@pytest.mark.parametrize(("name", "write"), [("b.csv", write_csv), ("b.svg", write_plot), ("b.png", write_plot)])
def test_a_hard_link_of_the_old_file_keeps_its_content(
    tmp_path: Path, name: str, write: Callable[[BenchResult, Path], None]
) -> None:
    (tmp_path / "other name").write_text("dear")
    os.link(tmp_path / "other name", tmp_path / name)
    write(comparison(cell("a", 128)), tmp_path / name)
    assert (tmp_path / "other name").read_text() == "dear" and (tmp_path / name).read_bytes() != b"dear"
    assert {path.name for path in tmp_path.iterdir()} == {"other name", name}


@pytest.mark.slow
def test_graphs_packed_or_not_and_the_eager_model_give_the_same_tokens(talking: Path, tmp_path: Path) -> None:
    arguments = ["bench", str(talking), "--against", "packed", "--against", "torch", "--lengths", "8,16"]
    given = ["--batch-sizes", "1,3", "--new-tokens", "6", "--repeat", "2", "--json", "--csv", str(tmp_path / "b.csv")]

    result = CliRunner().invoke(main, [*arguments, *given])

    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["same_tokens"]
    assert len(found["cells"]) == 12
    assert all(made["decode_tokens_per_second"] > 0 and made["peak_bytes"] > 1e7 for made in found["cells"])
    rows = list(csv.DictReader((tmp_path / "b.csv").read_text().splitlines()))
    assert [row["candidate"] for row in rows[:3]] == [str(talking), f"packed:{talking}", f"torch:{talking}"]


@pytest.mark.slow
def test_different_tokens_are_reported_with_exit_code_1(talking: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(talking)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1)
    model.save_pretrained(other)

    arguments = ["--against", f"torch:{other}", "--lengths", "8", "--new-tokens", "6", "--repeat", "1"]
    result = CliRunner().invoke(main, ["bench", str(talking), *arguments])

    assert result.exit_code == 1
    assert f"DIFFERENT TOKENS: torch:{other}" in result.stdout


@pytest.mark.slow
def test_a_folder_that_cannot_be_opened_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(InputRefused, match="cannot be measured: .* has no graphs"):
        bench(tiny("llama"), lengths=(8,), new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["genai", "optimum"])
def test_another_runtime_in_an_environment_of_its_own(runtime: str, talking: Path, tmp_path: Path) -> None:
    home = ROOT / environments.folder(runtime)
    if not (home / "complete").exists():
        pytest.skip(f"no build/{runtime}-env; `make clients` makes it")
    folder = Path(shutil.copytree(talking, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"repetition_penalty": 9.0, "no_repeat_ngram_size": 1}')
    export(folder, prefill=True, incremental=True, unified=True, layout=[runtime], overwrite=True)

    result = bench(
        folder,
        against=[BenchCandidate(runtime, folder, str(home / "bin/python"))],
        lengths=(8, 20),
        batch_sizes=(1, 2),
        new_tokens=6,
        repeat=1,
    )

    assert result.agrees
    assert not any(made.error for made in result.cells)
