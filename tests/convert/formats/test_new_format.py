"""A new format is one package: dropped into the folder it is found, listed, documented, and converts checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import formats
from tools import formats_page

FIXTURE = Path(__file__).parents[2] / "fixtures" / "composer" / "weights_only" / "ep0-ba2-rank0.pt"
FORMAT = """
from dataclasses import replace

from llmconv.convert.formats import Format
from llmconv.convert.formats.composer import FORMAT as COMPOSER
from llmconv.convert.formats.crate.read import inner


def _open(path, config, tokenizer):
    return replace(COMPOSER.open(inner(path), config, tokenizer), format="crate")


FORMAT = Format(
    name="crate",
    title="Crate: a `.crate` folder",
    detect=lambda path: path.is_dir() and (path / "CRATE").is_file(),
    open=_open,
    covers="what is in the crate",
)
"""
READ = """
def inner(path):
    return path / "run.pt"
"""


def llmconv(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def crate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of a format whose package was dropped next to the others; returns the checkpoint."""
    package = tmp_path / "dropped" / "crate"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("format", FORMAT), ("read", READ)):
        (package / f"{name}.py").write_text(text)
    checkpoint = tmp_path / "thing"
    checkpoint.mkdir()
    (checkpoint / "CRATE").touch()
    (checkpoint / "run.pt").write_bytes(FIXTURE.read_bytes())
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "dropped")])
    _forget()
    yield checkpoint
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for cached in (formats.formats, formats.adapter_formats, formats.delta_formats):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("llmconv.convert.formats.crate")]:
        del sys.modules[name]


@pytest.mark.slow
def test_it_is_detected_and_converted(crate: Path, tmp_path: Path) -> None:
    assert llmconv("to-hf", crate, "-o", tmp_path / "hf").exit_code == 0
    converted = open_checkpoint(tmp_path / "hf")
    assert converted.config["model_type"] == "llama"
    found = json.loads(llmconv("inspect", crate, "--json").stdout)
    assert found["format"] == "crate"


def test_it_is_listed_and_accepted_by_name(crate: Path, tmp_path: Path) -> None:
    assert "crate" in json.loads(llmconv("formats", "--json").stdout)
    assert llmconv("to-hf", "--from", "crate", crate, "-o", tmp_path / "hf").exit_code == 0


def test_it_is_documented(crate: Path) -> None:
    assert "| `crate` | Crate: a `.crate` folder | what is in the crate |" in formats_page.table()
