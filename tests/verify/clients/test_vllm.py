"""`verify --client vllm`: folders that are right pass in vLLM, plain, quantized and with an adapter; faults fail."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import environments
from llmconv import quantize
from llmconv.convert import to_hf
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.verify import Report, verify
from llmconv.verify.clients.comparison import Client
from llmconv.verify.clients.vllm import VllmChecks, activation_rounding, opened, rounded_activations
from tests.builders.talking import save_letters
from tests.conftest import save_tiny

HOME = Path(__file__).parents[3] / environments.folder("vllm")
SIZES: dict[str, Any] = {  # the least that vLLM's kernels for CPUs take
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=64)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE)),
}


def saved(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = FAMILIES[kind]()
    for parameter in model.parameters():
        wide = parameter.ndim > 1
        parameter.data = torch.randn_like(parameter) * 0.06 if wide else parameter + torch.randn_like(parameter) * 0.1
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("vllm") / "llama")


def checked(folder: Path, reference: Path | None = None, **options: Any) -> Report:
    """The report of a folder in vLLM's environment; skips without it."""
    if not (HOME / "complete").exists():
        pytest.skip("`make clients` makes the environment of vLLM")
    return verify(folder, clients="vllm", pythons=f"vllm={HOME / 'bin/python'}", reference=reference, **options)


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.verdict == "fail"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_floats_passes(kind: str, tmp_path: Path) -> None:
    report = checked(saved(kind, tmp_path / kind))
    assert report.exit_code == 0, report.lines()
    assert len(report.checks) == 2 + 2 * 3 * 2


QUANTIZED = [
    ("w4a16", {}),
    ("w4a16", {"base_format": "awq"}),
    ("w4a16", {"base_format": "gptq"}),
    ("w4a16-asym", {}),
    ("w8a8", {}),
    ("fp8-dynamic", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "options"), QUANTIZED, ids=str)
def test_codes_are_read_by_vllm_as_they_are_meant(
    scheme: str, options: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme, **options)
    report = checked(tmp_path / "out", llama)
    assert report.exit_code == 0, report.lines()
    assert {"codes", "logits, 1 prompt of 100 tokens", "logits, 1 prompt of 100 tokens, in float32"} <= {
        check.name for check in report.checks
    }


@pytest.mark.slow
def test_a_wrong_scale_fails(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="w8a8")
    tensors = load_file(tmp_path / "out/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 1.25
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    assert "codes" in failed(checked(tmp_path / "out", llama))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_computes_in_vllm_what_peft_computes(llama: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ranks = {"down_proj": 12}  # more than `r`
    peft = get_peft_model(base, LoraConfig(r=4, rank_pattern=ranks, target_modules=["q_proj", "down_proj"]))
    for name, parameter in peft.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.05 if "lora_" in name else parameter
    peft.save_pretrained(tmp_path / "adapter")
    report = checked(llama, adapter=tmp_path / "adapter")
    assert report.exit_code == 0, report.lines()


@pytest.mark.parametrize("config", [None, "{", json.dumps({"peft_type": "LORA", "r": "4"})])
def test_what_is_no_adapter_of_the_model_is_refused_before_vllm_runs(config: str | None, tmp_path: Path) -> None:
    folder, adapter = save_tiny("llama", tmp_path / "llama"), tmp_path / "adapter"
    adapter.mkdir()
    if config is not None:
        (adapter / "adapter_config.json").write_text(config)
    with opened(folder, None, adapter) as model, pytest.raises(InputRefused, match="PEFT cannot apply"):
        model.require_adapter()


def with_fields(model: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(model, target)
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, {"rms_norm_eps": 2e-6}], ids=str
)
def test_settings_that_are_not_the_references_fail(fields: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    found = failed(checked(with_fields(llama, tmp_path / "other", **fields), llama))
    assert "logits, 1 prompt of 100 tokens, in float32" in found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wider", "quantized"])
def test_a_folder_is_its_reference_rounded_to_its_own_types(kind: str, llama: Path, tmp_path: Path) -> None:
    if kind == "wider":
        to_hf(llama, tmp_path / "reference", dtype="float32")
        tensors = load_file(tmp_path / "reference/model.safetensors")
        tensors = {name: tensor * 1.0001 for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "reference/model.safetensors", {"format": "pt"})
        to_hf(tmp_path / "reference", tmp_path / "out", dtype="bfloat16")
    else:
        quantize(llama, tmp_path / "reference", scheme="fp8-dynamic")
        to_hf(tmp_path / "reference", tmp_path / "out", quant="dequantize")
    report = checked(tmp_path / "out", tmp_path / "reference")
    assert report.exit_code == 0, report.lines()


def in_vllm(folder: Path, reference: Path, ends: list[int], ids: list[list[list[int]]]) -> list[str]:
    """Names of the checks that fail of a folder that ends at tokens, and whose first text has ids."""
    with opened(folder, reference, None) as model:
        checks = VllmChecks(Client("vllm", ""), model)
        answer = {"ends": ends, "ids": ids, "versions": {}, "dtype": "float32"}
        found = [checks._ends(answer), checks._ids(["ab"], ids)]
    return [check.name for check in found if check.verdict == "fail"]


def test_tokens_and_ends_are_those_of_the_reference(tmp_path: Path) -> None:
    folder = save_letters(save_tiny("llama", tmp_path / "llama"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    tokenizer = load_tokenizer(folder)
    ids = [[tokenizer("ab")["input_ids"]] * 2]
    assert in_vllm(folder, folder, [2, 7], ids) == []
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "generation_config.json").write_text('{"eos_token_id": 2}')
    state = json.loads((other / "tokenizer.json").read_text())
    words = state["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(state))
    assert in_vllm(folder, other, [2, 7], ids) == ["end tokens", "tokens of texts"]
    assert in_vllm(folder, other, [2], ids) == ["tokens of texts"]
    assert in_vllm(folder, folder, [2], ids) == ["end tokens"]


def test_codes_of_activations_are_those_of_the_scheme() -> None:
    row = torch.tensor([[127.0, -3.0, 2.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(rounded_activations(row, "int", 0), torch.tensor([[127.0, -3.0, 2.0, 0.0], [0.0] * 4]))
    assert torch.equal(rounded_activations(torch.tensor([[448.0, 17.0]]), "float", 0), torch.tensor([[448.0, 16.0]]))
    parts = rounded_activations(torch.tensor([[127.0, 2.4, 1.27, 0.024]]), "int", 2)
    assert torch.allclose(parts, torch.tensor([[127.0, 2.0, 1.27, 0.02]]))


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16", "w8a8", "fp8-dynamic", "fp8-block"])
def test_which_schemes_round_activations(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (activation_rounding(settings) is None) == scheme.endswith("a16")


def test_other_roundings_of_activations_are_refused(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="mxfp4")
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    with pytest.raises(UnsupportedInput, match="activations are rounded in a way") as error:
        activation_rounding(settings)
    assert "--reference" in str(error.value.hint)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ],
    ids=str,
)
def test_roundings_of_other_programs_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInput, match="activations are rounded in a way") as error:
        activation_rounding(settings)
    assert "--quant dequantize" in str(error.value.hint)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clients": ["vllm", "genai"]}, "`vllm` opens Hugging Face folders, other clients do not"),
        ({"suite": "full"}, "`--suite` applies to graphs, and vLLM opens none"),
        ({"method": "structure"}, "`--method` applies to graphs, and vLLM opens none"),
        ({"low_memory": True}, "`--low-memory` applies to graphs, and vLLM opens none"),
        ({"threads": 2}, "`--provider, --threads or --timeout` applies to graphs, and vLLM opens none"),
    ],
)
def test_options_of_graphs_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageProblem) as error:
        verify(save_tiny("llama", tmp_path / "llama"), **{"clients": "vllm", **options})
    assert error.value.message == problem
    assert error.value.hint


def test_without_the_package_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="the client `vllm` is not installed") as error:
        verify(save_tiny("llama", tmp_path / "llama"), clients="vllm", pythons=f"vllm={sys.executable}")
    assert "pip install vllm" in str(error.value.hint)
