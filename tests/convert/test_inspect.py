"""inspect tells what lies in a path, whatever has to be known to convert it, and reads no weights for that."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.inspection import inspect
from llmconv.errors import MalformedInput
from llmconv.files import safetensors_file
from llmconv.files.source_file import read_into
from llmconv.runtime.extra_inputs import factor_names
from llmconv.runtime.onnxruntime.lora_names import encode_adapter
from tests.convert.conftest import FIXTURES

GENUINE: dict[str, tuple[str, int]] = {
    "accessory/llama_mp2_bf16": ("accessory", 2),
    "composer/llama_full/ep0-ba2-rank0.pt": ("composer", 1),
    "meta/llama3_gqa_mp1_bf16": ("meta", 1),
    "mindformers/mf132_llama_gqa": ("mindformers", 1),
    "paddle/tp2_llama/sharded": ("paddle", 2),
    "paddle/llama_sharded": ("paddle", 5),
}

NOT_YET: dict[str, tuple[str, str]] = {
    "composer/llama_peft_adapter_only/ep0-ba2-rank0.pt": ("composer", "without its base model"),
    "mindspore/tiny.ckpt": ("mindformers", "has no `num_heads`"),
    "mindspore/sh/rank_0": ("mindformers", "has no `num_heads`"),
    "paddle/lora_llama/lora": ("paddle", "is a LoRA adapter"),
    "paddle/opt_322.pdopt": ("paddle", "no `config.json`|optimizer"),
    "paddle/tiny_262.pdparams": ("paddle", "no `config.json`"),
}


@pytest.mark.parametrize("name", GENUINE)
def test_a_genuine_checkpoint_is_told_with_its_shards(name: str) -> None:
    found = inspect(FIXTURES / name)
    assert (found.format, found.shards) == GENUINE[name]
    assert found.parameters == sum(int(np.prod(tensor.shape)) for tensor in found.tensors.values()) > 0


@pytest.mark.parametrize("name", NOT_YET)
def test_what_cannot_be_converted_yet_is_told_with_its_tensors(name: str) -> None:
    format_name, reason = NOT_YET[name]
    found = inspect(FIXTURES / name)
    assert found.format == format_name and found.tensors
    (warning,) = found.warnings
    assert warning.startswith("cannot be converted as it is: ")
    assert any(part in warning for part in reason.split("|"))


def test_ranks_that_nothing_joins_are_listed_side_by_side(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "mindspore" / "sh", tmp_path / "x")
    found = inspect(tmp_path / "x")
    assert found.format == "mindformers" and "strategy" in found.warnings[0]
    assert {name.partition(": ")[0] for name in found.tensors} == {"rank_0", "rank_1"} and found.shards == 2


def test_a_damaged_checkpoint_is_still_refused(tmp_path: Path) -> None:
    data = (FIXTURES / "composer/llama_full/ep0-ba2-rank0.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(MalformedInput, match="damaged"):
        inspect(tmp_path / "x.pt")


def test_what_is_left_of_training_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "accessory" / "llama_mp2_bf16", tmp_path / "x")
    for rest in (
        "consolidated.00-of-02.optimizer.pth",
        "consolidated.00-of-02.other.pth",
        "rank-specific-00000-of-00002.pth",
    ):
        (folder / rest).touch()
    assert inspect(folder).dropped == (
        "the optimizer's state (`consolidated.00-of-02.optimizer.pth`)",
        "random number states (`rank-specific-00000-of-00002.pth`)",
        "the trainer's state (`consolidated.00-of-02.other.pth`)",
    )


def test_rotary_frequencies_are_told_as_dropped() -> None:
    folder = next((FIXTURES / "meta" / "llama2_mha_mp2_bf16_ropefreqs").rglob("params.json")).parent
    assert inspect(folder).dropped[0].startswith("rotary frequencies (`rope.freqs`")


def test_the_optimizer_among_the_weights_is_told_as_dropped(tmp_path: Path, save_ckpt: Callable[..., Path]) -> None:
    folder = shutil.copytree(FIXTURES / "mindformers" / "mf132_llama_gqa", tmp_path / "x")
    more = save_ckpt(tmp_path / "more", {"adam_m.lm_head.weight": np.zeros(4, np.float32), "step_num": np.zeros(1)})
    with open(folder / "model.ckpt", "ab") as file:
        file.write(more.read_bytes())
    assert inspect(folder / "model.ckpt").dropped == ("2 tensors of the optimizer and the run",)


@pytest.mark.parametrize(
    ("field", "path", "version"),
    [
        ("paddlenlp_version", "paddle/llama_gqa_fp32", "paddlenlp 2.8.0"),
        ("mindformers_version", None, "mindformers 1.3.2"),
    ],
)
def test_the_release_that_wrote_it_is_told(tmp_path: Path, field: str, path: str | None, version: str) -> None:
    if path:
        folder = shutil.copytree(FIXTURES / path, tmp_path / "x")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, field: "2.8.0"}))
    else:
        folder = shutil.copytree(FIXTURES / "mindformers" / "mf132_llama_gqa", tmp_path / "x")
        run = (folder / "run.yaml").read_text()
        (folder / "run.yaml").write_text(run + f"\n{field}: 1.3.2\n")
    assert inspect(folder).version == version


def test_the_table_and_the_json_tell_version_shards_and_what_is_dropped(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "paddle" / "tp2_llama" / "sharded", tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "paddlenlp_version": "2.8.0"}))
    (folder / "optimizer.pdopt").touch()
    told = json.loads(CliRunner().invoke(main, ["inspect", str(folder), "--json"]).stdout)
    assert (told["version"], told["shards"]) == ("paddlenlp 2.8.0", 2)
    assert told["dropped"] == ["the optimizer's state (`optimizer.pdopt`)"]
    lines = CliRunner().invoke(main, ["inspect", str(folder)]).stdout.splitlines()
    assert {"version       paddlenlp 2.8.0", "shards        2"} <= set(lines)
    assert "dropped       the optimizer's state (`optimizer.pdopt`)" in lines


WIDTH, WORDS, INNER = 4096, 262_144, 11_008
SHAPES = {
    "tok_embeddings.weight": (WORDS, WIDTH),
    "norm.weight": (WIDTH,),
    "output.weight": (WORDS, WIDTH),
    **{f"layers.0.attention.w{name}.weight": (WIDTH, WIDTH) for name in "qkvo"},
    **{f"layers.0.feed_forward.w{number}.weight": (INNER, WIDTH) for number in (1, 3)},
    "layers.0.feed_forward.w2.weight": (WIDTH, INNER),
    "layers.0.attention_norm.weight": (WIDTH,),
    "layers.0.ffn_norm.weight": (WIDTH,),
}


def test_factors_for_graphs_are_told_with_modules_and_rank(tmp_path: Path) -> None:
    names = [name for module in ("m.0.q_proj", "m.1.q_proj", "m.1.up_proj") for name in factor_names(module)]
    arrays = [np.ones(shape) for rank in (2, 2, 4) for shape in ((rank, 3), (5, rank))]
    file = tmp_path / "x.onnx_adapter"
    file.write_bytes(encode_adapter(dict(zip(names, arrays, strict=True))))
    found = inspect(file)
    assert (found.format, len(found.tensors), found.parameters) == ("onnx-adapter", 6, 64)
    assert found.adapter == {"peft_type": "LORA", "r": [2, 4], "targets": ["q_proj", "up_proj"], "modules": 3}
    assert "rank (r)    2, 4\n" in CliRunner().invoke(main, ["inspect", str(file)]).stdout


@pytest.mark.parametrize("command", ["to-hf", "export", "merge-lora"])
def test_factors_for_graphs_are_no_model(tmp_path: Path, command: str) -> None:
    file = tmp_path / "x.onnx_adapter"
    file.write_bytes(encode_adapter({"a.lora_A.weight": np.ones((2, 3))}))
    more = ["-"] if command == "merge-lora" else []
    done = CliRunner().invoke(main, [command, str(file), *more, "-o", str(tmp_path / "out")])
    assert done.exit_code == 3 and "has LoRA factors for graphs" in done.stderr and "--adapter" in done.stderr


def test_a_damaged_file_of_factors_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.onnx_adapter"
    file.write_bytes(encode_adapter({"a.lora_A.weight": np.ones((2, 3))})[:-40])
    with pytest.raises(MalformedInput, match="is damaged"):
        inspect(file)


def test_gigabytes_are_told_in_a_moment_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.serialization.skip_data():  # neither memory nor disk is touched
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        torch.save(tensors, tmp_path / "consolidated.00.pth")
    params = {"dim": WIDTH, "n_layers": 1, "n_heads": 32, "norm_eps": 1e-5, "multiple_of": 256}
    (tmp_path / "params.json").write_text(json.dumps(params))
    read: list[int] = []
    genuine = read_into

    def counting(path: Path, buffer: memoryview, offset: int) -> None:
        read.append(len(buffer))
        genuine(path, buffer, offset)

    monkeypatch.setattr(safetensors_file, "read_into", counting)
    began = time.process_time()
    found = inspect(tmp_path)
    assert found.nbytes > 2 << 30 and found.config["vocab_size"] == WORDS
    assert sum(read) < 16 << 20 and time.process_time() - began < 2


def test_weights_that_would_not_pass_their_checksum_are_told_all_the_same(tmp_path: Path) -> None:
    path = shutil.copy(FIXTURES / "composer/llama_full/ep0-ba2-rank0.pt", tmp_path / "x.pt")
    data = bytearray(Path(path).read_bytes())
    tensor = next(iter(inspect(path).tensors.values()))
    assert isinstance(tensor, safetensors_file.FileTensor)
    data[tensor.offset] ^= 1
    Path(path).write_bytes(data)
    assert inspect(path).format == "composer"
    with pytest.raises(MalformedInput, match="CRC-32"):
        to_hf(path, tmp_path / "hf")
