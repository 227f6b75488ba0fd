"""`--precision`: graphs that compute in float16 and bfloat16 over weights as they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.runtime.onnxruntime.guard import external_tensors
from llmconv.verify import verify
from tests.builders.prefix_models import save_adapter
from tests.builders.slow_rows import slow_but
from tests.conftest import save_tiny

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

Stored = Callable[..., Path]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """`stored(model_type, dtype)` is a tiny model whose weights are of that dtype, to write into."""

    def save(model_type: str, dtype: str) -> Path:
        folder = save_tiny(model_type, tmp_path / f"{model_type}-{dtype}")
        return cast_folder(folder, dtype)

    return save


def cast_folder(folder: Path, dtype: str, kept: str = "nothing") -> Path:
    """Casts the weights of a folder in place, except those whose name contains `kept`."""
    path = folder / "model.safetensors"
    tensors = {n: t.clone() if kept in n else t.to(getattr(torch, dtype)) for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return folder


def inferred(path: Path) -> onnx.ModelProto:
    """The graph with the types of all values; an operator that mixes types is an error."""
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def types(ports: Iterator[onnx.ValueInfoProto]) -> dict[str, int]:
    return {port.name: port.type.tensor_type.elem_type for port in ports}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(KINDS, "float16"))
@pytest.mark.parametrize("model_type", slow_but(["llama", "gpt2"], "llama"))
def test_weights_are_mapped_as_stored_without_a_cast(stored: Stored, model_type: str, dtype: str) -> None:
    folder = stored(model_type, dtype)
    exported = export(folder, precision=dtype)
    model = inferred(folder / "decode.onnx")
    weights = {tensor.name for tensor in external_tensors(model)}
    assert exported.sizes and exported.sizes.copied == 0
    assert {tensor.data_type for tensor in external_tensors(model)} == {KINDS[dtype]}
    assert not [node.name for node in model.graph.node if node.op_type == "Cast" and node.input[0] in weights]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_the_cache_has_the_precision_and_logits_are_float32(stored: Stored, dtype: str) -> None:
    folder = stored("llama", dtype)
    export(folder, precision=dtype)
    model = inferred(folder / "prefill.onnx")
    found = types(model.graph.input) | types(model.graph.output)
    assert found.pop("logits") == TensorProto.FLOAT
    assert {kind for name, kind in found.items() if name.startswith(("past", "present"))} == {KINDS[dtype]}


@pytest.mark.slow
def test_logits_can_have_the_precision(stored: Stored) -> None:
    folder = stored("llama", "float16")
    export(folder, precision="float16", logits_dtype="float16")
    assert types(inferred(folder / "prefill.onnx").graph.output)["logits"] == TensorProto.FLOAT16


def test_logits_of_another_half_type_are_refused(stored: Stored) -> None:
    with pytest.raises(UsageProblem, match="needs graphs that compute in bfloat16"):
        export(stored("llama", "float16"), precision="float16", logits_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_one_node_per_norm(stored: Stored, dtype: str) -> None:
    folder = stored("llama", dtype)
    export(folder, precision=dtype)
    operators = [node.op_type for node in inferred(folder / "decode.onnx").graph.node]
    assert operators.count("RMSNormalization") == 9
    assert not {"Pow", "ReduceMean", "Sqrt"} & {*operators}


@pytest.mark.slow
def test_the_manifest_records_the_precision(stored: Stored) -> None:
    folder = stored("llama", "bfloat16")
    export(folder, precision="bfloat16")
    manifest = json.loads((folder / "llmconv.json").read_text())
    assert manifest["graphs"]["decode"]["precision"] == "bfloat16"


def test_weights_of_another_dtype_are_not_mapped_in_place(stored: Stored) -> None:
    folder = stored("llama", "bfloat16")
    with pytest.raises(InputRefused, match="the weights are bfloat16") as caught:
        export(folder, precision="float16")
    assert "-o OUT" in caught.value.hint
    assert not list(folder.glob("*.onnx"))


@pytest.mark.slow
def test_weights_of_another_dtype_are_written_once_in_the_precision(stored: Stored, tmp_path: Path) -> None:
    export(stored("llama", "bfloat16"), tmp_path / "out", precision="float16")
    assert {tensor.dtype.name for tensor in open_checkpoint(tmp_path / "out").values()} == {"float16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.slow
def test_a_weight_that_overflows_float16_is_refused(stored: Stored, tmp_path: Path) -> None:
    folder = stored("llama", "bfloat16")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}  # not mapped
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputRefused, match=r"`model.norm.weight` contains 999424, and the largest number"):
        export(folder, tmp_path / "out", precision="float16")
    assert not (tmp_path / "out").exists()


def test_weights_that_become_zero_in_float16_are_counted(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored("llama", "bfloat16")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}  # not mapped
    tensors["model.norm.weight"][:5] = 1e-9
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export(folder, tmp_path / "out", precision="float16")
    assert "5 weights are too small for float16 and became zero" in capsys.readouterr().err


def test_a_dtype_that_the_graphs_cannot_map_is_refused(stored: Stored, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="--dtype float32"):
        export(stored("llama", "bfloat16"), tmp_path / "out", precision="bfloat16", dtype="float32")


@pytest.mark.slow
def test_weights_that_transformers_keeps_in_float32_keep_their_dtype(tmp_path: Path) -> None:
    folder = save_tiny("gpt_oss", tmp_path / "model", **SMALL_GPT_OSS)
    export(folder, tmp_path / "out", precision="float16")
    dtypes = {name: tensor.dtype.name for name, tensor in open_checkpoint(tmp_path / "out").items()}
    assert dtypes["model.layers.0.input_layernorm.weight"] == "float32"
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == "float16"


SMALL_GPT_OSS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_recurrent_states_stay_in_float32(tmp_path: Path, dtype: str) -> None:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
    folder = save_tiny("mamba2", tmp_path / "model", vocab_size=96, hidden_size=64, num_hidden_layers=4, **sizes)
    cast_folder(folder, dtype, kept="A_log")
    export(folder, precision=dtype)
    found = types(inferred(folder / "decode.onnx").graph.output)
    assert found["present_recurrent.0"] == TensorProto.FLOAT
    assert found["present_conv.0"] == KINDS[dtype]


@pytest.mark.slow
def test_float32_graphs_are_the_default_and_have_one_node_per_norm(stored: Stored) -> None:
    folder = stored("llama", "float32")
    export(folder)
    model = inferred(folder / "decode.onnx")
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("RMSNormalization") == 9
    assert types(model.graph.input)["past_key_values.0.key"] == TensorProto.FLOAT


@pytest.mark.slow
def test_masks_are_the_smallest_number_of_float16(stored: Stored) -> None:
    folder = stored("llama", "float16")
    export(folder, precision="float16")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    kinds = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16]
    values = [onnx.numpy_helper.to_array(tensor) for tensor in kinds if not tensor.external_data]
    assert min(float(np.min(value)) for value in values) == -65504.0


def test_a_prefix_in_half_precision_is_refused(stored: Stored, tmp_path: Path) -> None:
    folder = stored("llama", "float16")
    with pytest.raises(UsageProblem, match="`--prefix` adds keys and values in float32"):
        export(folder, precision="float16", prefix=save_adapter(folder, tmp_path / "adapter", "PrefixTuning"))


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize(
    "options", slow_but([{"stages": 2}, {"opset": 21}, {"shapes": "static", "max_seq_len": 32}], {"opset": 21})
)
def test_other_options_verify_in_half_precision(stored: Stored, options: dict[str, Any]) -> None:
    folder = stored("llama", "float16")
    export(folder, precision="float16", **options)
    report = verify(folder, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.quick_rows("bfloat16")
@pytest.mark.parametrize("dtype", KINDS)
def test_verify_compares_the_graphs_as_they_are_and_in_float32(stored: Stored, dtype: str) -> None:
    folder = stored("llama", dtype)
    export(folder, precision=dtype)
    report = verify(folder, scenario=["prefill, 7 tokens"])
    names = {check.name for check in report.checks}
    assert report.verdict == "pass", report.closing_lines()
    assert {"prefill, 7 tokens", "prefill, 7 tokens, in float32"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_verify_catches_an_epsilon_that_half_precision_hides(stored: Stored, dtype: str) -> None:
    folder = stored("llama", dtype)
    export(folder, precision=dtype)
    for path in folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        norms = [node for node in model.graph.node if node.op_type == "RMSNormalization"]
        for attribute in (one for node in norms for one in node.attribute if one.name == "epsilon"):
            attribute.f *= 1.2
        onnx.save(model, path)
    report = verify(folder, scenario=["prefill, 7 tokens"], allow_changed=True, bisect=True)
    assert report.verdict == "fail"
    assert report.where and report.where.scenario.endswith("in float32")
    assert "epsilon" in report.where.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_verify_goes_layer_by_layer_in_half_precision(stored: Stored, dtype: str) -> None:
    folder = stored("llama", dtype)
    export(folder, precision=dtype)
    report = verify(folder, scenario=["prefill, 7 tokens"], low_memory=True)
    assert report.verdict == "pass", report.closing_lines()


def test_the_layout_of_transformers_js_has_its_name_for_float16(stored: Stored) -> None:
    folder = stored("llama", "float16")
    export(folder, precision="float16", layout="transformersjs")
    assert (folder / "onnx" / "model_fp16.onnx").is_symlink()
    assert (folder / "onnx" / "model_fp16.onnx_data").resolve() == (folder / "model.safetensors").resolve()


def test_transformers_js_refuses_bfloat16(stored: Stored) -> None:
    with pytest.raises(UnsupportedInput, match="does not run bfloat16"):
        export(stored("llama", "bfloat16"), precision="bfloat16", layout="transformersjs")


@pytest.mark.slow
def test_genai_gets_the_provider_of_the_target(stored: Stored) -> None:
    folder = stored("llama", "bfloat16")
    export(folder, target="ort-cuda", layout="genai")
    config = json.loads((folder / "genai_config.json").read_text())
    assert config["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {}}]


@pytest.mark.slow
def test_the_manifest_names_what_computes_in_float32(tmp_path: Path) -> None:
    folder = cast_folder(save_tiny("llama", tmp_path), "float16")
    export(folder, prefill=True, incremental=True, precision="float16")
    for entry in json.loads((folder / "llmconv.json").read_text())["graphs"].values():
        assert entry["float32"]["model.rotary_emb"] == ["Cos", "Mul", "Sin"]
        assert not any("proj" in module for module in entry["float32"])


@pytest.mark.slow
def test_a_float32_graph_has_no_such_field(tmp_path: Path) -> None:
    export(save_tiny("llama", tmp_path), prefill=True)
    assert "float32" not in json.loads((tmp_path / "llmconv.json").read_text())["graphs"]["prefill"]
