"""generate: the graphs give the same text as transformers' generate, alone and in batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation import TextModel, generate

PROMPTS = ("Once upon a time", "a", "The quick brown fox jumps")


def run(*arguments: object) -> Result:
    """`llmconv generate` on the command line."""
    return CliRunner().invoke(main, ["generate", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 7}], ids=str)
def test_a_batch_gives_the_same_texts_as_its_prompts_alone(talking: Path, fields: dict[str, Any]) -> None:
    model = TextModel.open(talking)
    together = generate(model, PROMPTS, max_new_tokens=12, **fields)
    alone = [generate(model, [prompt], max_new_tokens=12, **fields).completions[0] for prompt in PROMPTS]
    assert together.completions == alone


@pytest.mark.slow
def test_a_seed_gives_one_text_and_another_seed_another(talking: Path) -> None:
    texts = [
        generate(talking, PROMPTS[:1], max_new_tokens=16, do_sample=True, seed=seed).completions for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def with_end(talking: Path, folder: Path, file: str, end: int | list[int]) -> Path:
    """A copy of the folder with other end tokens in `file`."""
    shutil.copytree(talking, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**content, "eos_token_id": end}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("several", [True, False])
def test_generation_stops_at_the_end_token(talking: Path, tmp_path: Path, file: str, several: bool) -> None:
    tokens = generate(talking, PROMPTS[:1], max_new_tokens=8).completions[0].tokens
    end = tokens[3]
    folder = with_end(talking, tmp_path / "model", file, [95, end] if several else end)
    found = generate(folder, PROMPTS[:1], max_new_tokens=8).completions[0]
    assert (found.tokens, found.finish) == (tokens[: tokens.index(end)], "eos")


def test_a_text_is_continued_with_the_space_behind_it(talking: Path, words: None) -> None:
    found = generate(talking, PROMPTS, max_new_tokens=3).completions
    assert all(one.text.startswith(" w") for one in found)


def test_the_pieces_of_a_stream_are_the_text(talking: Path) -> None:
    pieces: list[str] = []
    result = generate(talking, PROMPTS[:1], max_new_tokens=10, on_piece=lambda piece: pieces.append(piece.text))
    assert "".join(pieces) == result.completions[0].text
    assert sum(map(bool, pieces)) > 5


def test_a_folder_without_tokenizer_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(InputRefused, match="has no tokenizer"):
        generate(tiny("llama"), ["a"])


def test_a_folder_without_graphs_is_refused_and_export_is_named(talking: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(talking, tmp_path / "bare", ignore=shutil.ignore_patterns("*.onnx", "llmconv.json")))
    result = run(folder, "--prompt", "a", "--no-export")
    assert result.exit_code == 3
    assert "has no graphs" in result.stderr
    assert f"llmconv export {folder}" in result.stderr


def test_an_unknown_backend_is_a_usage_problem(talking: Path) -> None:
    with pytest.raises(UsageProblem, match="unknown backend `tpu`"):
        generate(talking, ["a"], backend="tpu")


@pytest.mark.slow
def test_the_text_is_on_stdout_and_the_speed_on_stderr(talking: Path) -> None:
    text = generate(talking, PROMPTS[:1], max_new_tokens=5).completions[0].text
    result = run(talking, "--prompt", PROMPTS[0], "--max-new-tokens", 5)
    assert (result.exit_code, result.stdout) == (0, text + "\n")
    assert "tokens/s" in result.stderr


@pytest.mark.slow
def test_streaming_prints_the_same_text(talking: Path) -> None:
    plain, stream = (run(talking, "--prompt", "abc", "--max-new-tokens", 6, *flag) for flag in ([], ["--stream"]))
    assert plain.stdout == stream.stdout != "\n"


@pytest.mark.slow
def test_several_streamed_prompts_follow_one_another(talking: Path) -> None:
    options = ("--prompt", "abc", "--prompt", "x", "--max-new-tokens", 6)
    assert run(talking, *options, "--stream").stdout == run(talking, *options).stdout


@pytest.mark.slow
def test_json_holds_every_completion(talking: Path) -> None:
    content = json.loads(run(talking, "--prompt", "a", "--prompt", "bc", "--max-new-tokens", 3, "--json").stdout)
    assert [item["prompt_tokens"] for item in content["completions"]] == [1, 2]
    assert content["tokens_per_second"] > 0


@pytest.mark.parametrize("option", [["--top-p", "0"], ["--temperature", "-1"], ["--max-new-tokens", "0"]])
def test_an_impossible_option_exits_2(talking: Path, option: list[str]) -> None:
    assert run(talking, "--prompt", "a", *option).exit_code == 2
