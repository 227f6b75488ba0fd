"""merge_lora into genuine quantized bases: plain results rounded once, and results that are quantized again."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from llmconv.cli import main
from llmconv.convert import merge_lora
from llmconv.errors import UnsupportedInput, UsageProblem
from tests.builders.quantized_models import BASES, FOLDER, reference, stored
from tests.convert.quantization.conftest import MODULES, update

Q, DOWN = (f"model.layers.0.{module}.weight" for module in MODULES)
K = "model.layers.0.self_attn.k_proj"


def data(tensor: torch.Tensor) -> bytes:
    """The bits, whatever numbers they are."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def inputs(base: str) -> int:
    """Width of `down_proj`."""
    return 320 if base == "nf4_nested" else 96


@pytest.mark.parametrize("base", [name for name in BASES if not name.startswith(("gptq", "awq", "autoround"))])
def test_plain_results_are_the_librarys_values_plus_the_update_rounded_once(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = adapter(0.02, inputs(base))
    merge_lora(FOLDER / base, [lora], tmp_path / "out", base_quant="dequantize")
    exact = reference(base)[Q].double() + update(lora, MODULES[0])
    found = stored(tmp_path / "out")[Q]
    assert found.dtype == torch.bfloat16
    assert (found != exact.to(torch.bfloat16)).float().mean() < 5e-4


@pytest.mark.parametrize(
    "base", [name for name in BASES if name.startswith(("gptq_4", "gptq_8", "awq", "autoround_sym", "autoround_asym"))]
)
def test_values_of_gptq_and_awq_are_not_rounded_to_float16_before_the_sum(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = adapter(0.02)
    merge_lora(FOLDER / base, [lora], tmp_path / "out", base_quant="dequantize")
    merge_lora(FOLDER / base, [lora], tmp_path / "wide", weights=[0.0], base_quant="dequantize", dtype="float32")
    wide = stored(tmp_path / "wide")[DOWN]
    assert torch.equal(wide.half(), reference(base)[DOWN])
    assert not torch.equal(wide, reference(base)[DOWN].float())
    exact = wide.double() + update(lora, MODULES[1])
    assert (stored(tmp_path / "out")[DOWN] != exact.to(torch.bfloat16)).float().mean() < 5e-4


@pytest.mark.parametrize(
    "base", ["nf4_nested", "int8", "gptq_4bit_act_order", "awq_gemm", "fp8_blocks", "ct_float_channel"]
)
def test_transformers_loads_a_plain_result_with_no_weight_missing_or_left(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    merge_lora(FOLDER / base, [adapter(0.02, inputs(base))], tmp_path / "out", base_quant="dequantize")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()[Q], stored(tmp_path / "out")[Q])


def test_a_plain_result_has_the_type_that_is_asked_for(adapter: Callable[..., Path], tmp_path: Path) -> None:
    merge_lora(FOLDER / "int8", [adapter(0.02)], tmp_path / "out", base_quant="dequantize", dtype="float16")
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.float16}


@pytest.mark.parametrize("base", BASES)
def test_results_that_are_quantized_again_have_the_same_tensors_and_config(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    merge_lora(FOLDER / base, [adapter(0.05, inputs(base))], tmp_path / "out", base_quant="requantize")
    before, after = stored(FOLDER / base), stored(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    others = [name for name in before if not name.startswith((Q[:-7], DOWN[:-7]))]
    assert all(data(before[name]) == data(after[name]) for name in others)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (FOLDER / base / "config.json").read_text()
    )


@pytest.mark.slow_rows("nf4_nested")
@pytest.mark.parametrize("base", BASES)
def test_retention_and_cosine_are_those_of_the_files_that_were_written(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora, nothing = adapter(0.05, inputs(base)), {"base_quant": "dequantize", "dtype": "float32"}
    merge = merge_lora(FOLDER / base, [lora], tmp_path / "out", base_quant="requantize")
    zero = [0.0]
    merge_lora(FOLDER / base, [lora], tmp_path / "before", weights=zero, **nothing)  # type: ignore[arg-type]
    merge_lora(tmp_path / "out", [lora], tmp_path / "after", weights=zero, **nothing)  # type: ignore[arg-type]
    moved = stored(tmp_path / "after")[DOWN].double() - stored(tmp_path / "before")[DOWN].double()
    wanted = update(lora, MODULES[1])
    assert merge.retention is not None
    change = merge.retention.weights[DOWN]
    assert change.retention == pytest.approx((moved.norm() / wanted.norm()).item(), rel=1e-4)
    assert change.cosine == pytest.approx(
        (moved.flatten() @ wanted.flatten() / moved.norm() / wanted.norm()).item(), rel=1e-4
    )


@pytest.mark.parametrize("base", ["gptq_4bit_sym", "awq_gemm", "fp8_blocks", "ct_pack_4bit"])
def test_an_update_below_the_steps_of_the_base_is_refused_before_anything_is_written(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedInput, match="keeps too little of the update") as caught:
        merge_lora(FOLDER / base, [adapter(0.0002)], tmp_path / "out", base_quant="requantize")
    assert "--base-quant dequantize" in caught.value.hint
    assert os.listdir(tmp_path) == ["adapter"]


def test_an_update_of_nothing_is_retained_whole(adapter: Callable[..., Path], tmp_path: Path) -> None:
    merge = merge_lora(FOLDER / "int8", [adapter(0.0)], tmp_path / "out", base_quant="requantize")
    assert merge.retention is not None and merge.retention.total.retention == 1
    before = stored(FOLDER / "int8")
    assert all(torch.equal(before[name], tensor) for name, tensor in stored(tmp_path / "out").items())


def test_a_quantized_base_without_a_choice_is_refused_and_both_ways_are_named(
    adapter: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedInput, match="quantized .bitsandbytes.") as caught:
        merge_lora(FOLDER / "nf4_bf16_storage", [adapter(0.02)], tmp_path / "out")
    assert "--base-quant dequantize" in caught.value.hint and "--base-quant requantize" in caught.value.hint


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        ("int8", {"base_quant": "requantize", "dtype": "float16"}, "keeps the types"),
        ("int8", {"base_quant": "round"}, "invalid `--base-quant round`"),
        (None, {"base_quant": "dequantize"}, "not quantized"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(
    base: str | None, options: dict[str, Any], message: str, adapter: Callable[..., Path], tiny: Callable[..., Path]
) -> None:
    folder = FOLDER / base if base else tiny("llama")
    with pytest.raises(UsageProblem) as caught:
        merge_lora(folder, [adapter(0.02)], folder / "never", **options)
    assert message in caught.value.message + caught.value.hint


@pytest.mark.parametrize("method", ["hqq", "aqlm", "eetq", "torchao", "vptq", "quanto", None, 4])
def test_other_methods_are_refused_by_name(
    method: object, changed: Callable[..., Path], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = changed("gptq_4bit_sym", quant_method=method)
    with pytest.raises(UnsupportedInput, match=f"`{method}`") as caught:
        merge_lora(base, [adapter(0.02)], tmp_path / "out", base_quant="dequantize")
    assert "bitsandbytes" in caught.value.hint


def test_the_command_says_what_it_did_and_prints_retention_as_json(
    adapter: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ["merge-lora", str(FOLDER / "int8"), str(adapter(0.02)), "-o", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(main, [*arguments, "--base-quant", "requantize"])
    assert result.exit_code == 0, result.output
    assert "2 merged weights are quantized again" in result.stderr
    printed = json.loads(result.stdout)
    assert printed["retention"]["total"]["cosine"] > 0.9
    assert set(printed["retention"]) == {"total", Q, DOWN}
    assert set(printed["merged"]) == {Q, DOWN}


def test_dry_run_of_a_plain_result_writes_nothing_and_says_so(adapter: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["merge-lora", str(FOLDER / "fp4"), str(adapter(0.02)), "-o", str(tmp_path / "out"), "--dry-run"]
    result = CliRunner().invoke(main, [*arguments, "--base-quant", "dequantize"])
    assert result.exit_code == 0 and "7 quantized weights (bitsandbytes) become plain bfloat16" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_quantized_weight_that_an_adapter_replaces_is_quantized_as_the_base_is(
    adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = adapter(0.05)
    name, weight = f"{K}.weight", torch.randn(32, 64)
    tensors = load_file(lora / "adapter_model.safetensors") | {f"base_model.model.{name}": weight}
    save_file(tensors, lora / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "modules_to_save": ["k_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    merge = merge_lora(FOLDER / "int8", [lora], tmp_path / "out", base_quant="requantize")
    found = stored(tmp_path / "out")
    assert torch.equal(found[f"{K}.SCB"], weight.abs().amax(dim=1))
    assert torch.equal(found[name], torch.round(weight * (127.0 / found[f"{K}.SCB"][:, None])).to(torch.int8))
    assert name in merge.replaced and merge.parts[f"{K}.SCB"] == name


def test_inspect_names_the_quantization() -> None:
    shown = CliRunner().invoke(main, ["inspect", str(FOLDER / "awq_gemm")]).stdout
    assert any(line.split() == ["quantization", "awq"] for line in shown.splitlines())
    printed = CliRunner().invoke(main, ["inspect", str(FOLDER / "int8"), "--json"]).stdout
    assert json.loads(printed)["quantization"] == "bitsandbytes"


@pytest.mark.parametrize("base", ["nf4_nested", "int8", "gptq_4bit_act_order", "awq_gemm", "fp8_blocks"])
def test_check_finds_every_element_of_a_plain_result_rounded_once(
    base: str, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    merge = merge_lora(
        FOLDER / base, [adapter(0.02, inputs(base))], tmp_path / "out", base_quant="dequantize", check=True
    )
    assert merge.check is not None and merge.check.elements > 30_000
    assert not merge.check.differing


def test_check_of_a_result_that_is_quantized_again_is_refused(adapter: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="a quantized weight cannot hold"):
        merge_lora(FOLDER / "int8", [adapter(0.02)], tmp_path / "out", base_quant="requantize", check=True)


def test_copies_of_quantized_layers_become_plain_and_are_not_quantized_again(
    adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = adapter(0.02)
    tensors = load_file(lora / "adapter_model.safetensors")
    tensors |= {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, lora / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "layer_replication": [[0, 1], [0, 1]]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    merge_lora(FOLDER / "int8", [lora], tmp_path / "out", base_quant="dequantize")
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}
    with pytest.raises(UnsupportedInput, match="moves or resizes"):
        merge_lora(FOLDER / "int8", [lora], tmp_path / "again", base_quant="requantize")
