"""Places where no output can be made are named for what they are, and an interrupt promises only what is left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import KEPT, InputRefused
from llmconv.output.local_folder import LocalFolder, StagedFolder, require_space
from llmconv.output.writer import _noting_what_stays
from tests.builders.hf_models import LLAMA, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model."""
    return save_model(tmp_path_factory.mktemp("model") / "model", LLAMA)


def converted(model: Path, output: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["to-hf", str(model), "--dtype", "bfloat16", "-o", output])
    return result.exit_code, result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these file systems")
@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_file_system_without_a_size_is_not_a_full_disk(folder: str, model: Path) -> None:
    code, stderr = converted(model, f"{folder}/llmconv-output")
    assert code == 4 and f"no folder can be made in `{folder}`" in stderr
    assert "space" not in stderr and "--resume" not in stderr


def test_the_root_of_the_file_system_is_refused(model: Path) -> None:
    code, stderr = converted(model, "/")
    assert code == 3 and "`/` is the root of the file system" in stderr


@pytest.mark.parametrize("name", ["a" * 250, "ä" * 120, "a" * 300, f"{'b' * 260}/out"])
def test_a_name_that_is_too_long_is_refused_before_anything_is_written(name: str, model: Path, tmp_path: Path) -> None:
    code, stderr = converted(model, str(tmp_path / name))
    assert code == 3 and "is too long" in stderr and "--resume" not in stderr
    assert not list(tmp_path.iterdir())


def test_the_longest_name_that_fits_is_taken(model: Path, tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len("..llmconv-partial")
    assert converted(model, str(tmp_path / ("a" * longest)))[0] == 0
    with pytest.raises(InputRefused, match="too long"):
        LocalFolder(tmp_path / ("a" * (longest + 1))).require_free(overwrite=False)


def test_a_full_disk_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no space left"):
        require_space(tmp_path / "out", 1 << 60)


@pytest.mark.parametrize("finished", [True, False])
def test_an_interrupt_promises_what_is_left(finished: bool, tmp_path: Path) -> None:
    making = StagedFolder(tmp_path / "out", key="k", overwrite=False, resume=False)
    with pytest.raises(KeyboardInterrupt) as caught, _noting_what_stays(making) as folder:
        if finished:
            folder.write_file("a.txt", b"content")
        raise KeyboardInterrupt
    assert (KEPT in getattr(caught.value, "__notes__", ())) == finished == bool(list(tmp_path.iterdir()))
