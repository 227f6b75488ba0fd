"""Every command that writes makes the missing folders above its output, and refuses a file in their place."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.talking import save_letters

EXAMPLE = Path(__file__).parents[1] / "examples/tiny-llama"

LINES = {
    "to-hf": f"to-hf {EXAMPLE}/ep4-ba2400-rank0.pt -o OUT",
    "from-hf": "from-hf base -o OUT --to meta",
    "merge-lora": f"merge-lora base {EXAMPLE}/adapter -o OUT",
    "delta extract": "delta extract base merged -o OUT",
    "delta apply": "delta apply base delta -o OUT",
    "export": "export base --prefill --incremental -o OUT",
    "onnx-adapter": f"onnx-adapter base {EXAMPLE}/adapter -o OUT.onnx_adapter",
    "verify": "verify base --suite quick --scenario 'prefill, 1 token' --no-record --report OUT",
    "generate": "generate base --prompt Once --max-new-tokens 2 --output-file OUT",
    "embed": "embed sentences Once --output-file OUT",
    "bench --csv": "bench base --lengths 4 --new-tokens 2 --repeat 1 --csv OUT",
    "bench --plot": "bench base --lengths 4 --new-tokens 2 --repeat 1 --plot OUT.svg",
}
"""A line for each option that writes; OUT is the output."""


def run(line: str, out: str) -> tuple[int, str]:
    """Exit code and stderr of a command, in this process."""
    done = CliRunner().invoke(main, shlex.split(line.replace("OUT", out)))
    return done.exit_code, done.stderr


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs of all lines."""
    folder = tmp_path_factory.mktemp("inputs")
    save_letters(save_modules(save_model(folder / "sentences", "llama")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in (
            f"to-hf {EXAMPLE}/ep4-ba2400-rank0.pt -o base",
            f"merge-lora base {EXAMPLE}/adapter -o merged",
            "delta extract base merged -o delta",
            "export base --lora-inputs all-linear",
            "export sentences --task embed",
        ):
            assert run(line, "")[0] == 0, line
    return folder


@pytest.fixture
def place(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of the inputs."""
    for name in ("base", "merged", "delta", "sentences"):
        shutil.copytree(inputs / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_missing_folders_above_an_output_are_made(name: str, place: Path) -> None:
    code, stderr = run(LINES[name], "new/folder/x")
    assert code == 0, stderr
    assert [path.name.partition(".")[0] for path in (place / "new/folder").glob("x*")] == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_file_in_place_of_a_folder_is_refused_before_any_work(name: str, place: Path) -> None:
    (place / "file").write_text("x")
    code, stderr = run(LINES[name], "file/x")
    assert code == 3 and "`" + str(place / "file") + "` is not a folder, so `file/x" in stderr
    assert (place / "file").read_text() == "x"
