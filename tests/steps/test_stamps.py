"""Stamps change with the file, here, in a bucket and on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from llmconv.output.manifest import MANIFEST
from llmconv.steps.execution import UNKNOWN, stamps
from tests.builders.fake_hub import serving as serving_hub
from tests.stores.reading_bucket import Bucket, serving


def test_every_file_of_a_folder_has_one(tmp_path: Path) -> None:
    (tmp_path / "base/onnx").mkdir(parents=True)
    (tmp_path / "base/a").write_text("one")
    (tmp_path / "base/onnx/b").write_text("two")
    found = stamps(["base", "none"], tmp_path)
    assert found.keys() == {"base/a", "base/onnx/b"}
    assert stamps(["base/a"], tmp_path) == {"base/a": found["base/a"]}


def test_it_changes_with_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    first = stamps(["a"], tmp_path)
    os.utime(file, ns=(2, 2))
    second = stamps(["a"], tmp_path)
    file.write_text("longer")
    os.utime(file, ns=(2, 2))
    assert len({one["a"] for one in (first, second, stamps(["a"], tmp_path))}) == 3


def test_those_of_a_file_include_the_configurations_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in (
        "adapter/model.safetensors",
        "adapter/adapter_config.json",
        "adapter/train.log",
        "m.pt",
        "run.yaml",
        "model.yaml",
        "b.json",
    ):
        (tmp_path / name).write_text("steps: []" if name == "run.yaml" else "x")
    assert stamps(["adapter/model.safetensors"], tmp_path, are_read=True).keys() == {
        "adapter/model.safetensors",
        "adapter/adapter_config.json",
    }
    assert stamps(["m.pt"], tmp_path, are_read=True).keys() == {"m.pt", "b.json", "model.yaml"}
    assert stamps(["m.pt"], tmp_path).keys() == {"m.pt"}


def test_those_of_a_file_in_parts_are_of_all_parts(tmp_path: Path) -> None:
    parts = [f"run/model-0000{number}-of-00002.gguf" for number in (1, 2)]
    (tmp_path / "run").mkdir()
    (tmp_path / parts[0]).touch()
    assert stamps(parts[:1], tmp_path, are_read=True).keys() == {parts[0]}  # the step reports what is missing
    (tmp_path / parts[1]).touch()
    (tmp_path / "tokenizer.bin").touch()
    assert stamps(parts[:1], tmp_path, are_read=True).keys() == {*parts, "tokenizer.bin"}


@pytest.mark.parametrize("name", ["latest.pt", "latest.pt.symlink"])
def test_those_of_a_pointer_are_its_own_and_of_the_file_that_it_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "ep1.pt").write_text("x")
    (tmp_path / "latest.pt.symlink").write_text("ep1.pt")
    assert {"ep1.pt", "latest.pt.symlink"} <= stamps([name], tmp_path, are_read=True).keys()


def test_that_of_a_manifest_says_only_that_it_is_there(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    first = stamps(["."], tmp_path)
    (tmp_path / MANIFEST).write_text("{ }")
    assert first == stamps(["."], tmp_path) != {}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serving(tmp_path / "served") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        yield bucket


def test_objects_have_one_that_changes_with_the_content(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("m/a", b"one")
    bucket.put("m/b", b"two")
    uri = bucket.uri("m")
    first = stamps([uri], tmp_path)
    assert first.keys() == {f"{uri}#a", f"{uri}#b"}
    assert stamps([uri + "/a"], tmp_path).keys() == {f"{uri}/a#a"}
    bucket.put("m/b", b"222")
    second = stamps([uri], tmp_path)
    assert (first[f"{uri}#a"] == second[f"{uri}#a"]) and first[f"{uri}#b"] != second[f"{uri}#b"]


def test_a_file_system_of_fsspec_has_them(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/stamps/a", b"one")
    first = stamps(["memory://stamps"], tmp_path)
    memory.pipe("/stamps/a", b"two")
    assert [*first] == ["memory://stamps#/a"]
    assert first != stamps(["memory://stamps"], tmp_path)
    memory.rm("/stamps", recursive=True)


def test_a_place_that_cannot_be_asked_is_unknown(tmp_path: Path) -> None:
    assert stamps(["none://x/y"], tmp_path) == {"none://x/y": UNKNOWN}


def test_a_model_on_the_hub_has_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub("hf_token") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        repository = hub.repository("org/tiny")
        repository.put(README_md=b"one")
        first = stamps(["org/tiny", "hf://org/tiny"], tmp_path, are_read=True)
        repository.put(README_md=b"two")
        second = stamps(["org/tiny", "hf://org/tiny"], tmp_path, are_read=True)
    assert first["org/tiny"] == first["hf://org/tiny"] != UNKNOWN
    assert second["org/tiny"] not in (UNKNOWN, first["org/tiny"])


def test_files_behind_links_to_folders_have_one(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/shard").write_text("x")
    (tmp_path / "store/round").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step3").symlink_to("../store")
    assert stamps(["run"], tmp_path).keys() == {"run/step3/shard"}


def test_those_of_a_checkpoint_include_configurations_in_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "ds/global_step3").mkdir(parents=True)
    for name in ("ds/config.json", "ds/notes.txt", "ds/global_step3/model.pt"):
        (tmp_path / name).write_text("x")
    inside = {"ds/global_step3/model.pt", "ds/config.json"}
    assert stamps(["ds/global_step3"], tmp_path, are_read=True).keys() == inside
    assert stamps(["ds/global_step3/model.pt"], tmp_path, are_read=True).keys() == inside
    assert stamps(["ds/global_step3"], tmp_path).keys() == {"ds/global_step3/model.pt"}
