"""An export into the model folder: links cannot redirect it, and it is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import InputRefused, MalformedInput, OutputFailed
from llmconv.export import export
from llmconv.files.safe_folder import temporary_name


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama without graphs."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file elsewhere, which nobody may change."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "victim").write_text("dear")
    return tmp_path / "elsewhere" / "victim"


def require_untouched(victim: Path) -> None:
    assert victim.read_text() == "dear" and os.listdir(victim.parent) == [victim.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode.onnx", "decode.onnx.part", "llmconv.json.part"])
@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_a_planted_link_does_not_redirect_a_graph(name: str, make: Any, model: Path, victim: Path) -> None:
    make(model / name, victim)
    export(model, incremental=True)
    require_untouched(victim)
    assert not (model / "decode.onnx").is_symlink() and (model / "decode.onnx").stat().st_nlink == 1


def test_a_planted_folder_link_is_refused_before_the_trace(model: Path, victim: Path) -> None:
    (model / "onnx").symlink_to(victim.parent)
    with pytest.raises(MalformedInput, match="`.*onnx` is a link or a file where a folder should be"):
        export(model, layout="transformersjs")
    require_untouched(victim)
    assert not list(model.glob("*.onnx"))


def test_a_manifest_that_is_a_link_out_of_the_folder_is_refused(model: Path, victim: Path) -> None:
    victim.write_text("{}")
    (model / "llmconv.json").symlink_to(victim)
    with pytest.raises(MalformedInput, match=r"`llmconv\.json` in .* is a link that leads out of the folder"):
        export(model)
    assert victim.read_text() == "{}"


def test_a_config_that_is_a_link_out_of_the_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "config.json").rename(tmp_path / "config.json")
    (model / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(MalformedInput, match=r"`config\.json` in .* is a link that leads out of the folder"):
        export(model)


def test_a_manifest_that_names_a_file_elsewhere_removes_nothing(model: Path, victim: Path) -> None:
    name = "../elsewhere/victim"
    manifest = {"files": {name: {"bytes": 4}}, "graphs": {"decode": {"file": name}}}
    (model / "llmconv.json").write_text(json.dumps(manifest))
    with pytest.raises(MalformedInput, match="is not a valid manifest"):
        export(model, incremental=True, overwrite=True)
    require_untouched(victim)


@pytest.mark.slow
def test_leftovers_of_a_killed_export_are_removed(model: Path) -> None:
    (model / temporary_name()).write_text("half")
    export(model, incremental=True)
    assert not list(model.glob(".llmconv-*"))


def test_resume_of_complete_graphs_reports_it_and_writes_nothing(model: Path) -> None:
    export(model, incremental=True)
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    done = CliRunner().invoke(main, ["export", str(model), "--incremental", "--resume"])
    assert done.exit_code == 0 and "are complete: nothing to resume" in done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_resume_with_other_options_is_refused(model: Path) -> None:
    export(model, incremental=True)
    before = (model / "decode.onnx").read_bytes()
    with pytest.raises(InputRefused, match=r"`.*decode\.onnx` already exists, made with other options"):
        export(model, incremental=True, last_logits=True, resume=True)
    assert (model / "decode.onnx").read_bytes() == before


@pytest.mark.slow
def test_resume_makes_missing_graphs(model: Path) -> None:
    export(model)
    before = (model / "decode.onnx").read_bytes()
    (model / "decode.onnx").unlink()
    export(model, resume=True)
    assert (model / "decode.onnx").read_bytes() == before


@pytest.mark.slow
def test_resume_of_a_complete_new_folder_reports_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = export(model, tmp_path / "out", incremental=True)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = export(model, tmp_path / "out", incremental=True, resume=True)
    assert "is complete: nothing to resume" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert made.sizes and again.sizes and (again.sizes.graphs, again.sizes.copied) == (made.sizes.graphs, 0)
    with pytest.raises(InputRefused, match="is complete, but it was made from another input or with other options"):
        export(model, tmp_path / "out", incremental=True, resume=True, last_logits=True)


@pytest.mark.slow
def test_resume_of_a_new_folder_whose_model_has_another_config_is_refused(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", incremental=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    os.utime(model / "config.json", (0, 0))
    with pytest.raises(InputRefused, match="is complete, but it was made from another input"):
        export(model, tmp_path / "out", incremental=True, resume=True)


def fill(disk: Path, leave: int) -> None:
    """Leaves so many bytes free."""
    free = shutil.disk_usage(disk).free
    (disk / "other").write_bytes(bytes(free - leave))


@pytest.mark.slow
def test_a_disk_without_room_for_the_graphs_is_refused_and_nothing_is_left(model: Path, small_disk: Path) -> None:
    folder = Path(shutil.copytree(model, small_disk / "model"))
    before = sorted(os.listdir(folder))
    fill(small_disk, 8192)
    with pytest.raises(InputRefused, match=r"no space left: `.*model` needs [\d,]+ bytes, 8,192 are free"):
        export(folder)
    assert sorted(os.listdir(folder)) == before


def test_a_disk_that_fills_up_leaves_nothing_and_the_path_is_named(
    model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(model, small_disk / "model"))
    before = sorted(os.listdir(folder))
    fill(small_disk, 8192)
    monkeypatch.setattr("llmconv.export.folders.require_space", lambda *_, **__: None)
    with pytest.raises(OutputFailed, match=r"No space left on device \(.*model/(prefill|decode)\.onnx\)"):
        export(folder)
    assert sorted(os.listdir(folder)) == before
