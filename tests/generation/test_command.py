"""llmconv generate on the command line: sources of prompts, continued files, closed pipes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.generation import generate


def run(*arguments: object, stdin: str | None = None) -> Result:
    """`llmconv generate`."""
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Eleven prompts of mixed lengths, one per line."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'ab' * (n % 4)}prompt {n}\n" for n in range(11)))
    return path


@pytest.mark.slow
def test_prompts_come_as_arguments_from_a_file_and_from_standard_input(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("ab\n\nhello\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "hello"}\n')
    ways = [
        run(talking, "ab", "hello", "--max-new-tokens", 4),
        run(talking, "--prompt", "ab", "--prompt", "hello", "--max-new-tokens", 4),
        run(talking, "--prompt-file", tmp_path / "p.txt", "--max-new-tokens", 4),
        run(talking, "--prompt-file", tmp_path / "p.jsonl", "--max-new-tokens", 4),
        run(talking, "--max-new-tokens", 4, stdin="ab\nhello\n"),
        run(talking, "--max-new-tokens", 4, "--prompt-file", "-", stdin='{"prompt": "ab"}\n{"prompt": "hello"}\n'),
    ]
    assert {way.exit_code for way in ways} == {0}
    assert len({way.stdout for way in ways}) == 1 and len(ways[0].stdout.splitlines()) == 4


@pytest.mark.slow
def test_chats_of_a_file_are_written_in_a_template(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "own.jinja").write_text("{{ messages[0].role }}: {{ messages[0].content }}")
    options = ("--template", tmp_path / "own.jinja", "--max-new-tokens", 5)
    chat, text = run(talking, "--prompt-file", tmp_path / "p.jsonl", *options), run(talking, "hi", *options)
    assert chat.exit_code == 0 and chat.stdout == text.stdout


@pytest.mark.slow
def test_a_killed_run_continues_and_gives_the_same_file(talking: Path, prompts: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    options = ("--prompt-file", prompts, "--max-new-tokens", 5, "--batch-size", 3)
    assert run(talking, *options, "--output-file", whole).exit_code == 0
    assert run(talking, *options, "--output-file", cut).exit_code == 0
    content = cut.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(content[:4]) + content[4][:20])
    result = run(talking, *options, "--output-file", cut)
    assert result.exit_code == 0 and "4 of the texts were finished before" in result.stderr
    assert [{**line, "tokens": None} for line in lines(cut)] == [{**line, "tokens": None} for line in lines(whole)]
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_fields_of_a_prompt_are_copied_to_its_completion(talking: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "o.jsonl", '{"id": 7, "prompt": "ab", "text": "kept out"}\n{"prompt": "c"}\n'
    assert run(talking, "--output-file", out, "--max-new-tokens", 2, stdin=given).exit_code == 0
    first, second = lines(out)
    assert list(first)[0] == "id" and first["id"] == 7 and first["text"] != "kept out" and "id" not in second
    assert run(talking, "--output-file", out, "--max-new-tokens", 2, stdin=given.replace("7", "8")).exit_code == 3


@pytest.mark.quick_rows("/dev/full-more1")
@pytest.mark.parametrize(("device", "more"), [("/dev/null", ("--overwrite",)), ("/dev/full", ())])
def test_a_device_is_not_accepted_as_an_output_file(talking: Path, device: str, more: tuple[str, ...]) -> None:
    result = run(talking, "ab", "--output-file", device, *more)
    assert result.exit_code == 3 and f"`{device}` is not a file" in result.stderr
    assert Path(device).exists()
    assert not Path(device).with_name(f".{Path(device).name}.options.json").exists()


def test_an_address_of_a_store_is_refused_by_the_name_of_the_option(talking: Path) -> None:
    result = run(talking, "ab", "--output-file", "s3://bucket/o.jsonl")
    assert result.exit_code == 3 and "`--output-file` takes a local path" in result.stderr


def test_a_finished_file_is_not_changed(talking: Path, prompts: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out.jsonl", ("--prompt-file", prompts, "--max-new-tokens", 2)
    assert run(talking, *options, "--output-file", out).exit_code == 0
    before = out.read_bytes()
    result = run(talking, *options, "--output-file", out)
    assert result.exit_code == 0 and out.read_bytes() == before


@pytest.mark.quick_rows("other2")
@pytest.mark.parametrize("other", [["--max-new-tokens", "3"], ["--temperature", "1"], ["--prompt-prefix", "x"]])
def test_other_options_are_refused_with_a_hint(talking: Path, prompts: Path, tmp_path: Path, other: list[str]) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--prompt-file", prompts, "--output-file", out)
    assert run(talking, *options, "--max-new-tokens", 2).exit_code == 0
    before = out.read_bytes()
    result = run(talking, *options, "--max-new-tokens", 2, *other)
    assert result.exit_code == 3 and "--overwrite" in result.stderr
    assert out.read_bytes() == before
    assert run(talking, *options, "--max-new-tokens", 2, *other, "--overwrite").exit_code == 0


@pytest.mark.quick_rows("no prompts")
@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ((), "x" * 5000),
        (("--prompt-file", "none.txt"), None),
        (("--template", "none"), "a"),
        (("--backend", "none"), "a"),
    ],
    ids=["a prompt beyond the context", "no prompts", "no template", "no backend"],
)
def test_overwrite_leaves_the_old_file_to_a_run_that_fails(
    talking: Path, tmp_path: Path, options: tuple[str, ...], prompt: str | None
) -> None:
    out = tmp_path / "out.jsonl"
    assert run(talking, "ab", "--output-file", out, "--max-new-tokens", 2).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    failed = run(talking, *([prompt] if prompt else []), "--output-file", out, "--overwrite", *options)
    assert failed.exit_code in (2, 3)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_another_model_in_the_same_place_is_refused(talking: Path, prompts: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(talking, model)
    arguments = (model, "--prompt-file", prompts, "--output-file", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    assert run(*arguments).exit_code == 0
    (model / "model.safetensors").touch()
    changed = run(*arguments)
    assert changed.exit_code == 3 and "or another model" in changed.output


def test_the_prompt_file_is_not_overwritten(talking: Path, prompts: Path) -> None:
    before = prompts.read_text()
    refused = run(talking, "--prompt-file", prompts, "--output-file", prompts, "--overwrite")
    assert refused.exit_code == 2 and prompts.read_text() == before


def test_a_prompt_that_is_not_utf8_is_refused(talking: Path) -> None:
    refused = run(talking, "\udcff\udcfe")
    assert refused.exit_code == 3 and "error: the prompt is not UTF-8 text" in refused.output


def test_a_file_not_written_by_llmconv_is_not_touched(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("my notes\n")
    assert run(talking, "a", "--output-file", tmp_path / "mine.jsonl").exit_code == 3
    assert (tmp_path / "mine.jsonl").read_text() == "my notes\n"


@pytest.mark.slow
def test_a_closed_pipe_ends_the_stream_quietly(talking: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "llmconv",
        "generate",
        str(talking),
        "a",
        "b",
        "--stream",
        "--max-new-tokens",
        "90",
    ]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout and writer.stderr
    writer.stdout.read(3)
    writer.stdout.close()
    assert "Traceback" not in writer.stderr.read() and writer.wait() == 141
    writer.stderr.close()


@pytest.mark.slow
def test_the_cost_is_reported_per_batch_and_in_total(talking: Path) -> None:
    result = run(talking, "a", "bcd", "ef", "--batch-size", 2, "--max-new-tokens", 4, "--json")
    result_json = json.loads(result.stdout)
    assert [(batch["prompts"], batch["prompt_tokens"], batch["new_tokens"]) for batch in result_json["batches"]] == [
        (2, 4, 8),
        (1, 2, 4),
    ]
    assert (result_json["prompt_tokens"], result_json["new_tokens"]) == (6, 12)
    assert result_json["time_to_first_token"] > 0 and result_json["peak_bytes"] > 1e6
    assert result.stderr.count("first token after") == 2 and "prompts took" in result.stderr


@pytest.mark.slow
def test_with_beams_the_rate_is_over_the_whole_time(talking: Path) -> None:
    cost = generate(talking, ["ab"], max_new_tokens=5, num_beams=2).total
    assert cost.first_seconds == cost.seconds and cost.rate == cost.new_tokens / cost.seconds


def test_fixed_sizes_of_the_session_are_named_when_a_batch_differs(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "s.ini").write_text("[free_dimensions]\nbatch_size = 1\n")
    result = run(talking, "ab", "cd", "--session-config", tmp_path / "s.ini")
    assert result.exit_code == 3 and "free dimensions are fixed to batch_size = 1" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("length", "code"), [(129, 3), (128, 0)])
def test_a_prompt_beyond_the_context_is_refused(talking: Path, length: int, code: int) -> None:
    result = run(talking, "a" * length, "--max-new-tokens", 5)
    assert result.exit_code == code
    if code:
        assert "the prompt has 129 tokens, but the model's context is 128" in result.stderr


@pytest.mark.slow
def test_a_length_that_leaves_no_room_is_refused(talking: Path) -> None:
    result = run(talking, "abcd", "--max-length", 4)
    assert result.exit_code == 3 and "the prompt has 4 tokens, but max_length is 4" in result.stderr
    assert "--max-new-tokens" in result.stderr


@pytest.mark.slow
def test_a_text_ends_at_the_end_of_the_context(talking: Path) -> None:
    found = generate(talking, ["a" * 125], max_new_tokens=50).completions[0]
    assert (len(found.tokens), found.finish) == (4, "length")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--prompt-file", "p.txt", "x"], "given both"),
        (["x", "--provider", "tpu"], "has no provider `tpu`"),
        (["x", "--template", "zephyr"], "unknown chat template `zephyr`"),
    ],
)
def test_invalid_options_give_one_line_and_a_hint(talking: Path, options: list[str], problem: str) -> None:
    result = run(talking, *options)
    assert result.exit_code == 2 and problem in result.stderr and "hint:" in result.stderr


def test_an_adapter_for_graphs_without_inputs_is_refused_as_by_other_commands(talking: Path, tmp_path: Path) -> None:
    result = run(talking, "x", "--adapter", "there")
    assert result.exit_code == 3 and "no inputs for LoRA factors" in result.stderr
    line = ["onnx-adapter", str(talking), "there", "-o", str(tmp_path / "x.onnx_adapter")]
    assert CliRunner().invoke(main, line).exit_code == 3


@pytest.mark.parametrize(
    ("content", "problem"), [('{"text": "x"}\n', "line 1"), ("{\n", "line 1"), ("\n\n", "no prompt")]
)
def test_unreadable_prompts_are_reported(talking: Path, tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    result = run(talking, "--prompt-file", tmp_path / "p.jsonl")
    assert result.exit_code == 3 and problem in result.stderr


def test_an_invalid_line_after_an_object_is_not_a_text(talking: Path) -> None:
    result = run(talking, stdin='{"prompt": "ab"}\n{"prompt": "hello"\n')
    assert result.exit_code == 3 and "line 2 of the prompts is not valid JSON" in result.stderr


@pytest.mark.slow
def test_the_tokenizer_of_the_graphs_needs_no_torch(talking: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from llmconv.generation import generate;"
        f"print(generate({str(talking)!r}, ['a'], max_new_tokens=2).completions[0].finish, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["length", "False"]


@pytest.mark.slow
def test_a_folder_without_weights_still_runs_its_graphs(talking: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(talking, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    assert len(generate(folder, ["a"]).completions[0].tokens) == 3
