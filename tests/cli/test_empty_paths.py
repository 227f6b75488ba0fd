"""An empty path is refused: it would mean the current folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from llmconv.errors import UsageProblem
from tests.cli.commands import CHECKPOINT

EMPTY = (
    "inspect ?",
    "to-hf ? -o out",
    "to-hf x -o ?",
    "to-hf x -o out --base ?",
    "to-hf x -o out --config ?",
    "from-hf x -o ? --to meta",
    "to-gguf x -o ?",
    "to-gguf ? -o x.gguf",
    "quantize ? -o out --scheme w8a8",
    "quantize m -o ? --scheme w8a8",
    "quantize m -o out --scheme w8a8 --adapter ?",
    "merge-lora ? a -o out",
    "merge-lora b ? -o out",
    "delta apply b ? -o out",
    "delta extract b t -o ?",
    "export ?",
    "export m -o ?",
    "verify ?",
    "verify m --reference ?",
    "verify m --report ?",
    "verify --graph ?",
    "generate ? --prompt x",
    "generate m --output-file ?",
    "chat ?",
    "serve ?",
    "bench ?",
    "bench m --csv ?",
)


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_path_is_a_usage_error(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["" if word == "?" else word for word in line.split()]
    done = CliRunner().invoke(llmconv.cli.main, words, prog_name="llmconv")
    assert done.exit_code == 2
    assert "is empty, which is not the name of a file or folder\n\nhint: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call",
    [
        lambda: llmconv.convert.inspect(""),
        lambda: llmconv.convert.to_hf(CHECKPOINT, ""),
        lambda: llmconv.convert.to_hf("", "out"),
        lambda: llmconv.convert.from_hf("m", "", to="meta"),
        lambda: llmconv.convert.merge_lora("m", "a", ""),
        lambda: llmconv.convert.apply_delta("m", "d", ""),
        lambda: llmconv.convert.extract_delta("m", "t", ""),
        lambda: llmconv.export.export(""),
        lambda: llmconv.verify.verify(""),
        lambda: llmconv.generation.generate("", ["x"]),
    ],
)
def test_an_empty_path_is_a_usage_problem_in_python(
    call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageProblem, match="is empty, which is not the name of a file or folder"):
        call()
    assert not list(tmp_path.iterdir())
