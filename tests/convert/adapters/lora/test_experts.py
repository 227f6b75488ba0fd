"""Adapters of expert weights against PEFT's merge in float64: fused and one by one, in the adapter and in the base."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput
from tests.builders.lora_models import Case, State, assert_equal, causal_lm, shake, train

PLAIN: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 10, "head_dim": 8},
    "olmoe": {"num_experts": 3},
    "granitemoe": {"num_local_experts": 3},
    "gpt_oss": {
        "num_local_experts": 3,
        "head_dim": 8,
        "intermediate_size": 16,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
    },
    "llama4_text": {
        "num_local_experts": 3,
        "head_dim": 8,
        "intermediate_size_mlp": 20,
        "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1,
    },
}
"""Files with one tensor per expert; files with fused ones under other names; fused ones stored [E, in, out]."""

WEIGHTS = "model.safetensors"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Case]:
    """`trained(model_type, …)` is a model with adapted experts, and PEFT's merge of it."""

    def make(model_type: str, dtype: torch.dtype = torch.float32, changes: Any = None, **fields: Any) -> Case:
        model = causal_lm(model_type, dtype, **(PLAIN | FAMILIES[model_type] | (changes or {})))
        return train(model, tmp_path, **{"target_modules": [], "target_parameters": BOTH, **fields})

    return make


def rewrite(file: Path, change: Callable[[State], State]) -> None:
    """Replaces the tensors of a file."""
    save_file({name: one.contiguous() for name, one in change(load_file(file)).items()}, file)


def reconfigure(case: Case, **fields: Any) -> None:
    """Sets fields of the adapter's config; None removes one."""
    path = case.adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def fused(state: State) -> State:
    """The tensors of a Mixtral file as transformers 5 holds them."""
    result = {name: one for name, one in state.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        each = [[state[f"{prefix}.{index}.{part}.weight"] for part in ("w1", "w3", "w2")] for index in range(3)]
        target = f"model.layers.{layer}.mlp.experts"
        result[f"{target}.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in each])
        result[f"{target}.down_proj"] = torch.stack([parts[2] for parts in each])
    return result


@pytest.mark.quick_rows("olmoe")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_equals_peft(model_type: str, trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained(model_type, lora_alpha=3, use_rslora=model_type == "olmoe")
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
@pytest.mark.parametrize("target", BOTH)
def test_one_parameter_alone_is_not_taken_for_the_other(
    target: str, trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained("mixtral", target_parameters=[target])
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def test_biases_of_experts_routers_and_attention_go_along(trained: Callable[..., Case], tmp_path: Path) -> None:
    targets = [*BOTH, "experts.gate_up_proj_bias", "experts.down_proj_bias", "router.weight"]
    case = trained("gpt_oss", target_modules=["q_proj"], target_parameters=targets)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_rank_and_alpha_patterns_name_parameters(trained: Callable[..., Case], tmp_path: Path) -> None:
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {r".*\.down_proj": 5}}
    case = trained("qwen3_moe", **patterns)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_a_base_with_fused_experts_equals_one_without(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("mixtral")
    rewrite(case.base / "model.safetensors", fused)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", fused(case.exact))


@pytest.mark.slow
def test_fused_experts_in_bfloat16_are_rounded_once(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("llama4_text", torch.bfloat16)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def per_expert(base: Path, rank: int = 2) -> tuple[State, State]:
    """An adapter of each expert as transformers 4 has them, and the merged state in float64."""
    torch.manual_seed(3)
    state, factors = load_file(base / "model.safetensors"), State()
    exact = {name: one.double() for name, one in state.items()}
    for name, weight in state.items():
        if ".experts." in name and ".2." not in name.partition(".experts.")[2]:
            a, b = torch.randn(rank, weight.shape[1]), torch.randn(weight.shape[0], rank)
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            exact[name] += 4 * b.double() @ a.double()
    return factors, exact


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [True, False])
def test_an_adapter_of_single_experts_fits_both_kinds_of_base(
    is_fused: bool, trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained("mixtral")
    factors, exact = per_expert(case.base)
    save_file(factors, case.adapter / "adapter_model.safetensors")
    reconfigure(case, r=2, lora_alpha=8, target_parameters=None, target_modules=["w1", "w2", "w3"])
    if is_fused:
        rewrite(case.base / "model.safetensors", fused)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", fused(exact) if is_fused else exact)


def mark(layout: str) -> dict[str, Any]:
    """The fields of an adapter that Unsloth trained since September 2026."""
    return {"lora_B_layout": layout, "unsloth_fused_expert_lora": {"version": 1, "lora_B_layout": layout}}


def mark_each(gate_up: str, down: str) -> dict[str, Any]:
    """The fields where the parameters of one adapter differ."""
    rows = {"gate_up_proj": {"lora_B_layout": gate_up}, "down_proj": {"lora_B_layout": down}}
    return {"unsloth_fused_expert_lora": {"version": 1, "parameters": rows}}


GROUPED, RANKS, OLD = "grouped_by_expert", "rank_major", {"auto_mapping": {"unsloth_fixed": True}}
MARKS: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "the older mark": (OLD, (True, True)),
    "grouped by expert": (mark(GROUPED), (True, True)),
    "rank by rank": (mark(RANKS), (False, False)),
    "the newer mark wins": (OLD | mark(RANKS), (False, False)),
    "both marks": (OLD | mark(GROUPED), (True, True)),
    "gate and up grouped": (mark_each(GROUPED, RANKS), (True, False)),
    "down grouped": (OLD | mark_each(RANKS, GROUPED), (False, True)),
}
"""The fields of a config, and whether the columns of B of gate_up_proj and down_proj are then those of one expert."""


@pytest.mark.quick_rows("the newer mark wins", "down grouped")
@pytest.mark.parametrize(("fields", "grouped"), MARKS.values(), ids=MARKS)
def test_unsloths_order_of_columns_is_told_by_its_mark(
    fields: dict[str, Any], grouped: tuple[bool, bool], trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained("qwen3_moe")

    def together(state: State) -> State:
        def columns(name: str, b: torch.Tensor) -> torch.Tensor:
            changed = "lora_B" in name and grouped[0 if len(b) == 20 else 1]  # gate and up of width 10; 16 are down's
            return b.reshape(len(b), -1, 3).transpose(1, 2).reshape(len(b), -1) if changed else b

        return {name: columns(name, one) for name, one in state.items()}

    rewrite(case.adapter / "adapter_model.safetensors", together)
    reconfigure(case, **fields)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def test_an_order_of_columns_without_a_meaning_is_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("qwen3_moe")
    reconfigure(case, **mark("by_column"))
    with pytest.raises(UnsupportedInput, match="unknown `lora_B_layout` 'by_column'"):
        merge_lora(case.base, [case.adapter], tmp_path / "out")


def old_layout(state: State) -> State:
    """The factors as PEFT 0.18 has them: of the transposed matrix, for experts stored [E, out, in]."""
    result = {}
    for name, a in state.items():
        if "lora_A" in name:
            b = state[name.replace("lora_A", "lora_B")]
            result[name] = b.reshape(len(b), -1, 3).permute(2, 1, 0).reshape(-1, len(b))
            result[name.replace("lora_A", "lora_B")] = (
                a.reshape(3, -1, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
            )
    return result


@pytest.mark.quick_rows("True")
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_layout_of_old_versions_is_told_by_the_shapes(
    is_fused: bool, trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained("mixtral")
    rewrite(case.adapter / "adapter_model.safetensors", old_layout)
    if is_fused:
        rewrite(case.base / "model.safetensors", fused)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", fused(case.exact) if is_fused else case.exact)


SQUARE = {"intermediate_size": 16}


@pytest.mark.quick_rows("0.18.1-old_layout")
@pytest.mark.parametrize(("version", "change"), [("0.18.1", old_layout), ("0.19.0", None)])
def test_square_experts_are_told_by_the_version(
    version: str, change: Any, trained: Callable[..., Case], tmp_path: Path
) -> None:
    case = trained("mixtral", changes=SQUARE, target_parameters=BOTH[1:])
    if change:
        rewrite(case.adapter / "adapter_model.safetensors", change)
    reconfigure(case, peft_version=version)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_square_experts_are_told_by_the_other_parameter(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("mixtral", changes=SQUARE)
    rewrite(case.adapter / "adapter_model.safetensors", old_layout)
    reconfigure(case, peft_version=None)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


def refusal(case: Case, out: Path) -> LlmconvError:
    """The error, after which there is no output."""
    with pytest.raises(LlmconvError) as caught:
        merge_lora(case.base, [case.adapter], out)
    assert not out.exists() and caught.value.hint
    return caught.value


def test_square_experts_without_a_version_are_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("mixtral", changes=SQUARE, target_parameters=BOTH[1:])
    reconfigure(case, peft_version=None)
    error = refusal(case, tmp_path / "out")
    assert isinstance(error, UnsupportedInput) and "peft_version" in error.hint


def test_another_number_of_experts_is_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("qwen3_moe", r=3)
    names = [name for name in load_file(case.base / "model.safetensors") if ".experts.2." in name]
    rewrite(case.base / "model.safetensors", lambda state: {key: state[key] for key in state if key not in names})
    assert isinstance(refusal(case, tmp_path / "out"), MalformedInput)


def test_other_sizes_of_experts_name_both(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("qwen3_moe")

    def longer(state: State) -> State:
        return {name: torch.cat([one, one]) if "base_layer.lora_B" in name else one for name, one in state.items()}

    rewrite(case.adapter / "adapter_model.safetensors", longer)
    assert "[40, 16]" in refusal(case, tmp_path / "out").message


def test_wrappers_of_parameters_with_unknown_names_are_refused(trained: Callable[..., Case], tmp_path: Path) -> None:
    case = trained("qwen3_moe")
    reconfigure(case, target_parameters=["experts.alpha", "experts.beta"])
    assert "alpha, beta" in refusal(case, tmp_path / "out").message


@pytest.mark.slow
def test_lists_of_layers_as_unsloth_makes_of_gpt_oss_find_the_fused_experts(tmp_path: Path) -> None:
    model = causal_lm("gpt_oss", **{**PLAIN, **FAMILIES["gpt_oss"]})
    model.save_pretrained(tmp_path / "base")
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):  # the second is square
            layers = torch.nn.ModuleList(torch.nn.Linear(*weight.shape) for weight in getattr(layer.mlp.experts, name))
            for linear, weight in zip(layers, getattr(layer.mlp.experts, name), strict=True):
                linear.weight.data = weight.detach().t().contiguous()
            setattr(layer.mlp.experts, f"{name}s", layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=r".*(gate_up|down)_projs\.\d+"))
    shake(peft_model)
    peft_model.save_pretrained(tmp_path / "adapter")
    merged = peft_model.double().merge_and_unload()
    exact = {name: value.double() for name, value in load_file(tmp_path / "base/model.safetensors").items()}
    for number, layer in enumerate(merged.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weights = [linear.weight.detach().t() for linear in getattr(layer.mlp.experts, f"{name}s")]
            exact[f"model.layers.{number}.mlp.experts.{name}"] = torch.stack(weights)
    merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    assert_equal(tmp_path / "out", exact)


@pytest.mark.parametrize("rank", [2, 6], ids=["one rank", "experts of a smaller rank"])
@pytest.mark.parametrize("fused", [False, True], ids=["experts one by one", "experts in one tensor"])
def test_factors_of_grouped_experts_are_those_of_gate_up_and_down(fused: bool, rank: int, tmp_path: Path) -> None:
    model = causal_lm("qwen3_moe", **{**PLAIN, **FAMILIES["qwen3_moe"]})
    model.save_pretrained(tmp_path / "base")
    if fused:
        save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "base" / WEIGHTS)
    base, experts = load_file(tmp_path / "base" / WEIGHTS), "model.layers.0.mlp.experts"
    shapes = {"gate_and_up_A": (3, 16, 2), "gate_and_up_B": (3, 2, 20), "down_A": (3, 10, 2), "down_B": (3, 2, 16)}
    factors = {name: torch.randn(shape) for name, shape in shapes.items()}
    up, down = (
        4 * (factors[f"{name}_A"].double() @ factors[f"{name}_B"].double()).mT for name in ("gate_and_up", "down")
    )
    exact = {name: value.double() for name, value in base.items()}
    if fused:
        exact[f"{experts}.gate_up_proj"] += up
        exact[f"{experts}.down_proj"] += down
    for expert in range(0 if fused else 3):
        for name, change in (("gate_proj", up[:, :10]), ("up_proj", up[:, 10:]), ("down_proj", down)):
            exact[f"{experts}.{expert}.{name}.weight"] += change[expert]
    (tmp_path / "adapter").mkdir()
    named = {f"base_model.model.{experts}.lora_{name}": value for name, value in factors.items()}
    save_file(named, tmp_path / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["experts"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    if rank != 2:
        (tmp_path / "adapter/automodel_peft_config.json").write_text('{"moe_rank_scaling": true}')
    merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    assert_equal(tmp_path / "out", exact)


def test_grouped_experts_of_two_dimensions_are_refused(tmp_path: Path) -> None:
    causal_lm("qwen3_moe", **{**PLAIN, **FAMILIES["qwen3_moe"]}).save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    named = {f"base_model.model.model.layers.0.mlp.experts.lora_down_{part}": torch.ones(3, 2) for part in "AB"}
    save_file(named, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    with pytest.raises(MalformedInput, match="three dimensions"):
        merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
