"""Composer checkpoints as they are packed, pointed to and laid out: the upstream's logits from every one of them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.formats.composer import ComposerRun, dropped, version
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.sources import files_under
from llmconv.output.manifest import read_manifest

FILE = "ep0-ba2-rank0.pt"
PACKED = [f"compressed/ep0-ba2-rank0.{end}" for end in ("pt.bz2", "pt.lz4", "pt.lzma", "pt.zst", "tar.lzma", "tgz")]
GENUINE = [*PACKED, "new_api_monolithic/ep0-ba2"]


def assert_logits(case: Path, folder: Path, logits_of: Callable[..., Any]) -> None:
    """The model in `folder` is the one that was trained."""
    with np.load(case / "reference.npz") as reference:
        mask = reference["attention_mask"]
        logits = logits_of(folder, reference["input_ids"], mask)
        assert np.abs((logits - reference["logits"]) * mask[..., None]).max() < 1e-5


@pytest.mark.parametrize("name", GENUINE)
def test_logits_are_those_of_the_trained_model(
    composer: Path, tmp_path: Path, logits_of: Callable[..., Any], name: str
) -> None:
    to_hf(composer / name, tmp_path / "hf")
    assert_logits((composer / name).parent, tmp_path / "hf", logits_of)


@pytest.mark.parametrize("name", GENUINE)
def test_every_tensor_and_tokenizer_file_has_the_bytes_of_the_source(composer: Path, name: str) -> None:
    case = (composer / name).parent
    expected = json.loads((case / "expected.json").read_text())["tensors"]
    checkpoint = open_training(composer / name)
    digests = {key: hashlib.sha256(tensor.read().tobytes()).hexdigest() for key, tensor in checkpoint.items()}
    assert digests == {key: entry["sha256"] for key, entry in expected.items()}
    assert checkpoint.side_files == {file.name: file.read_bytes() for file in (case / "hf_side_files").iterdir()}


def pack_tar(mode: Any) -> Callable[[Path, Path], None]:
    def pack(source: Path, target: Path) -> None:
        with tarfile.open(target, mode) as archive:
            archive.add(source, "composer_states.pt")

    return pack


def pack(compress: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        target.write_bytes(compress(source.read_bytes()))

    return write


PACK = {
    "pt.gz": pack(gzip.compress),
    "pt.bz2": pack(bz2.compress),
    "pt.xz": pack(lzma.compress),
    "tar": pack_tar("w"),
    "tar.gz": pack_tar("w:gz"),
    "tar.bz2": pack_tar("w:bz2"),
}


@pytest.mark.slow_rows("pt.xz")
@pytest.mark.parametrize("end", PACK)
def test_a_packed_checkpoint_is_the_same_model_under_its_own_name(composer: Path, tmp_path: Path, end: str) -> None:
    source, packed = composer / "weights_only" / FILE, tmp_path / f"ep0.{end}"
    PACK[end](source, packed)
    plain, opened = open_training(source), open_training(packed)
    assert {name: tensor.read().tobytes() for name, tensor in opened.items()} == {
        name: tensor.read().tobytes() for name, tensor in plain.items()
    }
    assert (opened.path, opened.side_files, opened.config) == (packed, plain.side_files, plain.config)


def test_the_manifest_and_a_dry_run_name_the_packed_file(composer: Path, tmp_path: Path) -> None:
    packed = composer / "compressed/ep0-ba2-rank0.tgz"
    to_hf(packed, tmp_path / "hf")
    assert read_manifest(tmp_path / "hf").steps[0]["source"] == "ep0-ba2-rank0.tgz"
    assert to_hf(packed, tmp_path / "x", dry_run=True).checkpoint.path == packed


def test_inspect_reports_a_packed_checkpoint_with_its_size_on_disk(composer: Path) -> None:
    found = inspect(composer / "compressed/ep0-ba2-rank0.pt.zst")
    assert (found.format, found.path.name, len(found.tensors)) == ("composer", "ep0-ba2-rank0.pt.zst", 21)
    assert found.file_bytes == 173_408


def test_a_link_to_an_archive_is_followed(composer: Path, tmp_path: Path) -> None:
    (tmp_path / "latest-rank0.pt").symlink_to(composer / "compressed/ep0-ba2-rank0.tgz")
    assert len(open_training(tmp_path / "latest-rank0.pt")) == 21


def test_a_pointer_in_a_copied_bucket_is_followed(composer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bucket/tiny-run/checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(composer / "weights_only" / FILE, folder)
    (folder / "latest-rank0.pt.symlink").write_text(f"tiny-run/checkpoints/{FILE}")
    for name in ("latest-rank0.pt", "latest-rank0.pt.symlink"):
        assert open_training(folder / name).path == folder / FILE
        assert inspect(folder / name).format == "composer"


def test_a_packed_file_of_no_format_is_refused_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "notes.gz").write_bytes(gzip.compress(b"notes"))
    done = CliRunner().invoke(main, ["to-hf", str(tmp_path / "notes.gz"), "-o", str(tmp_path / "hf")])
    assert done.exit_code == 3
    assert "error: `notes.gz` is not of a training format" in done.stderr


def test_a_packed_file_that_is_damaged_inside_is_refused_under_its_own_name(composer: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pt.gz").write_bytes(gzip.compress((composer / "weights_only" / FILE).read_bytes()[:9000]))
    with pytest.raises(MalformedInput, match=r"`x\.pt\.gz` is truncated or damaged"):
        open_training(tmp_path / "x.pt.gz")


@pytest.mark.slow
def test_a_packed_conversion_leaves_nothing_in_the_temporary_folder(composer: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    source = composer / "compressed/ep0-ba2-rank0.pt.bz2"
    command = [sys.executable, "-m", "llmconv", "inspect", "--json", str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tensors"] == 21
    assert not [*tmp_path.iterdir()]


# What a run tells of itself


TOLD = {
    "llama_full/" + FILE: ("composer 0.32.1, torch 2.13.0+cpu", "the optimizer's state (354 kB)"),
    "legacy_gpt2_0135/" + FILE: ("composer 0.13.5", "the optimizer's state (302 kB)"),
    "new_api_monolithic/ep0-ba2": ("composer 0.32.1, torch 2.13.0+cpu", "the state for resuming the run (12.3 kB)"),
}


@pytest.mark.parametrize(("name", "told"), TOLD.items())
def test_a_run_reports_its_writer_and_the_dropped_parts(composer: Path, name: str, told: tuple[str, str]) -> None:
    checkpoint = open_training(composer / name)
    assert (checkpoint.version, checkpoint.shards) == (told[0], 1)
    assert told[1] in checkpoint.dropped


def test_everything_but_empty_parts_is_reported_as_dropped(composer: Path) -> None:
    assert open_training(composer / "llama_full" / FILE).dropped == (
        "the optimizer's state (354 kB)",
        "the random number generators (5.06 kB)",
        "the training metrics (16 bytes)",
        "the evaluation metrics (16 bytes)",
        "the learning rate schedulers",
        "the algorithms",
        "the callbacks",
        "the time stamp",
    )
    assert open_training(composer / "weights_only" / FILE).dropped == ()


# The folder layout


@pytest.fixture
def run_folder(composer: Path, tmp_path: Path) -> Path:
    """A copy of a genuine folder that a test may change."""
    folder: Path = shutil.copytree(composer / "new_api_monolithic/ep0-ba2", tmp_path / "ep0-ba2")
    return folder


def test_the_folder_layout_counts_the_files_below_it(run_folder: Path) -> None:
    assert inspect(run_folder).file_bytes == sum(file.stat().st_size for file in run_folder.rglob("*.*"))


def test_a_changed_weights_file_in_the_folder_is_not_resumed_from(run_folder: Path) -> None:
    before = [(file, file.stat().st_mtime_ns) for file in files_under(run_folder)]
    (run_folder / "model/model.pt").touch()
    assert before != [(file, file.stat().st_mtime_ns) for file in files_under(run_folder)]


def test_a_folder_without_weights_is_refused(run_folder: Path) -> None:
    (run_folder / "model/model.pt").unlink()
    with pytest.raises(InputRefused, match=r"has no `model/model\.pt`"):
        open_training(run_folder)


def test_a_folder_without_its_own_configuration_takes_a_given_one(run_folder: Path, tmp_path: Path) -> None:
    told = json.loads((run_folder / "composer_metadata.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told["huggingface"]["model"]["config"]["content"]))
    (run_folder / "composer_metadata.json").write_text("{}")
    with pytest.raises(InputRefused, match="not contain a model configuration"):
        open_training(run_folder)
    assert open_training(run_folder, config=(tmp_path / "config.json",)).version == ""


BROKEN: dict[str, tuple[str, Any]] = {
    "no JSON": ("composer_metadata.json", b"{"),
    "a list": ("composer_metadata.json", b"[]"),
    "wrong types": ("composer_metadata.json", b'{"huggingface": [1], "composer_version": {}, "torch_version": 2}'),
    "a wrong configuration": ("composer_metadata.json", b'{"huggingface": {"model": {"config": {"content": 3}}}}'),
    "cut weights": ("model/model.pt", None),
    "no weights": ("model/model.pt", b""),
}


@pytest.mark.parametrize(("name", "content"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_folder_is_refused_in_one_line(run_folder: Path, name: str, content: bytes | None) -> None:
    file = run_folder / name
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    with pytest.raises(InputRefused) as refusal:
        open_training(run_folder)
    assert "\n" not in refusal.value.message and refusal.value.hint


def test_a_model_file_that_is_not_a_state_dict_is_refused(run_folder: Path) -> None:
    torch.save([torch.ones(2)], run_folder / "model/model.pt")
    with pytest.raises(MalformedInput, match="contains no state dict"):
        open_training(run_folder)


def test_unusual_and_endless_parts_of_a_run_are_reported_once() -> None:
    bomb: Any = ["x"]
    for _ in range(5000):
        bomb = [bomb, bomb]
    state = {"metadata": {"torch_version": 3, "composer_env_info": [1]}, "callbacks": bomb, "own": {1: 2}, "scaler": {}}
    run = ComposerRun({"state": state, "rng": None}, lambda name, leaf: leaf)
    assert (version(run), dropped(run)) == ("", ("the callbacks", "`own`"))
