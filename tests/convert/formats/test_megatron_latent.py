"""Megatron runs with latent attention, sigmoid routers and layers that predict later tokens (DeepSeek-V3, GLM-4.5)."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from llmconv.checkpoint import Checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats.megatron.config import arguments_of, family_of, to_config
from llmconv.convert.formats.megatron.experts import Arguments
from llmconv.convert.opening import open_training
from llmconv.errors import LlmconvError
from llmconv.export import export
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "megatron"
DEEPSEEK, GLM = FOLDER / "deepseek_v3_tp2_ep2", FOLDER / "glm4_moe_torch_dist"


def opened(run: Path, tmp_path: Path, **fields: Any) -> Checkpoint:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 90} | fields))
    return open_training(run, config=(config,))


def bits(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (one.dtype.name, one.shape, one.read().tobytes()) for name, one in checkpoint.items()}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return (lambda *_: None) if module.startswith("megatron.") else super().find_class(module, name)


WITHOUT_MEGATRON = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)


def loaded(file: Path) -> dict[str, Any]:
    """The content of a rank's file; enumerations of Megatron among its arguments become None."""
    found: dict[str, Any] = torch.load(file, weights_only=False, pickle_module=WITHOUT_MEGATRON)
    return found


def changed(run: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, dict[str, Any]]], None]) -> Path:
    """A copy of a run whose files of ranks are changed; `change` gets a file's content and those of all ranks."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    files = sorted(copy.rglob("model_optim_rng.pt"))
    contents = {file.parent.name: loaded(file) for file in files}
    for file in files:
        content = dict(contents[file.parent.name])
        content["model"] = dict(content["model"])
        change(content, contents)
        torch.save(content, file)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("run", [DEEPSEEK, GLM], ids=lambda run: run.name)
def test_the_head_of_later_tokens_has_the_logits_of_megatron(run: Path, tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text('{"vocab_size": 90}')
    to_hf(run, tmp_path / "hf", config=[tmp_path / "words.json"])
    export(tmp_path / "hf", tmp_path / "graphs", prefill=True, incremental=True, mtp=True)
    with np.load(run / "reference.npz") as file:
        ids, logits, later = (file[name] for name in ("input_ids", "logits", "mtp"))
    found = answers(tmp_path / "graphs/prefill.onnx", ids)
    assert np.abs(found["logits"] - logits).max() < 5e-5
    following = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], axis=1)  # as Megatron's `roll_tensor` does
    states = {"previous_hidden_state": found["last_hidden_state"]}
    assert np.abs(answers(tmp_path / "graphs/mtp.onnx", following, **states)["logits"] - later).max() < 5e-5


def answers(path: Path, ids: Any, **given: Any) -> dict[str, Any]:
    """All outputs of a graph for whole texts, without a past."""
    session = onnxruntime.InferenceSession(path)
    feeds = given | {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    sizes = {"batch_size": len(ids), "past_sequence_length": 0}
    for port in session.get_inputs():
        if port.name not in feeds:
            feeds[port.name] = np.zeros([sizes.get(axis, axis) for axis in port.shape], np.float32)
    return dict(zip([port.name for port in session.get_outputs()], session.run(None, feeds), strict=True))


def test_heads_are_layers_after_the_last(tmp_path: Path) -> None:
    for run, attention in {DEEPSEEK: 7, GLM: 9}.items():
        found = opened(run, tmp_path)
        assert found.config["num_nextn_predict_layers"] == 1 and found.config["num_hidden_layers"] == 4
        head = [name for name in found if name.startswith("model.layers.4.")]
        assert {"model.layers.4.shared_head.norm.weight", "model.layers.4.eh_proj.weight"} < {*head}
        experts, router, norms, own = (4 + 1) * 3, 2, 2, 4
        assert len(head) == attention + experts + router + norms + own
        assert not any("predict later" in str(note) for note in found.dropped)


ENGINE = {  # Transformer Engine's modules contain the norm before them
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
DOWN = re.compile(r"linear_(?:q|kv)_down_proj")


def test_names_of_the_engine_and_undivided_matrices_give_the_same_bits(tmp_path: Path) -> None:
    def by_engine(content: dict[str, Any], contents: dict[str, dict[str, Any]]) -> None:
        whole = {}
        for name, tensor in content["model"].items():
            if DOWN.search(name) and tensor is not None:  # since core 0.13 every rank has them whole
                tensor = torch.cat([contents[f"mp_rank_{rank:02d}_000"]["model"][name] for rank in (0, 1)])
            for apart, fused in ENGINE.items():
                name = name.replace(apart, fused)
            whole[name.replace(".transformer_layer.", ".mtp_model_layer.")] = tensor
        content["model"] = whole

    expected = opened(DEEPSEEK, tmp_path)
    found = opened(changed(DEEPSEEK, tmp_path, by_engine), tmp_path)
    assert bits(found) == bits(expected) and found.config == expected.config


def test_a_config_replaces_missing_arguments(tmp_path: Path) -> None:
    expected = opened(GLM, tmp_path)
    copy = Path(shutil.copytree(GLM, tmp_path / "run"))
    file = copy / "iter_0000100/common.pt"
    torch.save({**loaded(file), "args": None}, file)
    found = opened(copy, tmp_path, **expected.config)
    assert bits(found) == bits(expected) and found.config == expected.config


def test_arguments_of_a_config_give_its_fields(tmp_path: Path) -> None:
    config = dict(opened(DEEPSEEK, tmp_path).config)
    assert config_of(arguments_of(config, "run")).items() <= config.items()


def test_a_router_without_biases_gets_zeros(tmp_path: Path) -> None:
    def without(content: dict[str, Any], _: Any) -> None:
        content["model"] = {name: one for name, one in content["model"].items() if "expert_bias" not in name}
        content["args"].moe_router_enable_expert_bias = False

    found = opened(changed(DEEPSEEK, tmp_path, without), tmp_path)
    biases = [one for name, one in found.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 4 and not any(one.read().any() for one in biases)


def deepseek(**changes: Any) -> Arguments:
    """The arguments of the fixture with changes; those that are None are missing."""
    fields = vars(loaded(DEEPSEEK / "iter_0000100/mp_rank_00_000/model_optim_rng.pt")["args"]) | changes
    return Arguments({name: value for name, value in fields.items() if value is not ...}, "run")


def config_of(arguments: Arguments) -> dict[str, Any]:
    return to_config(arguments, family_of(arguments, None))


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, YARN),
        ({"original_max_position_embeddings": 2048}, YARN | {"original_max_position_embeddings": 2048}),
        ({"rope_type": ...}, YARN | {"original_max_position_embeddings": 64}),  # before core 0.14
        ({"mscale": 0.5, "mscale_all_dim": 0}, YARN | {"mscale": 0.5, "mscale_all_dim": 0, "attention_factor": 1.0693}),
        ({"rope_type": "rope"}, None),
        ({"rotary_scaling_factor": 1.0}, None),
    ],
    ids=["core 0.16", "length", "core 0.13", "without all_dim", "plain", "factor 1"],
)
def test_scaling_of_positions(changes: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = config_of(deepseek(**changes)).get("rope_scaling")
    if expected and "attention_factor" in expected:
        expected["attention_factor"] = pytest.approx(expected["attention_factor"], rel=1e-4)
    assert found == expected


V2 = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
"""The router of DeepSeek-V2: the highest probabilities as they are."""


def test_a_softmax_before_choosing_is_deepseek_v2() -> None:
    found = config_of(deepseek(**V2))
    assert (found["model_type"], found["topk_method"], found["norm_topk_prob"]) == ("deepseek_v2", "greedy", False)
    grouped = config_of(deepseek(**V2 | {"moe_router_num_groups": 2, "moe_router_group_topk": 2}))
    assert (grouped["topk_method"], grouped["topk_group"]) == ("group_limited_greedy", 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe_router_topk": 4, "moe_router_group_topk": 1}, "moe_router_group_topk"),
        ({"moe_router_num_groups": 3}, "moe_router_num_groups"),
        ({"rope_type": "dynamic"}, "rope_type"),
        ({"moe_shared_expert_intermediate_size": 12}, "moe_shared_expert_intermediate_size"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate"),
        ({"moe_layer_freq": [1, 0, 1, 1]}, "moe_layer_freq"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"rope_type": ..., "mscale": 0.5}, "mscale"),
        (V2 | {"moe_router_pre_softmax": False}, "moe_router_pre_softmax"),
        (V2 | {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_group_topk"),
    ],
    ids=str,
)
def test_what_transformers_computes_otherwise_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LlmconvError) as error:
        config_of(deepseek(**changes))
    assert f"`{named}`" in error.value.message


def test_latent_attention_without_experts_is_no_model_of_transformers() -> None:
    with pytest.raises(LlmconvError, match=r"latent attention \(MLA\)"):
        config_of(deepseek(num_experts=None, moe_shared_expert_intermediate_size=None))
