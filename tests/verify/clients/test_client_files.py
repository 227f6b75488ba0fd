"""The graphs and weights that a client opens must be the verified ones, whatever they are called."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest
from safetensors.numpy import load_file, save_file

from llmconv.export import export
from llmconv.output.manifest import graph_entries
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.clients import client_files
from llmconv.verify.clients.client_files import ClientFiles
from llmconv.verify.results import Check
from tests.builders.seeing import save_seeing
from tests.conftest import save_tiny

LAYOUTS = ("genai", "optimum", "transformersjs")
ALL = LAYOUTS
JS = ("transformersjs",)


def made(home: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Folders of all layouts, and the clients that they are for."""
    llama = save_tiny("llama", home / "llama", num_attention_heads=8, num_key_value_heads=1)
    gemma = save_tiny("gemma2", home / "gemma2", head_dim=24, sliding_window=5)
    seeing = save_seeing(home / "seeing")
    int8 = export(llama, home / "int8", quant="int8", layout=LAYOUTS).folder
    int4 = export(llama, home / "int4", quant="int4", layout=LAYOUTS).folder
    half = export(llama, home / "float16", precision="float16", layout=LAYOUTS).folder
    pair = export(llama, home / "pair", prefill=True, incremental=True, layout="genai").folder
    shards = export(llama, home / "shards", max_shard_size="200KB", layout=LAYOUTS).folder
    for folder in (llama, gemma):
        export(folder, layout=LAYOUTS)
    images = export(seeing, home / "images", layout=("genai", "transformersjs")).folder
    own = {"llama": llama, "gemma2": gemma, "int4": int4, "int8": int8, "float16": half, "shards": shards}
    return {
        **{name: (folder, ALL) for name, folder in own.items()},
        "pair": (pair, ("genai",)),
        "images": (images, ("genai", "transformersjs")),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, tuple[str, ...]]]:
    return made(tmp_path_factory.mktemp("client_files"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the files of all clients."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("exported") / "llama")
    export(folder, layout=LAYOUTS)
    return folder


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """The same as plain files, as `cp -rL` and uploads make it."""
    return Path(shutil.copytree(exported, tmp_path / "copied"))


def check(folder: Path, client: str) -> Check:
    parts = [name for name in ("embeddings.onnx", "vision.onnx") if (folder / name).exists()]
    models = {name: onnx.ModelProto() for name in parts}
    verified = VerifiedFolder(folder, graph_entries(folder), models, SessionSettings())
    (found,) = ClientFiles(verified, folder).checks(client)
    return found


def with_filename(folder: Path, name: str, value: str) -> None:
    """Another name of a file in the section of the decoder."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"][name] = value
    path.write_text(json.dumps(config))


def with_other_weights(path: Path) -> None:
    """Weights that differ in one number."""
    tensors = load_file(path)
    name = max(tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].flat[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def with_other_graph(path: Path) -> None:
    """A graph that computes something slightly different."""
    graph = onnx.load(path, format="protobuf", load_external_data=False)
    node = next(node for node in graph.graph.node if node.op_type in ("Mul", "Add"))
    node.op_type = "Sub"
    path.write_bytes(graph.SerializeToString())


def as_it_is(folder: Path) -> None:
    """Changes nothing."""


def without_manifest(folder: Path) -> None:
    (folder / "llmconv.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("change", [as_it_is, without_manifest])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "int4", "int8", "float16", "shards", "pair", "images"])
def test_correct_folders_pass(
    folders: Mapping[str, tuple[Path, tuple[str, ...]]],
    tmp_path: Path,
    name: str,
    links: bool,
    change: Callable[[Path], None],
) -> None:
    source, clients = folders[name]
    folder = Path(shutil.copytree(source, tmp_path / "model", symlinks=links))
    change(folder)
    for client in clients:
        found = check(folder, client)
        assert found.verdict == "pass", (client, found.detail)


@pytest.mark.parametrize("client", LAYOUTS)
def test_a_folder_of_plain_copies_passes(copied: Path, client: str) -> None:
    found = check(copied, client)
    assert (found.name, found.verdict) == ("client files", "pass")
    assert found.detail.endswith("model.onnx` as verified")


@pytest.mark.parametrize("change", [as_it_is, without_manifest])
def test_another_graph_for_transformersjs_fails(copied: Path, change: Callable[[Path], None]) -> None:
    with_other_graph(copied / "onnx/model.onnx")
    change(copied)
    found = check(copied, "transformersjs")
    assert found.verdict == "fail"
    assert "it opens `onnx/model.onnx`, which is not one of the verified graphs" in found.detail
    assert check(copied, "genai").verdict == "pass"


def test_a_recorded_graph_of_an_earlier_export_fails(copied: Path) -> None:
    with_other_graph(copied / "model.onnx")  # what `export` wrote since, or `--allow-changed` verified
    assert check(copied, "genai").verdict == "pass"
    assert check(copied, "transformersjs").verdict == "fail"


@pytest.mark.parametrize("change", [as_it_is, without_manifest])
def test_other_weights_for_transformersjs_fail(copied: Path, change: Callable[[Path], None]) -> None:
    with_other_weights(copied / "onnx/model.onnx_data")
    change(copied)
    found = check(copied, "transformersjs")
    assert found.verdict == "fail"
    assert found.detail == "transformersjs: the weights in `onnx/model.onnx_data` are not those in `model.safetensors`"


def test_weights_are_compared_up_to_the_last_block(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "BLOCK", 1000)
    assert check(copied, "transformersjs").verdict == "pass"
    path = copied / "onnx/model.onnx_data"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert check(copied, "transformersjs").verdict == "fail"
    path.write_bytes(content[:-1])
    assert check(copied, "transformersjs").verdict == "fail"


@pytest.mark.slow
def test_a_recorded_graph_on_swapped_weights_fails(exported: Path, tmp_path: Path) -> None:
    folder = export(exported, tmp_path / "shards", max_shard_size="150KB", layout=JS).folder
    folder = Path(shutil.copytree(folder, tmp_path / "copied"))
    assert check(folder, "transformersjs").verdict == "pass"
    first, second = folder / "onnx/model.onnx_data", folder / "onnx/model.onnx_data_1"
    os.rename(first, tmp_path / "kept")
    os.rename(second, first)
    os.rename(tmp_path / "kept", second)
    assert check(folder, "transformersjs").verdict == "fail"


def test_a_variety_that_is_not_selected_may_be_anything(copied: Path) -> None:
    (copied / "onnx/model_fp16.onnx").write_bytes(b"other")
    assert check(copied, "transformersjs").verdict == "pass"
    config = json.loads((copied / "config.json").read_text())
    config["transformers.js_config"] = {"device_config": {"cpu": {"dtype": {"model": "fp16"}}}}
    (copied / "config.json").write_text(json.dumps(config))
    found = check(copied, "transformersjs")
    assert (found.verdict, found.detail) == ("fail", "transformersjs: `onnx/model_fp16.onnx` is not an ONNX graph")


def test_a_graph_of_another_name_for_genai_fails(copied: Path) -> None:
    shutil.copyfile(copied / "model.safetensors", copied / "other.safetensors")
    with_other_weights(copied / "other.safetensors")
    graph = onnx.load(copied / "model.onnx", format="protobuf", load_external_data=False)
    for tensor in graph.graph.initializer:
        for pair in tensor.external_data:
            pair.value = "other.safetensors" if pair.key == "location" else pair.value
    (copied / "other.graph").write_bytes(graph.SerializeToString())
    with_filename(copied, "filename", "other.graph")
    found = check(copied, "genai")
    assert found.verdict == "fail"
    assert found.detail == "genai: the weights in `other.safetensors` are not those in `model.safetensors`"
    with_other_graph(copied / "other.graph")
    assert "`other.graph`, which is not one of the verified graphs" in check(copied, "genai").detail


def test_a_copy_of_a_verified_graph_under_another_name_passes(copied: Path) -> None:
    shutil.copyfile(copied / "model.onnx", copied / "other.graph")
    with_filename(copied, "filename", "other.graph")
    assert check(copied, "genai").verdict == "pass"


@pytest.mark.parametrize("name", ["adapter_filename", "data_file"])
def test_other_files_that_genai_maps_fail(copied: Path, name: str) -> None:
    shutil.copyfile(copied / "model.safetensors", copied / "other.bin")
    with_filename(copied, name, "other.bin")
    assert check(copied, "genai").verdict == "fail"


def test_the_graph_that_optimum_prefers_is_compared(copied: Path) -> None:
    (copied / "older").mkdir()
    shutil.copyfile(copied / "onnx/model.onnx", copied / "older/model.onnx")
    with_other_graph(copied / "older/model.onnx")
    assert check(copied, "optimum").verdict == "pass"
    os.rename(copied / "model.onnx", copied / "other.onnx")
    found = check(copied, "optimum")
    assert found.verdict == "fail"
    assert "`older/model.onnx`, which is not one of the verified graphs" in found.detail


@pytest.mark.slow
def test_an_unlisted_graph_for_optimum_fails(copied: Path, tmp_path: Path) -> None:
    pair = export(copied, tmp_path / "pair", prefill=True, incremental=True).folder
    assert check(pair, "optimum").verdict == "pass"
    shutil.copyfile(pair / "prefill.onnx", pair / "model.onnx")
    with_other_graph(pair / "model.onnx")
    assert check(pair, "optimum").verdict == "fail"
