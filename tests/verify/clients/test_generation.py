"""`verify --client` with the clients themselves, each in its environment (`make clients`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from benchmarks import environments
from llmconv.cli import main
from llmconv.export import export
from llmconv.verify import Report, verify
from tests.builders.seeing import save_seeing
from tests.conftest import save_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LAYOUTS = ("genai", "optimum", "transformersjs")
GRAPHS = ("*.onnx", "onnx", "*.onnx_data*", "*.graph", "llmconv.json", "genai_config.json")


def place(client: str) -> str:
    """`CLIENT=PATH` of its environment; skips without it."""
    home = ROOT / environments.folder(client)
    if not (home / "complete").exists():
        pytest.skip(f"no build/{client}-env; `make clients` makes it")
    return f"{client}={home if client == 'transformersjs' else home / 'bin/python'}"


def checked(folder: Path, client: str, **options: Any) -> Report:
    return verify(folder, clients=client, pythons=place(client), scenario="left padding", record=False, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("clients")
    llama = save_tiny("llama", home / "llama", num_attention_heads=8, num_key_value_heads=1)
    made = {"gemma2": save_tiny("gemma2", home / "gemma2", head_dim=24, sliding_window=5), "llama": llama}
    for folder in made.values():
        export(folder, layout=LAYOUTS)
    made["int4"] = export(llama, home / "int4", quant="int4", layout=LAYOUTS).folder
    made["float16"] = export(llama, home / "float16", precision="float16", layout=LAYOUTS).folder
    return made


@pytest.mark.parametrize("client", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "int4", "float16"])
def test_the_tokens_of_a_client_are_those_of_the_model(folders: dict[str, Path], name: str, client: str) -> None:
    report = checked(folders[name], client, reference=folders["llama"] if name == "int4" else None)
    assert report.verdict == "pass", report.lines()
    ours = [check for check in report.checks if check.graph == client]
    assert [check.detail for check in ours if check.output] == ["16 tokens", "16 tokens", "16 tokens", "48 tokens"]


@pytest.mark.parametrize("client", LAYOUTS)
def test_a_client_may_end_a_sequence_early(folders: dict[str, Path], tmp_path: Path, client: str) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "ending", ignore=shutil.ignore_patterns(*GRAPHS)))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": list(range(3, 90, 2))}))
    export(folder, layout=LAYOUTS)
    report = checked(folder, client)
    assert report.verdict == "pass", report.lines()
    assert any(check.detail and check.detail < "16" for check in report.checks if check.output == "tokens")


@pytest.mark.parametrize("client", LAYOUTS)
def test_a_client_searches_greedily_whatever_the_folder_sets(
    folders: dict[str, Path], tmp_path: Path, client: str
) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "num_return_sequences": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 3.0}
    config |= {"min_length": 30, "return_dict_in_generate": True}
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert checked(folder, client).verdict == "pass"


def test_other_end_tokens_in_the_configuration_of_a_client_fail(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = [5]
    (folder / "genai_config.json").write_text(json.dumps(config))
    report = checked(folder, "genai")
    assert report.verdict == "fail"
    assert "genai ends at [5], the model at [2]" in report.closing_lines()[-2]


def test_a_client_that_opens_another_graph_fails(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    other = save_tiny("llama", tmp_path / "other", num_attention_heads=8, num_key_value_heads=1, rms_norm_eps=0.5)
    export(other, layout="genai")
    shutil.copyfile(other / "model.onnx", folder / "other.onnx")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = "other.onnx"
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert checked(folders["llama"], "genai").verdict == "pass"
    report = checked(folder, "genai")
    assert report.verdict == "fail"
    assert "whose logit in the eager model is larger by" in "".join(report.lines())


def test_slightly_other_weights_of_a_client_fail(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    path = folder / "onnx/model.onnx_data"
    tensors = load_file(path)
    save_file({name: array * 1.0001 for name, array in tensors.items()}, path, metadata={"format": "pt"})
    report = checked(folder, "transformersjs")
    assert report.verdict == "fail"
    (failed,) = (check for check in report.checks if check.verdict == "fail")
    assert failed.detail == "transformersjs: the weights in `onnx/model.onnx_data` are not those in `model.safetensors`"


def without(folder: Path, copied: Path, field: str) -> Path:
    """A copy of a folder whose `genai_config.json` lacks a field of `model`."""
    shutil.copytree(folder, copied)
    config = json.loads((copied / "genai_config.json").read_text())
    del config["model"][field]
    (copied / "genai_config.json").write_text(json.dumps(config))
    return copied


def test_genai_pads_with_0_where_its_configuration_has_no_padding_token(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    report = checked(without(folders["llama"], tmp_path / "model", "pad_token_id"), "genai")
    assert report.verdict == "pass", report.lines()


def test_genai_ends_at_its_padding_token_where_its_configuration_has_no_end_token(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    report = checked(without(folders["llama"], tmp_path / "model", "eos_token_id"), "genai")
    assert [check.detail for check in report.checks if check.verdict == "fail"] == [
        "genai ends at [0], the model at [2]",
        "`eos_token_id` is None, and the model ends at [2]",
    ]


def test_a_folder_that_a_client_cannot_open_fails_in_its_words(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    (folder / "genai_config.json").unlink()
    command = ["verify", str(folder), "--scenario", "left padding", "--client", "genai", "--python", place("genai")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "the client failed: " in result.stdout
    assert "genai_config.json" in result.stdout


def test_a_model_with_images_is_not_run_in_transformersjs(tmp_path: Path) -> None:
    folder = export(save_seeing(tmp_path / "seeing"), tmp_path / "images", layout="transformersjs").folder
    report = checked(folder, "transformersjs")
    assert report.verdict == "pass", report.lines()
    ours = [(check.name, check.verdict) for check in report.checks if check.graph == "transformersjs"]
    assert ours == [("client files", "pass"), ("generation", "skip")]
