"""Fields of compressed-tensors' configs: read, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.models.head_and_dtype import plain_tensors
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export import export
from llmconv.quantized_weights.methods.compressed_tensors import WeightSchemes
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint, quantized_checkpoint
from tests.builders.quantized_models import FOLDER, groups, stored
from tests.conftest import save_tiny

PACKED, DOWN = "ct_pack_4bit", "model.layers.0.mlp.down_proj"
HADAMARD = {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}


def opened(folder: Path) -> QuantizedCheckpoint:
    base = quantized_checkpoint(open_checkpoint(folder))
    assert base is not None
    return base


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("transform_config", {"config_groups": HADAMARD}),
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("moe_sparsity_config", {"format": "other"}),
    ],
)
def test_fields_that_change_the_function_are_refused(name: str, content: Any, changed: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedInput, match=f"with a `{name}`"):
        opened(changed(PACKED, **{name: content}))


@pytest.mark.parametrize(
    "fields",
    [
        {"transform_config": {}},
        {"transform_config": {"config_groups": {}}},
        {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any], changed: Callable[..., Path]) -> None:
    assert opened(changed(PACKED, **fields)).weights


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("base", [PACKED, "ct_int8_channel"])
def test_missing_zero_points_are_refused_by_name(base: str, one: bool, changed: Callable[..., Path]) -> None:
    names = [name for name in stored(FOLDER / base) if name.endswith("zero_point") and (not one or DOWN in name)]
    scheme = {**groups(num_bits=8, strategy="channel", group_size=None), "format": None}
    fields = {} if base == PACKED else {"config_groups": scheme}
    with pytest.raises(MalformedInput, match="missing key .*down_proj.weight_zero_point"):
        opened(changed(base, dict.fromkeys(names), **fields))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_codes_of_int8_have_zero_points(strategy: str, changed: Callable[..., Path]) -> None:
    """The value is (code - zero point) * scale, in each layout of scales."""
    random = torch.Generator().manual_seed(0)
    tensors, expected = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, codes in stored(FOLDER / "ct_int8_channel").items():
        if codes.dtype == torch.int8:
            height, width = codes.shape
            shape = {"tensor": (1,), "channel": (height, 1), "group": (height, width // 32)}[strategy]
            zeros = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
            tensors |= {f"{name}_zero_point": zeros, f"{name}_scale": torch.rand(shape, generator=random)}
            spread = [tensors[f"{name}_{part}"].float() for part in ("zero_point", "scale")]
            each = width // (shape[1] if len(shape) > 1 else 1)
            zero, scale = (one.repeat_interleave(each, 1) if one.dim() > 1 else one for one in spread)
            expected[name] = (codes.float() - zero) * scale
    size = 32 if strategy == "group" else None
    scheme = groups(num_bits=8, strategy=strategy, group_size=size)
    found = opened(
        changed("ct_int8_channel", tensors, config_groups={"group_0": {**scheme["group_0"], "format": None}})
    )
    assert expected and all(
        torch.equal(torch.from_numpy(found.plain[name].read()), one) for name, one in expected.items()
    )


def test_one_zero_point_of_0_was_not_saved_by_old_versions(changed: Callable[..., Path]) -> None:
    state = stored(FOLDER / "ct_int8_channel")
    scales = {name: torch.full((1,), 0.5) for name in state if name.endswith("weight_scale")}
    scheme = {"group_0": {**groups(num_bits=8, strategy="tensor", group_size=None)["group_0"], "format": None}}
    for version in ({}, {"version": "0.9.2"}):
        found = opened(changed("ct_int8_channel", scales, config_groups=scheme, **version))
        value = torch.from_numpy(found.plain[f"{DOWN}.weight"].read())
        assert torch.equal(value, state[f"{DOWN}.weight"].float() * 0.5)
    for other in ("0.9.3", "0.10.1", 1):
        with pytest.raises(MalformedInput, match=r"missing key .*weight_zero_point"):
            opened(changed("ct_int8_channel", scales, config_groups=scheme, version=other))


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 8},
        {"num_bits": 2},
        {"num_bits": 5},
        {"num_bits": "4"},
        {"group_size": 64},
        {"group_size": 1 << 70},
        {"group_size": 0},
        {"group_size": None},
        {"group_size": -1},
        {"strategy": "channel", "group_size": None},
        {"strategy": "block", "block_structure": [32, 32], "group_size": None},
        {"strategy": "tensor_group"},
        {"type": "float"},
        {"symmetric": True},
        {"symmetric": "yes"},
        {"actorder": "group"},
    ],
)
def test_a_scheme_that_contradicts_the_files_is_refused(weights: dict[str, Any], changed: Callable[..., Path]) -> None:
    with pytest.raises(InputRefused):
        opened(changed(PACKED, config_groups=groups(**weights))).plain[f"{DOWN}.weight"].read()


@pytest.mark.parametrize(
    "weights", [{"strategy": "group", "group_size": 64}, {"type": "int"}, {"num_bits": 16}, {"symmetric": False}]
)
def test_a_scheme_that_contradicts_float8_is_refused(weights: dict[str, Any], changed: Callable[..., Path]) -> None:
    channel = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    with pytest.raises(InputRefused):
        opened(changed("ct_float_channel", config_groups=groups(**{**channel, **weights})))


def test_an_order_of_columns_that_keeps_groups_needs_no_indices(changed: Callable[..., Path]) -> None:
    assert opened(changed(PACKED, config_groups=groups(actorder="weight"))).weights


def test_indices_of_minus_one_say_that_groups_are_in_order(changed: Callable[..., Path]) -> None:
    folder = changed(PACKED, {f"{DOWN}.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)})
    expected = opened(FOLDER / PACKED).plain[f"{DOWN}.weight"].read()
    assert np.array_equal(opened(folder).plain[f"{DOWN}.weight"].read(), expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_few_columns_have_the_bits_of_the_config(bits: int, changed: Callable[..., Path]) -> None:
    others = {name: None for name in stored(FOLDER / PACKED) if "weight_" in name and DOWN not in name}
    small = {
        f"{DOWN}.weight_packed": torch.tensor([[0x00E4], [0x0039]], dtype=torch.int32),
        f"{DOWN}.weight_scale": torch.ones(2, 1),
        f"{DOWN}.weight_shape": torch.tensor([2, 4]),
        f"{DOWN}.weight_zero_point": None,
    }
    scheme = groups(num_bits=bits, symmetric=True, strategy="channel", group_size=None)
    found = opened(changed(PACKED, others | small, config_groups=scheme)).plain[f"{DOWN}.weight"].read()
    assert found.tolist() == ([[-2, -1, 0, 1], [-1, 0, 1, -2]] if bits == 2 else [[-4, 6, -8, -8], [1, -5, -8, -8]])


def test_the_last_group_is_partial(changed: Callable[..., Path]) -> None:
    state = stored(FOLDER / PACKED)
    fewer = {name: tensor[:, ::2].contiguous() for name, tensor in state.items() if name.endswith(("scale", "_point"))}
    plain = opened(changed(PACKED, fewer, config_groups=groups(group_size=64))).plain[f"{DOWN}.weight"].read()
    before = opened(FOLDER / PACKED).plain[f"{DOWN}.weight"].read()
    assert np.array_equal(plain[:, :32], before[:, :32]) and np.array_equal(plain[:, 64:], before[:, 64:])


def schemes(**targets: dict[str, Any]) -> WeightSchemes:
    """Groups by their target, with two underscores for a dot."""
    made = {name: {"targets": [name.replace("__", ".")], "weights": weights} for name, weights in targets.items()}
    return WeightSchemes({"config_groups": made})


def test_a_module_has_the_scheme_of_its_name_then_of_a_pattern_then_of_its_class() -> None:
    made = schemes(Linear={"num_bits": 4}, **{"re:.*down": {"num_bits": 8}, "a__down": {"num_bits": 2}})
    assert [made.of(name).bits for name in ("a.down", "b.down", "b.up")] == [2, 8, 4]


def test_groups_of_activations_alone_are_not_of_weights() -> None:
    made = WeightSchemes({"config_groups": {"a": {"targets": ["Linear"], "weights": None}}})
    with pytest.raises(MalformedInput, match="0 groups"):
        made.of("a.up")


def test_several_groups_that_may_be_meant_are_refused() -> None:
    with pytest.raises(MalformedInput, match="`a.up` is quantized, and 2 groups"):
        schemes(Mine={"num_bits": 4}, Other={"num_bits": 8}).of("a.up")


@pytest.mark.slow_rows("re:(a|a)*$")
@pytest.mark.parametrize("pattern", ["re:(", "re:" + "a" * 2000, "re:(a|a)*$", 7])
def test_patterns_that_are_invalid_or_take_too_long_are_refused(pattern: Any) -> None:
    config = {"config_groups": {"a": {"targets": [pattern], "weights": {"num_bits": 4}}}}
    with pytest.raises(MalformedInput, match="config_groups"):
        WeightSchemes(config).of("a" * 40 + "b")


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_settings_in_another_place_are_named(place: str, changed: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(changed(PACKED))
    settings = {"quantization_config": checkpoint.config["quantization_config"]}
    found = settings["quantization_config"] if place == "compression_config" else settings
    config = {**{name: one for name, one in checkpoint.config.items() if name not in settings}, place: found}
    moved = replace(checkpoint, config=config)
    for reads in (quantized_checkpoint, plain_tensors):
        with pytest.raises(MalformedInput, match=f"`quantization_config` is in `{place}`"):
            reads(moved)
    plain = {name: one for name, one in checkpoint.items() if "proj" not in name}
    assert quantized_checkpoint(replace(moved, tensors=plain)) is None  # plain weights, and a field that is left over
    both = quantized_checkpoint(replace(moved, config={**config, **settings}))
    assert both is not None
    assert "quantization_config" not in str(both.plain.config)
    assert "compression_config" not in both.plain.config


@pytest.mark.parametrize("options", [{"quant": "dequantize"}, {"dtype": "bfloat16"}, None], ids=str)
def test_commands_name_settings_in_another_place(
    options: dict[str, Any] | None, changed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = changed(PACKED)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedInput, match="`quantization_config` is in `compression_config`") as error:
        export(folder, tmp_path / "out") if options is None else to_hf(folder, tmp_path / "out", **options)
    assert "copy it to the top" in str(error.value.hint)


@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_fp8_channel", "modelopt_nvfp4"])
def test_settings_of_modelopt_may_be_in_a_file_of_their_own(name: str, changed: Callable[..., Path]) -> None:
    folder = changed(name)
    expected = quantized_checkpoint(open_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(FOLDER / name / "hf_quant_config.json", folder)
    found = quantized_checkpoint(open_checkpoint(folder))
    assert found and expected and found.method.name == "modelopt" and found.weights.keys() == expected.weights.keys()


def test_modelopt_with_quantized_keys_and_values_alone_has_plain_weights(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    assert quantized_checkpoint(open_checkpoint(folder)) is None


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "fp8_pb_wo", "NVFP4_AWQ", "MXFP8", "W8A8_SQ_PER_CHANNEL", None])
def test_other_formats_of_modelopt_are_refused_by_name(algorithm: str | None, changed: Callable[..., Path]) -> None:
    folder = changed("modelopt_nvfp4", quant_algo=algorithm)
    with pytest.raises(UnsupportedInput, match=f"by ModelOpt as `{algorithm}`"):
        quantized_checkpoint(open_checkpoint(folder))


NV = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "problem", "says"),
    [
        ({f"{NV}.pre_quant_scale": torch.ones(96)}, UnsupportedInput, "scaled by columns"),
        ({f"{NV}.weight_scale_2": None}, MalformedInput, "weight_scale_2"),
        ({f"{NV}.weight_scale_2": torch.tensor(0.0)}, MalformedInput, "scales are multiplied by it"),
        ({f"{NV}.weight_scale": torch.ones(64, 5).to(torch.float8_e4m3fn)}, MalformedInput, "weight_scale"),
        ({f"{NV}.weight": torch.ones(64, 44, dtype=torch.uint8)}, MalformedInput, "groups of 16"),
        ({f"{NV}.weight": torch.ones(64, 96)}, MalformedInput, "scale of no quantized weight"),
    ],
)
def test_parts_of_modelopt_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], problem: type[Exception], says: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(problem, match=says):
        found = quantized_checkpoint(open_checkpoint(changed("modelopt_nvfp4", change)))
        assert found
        found.plain[f"{NV}.weight"].read()


OWN = {"quant_method": "auto-round", "data_type": "int", "group_size": 32}
BY_PATTERN = {"extra_config": {r".*\.down_pr": {"bits": 4}, r"down_proj$": {"bits": 2}, "lm_head": {"bits": 16}}}
NAMED = {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, DOWN: {"bits": 4}}}


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ("awq_gemm", {"packing_format": "auto_round:auto_awq", "bits": 4, "sym": False}),
        ("gptq_4bit_sym", {"packing_format": "auto_round:auto_gptq", "bits": 4, "sym": True}),
        ("gptq_8bit_v2", {"packing_format": "auto_round", "bits": 8, "sym": False}),
        ("gptq_4bit_sym", {"packing_format": "auto_round:auto_gptq", "bits": 8, "sym": True, **NAMED}),
        ("gptq_4bit_sym", {"packing_format": "auto_round:auto_gptq", "bits": 8, "sym": True, **BY_PATTERN}),
    ],
)
def test_layouts_of_auto_round_are_those_of_gptq_and_awq(
    base: str, fields: dict[str, Any], changed: Callable[..., Path]
) -> None:
    expected, folder = opened(FOLDER / base), changed(base)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**OWN, **fields}}))
    name = f"{DOWN}.weight"
    others = {} if "extra_config" not in fields else {one: None for one in stored(folder) if "proj" in one}
    if others:  # one module with bits of its own
        kept = {one: tensor for one, tensor in stored(folder).items() if one not in others or one.startswith(DOWN)}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert np.array_equal(opened(folder).plain[name].read(), expected.plain[name].read())


def test_a_pattern_of_auto_round_that_takes_too_long_is_refused(changed: Callable[..., Path]) -> None:
    with pytest.raises(MalformedInput, match="has the pattern"):
        opened(changed("autoround_asym", extra_config={r"(.*)*(.*)*(.*)*(\w+\.)+$$x": {"bits": 4}, "(": {"bits": 4}}))


@pytest.mark.parametrize(
    "fields",
    [
        {"packing_format": "auto_round:fp8_static"},
        {"packing_format": "auto_round:llm_compressor", "data_type": "nv_fp"},
        {"data_type": "mx_int"},
    ],
)
def test_other_layouts_of_auto_round_are_refused_by_name(fields: dict[str, Any], changed: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedInput, match="by AutoRound as"):
        opened(changed("autoround_asym", **fields))


def test_zero_points_that_auto_round_damaged_are_refused(changed: Callable[..., Path]) -> None:
    """Before 0.13 or so a zero point of 0 was stored as -1, which fills the fields above it with ones."""
    zeros = stored(FOLDER / "autoround_asym")[f"{DOWN}.qzeros"].clone()
    zeros[0, 0] |= -16
    folder = changed("autoround_asym", {f"{DOWN}.qzeros": zeros}, packing_format="auto_round:auto_gptq")
    with pytest.raises(UnsupportedInput, match=r"down_proj\.qzeros"):
        opened(folder)


@pytest.mark.parametrize("table", ["model.embed_tokens", "transformer.wte", "backbone.embeddings"])
def test_a_group_of_embeddings_is_that_of_the_table(table: str) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128}
    linear = {"targets": ["Linear"], "weights": weights}
    tables = {"targets": ["Embedding"], "weights": {**weights, "group_size": 64}}
    schemes = WeightSchemes({"config_groups": {"group_0": tables, "group_1": linear}})
    assert schemes.of(table).group == 64 and schemes.of(DOWN).group == 128
    assert WeightSchemes({"config_groups": {"group_0": linear}}).of(table).group == 128
