"""A plain model folder: exported once into the cache, and again when it has changed; nothing is written into it."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import llmconv.cli
from llmconv.checkpoint import write_small
from llmconv.convert import to_hf
from llmconv.export import export
from llmconv.generation import runners
from llmconv.generation.runners import _identity, _torch_instead, graphs_in_cache
from tests.builders.chatting import save_chatting
from tests.builders.torch_states import LLAMA, llama_state
from tests.conftest import save_tiny

CHECKPOINT = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatting(tmp_path_factory.mktemp("exported") / "chatting")


@pytest.fixture
def plain(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model without graphs, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep = shutil.ignore_patterns("*.onnx", "llmconv.json")
    return Path(shutil.copytree(exported, tmp_path / "my model", ignore=keep))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights and a configuration, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("llama", tmp_path / "bare")
    return tmp_path / "bare"


def hub_cache(model: Path, home: Path, *without: str) -> str:
    """The name of a model whose files, as links to blobs, are in a hub's cache, but for those `without`."""
    commit = "a" * 40
    snapshot, blobs = home / "models--org--tiny/snapshots" / commit, home / "models--org--tiny/blobs"
    for folder in (snapshot, blobs, home / "models--org--tiny/refs"):
        folder.mkdir(parents=True)
    (home / "models--org--tiny/refs/main").write_text(commit)
    for at, path in enumerate(sorted(one for one in model.iterdir() if one.name not in without)):
        shutil.copy(path, blobs / str(at))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(at))
    return "org/tiny"


def generate(folder: Path | str, *options: str) -> Result:
    """One call of `generate`."""
    words = ["generate", str(folder), "--prompt", "abc", "--max-new-tokens", "5", "--temperature", "0", *options]
    return CliRunner().invoke(llmconv.cli.main, words)


@pytest.mark.slow
def test_a_plain_folder_is_exported_once_into_the_cache_and_stays_as_it_is(exported: Path, plain: Path) -> None:
    before = {path.name: path.read_bytes() for path in plain.iterdir()}
    first, again, reference = generate(plain), generate(plain), generate(exported)
    assert first.exit_code == again.exit_code == reference.exit_code == 0, first.stderr
    assert first.stdout == again.stdout == reference.stdout
    assert first.stderr.startswith(f"`{plain}` has no graphs: exporting them once, into `")
    assert again.stderr.startswith(f"`{plain}` has no graphs; those of an earlier run are in `")
    assert {path.name: path.read_bytes() for path in plain.iterdir()} == before
    made = graphs_in_cache(plain)
    assert made is not None and made.name == "my model"
    assert os.path.samefile(made / "model.safetensors", plain / "model.safetensors")


@pytest.mark.slow
def test_a_name_in_the_hub_s_cache_is_as_its_folder(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    name = hub_cache(plain, tmp_path / "hub")
    first, again, reference = generate(name), generate(f"hf://{name}"), generate(plain)
    assert first.exit_code == again.exit_code == 0 and first.stdout == again.stdout == reference.stdout, first.stderr
    assert "has no graphs: exporting them once, into" in first.stderr
    assert next((tmp_path / "cache/llmconv/exported").rglob("decode.onnx")).parent.name in ("tiny", "my model")


@pytest.mark.parametrize("form", ["{}", "hf://{}"])
def test_what_a_name_in_the_hub_s_cache_lacks_is_said(
    form: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    one, two = (f"model-0000{at}-of-00002.safetensors" for at in (1, 2))
    (bare / "model.safetensors").rename(bare / one)
    (bare / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": one, "b": two}}))
    done = generate(form.format(hub_cache(bare, tmp_path / "hub")))
    assert done.exit_code == 3 and f"error: shard `{two}` is missing from" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_changed_model_is_exported_anew_and_the_old_graphs_are_removed(plain: Path) -> None:
    old = graphs_in_cache(plain)
    weights = plain / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    new = graphs_in_cache(plain)
    assert old is not None and new is not None and old != new
    assert not old.exists() and (new / "decode.onnx").is_file()
    assert (new / "model.safetensors").read_bytes() == content


@pytest.mark.slow
def test_further_chat_templates_come_along_and_a_changed_one_is_taken(plain: Path) -> None:
    files = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"tools"}
    write_small(plain, files)
    old = graphs_in_cache(plain)
    assert old is not None and {name: (old / name).read_bytes() for name in files} == files
    write_small(plain, {"additional_chat_templates/tool_use.jinja": b"other tools"})
    new = graphs_in_cache(plain)
    assert new is not None and (new / "additional_chat_templates/tool_use.jinja").read_bytes() == b"other tools"


@pytest.mark.slow
def test_a_training_checkpoint_is_converted_and_exported_once_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = tmp_path / "run/ep4-ba2400-rank0.pt"
    checkpoint.parent.mkdir()
    shutil.copy(CHECKPOINT, checkpoint)
    to_hf(checkpoint, tmp_path / "hf")
    export(tmp_path / "hf")
    first, again, folder, reference = (
        generate(path) for path in (checkpoint, checkpoint, checkpoint.parent, tmp_path / "hf")
    )
    assert [done.exit_code for done in (first, again, folder, reference)] == [0] * 4, first.stderr
    assert first.stdout == again.stdout == folder.stdout == reference.stdout
    assert first.stderr.startswith(
        f"`{checkpoint}` is a training checkpoint (`composer`): converting and exporting it once, into `"
    )
    assert again.stderr.startswith(f"`{checkpoint}` has no graphs; those of an earlier run are in `")
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    old = graphs_in_cache(checkpoint)
    os.utime(checkpoint, (1, 1))
    assert graphs_in_cache(checkpoint) != old and old is not None and not old.exists()


@pytest.mark.parametrize(
    "name",
    ["config.json", "run.yaml", "configs/run.yml", "strategy/ckpt_strategy_rank_0.ckpt", "tokenizer.bin"]
    + ["tokenizer.model"],
)
@pytest.mark.parametrize("above", [0, 1])
def test_a_configuration_above_a_checkpoint_belongs_to_it(above: int, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run/step/weights"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights")
    config, known = folder.parents[above] / name, {_identity(folder)}
    config.parent.mkdir(exist_ok=True)
    for content in ("{}", '{"num_attention_heads": 4}'):
        config.write_text(content)
        known.add(_identity(folder))
    assert len(known) == 3


@pytest.mark.parametrize(
    "name",
    ["run/step/tokenizer.bin", "run/tokenizer.model", "run/configs/model.yml", "run/strategy/ckpt_strategy_rank_0.ckpt"]
    + ["run/step/model-00002-of-00002.gguf", "run/step/train.yaml", "linked/config.json"],
)
def test_what_lies_around_a_checkpoint_belongs_to_it(name: str, tmp_path: Path) -> None:
    """The other parts of a GGUF file, and what formats look for: next to a link, too."""
    folder = tmp_path / "run/step"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.gguf").touch()
    checkpoint = folder / "model-00001-of-00002.gguf"
    if name.startswith("linked"):
        (tmp_path / "linked").mkdir()
        checkpoint = tmp_path / "linked/model.pt"
        checkpoint.symlink_to(folder / "model-00001-of-00002.gguf")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    known = {_identity(checkpoint)}
    for content in ("{}", '{"num_attention_heads": 4}'):
        (tmp_path / name).write_text(content)
        known.add(_identity(checkpoint))
    assert len(known) == 3


@pytest.mark.parametrize("library", ["transformers", "torch"])
def test_graphs_that_another_version_of_a_library_made_are_made_again(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"weights")
    before = _identity(tmp_path)
    monkeypatch.setattr(runners, "version", lambda name: "0" if name == library else version(name))
    assert _identity(tmp_path) != before


def test_a_checkpoint_that_needs_options_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save(llama_state(), tmp_path / "plain.pt")
    done = generate(tmp_path / "plain.pt")
    assert done.exit_code == 3 and "does not contain a model configuration" in done.stderr
    assert f"hint: with `llmconv to-hf {tmp_path / 'plain.pt'} -o OUT`, give the model's `config.json`" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.*"))


@pytest.mark.slow
def test_without_the_export_the_one_command_is_named(plain: Path, tmp_path: Path) -> None:
    done = generate(plain, "--no-export")
    assert done.exit_code == 3 and f"run `llmconv export '{plain}'`" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_an_error_with_the_one_command(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = generate(plain)
    assert done.exit_code == 3 and f"`llmconv export '{plain}'`" in done.stderr and "--backend torch" in done.stderr


def test_a_family_that_is_not_exported_is_refused_with_the_eager_model_as_hint(bare: Path, tmp_path: Path) -> None:
    config = bare / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama"'))
    done = generate(bare)
    assert done.exit_code == 3 and "no input map for model_type `lama`" in done.stderr
    assert "--backend torch" in done.stderr
    assert not list((tmp_path / "cache/llmconv/exported").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "version": "0.14.0"},
            "--backend torch`",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "version": "0.13.0"},
            "dequantize` makes",
        ),
        ({"quant_method": "modelopt"}, "dequantize` makes"),
        ({"bits": 4, "group_size": 32}, "dequantize` makes"),  # of MLX
    ],
)
def test_torch_is_a_way_out_only_for_codes_that_transformers_reads(
    settings: dict[str, Any], way: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert _torch_instead(tmp_path).endswith(way)


def test_a_checkpoint_that_no_command_converts_is_not_said_to_be_converted_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = {**llama_state(), "model.norm.weight": Fraction(1, 2)}  # an object, as torchao's tensors are
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = generate(tmp_path)
    assert done.exit_code == 3 and "is an object, not a plain tensor (`fractions.Fraction`)" in done.stderr
    assert "can be given here" not in done.stderr and done.stderr.endswith("state dict of plain tensors\n")


@pytest.mark.parametrize("name", ["code", "graph", "no weights"])
def test_other_folders_are_left_to_the_usual_errors(name: str, bare: Path) -> None:
    if name == "code":
        (bare / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}')
    elif name == "graph":
        (bare / "other.onnx").write_bytes(b"")
    else:
        (bare / "model.safetensors").unlink()
    assert graphs_in_cache(bare) is None
