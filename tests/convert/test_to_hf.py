"""to-hf and inspect as commands: detection, options, messages and exit codes."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert.formats import formats
from llmconv.convert.opening import open_training
from tests.builders.gguf_files import write_gguf
from tests.builders.tiny_models import save_tiny

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMPOSER = sorted((FIXTURES / "composer").glob("*/ep0-ba2-rank0.pt"))
MINDFORMERS = sorted((FIXTURES / "mindformers").glob("*/*.ckpt")) + [
    FIXTURES / "mindspore" / name
    for name in ("tiny.ckpt", "tiny_crc.ckpt", "tiny_cbc.ckpt", "tiny.safetensors", "sh", "full", "one_bf.ckpt")
]
META = sorted({shard.parent for shard in (FIXTURES / "meta").rglob("consolidated.*.pth")})
ACCESSORY = sorted({shard.parent for shard in (FIXTURES / "accessory").rglob("consolidated.*-of-*.model*.pth")})
LLAMA2C = FIXTURES / "llama2c" / "tied"
LLAMA = FIXTURES / "composer" / "weights_only" / "ep0-ba2-rank0.pt"


def llmconv(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


CLAIMS = [
    (path, name)
    for name, paths in (("accessory", ACCESSORY), ("composer", COMPOSER), ("meta", META), ("mindformers", MINDFORMERS))
    for path in paths
]


@pytest.mark.parametrize(("path", "name"), CLAIMS, ids=[f"{path.parent.name}/{path.name}" for path, _ in CLAIMS])
def test_exactly_one_format_claims_each_checkpoint(path: Path, name: str) -> None:
    assert [claim for claim, found in formats().items() if found.detect(path)] == [name]


@pytest.mark.slow
def test_every_format_claims_genuine_files_and_no_two_claim_the_same_path(tmp_path: Path) -> None:
    llmconv("to-hf", LLAMA, "-o", tmp_path / "model")
    files = [*FIXTURES.rglob("*"), write_gguf(tmp_path / "model", tmp_path / "model.gguf")]
    claims = {path: [name for name, found in formats().items() if found.detect(path)] for path in files}
    assert not {str(path): names for path, names in claims.items() if len(names) > 1}
    assert {name for names in claims.values() for name in names} == set(formats())


def test_every_format_is_named_after_its_package_or_file() -> None:
    folder = Path(__file__).parents[2] / "convert" / "formats"
    entries = {file.stem for file in folder.glob("[a-z]*.py") if "\nFORMAT = " in file.read_text()}
    entries |= {file.parent.name for file in folder.glob("*/format.py")}
    assert [found.name for found in formats().values()] == list(formats()) == sorted(entries)


@pytest.mark.slow
def test_converting_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from llmconv.cli import main\n"
        f"main(['to-hf', {str(LLAMA)!r}, '-o', {str(tmp_path / 'hf')!r}], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_json_says_what_was_written(tmp_path: Path) -> None:
    result = llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["format"], found["tensors"], found["bytes"], found["written"]) == ("composer", 21, 176_768, True)


def test_a_dry_run_writes_nothing_and_prints_the_plan(tmp_path: Path) -> None:
    result = llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--dry-run")
    assert result.exit_code == 0
    assert "disk needed: 176,768 bytes" in result.stdout
    assert "model.layers.1.mlp.down_proj.weight  float32  [32, 64]" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_line_about_the_output_has_no_escape_sequences(tmp_path: Path) -> None:
    model = tmp_path / "model"
    llmconv("to-hf", LLAMA, "-o", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "\x1b[31mred\n"}))
    result = llmconv("to-hf", model, "-o", tmp_path / "hf", "--dtype", "bfloat16")
    assert "\x1b" not in result.output
    assert result.stdout.count("\n") == 1


def test_weights_are_cast_and_split_as_asked(tmp_path: Path) -> None:
    llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--dtype", "float16", "--max-shard-size", "40KB")
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert {tensor.dtype.name for tensor in checkpoint.values()} == {"float16"}
    assert checkpoint.config["torch_dtype"] == "float16"
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3


def test_the_manifest_says_what_it_was_made_from(tmp_path: Path) -> None:
    llmconv("to-hf", LLAMA, "-o", tmp_path / "hf")
    manifest = json.loads((tmp_path / "hf" / "llmconv.json").read_text())
    (step,) = manifest["steps"]
    assert (step["command"], step["source"]) == ("to-hf", "ep0-ba2-rank0.pt")
    assert step["options"]["format"] == "composer"


def test_a_warning_goes_to_stderr(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "meta" / "llama2_gqa_mp2_bf16", tmp_path / "x")
    (folder / "tokenizer.model").unlink()
    result = llmconv("to-hf", folder, "-o", tmp_path / "hf")
    assert result.exit_code == 0
    assert "has no tokenizer" in result.stderr and "tokenizer.model" not in result.stdout


def test_an_output_that_exists_needs_overwrite(tmp_path: Path) -> None:
    assert llmconv("to-hf", LLAMA, "-o", tmp_path / "hf").exit_code == 0
    assert llmconv("to-hf", LLAMA, "-o", tmp_path / "hf").exit_code == 3
    assert llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--overwrite").exit_code == 0


def test_a_wrong_format_name_is_a_usage_error_that_lists_the_right_ones(tmp_path: Path) -> None:
    result = llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--from", "compozer")
    assert result.exit_code == 2
    assert ", ".join(formats()) in result.stderr


def test_a_format_that_the_content_contradicts_is_a_usage_error(tmp_path: Path) -> None:
    assert llmconv("to-hf", LLAMA, "-o", tmp_path / "hf", "--from", "meta").exit_code == 2


def write_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(LLAMA.read_bytes())[:-20])
    return path


def write_text(path: Path) -> Path:
    path.write_text("ep0-ba2-rank0.pt")
    return path


def write_state_dict(path: Path) -> Path:
    torch.save({"weight": torch.ones(2)}, path)
    return path


def write_truncated(path: Path) -> Path:
    path.write_bytes(LLAMA.read_bytes()[:5000])
    return path


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def make_checkpoints(path: Path) -> Path:
    path.mkdir()
    for name in ("ep1.pt", "ep2.pt"):
        write_state_dict(path / name)
    write_text(path / "latest-rank0.pt")
    return path


UNCLAIMED: dict[str, tuple[Any, str]] = {
    "a compressed file that was cut": (write_gzip, "(compressed with gzip) is truncated"),
    "a text file": (write_text, "not of a training format"),
    "a bare state dict": (write_state_dict, "it contains `weight`"),
    "a truncated file": (write_truncated, "truncated or damaged"),
    "a sharded folder without what says what it holds": (
        lambda path: make_folder(path, "__0_0.distcp"),
        "but no `.metadata`",
    ),
    "an adapter": (lambda path: make_folder(path, "adapter_config.json"), "is an adapter"),
    "a model folder": (lambda path: make_folder(path, "config.json", "model.safetensors"), "already is a Hugging Face"),
    "an empty folder": (make_folder, "is an empty folder"),
    "a folder of packed checkpoints": (
        lambda path: make_folder(path, "a.pt.zst", "b.tar.gz", "c"),
        "contains 2 checkpoint files",
    ),
    "a folder of checkpoints": (make_checkpoints, "contains 2 checkpoint files"),
    "nothing": (lambda path: path, "does not exist"),
}


@pytest.mark.parametrize(("make", "reason"), UNCLAIMED.values(), ids=UNCLAIMED.keys())
def test_what_no_format_claims_is_refused_with_a_hint(tmp_path: Path, make: Any, reason: str) -> None:
    result = llmconv("to-hf", make(tmp_path / "x"), "-o", tmp_path / "hf")
    assert result.exit_code == 3
    assert reason in result.stderr and "\n\nhint: " in result.stderr
    assert not (tmp_path / "hf").exists()


def test_formats_lists_them_all() -> None:
    told = json.loads(llmconv("formats", "--json").stdout)
    assert list(told) == list(formats())
    table = llmconv("formats").stdout
    assert all(f"{name} " in table and row["title"] in table and row["covers"] in table for name, row in told.items())
    assert list(json.loads(llmconv("formats", "--json").stdout)) == list(formats())


# inspect


def inspect(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(llmconv("inspect", "--json", path).stdout)
    return content


def test_inspect_tells_a_composer_checkpoint() -> None:
    found = inspect(LLAMA)
    assert (found["format"], found["model_type"], found["parameters"]) == ("composer", "llama", 44_192)
    assert (found["tensors"], found["dtypes"], found["bytes"]) == (21, {"float32": 21}, 176_768)


def test_inspect_tells_a_meta_checkpoint() -> None:
    found = inspect(FIXTURES / "meta" / "llama2_gqa_mp2_bf16")
    assert (found["format"], found["dtypes"], found["bytes"]) == ("meta", {"bfloat16": 21}, 352_896)


def test_inspect_tells_a_model_folder_and_one_file_of_it(tmp_path: Path) -> None:
    llmconv("to-hf", LLAMA, "-o", tmp_path / "hf")
    assert (inspect(tmp_path / "hf")["format"], inspect(tmp_path / "hf")["tensors"]) == ("hf", 21)
    assert inspect(tmp_path / "hf" / "model.safetensors")["format"] == "safetensors"


def test_inspect_tells_an_adapter_and_a_plain_torch_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "adapter", "adapter_config.json")
    write_state_dict(folder / "adapter_model.bin")
    assert (inspect(folder)["format"], inspect(folder)["parameters"]) == ("adapter", 2)
    assert inspect(folder / "adapter_model.bin")["format"] == "torch-file"


def test_inspect_prints_a_table() -> None:
    lines = llmconv("inspect", LLAMA).stdout.splitlines()
    assert "format        composer" in lines
    assert "bytes         176,768 of weights, 204,324 on disk" in lines


def test_inspect_refuses_what_nobody_knows(tmp_path: Path) -> None:
    assert llmconv("inspect", write_text(tmp_path / "x")).exit_code == 3


NATIVE = {
    "paddle/chatglm_v2": "chatglm_v2 as glm",
    "paddle/qwen": "qwen as qwen2",
    "accessory/internlm_mp1_bf16": "internlm as llama",
    "mindformers/mf132_glm2/model.ckpt": "ChatGLM2ForConditionalGeneration as glm",
}


@pytest.mark.parametrize(("path", "said"), NATIVE.items())
def test_an_architecture_with_another_name_in_transformers_is_said_to_be_that(path: str, said: str) -> None:
    result = llmconv("to-hf", FIXTURES / path, "-o", "unused", "--dry-run")
    assert f"would write unused: {said}, " in result.stdout


ROTARY = {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}


@pytest.mark.parametrize(
    "path", [META[2], FIXTURES / "accessory" / "llama_mp2_bf16", LLAMA2C], ids=lambda path: path.name
)
def test_rotary_fields_of_a_given_configuration_are_those_of_the_model(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": ROTARY}))
    config = open_training(path, config=(tmp_path,)).config
    assert config["rope_parameters"] == ROTARY and not config.keys() & {"rope_theta", "rope_scaling"}


def test_a_given_tokenizer_leaves_settings_of_generation_and_of_images(tmp_path: Path) -> None:
    kept = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
    folder = save_tiny(tmp_path / "model", "llama")
    for name in (*kept, "tokenizer_config.json", "vocab.json"):
        (folder / name).write_text("{}")
    (tmp_path / "words").mkdir()
    (tmp_path / "words/tokenizer.json").write_text("{}")
    files = open_training(folder, None, (), tmp_path / "words", rewrite=True).side_files
    assert files.keys() == {*kept, "tokenizer.json"}
