"""`quantize --base-format`: the codes of `w4a16` in the forms of AutoAWQ and GPTQ, which our readers read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmconv.checkpoint import open_checkpoint
from llmconv.compressed import quantize
from llmconv.compressed.folder import plan_quantized
from llmconv.compressed.schemes import IntegerOptions, scheme_of
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export import export
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor

FORMS = [("awq", "w4a16"), ("awq", "w4a16-asym"), ("gptq", "w4a16")]
IDS = ["awq", "awq-asym", "gptq"]
UP = "model.layers.1.mlp.up_proj"


def by_fields(words: Array, places: list[int]) -> Array:
    """The fields of 4 bits of each word at their places, along a new last axis; written out, as a reference."""
    bits = words.view(np.uint32)
    return np.stack([bits >> np.uint32(4 * place) & np.uint32(15) for place in places], axis=-1).astype(np.int64)


def awq_values(tensors: dict[str, Array], stem: str, size: int) -> Array:
    """(code - zero) * scale as `dequantize_gemm` of AutoAWQ has it, float32 [K, N]."""
    places = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word
    words, zeros = (tensors[f"{stem}.{name}"] for name in ("qweight", "qzeros"))
    codes, points = (by_fields(one, places).reshape(len(one), -1) for one in (words, zeros))
    scales = tensors[f"{stem}.scales"].astype(np.float32).repeat(size, 0)
    return (codes - points.repeat(size, 0)).astype(np.float32) * scales


def gptq_values(tensors: dict[str, Array], stem: str, size: int) -> Array:
    """(code - (stored zero + 1)) * scale as the torch kernel of AutoGPTQ has it, float32 [K, N]."""
    words, zeros = (tensors[f"{stem}.{name}"] for name in ("qweight", "qzeros"))
    codes = by_fields(words, list(range(8))).swapaxes(1, 2).reshape(-1, words.shape[1])
    points = by_fields(zeros, list(range(8))).reshape(len(zeros), -1) + 1
    groups = tensors[f"{stem}.g_idx"]
    assert np.array_equal(groups, np.arange(len(groups)) // size)
    scales = tensors[f"{stem}.scales"].astype(np.float32)
    values: Array = (codes - points[groups]).astype(np.float32) * scales[groups]
    return values


@pytest.mark.parametrize(("form", "scheme"), FORMS, ids=IDS)
def test_values_are_those_of_the_packed_form(form: str, scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "packed", scheme=scheme)
    made = quantize(llama, tmp_path / "out", scheme=scheme, base_format=form)
    one, other = (quantized_checkpoint(open_checkpoint(tmp_path / name)) for name in ("packed", "out"))
    assert one and other and one.plain.keys() == other.plain.keys() and other.method.name == form
    assert all(np.array_equal(one.plain[name].read(), other.plain[name].read()) for name in one.plain)
    tensors, values = load_file(tmp_path / "out/model.safetensors"), awq_values if form == "awq" else gptq_values
    for name in made.weights:
        stem = name.removesuffix(".weight")
        assert np.array_equal(values(tensors, stem, 128).T, one.plain[name].read())
        assert not {f"{stem}.weight", f"{stem}.weight_packed"} & tensors.keys()


@pytest.mark.parametrize(("form", "scheme"), FORMS, ids=IDS)
@pytest.mark.quick_rows("awq", "gptq")
def test_verify_passes_and_finds_a_changed_code(form: str, scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme, base_format=form)
    report = verify(tmp_path / "out", reference=llama)
    assert report.exit_code == 0, report.lines()
    record = json.loads((tmp_path / "out/llmconv.json").read_text())
    del record["files"]["model.safetensors"]
    (tmp_path / "out/llmconv.json").write_text(json.dumps(record))

    def nudged(array: Array) -> Array:
        array[3, 20] ^= 1 << 16
        return array

    change_tensor(tmp_path / "out/model.safetensors", f"{UP}.qweight", nudged)
    failed = [one for one in verify(tmp_path / "out", reference=llama).checks if one.verdict == "fail"]
    assert [one.name for one in failed] == ["codes"] and "a code that is not the nearest" in failed[0].detail


@pytest.mark.slow
@pytest.mark.parametrize(("form", "scheme"), FORMS, ids=IDS)
def test_its_graphs_are_verified(form: str, scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme, base_format=form)
    export(tmp_path / "out", tmp_path / "graphs")
    report = verify(tmp_path / "graphs", reference=tmp_path / "out")
    assert report.exit_code == 0, report.lines()


def test_routers_are_kept_in_the_words_of_each_form(experts: Path, tmp_path: Path) -> None:
    awq = quantize(experts, tmp_path / "awq", scheme="w4a16", base_format="awq")
    gptq = quantize(experts, tmp_path / "gptq", scheme="w4a16", base_format="gptq")
    fields = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("awq", "gptq")
    ]
    assert fields[0]["modules_to_not_convert"] == list(awq.ignore) and fields[0]["zero_point"] is True
    assert list(fields[1]["dynamic"]) == [rf"-:^model\.layers\.{at}\.mlp\.gate$" for at in range(2)]
    found = quantized_checkpoint(open_checkpoint(tmp_path / "gptq"))
    assert found and [*found.weights] == [*gptq.weights] == [*awq.weights]


def test_a_kept_name_within_a_quantized_one_is_refused(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    layer = "model.layers.0.mlp"
    tensors = {**checkpoint.tensors, f"{layer}.gate.weight": checkpoint[f"{layer}.gate_proj.weight"]}
    scheme = scheme_of("w4a16", IntegerOptions(base_format="awq"))
    with pytest.raises(UnsupportedInput, match="`model.layers.0.mlp.gate` is kept, and engines would not quantize"):
        plan_quantized(replace(checkpoint, tensors=tensors), scheme)


def test_a_folder_without_a_record_is_no_folder_of_quantize(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="w4a16", base_format="awq")
    shutil.copytree(tmp_path / "out", tmp_path / "other", ignore=shutil.ignore_patterns("llmconv.json"))
    with pytest.raises(InputRefused, match="no graphs"):
        verify(tmp_path / "other", reference=llama)
