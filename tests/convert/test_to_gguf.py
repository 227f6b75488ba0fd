"""`to-gguf`: the file of `from-hf --to gguf`, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from click.testing import CliRunner
from gguf import GGUFReader, GGUFWriter

import llmconv
from llmconv import to_gguf
from llmconv.checkpoint import json_object
from llmconv.cli import main
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf.tokenizer import SAMPLING, sampling_fields, sampling_keys
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, OutputFailed, UnsupportedInput, UsageProblem
from llmconv.output import local_folder, plan
from tests.builders.embedding_models import TANH, save_modules
from tests.conftest import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("to_gguf") / "llama")


@pytest.mark.parametrize(
    ("type", "dtype"),
    [(None, "keep"), ("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")],
)
def test_the_file_is_that_of_from_hf(model: Path, tmp_path: Path, type: str | None, dtype: str) -> None:
    from_hf(model, tmp_path / "out", to="gguf", dtype=dtype)
    plan = llmconv.to_gguf(model, tmp_path / "x.gguf", type=type)
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "out/model.gguf").read_bytes()
    assert [shard.name for shard in plan.shards] == ["model.gguf"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.gguf"]


def test_a_folder_gets_a_file_in_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    to_gguf(model, tmp_path / "there")
    to_gguf(model, f"{tmp_path}/new/inner/")
    done = CliRunner().invoke(main, ["to-gguf", str(model), "-o", f"{tmp_path}/third/", "--json"])
    assert json.loads(done.stdout)["output"] == f"{tmp_path}/third/model.gguf"
    assert all((tmp_path / name / "model.gguf").is_file() for name in ("there", "new/inner", "third"))


def test_an_existing_file_is_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(InputRefused, match="exists"):
        to_gguf(model, path)
    assert path.read_bytes() == b"mine"
    to_gguf(model, path, overwrite=True)
    assert path.read_bytes()[:4] == b"GGUF"
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "folder.gguf/model.gguf").mkdir()
    with pytest.raises(InputRefused, match="exists"):
        to_gguf(model, tmp_path / "folder.gguf", overwrite=True)


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["to-gguf", str(model), "-o", str(tmp_path / "new/x.gguf"), "--dry-run"])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"would write {tmp_path}/new/x.gguf: llama, ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("output", "type", "problem"),
    [
        ("x", None, "`x` does not end with `.gguf`"),
        ("x.bin", None, "`x.bin` does not end with `.gguf`"),
        ("x.gguf", "q4_k", "unknown type `q4_k`"),
    ],
)
def test_a_slip_is_refused_before_anything_is_read(tmp_path: Path, output: str, type: str | None, problem: str) -> None:
    with pytest.raises(UsageProblem) as error:
        to_gguf(tmp_path / "missing", tmp_path / output, type=type)
    assert error.value.message == problem
    assert error.value.hint


def test_a_model_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", hidden_act="gelu")
    with pytest.raises(UnsupportedInput, match="does not state: `hidden_act` gelu"):
        to_gguf(model, tmp_path / "out/x.gguf")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
from llmconv import to_gguf
to_gguf(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_file_and_the_next_removes_its_part(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    done = subprocess.run([sys.executable, "-c", KILLED, model, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    (part,) = tmp_path.iterdir()
    assert part.name.startswith(".llmconv-")
    to_gguf(model, path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_appears_meanwhile_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stream = tmp_path / "x.gguf", plan.stream_shard

    def slow(*given: object) -> object:
        path.write_bytes(b"mine")
        return stream(*given)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(local_folder, "stream_shard", slow)
    with pytest.raises(OutputFailed, match="appeared while it was being made"):
        to_gguf(model, path)
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["x.gguf"]


@pytest.mark.parametrize(("pooling", "number"), [("mean", 1), ("cls", 2), ("lasttoken", 3)])
def test_the_pooling_of_sentence_transformers_goes_and_comes_back(tmp_path: Path, pooling: str, number: int) -> None:
    model = save_modules(save_tiny("qwen3", tmp_path / "model"), pooling)
    to_gguf(model, tmp_path / "x.gguf")
    assert GGUFReader(tmp_path / "x.gguf").fields["qwen3.pooling_type"].contents() == number
    to_hf(tmp_path / "x.gguf", tmp_path / "back")
    kinds = [one["type"].rpartition(".")[2] for one in json.loads((tmp_path / "back/modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    to_gguf(tmp_path / "back", tmp_path / "again.gguf")
    assert GGUFReader(tmp_path / "again.gguf").fields["qwen3.pooling_type"].contents() == number


@pytest.mark.parametrize(
    ("pooling", "dense", "named"),
    [(["mean", "cls"], [], "Pooling"), ("max", [], "Pooling"), ("mean", [(48, TANH, True)], "Dense")],
)
def test_modules_that_a_file_does_not_state_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pooling: str, dense: list[Any], named: str
) -> None:
    to_gguf(save_modules(save_tiny("qwen3", tmp_path / "model"), pooling, dense), tmp_path / "x.gguf")
    assert f"does not state the modules {named} of" in capsys.readouterr().err
    assert ("qwen3.pooling_type" in GGUFReader(tmp_path / "x.gguf").fields) is (named == "Dense")


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "do_sample": True},
    {"temperature": 1, "top_p": 0.8, "eos_token_id": [2, 1]},
    {"do_sample": False, "top_k": None},
    {"temperature": "0.6", "top_k": True},
    {},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_sampling_settings_are_those_of_the_converter_and_come_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = save_tiny("llama", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(fields))
    to_gguf(model, tmp_path / "model.gguf")
    found = {name: one for name, one in GGUFReader(tmp_path / "model.gguf").fields.items() if "sampling" in name}
    numbers = {name: one for name, one in fields.items() if type(one) in (int, float)}
    older = {"penalty_repeat": numbers["repetition_penalty"]} if "repetition_penalty" in numbers else {}
    (model / "generation_config.json").write_text(json.dumps(numbers | older))  # it took this name alone until 2026
    writer = GGUFWriter(tmp_path / "theirs.gguf", "llama")
    gguf.Metadata.load(None, model).set_gguf_meta_model(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs = {name: one for name, one in GGUFReader(tmp_path / "theirs.gguf").fields.items() if "sampling" in name}
    assert {name: (one.types, one.contents()) for name, one in found.items()} == {
        name: (one.types, one.contents()) for name, one in theirs.items()
    }
    back = json_object(open_training(tmp_path / "model.gguf").side_files.get("generation_config.json", b"{}"))
    sampling = {name: back[name] for name in SAMPLING if name in back}
    assert sampling == {name: one for name, one in numbers.items() if name in SAMPLING}
    assert back.get("do_sample") is (True if sampling else None)


def test_settings_that_transformers_lacks_are_named(tmp_path: Path) -> None:
    warnings = list[str]()
    stated = {"general.sampling.mirostat": 2, "general.sampling.temp": 0.0, "general.sampling.top_k": 40}
    assert sampling_fields(stated, "x.gguf", warnings) == {"do_sample": False}
    assert len(warnings) == 1 and "mirostat" in warnings[0]
    assert sampling_fields({"general.sampling.temp": 1e300, "general.sampling.top_p": float("nan")}, "x", []) == {}


@pytest.mark.parametrize(
    ("fields", "back"),
    [
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 1.2, "temperature": 0.0}, {"repetition_penalty": 1.2, "do_sample": False}),
        ({"do_sample": True}, {"do_sample": True, "temperature": 1.0}),
    ],
)
def test_greedy_settings_come_back_greedy_and_sampling_ones_sample(
    fields: dict[str, Any], back: dict[str, Any]
) -> None:
    keys = sampling_keys({"generation_config.json": json.dumps(fields).encode()}, [])
    assert sampling_fields(keys, "x.gguf", []) == back


def test_settings_that_a_file_does_not_state_are_told() -> None:
    warnings = list[str]()
    fields = {"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 0.9, "top_p": 0.5, "eos_token_id": 2}
    sampling_keys({"generation_config.json": json.dumps(fields).encode()}, warnings)
    assert "`no_repeat_ngram_size`, `typical_p` of" in warnings[0] and "num_beams" not in warnings[0]
    assert "`top_p` without `do_sample`" in warnings[1] and len(warnings) == 2
