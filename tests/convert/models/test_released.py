"""Tensors named as in memory: what transformers saves of them, and which weights files may have only once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from llmconv import to_gguf
from llmconv.checkpoint import TwoCopies
from llmconv.compressed import quantize
from llmconv.convert import extract_delta, to_hf
from llmconv.convert.models.blueprint import refuse_shapes, released
from llmconv.convert.models.completeness import check_complete, check_folder
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.runtime.eager.torch_runner import TorchRunner
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8, "norm_topk_prob": True},
    "mixtral": {},
    "phimoe": {},
    "minimax_m2": {"head_dim": 8, "rotary_dim": 8},
    "glm4_moe": {"head_dim": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "nemotron_h": {"hybrid_override_pattern": "E*", "moe_shared_expert_intermediate_size": 8, "head_dim": 8},
    "olmoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 8},
    "llama": {},
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | TYPES[kind])))


def lazy(state: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {name: in_memory(one.detach().numpy().copy(), BY_NAME["float32"]) for name, one in state.items()}


@pytest.mark.quick_rows("mixtral", "qwen3_moe", "nemotron_h")
@pytest.mark.parametrize("kind", TYPES)
def test_the_tensors_are_those_that_transformers_saves_of_the_same_model(kind: str) -> None:
    one = model(kind)
    wanted = {name: value.detach().numpy() for name, value in revert_weight_conversion(one, one.state_dict()).items()}
    config = json.loads(one.config.to_json_string())
    for start in (one.state_dict(), revert_weight_conversion(one, one.state_dict())):
        found = released(lazy(start), config)
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(tensor.read(), wanted[name]) for name, tensor in found.items())
        assert all(np.array_equal(tensor.rows(1, 2), wanted[name][1:2]) for name, tensor in found.items())
    check_complete(lazy(one.state_dict()), config, "x")


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """A tuned Qwen3-MoE, with the experts of its base still in their stacks."""
    torch.manual_seed(1)
    tuned = tmp_path / "twice"
    model("qwen3_moe").save_pretrained(tuned)
    model("qwen3_moe").save_pretrained(tmp_path / "base", save_original_format=False)
    both = load_file(tmp_path / "base/model.safetensors") | load_file(tuned / "model.safetensors")
    save_file(both, tuned / "model.safetensors", {"format": "pt"})
    return tuned


def test_experts_in_stacks_and_one_by_one_are_refused(twice: Path, tmp_path: Path) -> None:
    said = r"24 weights twice: `model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight`"
    with pytest.raises(TwoCopies, match=said):
        to_hf(twice, tmp_path / "out", dtype="float16")
    with pytest.raises(TwoCopies, match=said):
        to_gguf(twice, tmp_path / "out.gguf")
    with pytest.raises(InputRefused):
        TorchRunner(twice)
    assert not {path.name for path in tmp_path.iterdir()} & {"out", "out.gguf"}


def test_a_weight_under_two_names_is_not_run_as_either(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(state | {name.removeprefix("model."): state[name] * 2}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MalformedInput, match="weights twice"):
        TorchRunner(tmp_path)
    save_file(state | {name.removeprefix("model."): state[name].clone()}, tmp_path / "model.safetensors")
    TorchRunner(tmp_path)  # equal ones are one


def test_a_weight_under_two_names_of_a_model_with_images_is_refused() -> None:
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **{name: SIZES[name] for name in [*SIZES][:6]}},
        vision_config={"model_type": "siglip_vision_model", "num_hidden_layers": 1, "hidden_size": 24},
        architectures=["LlavaForConditionalGeneration"],
    )
    fields = json.loads(config.to_json_string())
    state = {name: torch.ones(1).expand(one.shape) for name, one in meta(config).items()}
    new = "model.language_model.layers.0.mlp.up_proj.weight"
    old = "language_model.model.layers.0.mlp.up_proj.weight"
    check_folder(lazy(state | {old: state[new]}), fields, "x")
    with pytest.raises(TwoCopies, match=f"`{old}` is also in `{new}`"):
        check_folder(lazy(state | {old: state[new] * 2}), fields, "x")


def meta(config: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        state: dict[str, torch.Tensor] = AutoModelForImageTextToText.from_config(config).state_dict()
    return state


def test_a_gguf_file_of_stacks_has_the_tensors_of_the_released_names(tmp_path: Path) -> None:
    one = model("qwen3_moe")
    files = []
    for number in (0, 1):
        folder = tmp_path / "model"
        one.save_pretrained(folder, save_original_format=bool(number))
        to_gguf(folder, tmp_path / f"{number}.gguf")
        files.append({each.name: each.data.tobytes() for each in GGUFReader(tmp_path / f"{number}.gguf").tensors})
        shutil.rmtree(folder)  # the file has its name
    assert files[0] == files[1]


def test_the_embedding_of_a_resized_mllama_is_explained() -> None:
    name = "model.language_model.embed_tokens.weight"
    with pytest.raises(MalformedInput) as caught:
        refuse_shapes({name: ((310, 32), (318, 32))}, "x")
    assert "copy its rows into one of 318" in caught.value.hint
    with pytest.raises(MalformedInput) as caught:
        refuse_shapes({name: ((310, 32), (311, 32))}, "x")
    assert "--config" in caught.value.hint


def test_a_run_that_has_stacks_is_quantized_and_compared_as_the_released_model(tmp_path: Path) -> None:
    one = model("qwen3_moe")
    one.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        one.model.layers[0].self_attn.q_proj.weight[1, 2] += 1
    one.save_pretrained(tmp_path / "stacks", save_original_format=False)
    one.save_pretrained(tmp_path / "plain")
    for name in ("stacks", "plain"):
        quantize(tmp_path / name, tmp_path / f"{name}8", scheme="w8a8")
        extract_delta(tmp_path / "base", tmp_path / name, tmp_path / f"{name}_delta", rank=2)
    for end, file in (("8", "model"), ("_delta", "adapter_model")):
        found = [load_file(tmp_path / f"{name}{end}/{file}.safetensors") for name in ("stacks", "plain")]
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    with pytest.raises(UnsupportedInput, match="here experts in stacks") as caught:
        quantize(tmp_path / "stacks", tmp_path / "out", scheme="w4a16", quant_block=16, calibrate="default")
    assert "one tensor per expert" in caught.value.hint
