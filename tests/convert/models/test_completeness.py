"""A state dict is the whole model of its configuration, for every model type that transformers itself knows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llmconv.checkpoint import open_weights
from llmconv.convert.models.blueprint import blueprint
from llmconv.convert.models.completeness import as_loaded, check_complete, check_folder, depth_is_possible
from llmconv.convert.models.head_and_dtype import settle_head
from llmconv.convert.opening import open_training
from llmconv.errors import LlmconvError, MalformedInput
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADED = {**GROUPED, "head_dim": 16}
EXPERTS = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}
MPT = {"vocab_size": 24, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
GPT2 = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
NEO = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {**SIZES, **LATENT, **ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "alibi": False}
OLD_FALCON = {"multi_query": False, "parallel_attn": False, "alibi": True}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GROUPED),
    ("llama", {**HEADED, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**GROUPED, **TIED}),
    ("mistral", HEADED),
    ("mixtral", EXPERTS),
    ("mixtral", {**EXPERTS, **TIED}),
    ("qwen2", GROUPED),
    ("qwen2", {**GROUPED, **TIED}),
    ("qwen2_moe", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    ("qwen3", HEADED),
    ("qwen3", {**HEADED, "attention_bias": True, **TIED}),
    ("qwen3_moe", {**HEADED, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}),
    ("gemma", HEADED),
    ("gemma2", {**HEADED, "attention_bias": True}),
    ("gemma2", {**HEADED, **UNTIED}),
    ("gemma3_text", HEADED),
    ("phi", SIZES),
    ("phi", {**GROUPED, "qk_layernorm": True}),
    ("phi3", GROUPED),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 40, **UNTIED}),
    ("gpt_neox", SIZES),
    ("gpt_neox", {**SIZES, "attention_bias": False, **TIED}),
    ("gpt_neo", NEO),
    ("gptj", {**GPT2, "rotary_dim": 4}),
    ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "enable_bias": False, **UNTIED}),
    ("bloom", {"vocab_size": 24, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("falcon", SIZES),
    ("falcon", {**SIZES, **NEW_FALCON}),
    ("falcon", {**SIZES, **OLD_FALCON, **UNTIED}),
    ("mpt", MPT),
    ("mpt", {**MPT, **UNTIED}),
    ("glm", {**HEADED, "attention_bias": False}),
    ("glm4", HEADED),
    ("olmo", GROUPED),
    ("olmo2", GROUPED),
    ("cohere", {**GROUPED, "use_qk_norm": True}),
    ("cohere", {**GROUPED, "attention_bias": True}),
    ("stablelm", {**GROUPED, "use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", {**GROUPED, "use_parallel_residual": True}),
    ("starcoder2", GROUPED),
    ("starcoder2", {**GROUPED, "use_bias": False}),
    ("gpt_bigcode", {**GPT2, "multi_query": True}),
    ("gpt_bigcode", {**GPT2, "multi_query": False}),
    ("deepseek_v2", DEEPSEEK),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None}),
    ("granite", GROUPED),
    ("smollm3", GROUPED),
    (
        "jamba",
        {**EXPERTS, "num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
]
IDS = [f"{kind}{number}" for number, (kind, _) in enumerate(CASES)]

Shapes = dict[str, tuple[int, ...]]


@cache
def built(number: int) -> tuple[dict[str, Any], Shapes, Shapes]:
    """The configuration as transformers saves it, the shapes of the state dict, and those of the file it saves."""
    kind, fields = CASES[number]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        saved = {name: tensor.shape for name, tensor in open_weights(Path(folder)).items()}
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, saved


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """Seeded tensors."""
    random = np.random.default_rng(0)
    return {name: in_memory(random.random(shape, np.float32), BY_NAME["float32"]) for name, shape in shapes.items()}


@pytest.mark.slow_rows("gpt_neo23")
@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_names_and_shapes_are_those_of_transformers(number: int) -> None:
    config, state, _ = built(number)
    plan = blueprint(config)
    assert plan
    assert set(plan.shapes) == set(state)
    assert {name: shape or state[name] for name, shape in plan.shapes.items()} == state


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_what_transformers_saves_is_whole(number: int) -> None:
    config, state, saved = built(number)
    found = tensors(saved)
    assert whole(found, config, "x", []).get("tie_word_embeddings", False) in (True, False)
    assert set(found) == set(saved)
    untied = config if "lm_head.weight" in saved else {**config, "tie_word_embeddings": False}
    whole(tensors(state), untied, "x", [])


def whole(found: dict[str, LazyTensor], config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The config as it is written, once the tensors are known to be the whole model."""
    settings = as_loaded(found, dict(config))
    warnings += check_complete(found, settings, source)
    return settle_head(found, settings, warnings)


Change = Callable[[dict[str, LazyTensor], str], None]


def removed(found: dict[str, LazyTensor], name: str) -> None:
    del found[name]


def renamed(found: dict[str, LazyTensor], name: str) -> None:
    found[f"{name}s"] = found.pop(name)


def longer(found: dict[str, LazyTensor], name: str) -> None:
    found[name] = replace(found[name], shape=(found[name].shape[0] + 1, *found[name].shape[1:]))


def flat(found: dict[str, LazyTensor], name: str) -> None:
    found[name] = replace(found[name], shape=(1, *found[name].shape))


def integer(found: dict[str, LazyTensor], name: str) -> None:
    found[name] = replace(found[name], dtype=BY_NAME["int32"])


def doubled(found: dict[str, LazyTensor], name: str) -> None:
    found[f"{name}.copy"] = found[name]


CHANGES: list[Change] = [removed, renamed, longer, flat, integer, doubled]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(number=st.integers(0, len(CASES) - 1), change=st.sampled_from(CHANGES), data=st.data())
def test_any_one_tensor_removed_renamed_or_reshaped_is_missed(number: int, change: Change, data: st.DataObject) -> None:
    config, _, saved = built(number)
    found, plan = tensors(saved), blueprint(config)
    assert plan
    free = {name for name, shape in plan.shapes.items() if shape is None} if change in (longer, flat) else set()
    free |= {name for name in saved if change is doubled and plan.ignores(f"{name}.copy")}  # as transformers loads it
    change(found, data.draw(st.sampled_from(sorted(set(saved) - free))))
    with pytest.raises(MalformedInput) as caught:
        whole(found, config, "x", [])
    assert caught.value.hint


def test_every_expert_is_missed_under_either_name() -> None:
    number = next(number for number, (kind, _) in enumerate(CASES) if kind == "mixtral")
    config, state, saved = built(number)
    assert any("experts.gate_up_proj" in name for name in state)
    assert any("experts.2.w1" in name for name in saved)
    for shapes in (state, saved):
        for name in [name for name in shapes if "experts" in name]:
            found = tensors(shapes)
            del found[name]
            with pytest.raises(MalformedInput, match="experts"):
                whole(found, config, "x", [])


def test_the_embedding_is_missed_though_the_head_is_tied_to_it() -> None:
    config, state, _ = built(next(number for number, (kind, _) in enumerate(CASES) if kind == "gemma"))
    found = tensors(state)
    del found["model.embed_tokens.weight"]
    with pytest.raises(MalformedInput, match="embed_tokens"):
        whole(found, config, "x", [])


@pytest.mark.parametrize(("name", "kept"), [("self_attn.o_proj", False), ("eh_proj", True)])
def test_what_transformers_passes_over_is_left_out_but_for_the_head_that_predicts_further(
    name: str, kept: bool
) -> None:
    config, _, saved = built(next(number for number, (kind, _) in enumerate(CASES) if kind == "deepseek_v3"))
    found = tensors({**saved, f"model.layers.61.{name}.weight": (32, 64)})
    whole(found, config, "x", [])
    assert (found.keys() != saved.keys()) == kept


def run_without(folder: Path, name: str, config: Mapping[str, Any], shapes: Shapes) -> Path:
    """A Composer run that lacks a tensor."""
    state = {f"model.{one}": torch.zeros(shape) for one, shape in shapes.items() if one != name}
    huggingface = {"model": {"config": {"file_extension": ".json", "content": dict(config)}}, "tokenizer": {}}
    content = {"state": {"model": state, "integrations": {"huggingface": huggingface}}, "rng": []}
    torch.save(content, folder / "ep1-ba1-rank0.pt")
    return folder / "ep1-ba1-rank0.pt"


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_composer_run_without_an_end_is_refused(tmp_path: Path, name: str) -> None:
    config, state, _ = built(0)
    open_training(run_without(tmp_path, "", config, state))
    untold = {field: value for field, value in config.items() if field != "tie_word_embeddings"}
    with pytest.raises(MalformedInput, match=name.split(".")[-2]):
        open_training(run_without(tmp_path, name, untold, state))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [10**30, -1, 0, "x", None, {}, 1.5, True])
def test_a_configuration_without_sense_ends_soon_and_is_refused(field: str, value: Any) -> None:
    config, _, saved = built(0)
    begun = time.monotonic()
    with pytest.raises(LlmconvError):
        whole(tensors(saved), {**config, field: value}, "x", [])
    assert time.monotonic() - begun < 5


def test_a_type_that_is_not_known_is_held_to_what_all_models_have() -> None:
    config, _, saved = built(0)
    unknown = {**config, "model_type": "of another house"}
    whole(tensors(saved), unknown, "x", [])
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        with pytest.raises(MalformedInput):
            whole(tensors({one: shape for one, shape in saved.items() if one != name}), unknown, "x", [])


@pytest.mark.slow
def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from llmconv.convert.models.blueprint import blueprint; "
        "assert blueprint({'model_type': 'llama'}); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_size_in_a_layer_is_no_number_of_layers() -> None:
    sizes = {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 8192}
    assert depth_is_possible({}, {"text_config": sizes})
    assert depth_is_possible({}, {"num_experts": 16384}), "the default of Doge"
    assert not depth_is_possible({}, {"text_config": {"num_foo_layers": 5000}})


def with_images(folder: Path) -> tuple[dict[str, Any], Mapping[str, LazyTensor]]:
    """The config and tensors of a model with images, whose type has a class of language alone, too."""
    text: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), open_weights(folder)


@pytest.mark.parametrize("moved", ["layers.0.mlp.down_proj.weight", "embed_tokens.weight"])
def test_a_tensor_under_the_name_of_the_class_without_images_is_missing_with_them(tmp_path: Path, moved: str) -> None:
    fields, tensors = with_images(tmp_path)
    assert check_folder(tensors, fields, "whole") == []
    mixed = {(f"model.{moved}" if name.endswith(moved) else name): one for name, one in tensors.items()}
    with pytest.raises(MalformedInput, match=f"missing keys: `model.language_model.{moved}`"):
        check_folder(mixed, fields, "mixed")


@pytest.mark.slow
def test_the_text_part_alone_of_a_model_with_images_is_named(tmp_path: Path) -> None:
    fields, tensors = with_images(tmp_path)
    assert not any("images" in note for note in check_folder(tensors, fields, "whole"))
    alone = {name.replace("language_model.", ""): one for name, one in tensors.items() if "visual" not in name}
    assert any("no tensors of images" in note for note in check_folder(alone, fields, "part"))
