"""Adapters of other kinds than LoRA that must be refused: one clear error each, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmconv.convert import merge_lora
from llmconv.convert.adapters.tuner_kinds import TUNERS, UNMERGEABLE
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from tests.builders.hf_models import SMALLEST, smallest_shapes

Q = "layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.model.{Q}"
BANK, SIDES = "vblora_vector_bank", ("randlora_A", "randlora_B")  # of all modules
GOOD: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "ADALORA": ({"lora_alpha": 4, "init_r": 2}, {"lora_A": (2, 4), "lora_B": (6, 2), "lora_E": (2, 1)}),
    "LOHA": (
        {"r": 2, "alpha": 4},
        {"hada_w1_a": (6, 2), "hada_w1_b": (2, 4), "hada_w2_a": (6, 2), "hada_w2_b": (2, 4)},
    ),
    "LOKR": ({"r": 2, "alpha": 4}, {"lokr_w1": (2, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 2)}),
    "IA3": ({}, {"ia3_l": (6, 1)}),
    "VERA": ({"r": 2}, {"vera_lambda_b": (6,), "vera_lambda_d": (2,)}),
    "OFT": ({"oft_block_size": 2}, {"oft_R.weight": (2, 1)}),
    "BOFT": ({"boft_block_size": 2}, {"boft_R": (1, 2, 2, 2), "boft_s": (6, 1)}),
    "FOURIERFT": ({"n_frequency": 5}, {"fourierft_spectrum": (5,)}),
    "HRA": ({"r": 2}, {"hra_u": (4, 2)}),
    "LN_TUNING": ({}, {"ln_tuning_layers.bias": (6,)}),
    "MISS": ({"r": 2}, {"miss_block": (2, 6)}),
    "BONE": ({"r": 2}, {"bone_block": (2, 6)}),
    "C3A": ({"block_size": 2}, {"c3a_kernel": (3, 2, 2)}),
    "ROAD": ({"group_size": 2}, {"road_theta": (3,), "road_alpha": (3,)}),
    "DELORA": ({"r": 2}, {"delora_A": (2, 4), "delora_B": (6, 2), "delora_lambda": (1,), "delora_w_norm": (4,)}),
    "GRALORA": ({"r": 2}, {"gralora_A": (2, 2, 2), "gralora_B": (2, 2, 3)}),
    "HIRA": ({"r": 2}, {"hira_A": (2, 4), "hira_B": (6, 2)}),
    "VBLORA": ({"r": 2, "topk": 1}, {"vblora_logits_A": (2, 2, 3), "vblora_logits_B": (3, 2, 3), BANK: (3, 2)}),
    "RANDLORA": (
        {"r": 2},
        {"randlora_lambda": (2, 2), "randlora_gamma": (2, 4), SIDES[0]: (2, 1, 4), SIDES[1]: (6, 2, 2)},
    ),
    "SHIRA": ({"r": 1}, {"shira_weight": (1,), "shira_indices": (2, 1)}),
}
ATTEMPTS = [
    ("ADALORA", {"lora_A": (3, 4)}, {}, "rank"),
    ("ADALORA", {"lora_E": None}, {}, "lacks `lora_E`"),
    ("ADALORA", {}, {"lora_alpha": 0}, "lora_alpha"),
    ("ADALORA", {"ranknum": (2,)}, {}, "ranknum"),
    ("ADALORA", {}, {"init_r": 10**400}, "init_r"),
    ("ADALORA", {}, {"use_dora": True}, "use_dora"),
    ("ADALORA", {}, {"bias": ["all"]}, "bias"),
    ("LOHA", {"hada_w1_b": (2, 5), "hada_w2_b": (2, 5)}, {}, "[6, 4]"),
    ("LOHA", {"hada_w2_b": (2, 5)}, {}, "in is"),
    ("LOHA", {"hada_w2_b": (2,)}, {}, "hada_w2_b"),
    ("LOHA", {}, {"r": 3}, "rank"),
    ("LOHA", {}, {"alpha": "much"}, "alpha"),
    ("LOHA", {}, {"alpha": float("nan")}, "alpha"),
    ("LOHA", {}, {"rank_pattern": {"q_proj(": 2}}, "q_proj("),
    ("LOHA", {}, {"alpha_pattern": {"q_proj": 0}}, "alpha_pattern"),
    ("LOHA", {}, {"alpha_pattern": [1]}, "alpha_pattern"),
    ("LOKR", {"lokr_w1": (2, 3)}, {}, "[6, 4]"),
    ("LOKR", {"lokr_w1": (2, 2, 1, 1)}, {}, "lokr_w1"),
    ("LOKR", {"lokr_w2_b": None}, {}, "lacks `lokr_w2_b`"),
    ("IA3", {"ia3_l": (5, 1)}, {}, "5×any"),
    ("IA3", {"ia3_l": (2, 4)}, {}, "short side"),
    ("IA3", {"ia3_l": (1, 6, 1, 1)}, {}, "convolution"),
    ("VERA", {"vera_lambda_d": (3,)}, {}, "rank"),
    ("VERA", {}, {"r": 10**12}, "rank"),
    ("VERA", {}, {"projection_prng_key": "x"}, "projection_prng_key"),
    ("OFT", {"oft_R.weight": (3, 1)}, {}, "any×6"),
    ("OFT", {"oft_R.weight": (2, 2)}, {}, "width"),
    ("OFT", {}, {"block_share": True}, "shared"),
    ("OFT", {}, {"num_cayley_neumann_terms": 2.5}, "num_cayley_neumann_terms"),
    ("OFT", {}, {"num_cayley_neumann_terms": 10**9}, "num_cayley_neumann_terms"),
    ("OFT", {}, {"coft": "yes"}, "coft"),
    ("OFT", {"oft_R.weight": None, "oft_r": (2, 3, 3)}, {}, "oft_r`, of an OFT that newer releases"),
    ("OFT", {"oft_R.weight": None, "oft_r.default": (2, 3, 3), "oft_s": (6, 1)}, {}, "newer releases"),
    ("BOFT", {"boft_R": (1, 2, 2, 3)}, {}, "side of a block"),
    ("BOFT", {"boft_R": (3, 2, 2, 2)}, {}, "factors"),
    ("BOFT", {"boft_s": (6, 2)}, {}, "short side"),
    ("FOURIERFT", {}, {"n_frequency": 6}, "frequencies"),
    ("FOURIERFT", {"fourierft_spectrum": (25,)}, {"n_frequency": 25}, "25 frequencies"),
    ("FOURIERFT", {}, {"random_loc_seed": None}, "random_loc_seed"),
    ("HRA", {"hra_u": (5, 2)}, {}, "any×5"),
    ("HRA", {}, {"r": 3}, "rank"),
    ("HRA", {}, {"apply_GS": True}, "hra_u"),
    ("LN_TUNING", {"ln_tuning_layers.bias": (5,)}, {}, "[5]"),
    ("MISS", {"miss_block": (2, 5)}, {}, "5×any"),
    ("MISS", {"miss_block": (2, 4)}, {"init_weights": "mini"}, "2×4"),
    ("MISS", {"miss_block": (3, 2, 2)}, {}, "miss_block"),
    ("MISS", {"miss_block": (2, 3, 3)}, {"init_weights": "bat", "r": 3}, "do not fill"),
    ("BONE", {"bone_block": None}, {}, "no tensors"),
    ("BONE", {"bone_block": (3, 6)}, {}, "rank"),
    ("C3A", {"c3a_kernel": (3, 2, 3)}, {}, "9×6"),
    ("C3A", {"c3a_kernel": (3, 2)}, {}, "c3a_kernel"),
    ("ROAD", {"road_alpha": (2,)}, {}, "angles"),
    ("ROAD", {}, {"variant": "road_3"}, "road_3"),
    ("ROAD", {}, {"group_size": 4}, "groups"),
    ("ROAD", {}, {"group_size": 0}, "group_size"),
    ("DELORA", {"delora_w_norm": (5,)}, {}, "in is"),
    ("DELORA", {"delora_w_norm": None}, {}, "lacks `delora_w_norm`"),
    ("DELORA", {}, {"r": 3}, "rank"),
    ("GRALORA", {}, {"gralora_k": 3}, "blocks"),
    ("GRALORA", {}, {"hybrid_r": 1}, "lacks `gralora_A_general`"),
    ("GRALORA", {"gralora_A": (2, 2, 3), "gralora_B": (2, 3, 3)}, {"r": 3}, "rank 3"),
    ("HIRA", {"hira_B": (6, 3)}, {}, "rank"),
    ("HIRA", {"hira_B": (6, 2, 1, 1)}, {}, "B [6, 2, 1, 1]"),
    ("VBLORA", {BANK: (4, 2)}, {}, "vectors"),
    ("VBLORA", {BANK: None}, {}, "lacks `vblora_vector_bank`"),
    ("VBLORA", {}, {"topk": 4}, "topk"),
    ("VBLORA", {"vblora_logits_B": (2, 2, 3)}, {}, "4×4"),
    ("RANDLORA", dict.fromkeys(SIDES), {}, "save_projection"),
    ("RANDLORA", {SIDES[1]: (5, 2, 2)}, {}, "[5, 2, 2]"),
    ("RANDLORA", {"randlora_gamma": (2, 3)}, {}, "smaller side"),
    ("SHIRA", {"shira_weight": (2,), "shira_indices": (2, 2)}, {}, "twice"),
    ("SHIRA", {"shira_indices": (3, 1)}, {}, "shira_indices"),
    ("SHIRA", {"shira_weight": (2,)}, {}, "elements"),
    ("LN_TUNING", {"other.ln_tuning_layers.weight": (5,)}, {}, "other.weight"),
]


@pytest.fixture
def folders(save_tensors: Callable[..., Path]) -> Callable[..., tuple[Path, Path]]:
    """`folders(kind, changes of shapes, changes of the config)`: a base of one layer, and an adapter of ones."""

    def make(kind: str, shapes: dict[str, Any], fields: dict[str, Any]) -> tuple[Path, Path]:
        good = GOOD.get(kind, ({}, {}))
        tensors = {name: torch.ones(shape) for name, shape in smallest_shapes().items()}
        base = save_tensors("base", tensors, {"config.json": SMALLEST})
        parts = {name: shape for name, shape in {**good[1], **shapes}.items() if shape}
        learned = {
            f"base_model.{name}" if name in (BANK, *SIDES) else f"{PREFIX}.{name}": torch.ones(shape)
            for name, shape in parts.items()
        }
        files = {"adapter_config.json": {"peft_type": kind, **good[0], **fields}}
        return base, save_tensors("adapter", learned, files, weights="adapter_model.safetensors")

    return make


@pytest.mark.parametrize("kind", GOOD)
def test_the_adapters_that_are_spoiled_below_are_good_themselves(kind: str, folders: Any, tmp_path: Path) -> None:
    base, adapter = folders(kind, {}, {})
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert merge.merged or merge.replaced


def test_every_tuner_is_spoiled() -> None:
    assert set(GOOD) == set(TUNERS) == {kind for kind, *_ in ATTEMPTS}


@pytest.mark.parametrize(("kind", "shapes", "fields", "named"), ATTEMPTS, ids=str)
def test_what_does_not_fit_is_named(
    kind: str, shapes: dict[str, Any], fields: dict[str, Any], named: str, folders: Any, tmp_path: Path
) -> None:
    base, adapter = folders(kind, shapes, fields)
    with pytest.raises(LlmconvError) as caught:
        merge_lora(base, [adapter], tmp_path / "out")
    assert named in caught.value.message and caught.value.hint
    assert isinstance(caught.value, InputRefused) and "\n" not in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("kind", [*UNMERGEABLE, "NOVELTY"])
def test_a_kind_without_a_merge_is_refused_by_name(kind: str, folders: Any, tmp_path: Path) -> None:
    base, adapter = folders(kind, {"prompt_embeddings": (2, 2)}, {})
    with pytest.raises(UnsupportedInput, match=f"`peft_type` '{kind}'"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_virtual_tokens_have_another_way(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders("PREFIX_TUNING", {"prompt_embeddings": (2, 2)}, {})
    with pytest.raises(UnsupportedInput) as refused:
        merge_lora(base, [adapter], tmp_path / "out")
    assert "--prefix-tuning" in refused.value.hint


def test_two_adapters_in_one_file_are_refused(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders("HRA", {"hra_u.second": (4, 2)}, {})
    with pytest.raises(MalformedInput, match="twice"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_alpha_is_for_lora(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders("LOHA", {}, {})
    with pytest.raises(UsageProblem, match="--alpha"):
        merge_lora(base, [adapter], tmp_path / "out", alpha=4)


def test_a_missing_weights_file_is_named(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders("LOHA", {}, {})
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputRefused, match="no adapter weights"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_values_that_are_not_finite_are_refused(folders: Any, save_tensors: Any, tmp_path: Path) -> None:
    base, _ = folders("HRA", {}, {})
    bad = {f"{PREFIX}.hra_u": torch.full((4, 2), float("nan"))}
    files = {"adapter_config.json": {"peft_type": "HRA", "r": 2}}
    adapter = save_tensors("bad", bad, files, weights="adapter_model.safetensors")
    with pytest.raises(MalformedInput, match="not finite"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_an_integer_base_is_refused(folders: Any, save_tensors: Any, tmp_path: Path) -> None:
    _, adapter = folders("HRA", {}, {})
    tensors = {f"model.{Q}.weight": torch.ones(6, 4, dtype=torch.int8)}
    base = save_tensors("integers", tensors, {"config.json": {"model_type": "llama"}})
    with pytest.raises(UnsupportedInput, match="int8"):
        merge_lora(base, [adapter], tmp_path / "out")


def test_an_unknown_field_is_reported(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders("HRA", {}, {"use_novelty": True})
    assert "`use_novelty`" in merge_lora(base, [adapter], tmp_path / "out").warnings[0]
