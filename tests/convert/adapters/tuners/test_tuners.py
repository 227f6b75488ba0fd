"""Every kind of adapter against PEFT's own merge in float64: families, layers and the variants of each config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.convert.adapters import edits
from llmconv.convert.adapters.tuner_kinds import LONG, TorchRandom, first_of_permutation
from llmconv.errors import UnsupportedInput, UsageProblem
from tests.builders.tuned_models import (
    OPT,
    in_float64,
    layers_of,
    merged_by_peft,
    train,
    train_causal,
    train_layers,
    wrong,
)
from tests.conftest import save_tiny

LINEAR = ["linear", "square"]
CONV = [*LINEAR, "conv"]
CONFIGS: dict[str, Callable[..., peft.PeftConfig]] = {
    "adalora": lambda **more: peft.AdaLoraConfig(**{"total_step": 10, "init_r": 4, "lora_alpha": 6, **more}),
    "loha": lambda **more: peft.LoHaConfig(**{"r": 4, "alpha": 6, "init_weights": False, **more}),
    "lokr": lambda **more: peft.LoKrConfig(**{"r": 2, "alpha": 6, "init_weights": False, **more}),
    "ia3": lambda **more: peft.IA3Config(**{"feedforward_modules": [], **more}),
    "vera": lambda **more: peft.VeraConfig(**{"r": 4, **more}),
    "oft": lambda **more: peft.OFTConfig(**{"oft_block_size": 4, **more}),
    "boft": lambda **more: peft.BOFTConfig(**{"boft_block_size": 4, **more}),
    "fourierft": lambda **more: peft.FourierFTConfig(**{"n_frequency": 30, **more}),
    "hra": lambda **more: peft.HRAConfig(**{"r": 4, **more}),
    "miss": lambda **more: peft.MissConfig(**{"r": 8, **more}),
    "c3a": lambda **more: peft.C3AConfig(**{"block_size": 4, **more}),
    "road": lambda **more: peft.RoadConfig(**{"group_size": 4, **more}),
    "delora": lambda **more: peft.DeloraConfig(**{"r": 4, **more}),
    "gralora": lambda **more: peft.GraloraConfig(**{"r": 4, "alpha": 6, **more}),
    "hira": lambda **more: peft.HiraConfig(**{"r": 4, **more}),
    "vblora": lambda **more: peft.VBLoRAConfig(**{"r": 4, "num_vectors": 30, "vector_length": 4, **more}),
    "randlora": lambda **more: peft.RandLoraConfig(**{"r": 5, "randlora_alpha": 3, **more}),
    "shira": lambda **more: peft.ShiraConfig(**{"r": 3, "random_seed": 1, **more}),
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("adalora", {"target_modules": LINEAR}),
    ("adalora", {"target_modules": ["conv"]}),
    ("loha", {"target_modules": [*CONV, "conv1"], "rank_dropout": 0.5}),
    ("loha", {"target_modules": ["conv", "conv1"], "use_effective_conv2d": True}),
    ("loha", {"target_modules": LINEAR, "rank_pattern": {"square": 7}, "alpha_pattern": {"lin.*": 3}}),
    ("lokr", {"target_modules": [*CONV, "conv1"], "rank_dropout_scale": True}),
    ("lokr", {"target_modules": LINEAR, "decompose_both": True, "r": 1}),
    ("lokr", {"target_modules": LINEAR, "decompose_factor": 3, "r": 100}),
    ("lokr", {"target_modules": ["conv"], "use_effective_conv2d": True, "r": 1}),
    ("lokr", {"target_modules": LINEAR, "rank_pattern": {"square": 1}, "alpha_pattern": {"square": 5}}),
    ("ia3", {"target_modules": LINEAR}),
    ("ia3", {"target_modules": LINEAR, "feedforward_modules": ["linear"]}),
    ("vera", {"target_modules": LINEAR}),
    ("vera", {"target_modules": LINEAR, "save_projection": False, "projection_prng_key": 2**40 + 5}),
    ("oft", {"target_modules": [*LINEAR, "embedding"]}),
    ("oft", {"target_modules": LINEAR, "use_cayley_neumann": False, "oft_block_size": 12}),
    *(("oft", {"target_modules": LINEAR, "num_cayley_neumann_terms": terms}) for terms in (1, 2, 3, 4, 7)),
    ("oft", {"target_modules": CONV, "oft_block_size": 6, "bias": "oft_only"}),
    ("oft", {"target_modules": LINEAR, "coft": True, "eps": 0.3}),
    ("oft", {"target_modules": LINEAR, "block_share": True}),
    ("oft", {"target_modules": LINEAR, "oft_block_size": 0, "r": 2}),
    ("boft", {"target_modules": LINEAR}),
    ("boft", {"target_modules": CONV, "boft_block_size": 0, "boft_block_num": 6}),
    ("fourierft", {"target_modules": LINEAR, "scaling": 7.5, "random_loc_seed": 3}),
    ("fourierft", {"target_modules": LINEAR, "n_frequency_pattern": {"square": 576}}),
    ("hra", {"target_modules": CONV}),
    ("hra", {"target_modules": LINEAR, "apply_GS": True, "modules_to_save": ["norm"]}),
    ("hra", {"target_modules": LINEAR, "bias": "all"}),
    ("miss", {"target_modules": LINEAR}),
    ("miss", {"target_modules": LINEAR, "r": 7, "init_weights": False}),  # the last block is smaller
    ("miss", {"target_modules": LINEAR, "init_weights": "mini", "mini_r": 12}),
    ("miss", {"target_modules": LINEAR, "init_weights": "bat", "r": 12}),
    ("c3a", {"target_modules": LINEAR}),
    ("c3a", {"target_modules": LINEAR, "block_size": 12, "block_size_pattern": {"square": 6}}),
    *(("road", {"target_modules": LINEAR, "variant": f"road_{number}", "group_size": 12}) for number in (1, 2, 4)),
    ("delora", {"target_modules": LINEAR}),
    ("delora", {"target_modules": LINEAR, "rank_pattern": {"square": 7}, "lambda_pattern": {"linear": 3}}),
    ("gralora", {"target_modules": LINEAR}),
    ("gralora", {"target_modules": LINEAR, "gralora_k": 4, "r": 8, "hybrid_r": 3}),
    ("hira", {"target_modules": [*CONV, "conv1", "embedding"]}),
    ("hira", {"target_modules": LINEAR, "rank_pattern": {"square": 7}}),
    ("vblora", {"target_modules": LINEAR}),
    ("randlora", {"target_modules": LINEAR}),
    ("randlora", {"target_modules": ["linear"], "sparse": True, "r": 6}),
    ("shira", {"target_modules": LINEAR}),
]


@pytest.mark.slow_rows(
    "oft-{'target_modules': ['linear', 'square', 'conv'], 'oft_block_size': 6, 'bias': 'oft_only'}",
    "oft-{'target_modules': ['linear', 'square'], 'oft_block_size': 0, 'r': 2}",
    "boft-{'target_modules': ['linear', 'square']}",
)
@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
@pytest.mark.parametrize(("kind", "fields"), VARIANTS, ids=str)
def test_every_variant_of_a_config_is_merged_as_peft_does(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    base, adapter, exact = train_layers(tmp_path, CONFIGS[kind](**fields))
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert merge.merged
    warning, *others = merge.warnings  # transformers has no model of this type
    assert others in ([], ["the merge changes nothing: every weight is that of the base"])  # OFT of one Neumann term
    assert "only checked by generic rules" in warning and "model of type `layers`" in warning
    assert not wrong(tmp_path / "out", exact)


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_an_oft_of_before_peft_0_18_ends_with_twice_the_last_power(terms: int, tmp_path: Path) -> None:
    """I + 2Q + … + 2Qⁿ⁻¹ (PEFT 0.17 `tuners/oft/layer.py`); such adapters state no `peft_version`."""
    base, adapter, _ = train_layers(tmp_path, CONFIGS["oft"](target_modules=LINEAR, num_cayley_neumann_terms=terms))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_version": None}))
    merge_lora(base, [adapter], tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    for name, upper in load_file(adapter / "adapter_model.safetensors").items():
        weight = f"{name.removeprefix('base_model.model.').removesuffix('.oft_R.weight')}.weight"
        skew = torch.zeros(len(upper), 4, 4, dtype=torch.float64)
        skew[:, *torch.triu_indices(4, 4, 1)] = upper.double()
        skew -= skew.mT.clone()
        series = torch.eye(4).double() + 2 * sum(torch.linalg.matrix_power(skew, power) for power in range(1, terms))
        blocks = before[weight].double().reshape(-1, len(upper), 4)
        exact = torch.einsum("obi,bji->obj", blocks, series).reshape(before[weight].shape)
        torch.testing.assert_close(after[weight].double(), exact, rtol=1e-6, atol=1e-6)


def test_the_largest_weights_of_vblora_alone_are_enough(tmp_path: Path) -> None:
    """PEFT turns them into logits of float32 and back, so that its merge is not exact."""
    config = CONFIGS["vblora"](target_modules=LINEAR, topk=3, save_only_topk_weights=True)
    base, adapter, exact = train_layers(tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    found, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    for name in ("linear.weight", "square.weight"):
        torch.testing.assert_close(found[name].double(), exact[name], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(found[name], before[name], rtol=1e-3)


@pytest.mark.parametrize("form", [True, "bat"])
def test_a_bone_is_a_miss_of_another_name(form: bool | str, tmp_path: Path) -> None:
    """PEFT up to 0.18, `tuners/bone/layer.py`: the same layers under another name."""
    base, adapter, exact = train_layers(tmp_path, CONFIGS["miss"](target_modules=LINEAR, init_weights=form, r=12))
    file, config = adapter / "adapter_model.safetensors", json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "BONE"}))
    save_file({name.replace("miss_block", "bone_block"): value for name, value in load_file(file).items()}, file)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


def test_trained_tokens_alone_replace_rows(tmp_path: Path) -> None:
    config = peft.TrainableTokensConfig(target_modules=["embedding"], token_indices=[7, 1])
    base, adapter, exact = train_layers(tmp_path, config)
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact) and len(merge.warnings) == 1
    assert not torch.equal(exact["embedding.weight"][7], layers_of(base).embedding.weight[7].double())
    with pytest.raises(UsageProblem, match="--alpha"):
        merge_lora(base, [adapter], tmp_path / "other", alpha=4)


def test_trained_tokens_of_a_tied_model_are_in_its_head_too(tiny: Any, tmp_path: Path) -> None:
    config = peft.TrainableTokensConfig(target_modules=["wte"], token_indices=[7, 1])
    base, adapter, exact = train_causal(tiny("gpt2"), tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*have invalid shape")  # of a pruned module, as of one that was not gathered
def test_a_module_that_adalora_pruned_away_keeps_its_weight(tmp_path: Path) -> None:
    base, adapter, _ = train_layers(tmp_path, CONFIGS["adalora"](target_modules=LINEAR))
    model = peft.PeftModel.from_pretrained(layers_of(base), adapter)
    kept = {"linear": [False] * 4, "square": [True, False, True, False]}
    model.peft_config["default"].rank_pattern = {f"{name}.lora_E.default": mask for name, mask in kept.items()}
    model.save_pretrained(adapter)
    assert load_file(adapter / "adapter_model.safetensors")["base_model.model.linear.lora_A"].shape == (0, 24)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", merged_by_peft(layers_of(base).double(), adapter))


BAT = {"init_weights": "bat", "r": 12}


@pytest.mark.quick_rows("road-{}", "gralora-{}", f"miss-{BAT}")
@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in CONFIGS), ("miss", BAT)], ids=str)
def test_an_update_does_not_depend_on_the_rows_that_are_asked_for(
    kind: str, more: dict[str, Any], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(edits, "TILE_ELEMENTS", 7 * 24)  # rows of a `Layers`
    base, adapter, exact = train_layers(tmp_path, CONFIGS[kind](target_modules=LINEAR, **more))
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


PAIRS = {**CONFIGS, "dora": lambda **more: peft.LoraConfig(**{"r": 4, "use_dora": True, **more})}
PAIRS["lora"] = lambda **more: peft.LoraConfig(**{"r": 4, **more})


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly_factor")
@pytest.mark.quick_rows("dora", "ia3", "lora")
@pytest.mark.parametrize("kind", PAIRS)
def test_two_adapters_are_what_peft_computes_or_the_merge_says_that_they_are_not(kind: str, tmp_path: Path) -> None:
    base, first, _ = train_layers(tmp_path, PAIRS[kind](target_modules=LINEAR))
    second = train(layers_of(base), tmp_path / "second", PAIRS[kind](target_modules=LINEAR), seed=7)
    both = peft.PeftModel.from_pretrained(layers_of(base).double(), first)
    both.load_adapter(
        second,
        "second",
    )
    with in_float64():
        exact = dict(both.double().merge_and_unload(adapter_names=["default", "second"]).state_dict())
    merge = merge_lora(base, [first, second], tmp_path / "out")
    noted = any("is not what PEFT computes with both active" in warning for warning in merge.warnings)
    found = load_file(tmp_path / "out" / "model.safetensors")
    differs = any(not torch.allclose(found[name].double(), exact[name], atol=1e-4) for name in found)
    assert noted == differs


@pytest.mark.slow_rows(*(f"{kind}-dtype1" for kind in CONFIGS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_half_precision_is_rounded_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter, exact = train_layers(tmp_path, CONFIGS[kind](target_modules=LINEAR), dtype)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


@pytest.mark.quick_rows("ia3")
@pytest.mark.parametrize("kind", ["adalora", "ia3", "vera", "fourierft", "gralora", "hira", "vblora", "randlora"])
def test_conv1d_weights_are_stored_the_other_way_round(kind: str, tiny: Any, tmp_path: Path) -> None:
    config = CONFIGS[kind](target_modules=["c_attn", "c_proj", "c_fc"])
    base, adapter, exact = train_causal(tiny("gpt2"), tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_biases_equals_peft(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind](target_modules=["q_proj", "out_proj", "fc1", "fc2"])
    base, adapter, exact = train_causal(save_tiny("opt", tmp_path / "opt", **OPT), tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_llama_equals_peft(kind: str, tiny: Any, tmp_path: Path) -> None:
    config = CONFIGS[kind](target_modules=["q_proj", "v_proj", "down_proj"])
    base, adapter, exact = train_causal(tiny("llama"), tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "norms"), [("llama", ["input_layernorm", "norm"]), ("gpt2", ["ln_1", "ln_f"])])
def test_tuned_norms_replace_the_bases(model_type: str, norms: list[str], tiny: Any, tmp_path: Path) -> None:
    base, adapter, exact = train_causal(tiny(model_type), tmp_path, peft.LNTuningConfig(target_modules=norms))
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert len(merge.replaced) >= 5 and not merge.merged
    assert not wrong(tmp_path / "out", exact)


def test_butterfly_factors_that_need_a_gpu_to_train_are_merged(monkeypatch: Any, tmp_path: Path) -> None:
    """PEFT's only way to several factors is a CUDA kernel; what it computes is a block-diagonal matrix for each."""
    monkeypatch.setattr(peft.tuners.boft.layer, "get_fbd_cuda", BlockDiagonal)
    config = CONFIGS["boft"](target_modules=["square"], boft_block_size=2, boft_n_butterfly_factor=3)
    base, adapter, exact = train_layers(tmp_path, config)
    merge_lora(base, [adapter], tmp_path / "out")
    assert not wrong(tmp_path / "out", exact)


class BlockDiagonal:
    """In place of the kernel of `peft/tuners/boft/fbd`."""

    def forward(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """factors×blocks×k×k to factors×(blocks·k)×(blocks·k)."""
        factors = [torch.block_diag(*factor) for factor in blocks]  # type: ignore[no-untyped-call]
        return [torch.stack(factors)]


def test_the_weight_scales_the_whole_change(tmp_path: Path) -> None:
    base, adapter, exact = train_layers(tmp_path, CONFIGS["oft"](target_modules=LINEAR))
    merge_lora(base, [adapter], tmp_path / "out", weights=[0.25])
    plain = {name: value.double() for name, value in load_file(base / "model.safetensors").items()}
    assert not wrong(tmp_path / "out", {name: plain[name] + 0.25 * (exact[name] - plain[name]) for name in plain})


def test_what_torch_draws_from_a_seed_is_drawn_without_it() -> None:
    for size, count, seed in [(10, 10, 0), (1000, 77, 777), (10**6, 500, 2**33 + 1)]:
        permutation = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        assert np.array_equal(first_of_permutation(size, count, seed), permutation[:count].numpy())
    generator, draws = torch.Generator().manual_seed(3), TorchRandom(3)
    for shape in [(4, 17), (24, 4), (33, 65)]:
        expected = torch.empty(shape).uniform_(-0.7, 0.7, generator=generator)
        assert np.array_equal(draws.uniform(shape, -0.7, 0.7), expected.numpy())


def test_permutations_that_torch_draws_in_another_way_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match="permutation"):
        first_of_permutation(LONG, 5, 0)
