"""Graphs of GGUF files: they map the file's own values, and have the codes, scales and offsets of its blocks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType

from llmconv import to_gguf
from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.files.gguf_file import BLOCKS
from llmconv.files.safetensors_file import RANGES, read_header
from llmconv.generation import generate
from llmconv.generation.runners import graphs_in_cache
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.runtime.onnxruntime.guard import external_fields
from llmconv.tensors import LazyTensor
from llmconv.verify import verify
from tests.builders.gguf_files import byte_level, write_gguf
from tests.conftest import save_tiny
from tests.convert.formats.test_gguf import PRE, trained
from tests.convert.formats.test_gguf_families import FAMILIES

F16 = GGMLQuantizationType.F16
SCENARIOS = ["prefill, 7 tokens", "decode chain, 16 steps"]
MAPPED = ["llama", "mixtral", "gemma2", "qwen3_moe", "phi3", "mpt", "lfm2"]


def values(tensors: dict[str, LazyTensor] | Any) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def half_file(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny("llama"), tmp_path_factory.mktemp("files") / "half.gguf", quantized=F16)


@pytest.fixture
def alone(half_file: Path, tmp_path: Path) -> Path:
    """A file in a folder of its own."""
    (tmp_path / "model").mkdir()
    return Path(shutil.copyfile(half_file, tmp_path / "model/half.gguf"))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are blocks of 256, with a head of its own."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "model", **sizes)


@pytest.mark.quick_rows("llama")
@pytest.mark.parametrize("name", MAPPED)
def test_graphs_map_the_file_itself(tmp_path: Path, name: str) -> None:
    kind, changes = FAMILIES[name]
    file = write_gguf(save_tiny(kind, tmp_path / "hf", **changes), tmp_path / "x.gguf", quantized=F16)
    home = tmp_path / "model"
    home.mkdir()
    os.link(file, home / "x.gguf")
    done = export(home / "x.gguf", prefill=True, incremental=True)
    assert done.sizes and done.sizes.copied == 0
    new = {path.name: path.stat().st_size for path in home.iterdir() if path.name != "x.gguf"}
    assert {*new} >= {"config.json", RANGES, "prefill.onnx", "decode.onnx", "llmconv.json"}
    for graph in ("prefill.onnx", "decode.onnx"):
        places = [external_fields(one) for one in onnx.load(home / graph, load_external_data=False).graph.initializer]
        assert sum(int(one["length"]) for one in places if one.get("location") == "x.gguf") >= done.sizes.mapped / 2
        assert {one["location"] for one in places if one} == {"x.gguf"}
    to_hf(file, tmp_path / "own")
    assert values(open_checkpoint(home)) == values(open_checkpoint(tmp_path / "own"))
    assert verify(home, scenario=SCENARIOS).verdict == "pass"
    assert verify(home, scenario=SCENARIOS, reference=file).verdict == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["induction", "structure"])
def test_other_methods_verify_mapped_files(alone: Path, method: str) -> None:
    export(alone, prefill=True, incremental=True)
    assert verify(alone.parent, method=method).verdict == "pass"


@pytest.mark.slow
def test_wrong_bytes_of_a_file_do_not_pass(alone: Path) -> None:
    """A graph that maps keys where queries lie, and one without the order of rows."""
    export(alone, unified=True, prefill=False, incremental=False)
    graph = alone.parent / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    shipped = model.SerializeToString()
    named = {one.name: one for one in model.graph.initializer}
    first, other = (named[f"model.layers.{layer}.self_attn.q_proj.weight:stored"] for layer in (0, 1))
    places = [list(one.external_data) for one in (first, other)]
    for one, place in ((first, places[1]), (other, places[0])):
        del one.external_data[:]
        one.external_data.extend(place)
    graph.write_bytes(model.SerializeToString())
    assert verify(alone.parent, allow_changed=True, scenario=SCENARIOS).verdict == "fail"
    model = onnx.load_from_string(shipped)
    turned = next(node for node in model.graph.node if node.op_type == "Transpose" and "q_proj" in node.name)
    next(one for one in turned.attribute if one.name == "perm").ints[:] = [0, 1, 2, 3]
    graph.write_bytes(model.SerializeToString())
    assert verify(alone.parent, allow_changed=True, scenario=SCENARIOS).verdict == "fail"


@pytest.mark.slow
def test_an_index_and_graphs_that_agree_on_another_model_do_not_pass(alone: Path) -> None:
    """Names of two matrices exchanged in the index, and a configuration of another model, before the export."""
    export(alone, unified=True, prefill=False, incremental=False)
    index = json.loads((alone.parent / RANGES).read_text())
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors = index["tensors"]
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    config = json.loads((alone.parent / "config.json").read_text())
    (alone.parent / RANGES).write_text(json.dumps(index))
    (alone.parent / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    export(alone.parent, unified=True, prefill=False, incremental=False, overwrite=True)
    found = verify(alone.parent, scenario=SCENARIOS)
    detail = next(check.detail for check in found.checks if check.graph == RANGES)
    assert found.verdict == "fail"
    assert "gate_proj" in detail and "rms_norm_eps" in detail


def test_a_file_is_not_written_over_itself(alone: Path) -> None:
    export(alone, incremental=False)
    before = alone.read_bytes()
    with pytest.raises(InputRefused, match="has the weights of the model itself"):
        to_gguf(alone.parent, alone, type="f32", overwrite=True)
    assert alone.read_bytes() == before


def test_a_new_folder_has_the_weights_or_the_graphs_only(alone: Path, tmp_path: Path) -> None:
    plain = open_training(alone)
    export(alone, tmp_path / "new", incremental=False)
    assert values(open_checkpoint(tmp_path / "new")) == values(plain)
    assert not (tmp_path / "new" / RANGES).exists()
    export(alone, tmp_path / "graphs", incremental=False, graphs_only=True)
    assert not list((tmp_path / "graphs").glob("*.safetensors"))
    shutil.copy(alone, tmp_path / "graphs")
    assert values(open_checkpoint(tmp_path / "graphs")) == values(plain)


def test_what_cannot_be_mapped_is_refused_and_writes_nothing(alone: Path, tmp_path: Path, wide_model: Path) -> None:
    for name in "tc":
        (tmp_path / name).mkdir()
    turned = write_gguf(save_tiny("gpt2", tmp_path / "gpt2"), tmp_path / "t/turned.gguf", quantized=F16)
    coded = write_gguf(wide_model, tmp_path / "c/coded.gguf", quantized=GGMLQuantizationType.Q4_K)
    (alone.parent / "config.json").write_text('{"model_type": "llama"}')
    for file, said in ((turned, "cannot map"), (coded, "cannot map"), (alone, "not that of the model file")):
        before = sorted(file.parent.iterdir())
        with pytest.raises(InputRefused, match=said) as error:
            export(file)
        assert "`-o OUT`" in str(error.value.hint)
        assert sorted(file.parent.iterdir()) == before
    with pytest.raises(UsageProblem, match="quantized already"):
        export(coded, tmp_path / "out", quant="int8")
    assert not (tmp_path / "out").exists()


def test_a_replaced_file_is_refused(alone: Path, tiny: Callable[[str], Path]) -> None:
    export(alone, incremental=False)
    whole = alone.read_bytes()
    write_gguf(tiny("llama"), alone, quantized=GGMLQuantizationType.BF16)
    problem = rf"`half.gguf` is not the file that `{RANGES}` was made of"
    with pytest.raises(MalformedInput, match=problem):
        open_checkpoint(alone.parent)
    alone.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))  # the same header
    with pytest.raises(MalformedInput, match=problem):
        open_checkpoint(alone.parent)
    alone.unlink()
    with pytest.raises(MalformedInput, match="is missing"):
        open_checkpoint(alone.parent)


def test_graphs_of_another_file_do_not_stay(alone: Path, tiny: Callable[[str], Path]) -> None:
    export(alone, prefill=False, incremental=False, unified=True)
    other = write_gguf(tiny("llama"), alone.parent / "other.gguf", quantized=GGMLQuantizationType.BF16)
    for overwrite in (False, True):
        with pytest.raises(InputRefused, match="has graphs of another model file") as error:
            export(other, incremental=False, overwrite=overwrite)
        assert ("unified, too" in str(error.value.hint)) == overwrite
    export(other, prefill=False, incremental=False, unified=True, overwrite=True)
    assert values(open_checkpoint(alone.parent)) == values(open_training(other))


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda index: index.pop("files"),
    "no tensors": lambda index: index.update(tensors={}),
    "a list": lambda index: index.update(tensors=[1]),
    "another folder": lambda index: index["files"].update({"../half.gguf": next(iter(index["files"].values()))}),
    "a folder": lambda index: index["files"].update({"..": {}}),
    "a header of another length": lambda index: index["files"]["half.gguf"].update(header_bytes=1 << 61),
    "no number of bytes": lambda index: index["files"]["half.gguf"].update(bytes="x"),
    "another hash": lambda index: index["files"]["half.gguf"].update(header_sha256="0" * 64),
    "beyond the end": lambda index: first(index).update(offset=1 << 40),
    "before the start": lambda index: first(index).update(offset=-4),
    "a huge shape": lambda index: first(index).update(shape=[1 << 61, 1 << 61]),
    "a shape of text": lambda index: first(index).update(shape=["1"]),
    "a shape of many dims": lambda index: first(index).update(shape=[1] * 40),
    "an unknown dtype": lambda index: first(index).update(dtype="I64"),
    "an unknown file": lambda index: first(index).update(file="config.json"),
    "odd pairs": lambda index: first(index).update(pairs=3),
    "pairs that do not divide": lambda index: first(index).update(pairs=1 << 20),
    "an infinite number": lambda index: first(index).update(add=1e999),
    "a number on float16": lambda index: first(index).update(add=1.0),
    "pairs of nothing": lambda index: first(index).update(pairs=0),
    "over the header": lambda index: first(index).update(offset=8),
    "no header": lambda index: index["files"]["half.gguf"].update(
        header_bytes=0, header_sha256=hashlib.sha256().hexdigest()
    ),
    "over another tensor": lambda index: index["tensors"].update({"x": dict(first(index))}),
    "an empty dim": lambda index: first(index).update(shape=[0, 64]),
    "true": lambda index: first(index).update(pairs=True),
    "no entry": lambda index: index["tensors"].update({"x": None}),
}


def first(index: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = index["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    return found


@pytest.fixture(scope="module")
def mapped_folder(half_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mapped")
    shutil.copy(half_file, home)
    export(home / "half.gguf", incremental=False)
    return home


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(mapped_folder: Path, tmp_path: Path, lie: str) -> None:
    home = shutil.copytree(mapped_folder, tmp_path / "model")
    index = json.loads((home / RANGES).read_text())
    LIES[lie](index)
    (home / RANGES).write_text(json.dumps(index))
    with pytest.raises(MalformedInput, match=r"model\.ranges\.json|half\.gguf") as error:
        open_checkpoint(home)
    assert error.value.hint


def test_a_link_is_no_file_of_the_folder(mapped_folder: Path, tmp_path: Path) -> None:
    home = shutil.copytree(mapped_folder, tmp_path / "model")
    (home / "half.gguf").unlink()
    (home / "half.gguf").symlink_to(mapped_folder / "half.gguf")
    with pytest.raises(MalformedInput, match="is missing"):
        open_checkpoint(home)


@pytest.mark.parametrize("kind", [block.name for block in BLOCKS.values()])
def test_codes_for_graphs_have_the_values_of_the_file(wide_model: Path, tmp_path: Path, kind: str) -> None:
    file = write_gguf(wide_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind])
    plain, coded = open_training(file), open_training(file, options={"quant": "graphs"})
    found = quantized_checkpoint(coded)
    assert found and len(found.weights) == 16  # seven of each layer, the embedding, and the head
    assert values(found.plain) == values(plain)
    for weight in found.weights.values():  # as graphs compute them: with the middle of the codes as zero
        codes = weight.integers
        assert codes and codes.has_operator
        offsets = 0 if codes.offsets is None else codes.offsets()[:, codes.groups]
        rows = codes.codes(0, codes.shape[0]).astype(np.float32) - (1 << codes.bits - 1)
        scaled = rows * codes.scales(0, codes.shape[0])[:, codes.groups]
        wanted = plain[weight.name].read()
        # a sum of float32, each rounded to one part in 2^24
        assert (np.abs(scaled + offsets - wanted) <= 2**-22 * (np.abs(scaled) + np.abs(wanted))).all()
        assert (codes.offsets is None) == (kind not in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"))


@pytest.mark.quick_rows("Q4_K")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q2_K", "Q4_K", "Q5_K", "Q6_K"])
def test_graphs_have_the_codes_of_the_file(wide_model: Path, tmp_path: Path, kind: str) -> None:
    file = write_gguf(wide_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind])
    export(file, tmp_path / "out", prefill=True, incremental=True)
    assert verify(tmp_path / "out", reference=file, scenario=SCENARIOS).verdict == "pass"
    stored = read_header(tmp_path / "out/quantized.safetensors").tensors
    assert sum(name.endswith(".codes") for name in stored) == 16
    assert not any(name.endswith("_proj.weight") for name in stored)


@pytest.mark.slow
def test_another_offset_does_not_pass(wide_model: Path, tmp_path: Path) -> None:
    file = write_gguf(wide_model, tmp_path / "x.gguf", quantized=GGMLQuantizationType.Q4_K)
    export(file, tmp_path / "out", prefill=True, incremental=False)
    codes = tmp_path / "out/quantized.safetensors"
    changed = read_header(codes).tensors["model.layers.1.mlp.up_proj.weight.offsets"]
    with open(codes, "r+b") as stored:
        stored.seek(changed.offset)
        value = np.frombuffer(stored.read(4), np.float32)
        stored.seek(changed.offset)
        stored.write((value * np.float32(1.01)).tobytes())
    found = verify(tmp_path / "out", reference=file, scenario=SCENARIOS)
    assert any("model.layers.1.mlp.up_proj.weight" in check.detail for check in found.checks if check.verdict == "fail")
    # a graph that leaves the offsets of one matrix out
    export(file, tmp_path / "other", prefill=True, incremental=False)
    graph = tmp_path / "other/prefill.onnx"
    model = onnx.load(graph, load_external_data=False)
    offsets = next(one for one in model.graph.initializer if one.name.endswith("down_proj.weight.offsets"))
    product = next(node for node in model.graph.node if offsets.name in node.input)
    total = next(node for node in model.graph.node if node.op_type == "Add" and product.output[0] in node.input)
    total.input[1] = total.input[0]
    graph.write_bytes(model.SerializeToString())
    wrong = verify(tmp_path / "other", reference=file, scenario=SCENARIOS, allow_changed=True)
    assert wrong.verdict == "fail"


def test_a_hint_names_the_command_that_takes_a_tokenizer(tmp_path: Path) -> None:
    add = byte_level(trained(**PRE["qwen2"]), "unknown-words", bos=0, eos=0, rows=512)
    file = write_gguf(
        save_tiny("llama", tmp_path / "hf", vocab_size=512), tmp_path / "x.gguf", quantized=F16, tokenizer=add
    )
    with pytest.raises(UnsupportedInput) as refused:
        export(file)
    assert f"with `llmconv to-hf {file} -o MODEL --tokenizer FOLDER`, and export MODEL" in refused.value.hint


def test_a_file_generates_without_a_copy_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = trained(**PRE["qwen2"])
    add = byte_level(content, "qwen2", bos=0, eos=0, rows=512)
    model = save_tiny("llama", tmp_path / "hf", vocab_size=512)
    file = write_gguf(model, tmp_path / "x.gguf", quantized=F16, tokenizer=add)
    made = graphs_in_cache(file)
    assert made
    found = generate(made, "the cat", max_new_tokens=4)
    assert next((tmp_path / "cache").rglob("x.gguf/x.gguf")).samefile(file)
    to_hf(file, tmp_path / "plain")
    eager = generate(tmp_path / "plain", "the cat", max_new_tokens=4, backend="torch")
    assert [one.text for one in found.completions] == [one.text for one in eager.completions]
