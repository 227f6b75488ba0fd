"""Baichuan-13B and ChatGLM-6B of PaddleNLP and MindFormers, with code that has the published names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from llmconv.convert import to_hf
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.own_code import loaded
from tests.builders.own_families import (
    BAICHUAN,
    CHATGLM,
    IDS,
    baichuan_logits,
    llama_state,
    save_baichuan,
    save_chatglm,
)

pytestmark = pytest.mark.usefixtures("modules_cache")

PADDLE_BAICHUAN = {"model_type": "llama", "alibi": True, **BAICHUAN, "tie_word_embeddings": False}
PADDLE_CHATGLM = {
    "model_type": "chatglm",
    **{name: value for name, value in CHATGLM.items() if name != "num_layers"},
    "num_hidden_layers": 2,
    "position_encoding_2d": True,
}
LINEAR = ("_proj.weight", "lm_head.weight", "query_key_value.weight", "dense.weight", "4h.weight", "to_h.weight")
TO_MINDFORMERS = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    **{f".self_attn.{one}_proj.": f".attention.w{one}." for one in "qkvo"},
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    "model.norm.": "model.norm_out.",
}


def save_paddle(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """A PaddleNLP folder: Linear weights are [in, out]."""
    folder.mkdir()
    arrays = {name: (one.T if name.endswith(LINEAR) else one).contiguous().numpy() for name, one in state.items()}
    (folder / "model_state.pdparams").write_bytes(pickle.dumps(arrays, protocol=4))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_mindformers(
    folder: Path, save_ckpt: Callable[..., Path], state: dict[str, torch.Tensor], arch: str, **fields: Any
) -> Path:
    """A `.ckpt` with the YAML of its run."""
    folder.mkdir()
    model = {"arch": {"type": arch}, "model_config": fields}
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": {**model}}))
    return save_ckpt(folder / "x.ckpt", {name: one.numpy() for name, one in state.items()})


def chatglm(code: Path) -> Any:
    """A random ChatGLM of `CHATGLM`'s sizes, built from the code."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(code, trust_remote_code=True, vocab_size=CHATGLM["vocab_size"])
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        model.lm_head.weight.copy_(model.transformer.word_embeddings.weight)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.slow
def test_a_paddle_llama_with_alibi_computes_the_same_as_a_baichuan(tmp_path: Path) -> None:
    state = llama_state()
    paddle = {name.replace("model.", "llama."): one for name, one in state.items()}
    source = save_paddle(tmp_path / "paddle", paddle, PADDLE_BAICHUAN)
    to_hf(source, tmp_path / "hf", code=save_baichuan(tmp_path / "code"), trust_remote_code=True)
    torch.testing.assert_close(logits(loaded(tmp_path / "hf")), baichuan_logits(state), rtol=1e-4, atol=1e-4)


@pytest.mark.quick_rows("Baichuan13BV2ForCausalLM")
@pytest.mark.parametrize("arch", ["Baichuan13BForCausalLM", "Baichuan13BV2ForCausalLM"])
def test_a_mindformers_baichuan_computes_the_same(tmp_path: Path, save_ckpt: Callable[..., Path], arch: str) -> None:
    state, renamed = llama_state(), dict[str, torch.Tensor]()
    for name, tensor in state.items():
        for old, new in TO_MINDFORMERS.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-6}
    source = save_mindformers(tmp_path / "ms", save_ckpt, renamed, arch, **sizes)
    to_hf(source, tmp_path / "hf", code=save_baichuan(tmp_path / "code"), trust_remote_code=True)
    torch.testing.assert_close(logits(loaded(tmp_path / "hf")), baichuan_logits(state), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_paddle_chatglm_has_the_logits_of_its_code(tmp_path: Path) -> None:
    code = save_chatglm(tmp_path / "code")
    model = chatglm(code)
    state = {f"chatglm.{name}": one for name, one in model.state_dict().items() if "inv_freq" not in name}
    del state["chatglm.lm_head.weight"]  # PaddleNLP ties it
    source = save_paddle(tmp_path / "paddle", state, PADDLE_CHATGLM)
    to_hf(source, tmp_path / "hf", code=code, trust_remote_code=True)
    found = AutoModel.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(model))


def test_the_rotary_frequencies_of_a_chatglm_are_those_of_its_code(tmp_path: Path) -> None:
    code = save_chatglm(tmp_path / "code")
    model = chatglm(code)
    state = {f"chatglm.{name}": one for name, one in model.state_dict().items() if "inv_freq" not in name}
    del state["chatglm.lm_head.weight"]
    to_hf(save_paddle(tmp_path / "paddle", state, PADDLE_CHATGLM), tmp_path / "hf", code=code, trust_remote_code=True)
    name = "transformer.layers.1.attention.rotary_emb.inv_freq"
    assert torch.equal(load_file(tmp_path / "hf/model.safetensors")[name], model.state_dict()[name])


def test_a_mindformers_chatglm_has_the_logits_of_its_code(tmp_path: Path, save_ckpt: Callable[..., Path]) -> None:
    code = save_chatglm(tmp_path / "code")
    model = chatglm(code)
    state = {name: one for name, one in model.state_dict().items() if "inv_freq" not in name}
    renamed = {name.replace("word_embeddings.weight", "word_embeddings.embedding_table"): state[name] for name in state}
    for old, new in (("layernorm.weight", "layernorm.gamma"), ("layernorm.bias", "layernorm.beta")):
        renamed = {name.replace(old, new): one for name, one in renamed.items()}
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_size": 16, "vocab_size": 24, "seq_length": 64}
    source = save_mindformers(tmp_path / "ms", save_ckpt, renamed, "GLMForPreTraining", **sizes)
    to_hf(source, tmp_path / "hf", code=code, trust_remote_code=True)
    found = AutoModel.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(model))


def test_without_code_the_option_is_named(tmp_path: Path) -> None:
    paddle = {name.replace("model.", "llama."): one for name, one in llama_state().items()}
    source = save_paddle(tmp_path / "paddle", paddle, PADDLE_BAICHUAN)
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises(UnsupportedInput, match="Llama with ALiBi") as refused:
            to_hf(source, tmp_path / "hf", **options)  # type: ignore[arg-type]
        assert "--code FOLDER --trust-remote-code" in refused.value.hint


def test_the_code_of_another_family_is_refused(tmp_path: Path) -> None:
    paddle = {name.replace("model.", "llama."): one for name, one in llama_state().items()}
    source = save_paddle(tmp_path / "paddle", paddle, PADDLE_BAICHUAN)
    with pytest.raises(MalformedInput, match="that of a `chatglm`, and `paddle` is a `baichuan`"):
        to_hf(source, tmp_path / "hf", code=save_chatglm(tmp_path / "code"), trust_remote_code=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "geglu"}, "`activation` 'geglu'"),
        ({"pre_seq_len": 8}, "`pre_seq_len` 8"),
        ({"attention_scale": False}, "`attention_scale` False"),
        ({"num_attention_heads": 3}, "hidden sizes for four times the heads"),
    ],
)
def test_a_chatglm_that_its_code_does_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    source = save_paddle(tmp_path / "paddle", {"chatglm.x": torch.zeros(1)}, {**PADDLE_CHATGLM, **fields})
    with pytest.raises(InputRefused, match=message):
        to_hf(source, tmp_path / "hf", code=save_chatglm(tmp_path / "code"), trust_remote_code=True)
