"""`export --verify` exports, verifies, and exits as `verify` does; the export stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import llmconv.verify
from llmconv.cli import main
from llmconv.errors import OutOfMemory
from llmconv.verify.results import Check, Report


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama without graphs."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def run(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(main, ["export", *map(str, arguments), "--verify"])


def verdict_of(folder: Path) -> str:
    found: str = json.loads((folder / "llmconv.json").read_bytes())["verified"]["verdict"]
    return found


@pytest.mark.slow
def test_graphs_in_the_model_folder_are_verified(model: Path) -> None:
    done = run(model, "--incremental")
    first, *_, last = done.stdout.splitlines()
    assert (done.exit_code, first) == (0, f"{model}/decode.onnx")
    assert last.startswith("PASS: ") and "the export stays" not in done.stderr
    assert verdict_of(model) == "pass"


@pytest.mark.slow
def test_quantized_weights_are_compared_with_the_model(model: Path, tmp_path: Path) -> None:
    done = run(model, "-o", tmp_path / "out", "--incremental", "--quant", "int8", "--json")
    content = json.loads(done.stdout)
    assert done.exit_code == 0, done.stderr
    assert content["graphs"] == {"decode": "decode.onnx"} and content["quantized"]
    assert (content["verify"]["verdict"], content["verify"]["reference"]) == ("pass", "model")
    assert verdict_of(tmp_path / "out") == "pass"


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report | Exception], None]:
    """`judged(report)` makes this the result of every verification."""

    def judge(result: Report | Exception) -> None:
        def verify(*_: object, **__: object) -> Report:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(llmconv.verify, "verify", verify)

    return judge


@pytest.mark.quick_rows("fail-1")
@pytest.mark.parametrize(("verdict", "code"), [("fail", 1), ("skip", 5)])
def test_the_exit_code_is_that_of_verify_and_the_export_stays(
    model: Path, tmp_path: Path, judged: Callable[[Report], None], verdict: str, code: int
) -> None:
    judged(Report("out", "out", "quick", [Check("prefill", "decode.onnx", "logits", verdict=verdict)]))
    done = run(model, "-o", tmp_path / "out", "--incremental")
    assert done.exit_code == code and (tmp_path / "out" / "decode.onnx").is_file()
    assert f"the export stays in `{tmp_path / 'out'}`" in done.stderr


def test_an_error_of_verify_ends_the_command_and_the_export_stays(
    model: Path, judged: Callable[[Exception], None]
) -> None:
    judged(OutOfMemory("memory ran out", hint="none"))
    done = run(model, "--incremental", "--json")
    assert done.exit_code == 4 and "the export stays" in done.stderr
    assert json.loads(done.stdout)["verify"] is None and (model / "decode.onnx").is_file()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("-o", "s3://bucket/out"), "`s3://bucket/out` is not on this machine"),
        (("-o", "hf://org/name"), "is not on this machine"),
        (("--dry-run",), "`--dry-run` writes no graphs"),
        (("-o", "out", "--graphs-only"), "`--graphs-only` writes no weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_verified_is_refused_before_anything_is_written(
    model: Path, arguments: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(model, *arguments)
    assert done.exit_code == 2 and problem in done.stderr and "hint: " in done.stderr
    assert not list(model.glob("*.onnx")) and not (tmp_path / "out").exists()
