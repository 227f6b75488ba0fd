"""MPT of LLM Foundry: transformers' own class gives its logits, and every option that it does not have is refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MptConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import to_hf
from llmconv.convert.models.config_file import OPTION, TrustedCode, causal_lm_config
from llmconv.convert.opening import open_training
from llmconv.errors import MalformedInput, UnsupportedInput
from tests.builders.mpt_models import CONFIG, IDS, config_with, foundry_logits, random_state, save

FILE = "ep0-ba2-rank0.pt"
GENUINE = "mpt_alibi_mha_native"


ROPE = {"alibi": False, "rope": True, "attn_impl": "flash"}


@pytest.mark.parametrize(
    ("attention", "given", "own"), [(ROPE, None, True), (None, None, False), (None, Path("code"), True)]
)
def test_its_own_code_computes_what_transformers_cannot(
    attention: dict[str, Any] | None, given: Path | None, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = TrustedCode(given, (tmp_path,))
    stored = config_with(attention, auto_map={"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"})
    found = causal_lm_config(stored, {OPTION: code}, "x.pt", [])
    assert ("auto_map" in found) is own
    assert (found["attn_config"]["attn_impl"], found["init_device"]) == ("torch", "cpu")


@pytest.mark.slow
def test_a_genuine_one_gives_the_logits_of_the_trained_model(
    composer: Path, tmp_path: Path, logits_of: Callable[..., Any]
) -> None:
    to_hf(composer / GENUINE / FILE, tmp_path / "hf")
    with np.load(composer / GENUINE / "reference.npz") as reference:
        mask = reference["attention_mask"]
        logits = logits_of(tmp_path / "hf", reference["input_ids"], mask)
        assert np.abs((logits - reference["logits"]) * mask[..., None]).max() < 1e-5


def test_every_tensor_of_a_genuine_one_has_the_bits_of_the_trained_model(composer: Path) -> None:
    expected = json.loads((composer / GENUINE / "expected.json").read_text())["tensors"]
    checkpoint = open_training(composer / GENUINE / FILE)
    found = {name: hashlib.sha256(tensor.read().tobytes()).hexdigest() for name, tensor in checkpoint.items()}
    assert found == {name: entry["sha256"] for name, entry in expected.items()}


def test_every_option_in_the_way_of_a_genuine_one_is_named_in_one_line(composer: Path) -> None:
    config = json.loads((composer / "mpt_learned_pos_untied_bias" / "config.json").read_text())
    with pytest.raises(UnsupportedInput) as refusal:
        causal_lm_config(config, {}, "x.pt", [])
    for option in (
        "`attn_config.alibi` False",
        "`attn_config.qk_ln` True",
        "`no_bias` False",
        "`learned_pos_emb` True",
    ):
        assert option in refusal.value.message
    assert "\n" not in refusal.value.message


EXPRESSED: dict[str, dict[str, Any]] = {
    "as it is": config_with(),
    "a power of two heads": config_with(n_heads=4),
    "clip_qkv": config_with({"clip_qkv": 1}),
    "softmax_scale": config_with({"softmax_scale": 1}),
    "norm_eps": config_with(norm_eps=0.3),
    "no norm_eps, as before July 2024": {name: value for name, value in CONFIG.items() if name != "norm_eps"},
    "layernorm": config_with(norm_type="LayerNorm"),
    "as many key heads as heads": config_with({"attn_type": "grouped_query_attention", "kv_n_heads": 3}),
    "multi-query": config_with({"attn_type": "multiquery_attention"}),
    "grouped": config_with({"attn_type": "grouped_query_attention", "kv_n_heads": 2, "clip_qkv": 1}, n_heads=4),
    "a narrow MLP": config_with(expansion_ratio=2),
    "a narrow MLP by its size": config_with(ffn_config={"ffn_hidden_size": 31}),
    "hidden size instead of ratio": config_with(
        expansion_ratio=2, ffn_config={"ffn_type": "mptmlp", "ffn_hidden_size": 96}
    ),
    "learned positions that ALiBi switches off": config_with(learned_pos_emb=True),
    "sequence ids, which only training gives": config_with({"attn_uses_sequence_id": True}),
    "whole numbers where transformers wants others": config_with(
        embedding_fraction=1, expansion_ratio=4.0, d_model=24.0
    ),
    "logit_scale 1": config_with(logit_scale=1.0),
}


@pytest.mark.quick_rows("softmax_scale", "norm_eps", "a narrow MLP", "hidden size instead of ratio")
@pytest.mark.parametrize("config", EXPRESSED.values(), ids=EXPRESSED.keys())
def test_transformers_computes_what_foundry_computes(
    tmp_path: Path, logits_of: Callable[..., Any], config: dict[str, Any]
) -> None:
    state = random_state({**config, "d_model": 24})
    to_hf(save(tmp_path / "x.pt", state, config), tmp_path / "hf")
    expected = foundry_logits(state, config).numpy()
    assert np.abs(logits_of(tmp_path / "hf", IDS) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("attention", [{"clip_qkv": 1}, {"softmax_scale": 1}])
def test_options_that_are_carried_over_matter(attention: dict[str, Any]) -> None:
    state = random_state(CONFIG)
    difference = foundry_logits(state, config_with(attention)) - foundry_logits(state, CONFIG)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("name", ["multi-query", "grouped", "a narrow MLP"])
def test_what_becomes_larger_is_a_warning(tmp_path: Path, name: str) -> None:
    config = EXPRESSED[name]
    warnings = open_training(save(tmp_path / "x.pt", random_state(config), config)).warnings
    assert sum("results the same" in warning for warning in warnings) == 1


@pytest.mark.parametrize("name", ["as it is", "a narrow MLP", "multi-query"])
def test_a_layer_of_another_width_than_declared_is_refused(tmp_path: Path, name: str) -> None:
    config = EXPRESSED[name]
    state = random_state(config)
    up, down = (f"transformer.blocks.1.ffn.{part}_proj.weight" for part in ("up", "down"))
    narrow = state | {up: state[up][:31].clone(), down: state[down][:, :31].clone()}
    with pytest.raises(MalformedInput, match="shape|expected"):
        open_training(save(tmp_path / "x.pt", narrow, config))


def test_fewer_key_heads_than_declared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="shape|expected"):
        open_training(save(tmp_path / "x.pt", random_state(EXPRESSED["multi-query"]), CONFIG))


@pytest.mark.slow
def test_an_untied_head_is_kept(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    config = config_with(tie_word_embeddings=False)
    state = random_state(config) | {"lm_head.weight": torch.randn(40, 24)}
    to_hf(save(tmp_path / "x.pt", state, config), tmp_path / "hf")
    expected = foundry_logits(state, config).numpy()
    assert np.abs(logits_of(tmp_path / "hf", IDS) - expected).max() < 1e-5 * np.abs(expected).max()


def test_separate_query_key_and_value_become_one_matrix(tmp_path: Path) -> None:
    state = random_state(CONFIG)
    apart = {name: tensor for name, tensor in state.items() if "Wqkv" not in name}
    for name in state.keys() - apart.keys():
        rows = state[name].chunk(3)
        apart |= {name.replace("Wqkv", f"W{part}"): rows[i].clone() for i, part in enumerate("qkv")}
    found = open_training(save(tmp_path / "x.pt", apart, config_with({"fused_qkv": False})))
    assert set(found) == set(state)
    assert all(np.array_equal(found[name].read(), state[name].numpy()) for name in state)


def test_names_of_a_block_that_fuses_norm_and_attention_are_resolved(tmp_path: Path) -> None:
    state = random_state(CONFIG)
    names = {name: re.sub(r"(\d\.)(norm|attn)", r"\1norm_attn_norm.\2", name) for name in state}
    path = save(tmp_path / "x.pt", {names[n]: t for n, t in state.items()}, config_with(fuse_norm_attn_norm=True))
    assert set(open_training(path)) == set(state)


def old_config(**fields: Any) -> dict[str, Any]:
    """A configuration from before LLM Foundry."""
    sizes = {name: CONFIG[name] for name in ("d_model", "n_layers", "max_seq_len", "vocab_size", "no_bias")}
    old = {"model_type": "mosaic_gpt", "n_heads": 4, "mlp_ratio": 4, "low_precision_layernorm": True, "alibi": True}
    return {**sizes, **old, "attn_clip_qkv": 2, "param_init_fn": "kaiming_normal_", "prefix_lm": False, **fields}


def test_one_from_before_llm_foundry_is_renamed(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    state = random_state(CONFIG)
    new = (".norm_", ".up_proj.", ".down_proj.", ".ffn.")
    old = (".ln_", ".mlp_up.", ".mlp_down.", ".mlp.")
    names = {name: name for name in state}
    for before, after in zip(new, old, strict=True):
        names = {name: today.replace(before, after) for name, today in names.items()}
    to_hf(save(tmp_path / "x.pt", {names[n]: t for n, t in state.items()}, old_config()), tmp_path / "hf")
    expected = foundry_logits(state, config_with({"clip_qkv": 2}, n_heads=4)).numpy()
    assert np.abs(logits_of(tmp_path / "hf", IDS) - expected).max() < 1e-5 * np.abs(expected).max()


def test_one_from_before_llm_foundry_whose_alibi_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="`n_heads` 3"):
        open_training(save(tmp_path / "x.pt", random_state(CONFIG), old_config(n_heads=3)))


def test_the_config_holds_nothing_of_foundry(tmp_path: Path) -> None:
    to_hf(save(tmp_path / "x.pt", random_state(CONFIG), CONFIG), tmp_path / "hf")
    config = open_checkpoint(tmp_path / "hf").config
    assert not {"norm_eps", "ffn_config", "fc_type", "init_config"} & set(config)
    assert (config["architectures"], config["layer_norm_epsilon"]) == (["MptForCausalLM"], 1e-5)


def test_dropout_that_cannot_be_carried_over_is_a_warning(tmp_path: Path) -> None:
    checkpoint = open_training(save(tmp_path / "x.pt", random_state(CONFIG), config_with({"attn_pdrop": 0.1})))
    assert any("`attn_pdrop` 0.1" in warning for warning in checkpoint.warnings)


IN_THE_WAY: dict[str, tuple[dict[str, Any], str]] = {
    "no alibi": (config_with({"alibi": False}), "`attn_config.alibi` False"),
    "alibi_bias_max": (config_with({"alibi_bias_max": 16}), "`attn_config.alibi_bias_max` 16"),
    "rope": (config_with({"rope": True}), "`attn_config.rope` True"),
    "window": (config_with({"sliding_window_size": 4}), "`attn_config.sliding_window_size` 4"),
    "qk_ln": (config_with({"qk_ln": True}), "`attn_config.qk_ln` True"),
    "qk_gn": (config_with({"qk_gn": True}), "`attn_config.qk_gn` True"),
    "prefix": (config_with({"prefix_lm": True}), "`attn_config.prefix_lm` True"),
    "softcap": (config_with({"attn_logit_softcapping": 30.0}), "`attn_config.attn_logit_softcapping` 30.0"),
    "grouped": (config_with({"attn_type": "grouped_query_attention", "kv_n_heads": 2}), "`attn_config.kv_n_heads` 2"),
    "no groups": (config_with({"attn_type": "grouped_query_attention"}), "`attn_config.kv_n_heads` None"),
    "foreign attention": (config_with({"attn_type": ["x"]}), "`attn_config.attn_type` ['x']"),
    "foreign option": (config_with({"new_thing": 3}), "`attn_config.new_thing` 3"),
    "temperature": (config_with({"attn_temperature_tuning": {"attn_scale": 0.1}}), "attn_temperature_tuning`"),
    "key width": (config_with({"kv_dim": 8}), "`attn_config.kv_dim` 8"),
    "biases": (config_with(no_bias=False), "`no_bias` False"),
    "biases of attention": (config_with(attention_bias=True), "`attention_bias` True"),
    "expansion": (config_with(expansion_ratio=5), "`expansion_ratio` 5"),
    "hidden size": (config_with(ffn_config={"ffn_hidden_size": 99}), "`ffn_config.ffn_hidden_size` 99"),
    "glu": (config_with(ffn_config={"ffn_type": "mptglu"}), "`ffn_config.ffn_type` 'mptglu'"),
    "activation": (
        config_with(ffn_config={"ffn_act_fn": {"name": "relu"}}),
        "`ffn_config.ffn_act_fn` {'name': 'relu'}",
    ),
    "norm": (config_with(norm_type="rmsnorm"), "`norm_type` 'rmsnorm'"),
    "logit_scale": (config_with(logit_scale="inv_sqrt_d_model"), "`logit_scale` 'inv_sqrt_d_model'"),
    "final softcap": (config_with(final_logit_softcapping=30.0), "`final_logit_softcapping` 30.0"),
    "overrides": (config_with(block_overrides={"order": []}), "`block_overrides` {'order': []}"),
    "head_dim": (config_with(head_dim=16), "`head_dim` 16"),
    "layers of another library": (config_with(fc_type={"name": "mine"}), "`fc_type` {'name': 'mine'}"),
    "two epsilons": (config_with(layer_norm_epsilon=1e-6), "`norm_eps` 1e-05 next to `layer_norm_epsilon` 1e-06"),
}


@pytest.mark.parametrize(("config", "option"), IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_an_option_that_transformers_does_not_have_is_refused(
    tmp_path: Path, config: dict[str, Any], option: str
) -> None:
    with pytest.raises(UnsupportedInput, match=re.escape(option)) as refusal:
        open_training(save(tmp_path / "x.pt", random_state(CONFIG), config))
    assert ", `" not in refusal.value.message


def test_an_option_left_out_is_what_foundry_takes_for_it_and_not_transformers() -> None:
    config = {**CONFIG, "attn_config": {}}
    with pytest.raises(UnsupportedInput, match=re.escape("`attn_config.alibi` False")):
        causal_lm_config(config, {}, "x", [])


def test_a_configuration_that_transformers_wrote_passes_as_it_is() -> None:
    native = json.loads(MptConfig(d_model=24).to_json_string())
    native["attn_config"] = {"alibi_bias_max": 8, "model_type": ""}  # the second as transformers 4 writes it
    assert causal_lm_config(native, {}, "x", []) == {**native, "architectures": ["MptForCausalLM"]}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "attention that is a text": (
        {**CONFIG, "attn_config": "flash"},
        "`attn_config` in the configuration of `x.pt` is invalid: 'flash'",
    ),
    "heads that are a text": (config_with(n_heads="3"), "`n_heads` in the configuration of `x.pt` is invalid: '3'"),
    "no layer": (config_with(n_layers=0), "`n_layers` in the configuration of `x.pt` is invalid: 0"),
    "half a width": (config_with(d_model=24.5), "`d_model` in the configuration of `x.pt` is invalid: 24.5"),
    "epsilon": (config_with(norm_eps=None), "`norm_eps` in the configuration of `x.pt` is invalid: None"),
    "clip": (config_with({"clip_qkv": "8"}), "`clip_qkv` in the configuration of `x.pt` is invalid: '8'"),
    "scale": (
        config_with({"softmax_scale": float("nan")}),
        "`softmax_scale` in the configuration of `x.pt` is invalid: nan",
    ),
    "mlp that is a list": (config_with(ffn_config=[1]), "`ffn_config` in the configuration of `x.pt` is invalid: [1]"),
}


@pytest.mark.parametrize(("config", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedInput, match=re.escape(reason)):
        open_training(save(tmp_path / "x.pt", random_state(CONFIG), config))


def test_learned_positions_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    state = random_state(CONFIG) | {"transformer.wpe.weight": torch.randn(32, 24)}
    with pytest.raises(MalformedInput, match=r"does not have; unexpected keys: `transformer\.wpe\.weight`"):
        open_training(save(tmp_path / "x.pt", state, CONFIG))


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    state = random_state(CONFIG) | {"transformer.norm_f.weight": torch.ones(25)}
    with pytest.raises(
        MalformedInput, match=r"shape mismatch for `transformer\.norm_f\.weight`: expected \[24\], got \[25\]"
    ):
        open_training(save(tmp_path / "x.pt", state, CONFIG))


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    state = random_state(CONFIG)
    del state["transformer.norm_f.weight"]
    with pytest.raises(MalformedInput, match="lacks 1 tensors of the mpt of its configuration"):
        open_training(save(tmp_path / "x.pt", state, CONFIG))


def test_parts_of_one_matrix_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    state = random_state(CONFIG)
    state = {name: tensor for name, tensor in state.items() if "Wqkv" not in name}
    for layer in range(2):
        block = f"transformer.blocks.{layer}.attn."
        state |= {f"{block}Wq.weight": torch.ones(24, 24), f"{block}Wk.weight": torch.ones(24, 23)}
    with pytest.raises(MalformedInput, match="do not fit together"):
        open_training(save(tmp_path / "x.pt", state, CONFIG))


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    state = random_state(CONFIG) | {"transformer.ln_f.weight": torch.ones(24)}
    with pytest.raises(MalformedInput, match=r"holds `transformer\.norm_f\.weight` twice"):
        open_training(save(tmp_path / "x.pt", state, CONFIG))
