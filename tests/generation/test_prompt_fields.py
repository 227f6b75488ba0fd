"""Fields of JSON lines that are prompts: llmconv's own, Alpaca's, PaddleNLP's, and one by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.generation import generate
from llmconv.generation.prompts import read_prompts

FIELDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "src": ('{"src": "a", "tgt": "b"}', "a", {"tgt": "b"}),
    "instruction": ('{"instruction": "a", "output": "b"}', "a", {"output": "b"}),
    "instruction with empty input": ('{"instruction": "a", "input": " "}', "a", {}),
    "instruction and input": (
        '{"instruction": "a", "input": "b"}',
        [{"role": "user", "content": "a", "input": "b"}],
        {},
    ),
    "prompt first": ('{"prompt": "a", "src": "wiki"}', "a", {"src": "wiki"}),
}


@pytest.mark.parametrize(("line", "content", "rest"), FIELDS.values(), ids=FIELDS)
def test_known_fields_are_prompts(tmp_path: Path, line: str, content: Any, rest: dict[str, Any]) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert (prompt.content, prompt.fields) == (content, rest)


@pytest.mark.parametrize("text", ['{"q": "a", "prompt": "b"}', '[{"q": "a", "prompt": "b"}]', '{"q": "a"}'])
def test_a_field_is_chosen_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    assert read_prompts(tmp_path / "p.json", "q")[0].content == "a"


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ('{"src": "a", "instruction": "b"}', None, "has `instruction` and `src`"),
        ('{"src": ["a", "b"]}', None, "neither a text `prompt`"),
        ('{"prompt": "a"}', "q", "has no `q`"),
        ('{"q": 3}', "q", "has an int in `q`"),
        ("plain text", "q", "lines of text"),
        ('["a", {"q": 1}]', None, "item 2"),
    ],
)
def test_other_fields_are_refused(tmp_path: Path, text: str, field: str | None, problem: str) -> None:
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(MalformedInput, match=problem):
        read_prompts(tmp_path / "p.txt", field)


def test_an_input_that_the_template_leaves_out_is_refused(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"instruction": "a", "input": "b"}')
    with pytest.raises(InputRefused, match="which the chat template does not use"):
        generate(talking, prompt_file=tmp_path / "p.jsonl", template="v1_2")
    made = generate(talking, prompt_file=tmp_path / "p.jsonl", template="alpaca", src_length=50)
    assert made.completions[0].cut_tokens > 100


def test_the_field_needs_a_file(talking: Path) -> None:
    with pytest.raises(UsageProblem, match="`prompt_field` needs `prompt_file`"):
        generate(talking, "a", prompt_field="q")
    assert CliRunner().invoke(main, ["generate", str(talking), "a", "--prompt-field", "q"]).exit_code == 2
