"""A folder of quantized graphs in place of a model: the error names the model that they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.export import export
from llmconv.not_a_model_folder import described, export_again, is_quantized_export
from tests.builders.talking import save_letters
from tools.tiny_models import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of a Llama that talks; do not write into it."""
    home = tmp_path_factory.mktemp("home")
    save_tiny("llama", home / "llama", 3)
    save_letters(home / "llama")
    export(home / "llama", home / "out", quant="int4")
    return home / "out"


@pytest.mark.parametrize(
    "words",
    [
        ["export", "IN", "-o", "OUT"],
        ["to-hf", "IN", "-o", "OUT"],
        ["merge-lora", "IN", "examples/tiny-llama/adapter", "-o", "OUT"],
        ["from-hf", "IN", "--to", "meta", "-o", "OUT"],
    ],
    ids=lambda words: words[0],
)
def test_commands_for_models_name_the_source(quantized: Path, tmp_path: Path, words: list[str]) -> None:
    places = {"IN": str(quantized), "OUT": str(tmp_path / "new")}
    result = CliRunner().invoke(main, [places.get(word, word) for word in words])
    assert (
        result.exit_code == 3 and f"`{quantized}` contains graphs with quantized weights, not a model" in result.stderr
    )
    assert "(its manifest names `llama`): `llmconv export llama -o OUT --quant int4`" in result.stderr


def test_the_hint_has_the_layout_that_was_asked_for(quantized: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(quantized), "--layout", "genai"])
    assert result.exit_code == 3 and "`llmconv export llama -o OUT --quant int4 --layout genai`" in result.stderr


def test_genai_names_the_export_that_it_needs(quantized: Path) -> None:
    result = CliRunner().invoke(main, ["generate", str(quantized), "x", "--backend", "genai"])
    assert result.exit_code == 3 and "`llmconv export llama -o OUT --quant int4 --layout genai`" in result.stderr


@pytest.mark.parametrize(
    "content",
    [
        "[" * 5000,
        "[]",
        json.dumps({"steps": [{"command": "export", "source": "x`; rm -rf y", "options": {"quant": "$(z)"}}, 3]}),
        json.dumps({"steps": [{"command": "export", "source": {}, "options": []}]}),
    ],
    ids=["deep", "a list", "commands", "types"],
)
def test_a_hostile_manifest_gets_into_no_command_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "llmconv.json").write_text(content)
    (tmp_path / "quantized-00001-of-00002.safetensors").touch()
    assert is_quantized_export(tmp_path)
    assert export_again(tmp_path, "--layout genai") == "llmconv export MODEL -o OUT --layout genai"


def test_a_model_with_a_manifest_is_no_quantized_export(tmp_path: Path) -> None:
    for name in ("llmconv.json", "quantized.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    assert not is_quantized_export(tmp_path)


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        ({(4, 32): 1}, "1 matrix (1 of 4 bits in blocks of 32)"),
        ({(4, 32): 1042, (8, 0): 1}, "1,043 matrices (1,042 of 4 bits in blocks of 32, 1 of 8 bits by column)"),
    ],
)
def test_matrices_are_described_by_kind(matrices: dict[tuple[int, int], int], words: str) -> None:
    assert described(matrices) == words
