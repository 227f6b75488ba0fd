"""Graphs of models that other libraries quantized: the codes are repacked or mapped, and no value changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.quantization.block_rounding import BlockFormat
from llmconv.export.quantization.selection import StoredFormats, repacked
from llmconv.quantized_weights.packed_weight import IntegerCodes, PackedWeight
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.tensors import BY_NAME, Array
from llmconv.verify import verify
from tests.builders.prefix_models import save_adapter
from tests.builders.quantized_models import BASES, FOLDER, changed, groups, stored, without_indices
from tests.builders.safetensors import change_tensor
from tools.tiny_models import depth, save_tiny

__all__ = ["changed"]

FLOATING = ["ct_float_block", "ct_float_channel", "fp4", "fp8_blocks", "nf4_bf16_storage", "nf4_nested"]
FLOATING += ["modelopt_fp8", "modelopt_fp8_channel", "modelopt_nvfp4"]
INTEGERS = [name for name in (*BASES, "conv1d/int8") if name not in FLOATING]
CALLS = ["prefill, 7 tokens", "left padding"]
"""In these models some states nearly cancel, which the scenarios of scaled weights amplify, with plain weights too."""

DOWN = "model.layers.0.mlp.down_proj.weight"


def weights_of(folder: Path) -> dict[str, PackedWeight]:
    found = quantized_checkpoint(open_checkpoint(folder))
    assert found is not None
    return dict(found.weights)


def unpacked(codes: Array, bits: int) -> Array:
    """Codes of bytes [rows, n] as [rows, n * 8 / bits], the first in the low bits."""
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def read_back(tensors: dict[str, Array], name: str, form: BlockFormat, columns: int) -> Array:
    """The values of a repacked weight, [N, K], by the formula of `MatMulNBits`."""
    scales = tensors[name + ".scales"].astype(np.float32)
    codes = unpacked(tensors[name + ".codes"].reshape(len(scales), -1), form.bits)
    zeros = np.full(scales.shape, form.middle)
    if not form.symmetric:
        zeros = unpacked(tensors[name + ".zeros"], form.bits)[:, : scales.shape[1]]
    spread = [np.repeat(part, form.size, axis=1)[:, :columns].astype(np.float32) for part in (zeros, scales)]
    values: Array = (codes[:, :columns].astype(np.float32) - spread[0]) * spread[1]
    if name + ".offsets" in tensors:
        values += np.repeat(tensors[name + ".offsets"].T, form.size, axis=1)[:, :columns]
    return values[:, np.argsort(tensors[name + ".order"])] if name + ".order" in tensors else values


@pytest.mark.parametrize("base", INTEGERS)
def test_repacked_codes_have_the_values_of_the_stored_ones(base: str) -> None:
    for name, weight in weights_of(FOLDER / base).items():
        integers = weight.integers
        assert integers is not None
        found = repacked(integers)
        assert found is not None
        tensors = {key: tensor.read() for key, tensor in found.tensors(name).items()}
        plain = weight.plain.read()
        np.testing.assert_allclose(
            read_back(tensors, name, found.form, integers.shape[-1]),
            plain.T if integers.turned else plain,
            rtol=2e-7,
            atol=2e-7 * np.abs(plain).max() if integers.offsets else 0,  # products and offsets cancel
        )


@pytest.mark.parametrize("base", ["gptq_4bit_act_order", "awq_gemm", "gptq_3bit"])
def test_repacked_tensors_do_not_depend_on_the_rows_that_are_asked_for(base: str) -> None:
    weight = weights_of(FOLDER / base)[DOWN].integers
    assert weight is not None
    found = repacked(weight)
    assert found is not None
    for key, tensor in found.tensors(DOWN).items():
        parts = [tensor.rows(start, min(start + 5, tensor.num_rows)) for start in range(0, tensor.num_rows, 5)]
        assert np.array_equal(np.concatenate(parts), tensor.read()), key


@pytest.mark.parametrize("base", FLOATING)
def test_codes_that_are_no_integers_are_quantized_again(base: str) -> None:
    found = quantized_checkpoint(open_checkpoint(FOLDER / base))
    assert found is not None
    formats = StoredFormats.of(found)
    assert formats.without_operator == list(found.weights)
    assert all(formats.format_of(name, name, 0, 1).bits == 8 for name in found.weights)  # type: ignore[union-attr]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("base", ["gptq_3bit", "gptq_4bit_sym", "awq_gemm", "ct_pack_4bit", "int8", "fp8_blocks"])
def test_verify_accepts_graphs_of_a_quantized_model(base: str, tmp_path: Path) -> None:
    export(FOLDER / base, tmp_path / "out", incremental=True)
    assert verify(tmp_path / "out", reference=FOLDER / base, scenario=CALLS).verdict == "pass"


@pytest.mark.slow
def test_columns_in_the_order_of_activations_are_gathered_before_the_product(tmp_path: Path) -> None:
    export(FOLDER / "gptq_4bit_act_order", tmp_path / "out")
    nodes = onnx.load(tmp_path / "out" / "decode.onnx", load_external_data=False).graph.node
    makers = {name: node for node in nodes for name in node.output}
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    assert len(products) == 7
    assert all(makers[node.input[0]].op_type == "Gather" and len(node.input) == 4 for node in products)
    assert (
        verify(tmp_path / "out", reference=FOLDER / "gptq_4bit_act_order", scenario=["prefill, 7 tokens"]).verdict
        == "pass"
    )


@pytest.mark.slow
def test_another_order_of_columns_is_found(tmp_path: Path) -> None:
    export(FOLDER / "gptq_4bit_act_order", tmp_path / "out", incremental=True)
    change_tensor(tmp_path / "out" / "quantized.safetensors", DOWN + ".order", lambda order: np.roll(order, 1))
    report = verify(tmp_path / "out", reference=FOLDER / "gptq_4bit_act_order", allow_changed=True)
    assert report.verdict == "fail"


def another_code(codes: Array) -> Array:
    codes[7, 1, 4] ^= 1
    return codes


def another_scale(scales: Array) -> Array:
    scales[7, 1] *= 1.03
    return scales


def the_next_scale(scales: Array) -> Array:
    scales[7, 1] = np.nextafter(scales[7, 1], np.inf, dtype=np.float16)
    return scales


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "edit"), [(".codes", another_code), (".scales", another_scale), (".scales", the_next_scale)]
)
def test_another_code_or_scale_is_found(part: str, edit: Callable[[Array], Array], tmp_path: Path) -> None:
    export(FOLDER / "gptq_4bit_sym", tmp_path / "out", incremental=True)
    change_tensor(tmp_path / "out" / "quantized.safetensors", DOWN + part, edit)
    report = verify(tmp_path / "out", reference=FOLDER / "gptq_4bit_sym", allow_changed=True)
    assert any(DOWN in check.detail and "in the quantized model it is" in check.detail for check in report.checks)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_scales_may_be_rounded_to_the_precision_of_the_graph(precision: str, tmp_path: Path) -> None:
    export(FOLDER / "awq_gemm", tmp_path / "out", precision=precision)
    report = verify(tmp_path / "out", reference=FOLDER / "awq_gemm", scenario=["prefill, 7 tokens"])
    assert not [check.detail for check in report.checks if "in the quantized model it is" in check.detail]


@pytest.fixture
def symmetric(changed: Callable[..., Path]) -> Path:
    """Genuine packed 4-bit codes of compressed-tensors, without their zero points."""
    zeros = [name for name in stored(FOLDER / "ct_pack_4bit") if name.endswith("zero_point")]
    return changed("ct_pack_4bit", dict.fromkeys(zeros), config_groups=groups(symmetric=True))


@pytest.mark.slow
def test_packed_codes_of_compressed_tensors_are_mapped_as_they_lie(symmetric: Path) -> None:
    before = (symmetric / "model.safetensors").read_bytes()
    done = export(symmetric, incremental=True)
    assert done.weight_bytes_written == 0
    assert (symmetric / "model.safetensors").read_bytes() == before
    assert verify(symmetric).verdict == "pass"


@pytest.mark.slow
def test_codes_that_must_be_repacked_need_a_folder(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "gptq_4bit_sym", tmp_path / "model")
    with pytest.raises(InputRefused, match="as the model's files store it") as error:
        export(tmp_path / "model")
    assert "`-o OUT`" in error.value.hint
    assert not list((tmp_path / "model").glob("*.onnx"))


def test_codes_are_not_quantized_again_on_demand(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"quantized already \(gptq\)"):
        export(FOLDER / "gptq_4bit_sym", tmp_path / "out", quant="int8")


@pytest.mark.slow
def test_codes_without_an_operator_may_be_quantized_as_the_user_likes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(FOLDER / "nf4_nested", tmp_path / "out", quant="int4", quant_block=16)
    assert "they are quantized again, as `--quant int4` says" in capsys.readouterr().err


@pytest.mark.slow
def test_conv1d_codes_are_those_of_the_transposed_matrix(tmp_path: Path) -> None:
    export(FOLDER / "conv1d" / "int8", tmp_path / "out", incremental=True)
    assert verify(tmp_path / "out", reference=FOLDER / "conv1d" / "int8").verdict == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_graphs_in_half_precision_have_the_same_codes(precision: str, tmp_path: Path) -> None:
    export(FOLDER / "awq_gemm", tmp_path / "float32")
    export(FOLDER / "awq_gemm", tmp_path / "half", precision=precision)
    wide, half = (load_file(tmp_path / name / "quantized.safetensors") for name in ("float32", "half"))
    assert all(np.array_equal(wide[name], half[name]) for name in wide if name.endswith((".codes", ".zeros")))


def mxfp4_model(folder: Path) -> None:
    """A tiny gpt-oss with random experts in MXFP4."""
    save_tiny("gpt_oss", folder, depth("gpt_oss"))
    tensors = {name: torch.from_numpy(np.array(t)) for name, t in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[name + "_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))


@pytest.mark.slow
def test_mxfp4_experts_are_integers_of_8_bits_without_a_change_of_values(tmp_path: Path) -> None:
    mxfp4_model(tmp_path / "model")
    for name, weight in weights_of(tmp_path / "model").items():
        integers = weight.integers
        assert integers is not None
        found = repacked(integers)
        assert found is not None
        made = {key: tensor.read() for key, tensor in found.tensors(name).items()}
        for expert, plain in enumerate(weight.plain.read()):
            one = {key: tensor[expert] for key, tensor in made.items()}
            assert np.array_equal(read_back(one, name, found.form, integers.shape[-1]), plain.T)
    export(tmp_path / "model", tmp_path / "out", incremental=True)
    for method in ("structure", "whole"):
        assert verify(tmp_path / "out", reference=tmp_path / "model", method=method).verdict == "pass"


def test_a_soft_prompt_is_refused_because_its_keys_need_float_weights(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tiny("llama"), tmp_path / "adapter", "PromptTuning")
    with pytest.raises(UnsupportedInput, match="soft prompt cannot be computed, because .* is quantized"):
        export(FOLDER / "gptq_4bit_sym", tmp_path / "out", prefix=adapter)


@pytest.mark.parametrize(("columns", "size"), [(96, 64), (576, 128), (176, 128)])
@pytest.mark.parametrize("accuracy", [0, 4])
def test_a_partial_last_group_is_multiplied_as_computed_plainly(columns: int, size: int, accuracy: int) -> None:
    random, groups_ = np.random.default_rng(0), np.arange(columns) // size
    codes, scales = random.integers(0, 16, (24, columns), dtype=np.uint8), random.random((24, groups_[-1] + 1), "f4")
    zeros = random.integers(0, 16, scales.shape, dtype=np.uint8)
    dtype = BY_NAME["float32"]
    found = repacked(
        IntegerCodes(codes.shape, 4, groups_, lambda a, b: codes[a:b], lambda a, b: scales[a:b], lambda: zeros, dtype)
    )
    assert found is not None and found.form.size == size
    inputs = [tensor.read() for tensor in found.tensors("w").values()]  # codes, zero points, scales
    names = {
        "A": random.standard_normal((3, columns)).astype(np.float32),
        "B": inputs[0],
        "S": inputs[2],
        "Z": inputs[1],
    }
    fields: dict[str, Any] = {"K": columns, "N": 24, "bits": 4, "block_size": size, "accuracy_level": accuracy}
    node = onnx.helper.make_node("MatMulNBits", list(names), ["Y"], domain="com.microsoft", **fields)
    plain = (codes.astype(np.float64) - zeros[:, groups_]) * scales[:, groups_]
    rtol = 0.02 if accuracy == 4 else 1e-5  # of activations that are rounded to int8
    expected = names["A"] @ plain.T
    np.testing.assert_allclose(run_node(node, names), expected, atol=rtol * np.abs(expected).max())


def run_node(node: onnx.NodeProto, inputs: dict[str, Array]) -> Array:
    """The output of one node."""
    types = [onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs.values()]
    arguments = [
        onnx.helper.make_tensor_value_info(name, kind, array.shape)
        for (name, array), kind in zip(inputs.items(), types, strict=True)
    ]
    result = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in list(inputs.items())[1:]]
    graph = onnx.helper.make_graph([node], "node", arguments[:1], [result], weights)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    output: Array = session.run(None, {"A": inputs["A"]})[0]
    return output


def test_graphs_of_gptq_without_group_indices_have_a_partial_last_group(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = changed("gptq_4bit_sym", without_indices(64), group_size=64)
    export(folder, tmp_path / "out", incremental=True)
    scales = load_file(tmp_path / "out" / "quantized.safetensors")[DOWN + ".scales"]
    assert np.array_equal(scales, stored(folder)[DOWN.replace("weight", "scales")].numpy().T)
    assert verify(tmp_path / "out", reference=folder, scenario=CALLS).verdict == "pass"


@pytest.mark.quick_rows("ct_int8_channel-weight_scale")
@pytest.mark.parametrize(
    ("base", "part"),
    [
        ("gptq_4bit_sym", "scales"),
        ("int8", "SCB"),
        ("ct_pack_4bit", "weight_scale"),
        ("ct_int8_channel", "weight_scale"),
    ],
)
def test_scales_that_make_values_infinite_are_refused(
    base: str, part: str, changed: Callable[..., Path], tmp_path: Path
) -> None:
    name = DOWN.replace("weight", part)
    folder = changed(base, {name: torch.full_like(stored(FOLDER / base)[name].float(), 3e38)})
    with pytest.raises(InputRefused, match=r"down_proj.weight` has scales so large that its values are infinite"):
        export(folder, tmp_path / "out", incremental=True)
    assert not (tmp_path / "out").exists()


def test_scales_that_make_values_infinite_are_not_mapped(symmetric: Path) -> None:
    state = stored(symmetric)
    save_file(
        {
            name: torch.full_like(tensor, 3e38) if "down_proj.weight_scale" in name else tensor
            for name, tensor in (
                (name, tensor.float() if "scale" in name else tensor) for name, tensor in state.items()
            )
        },
        symmetric / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputRefused, match="has scales so large that its values are infinite"):
        export(symmetric, incremental=True)
    assert not list(symmetric.glob("*.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "problem"), [(1e-7, "the scales .* are too small"), (1e7, "a scale .* is too large")]
)
def test_stored_scales_beyond_float16_are_refused_with_a_hint_that_helps(
    factor: float, problem: str, changed: Callable[..., Path], tmp_path: Path
) -> None:
    name = DOWN.replace("weight", "scales")
    folder = changed("awq_gemm", {name: stored(FOLDER / "awq_gemm")[name].float() * factor})
    with pytest.raises(InputRefused, match=problem) as error:
        export(folder, tmp_path / "out", incremental=True, precision="float16")
    assert error.value.hint == "give `--precision bfloat16` or float32"
    export(folder, tmp_path / "out", incremental=True, precision="bfloat16")
