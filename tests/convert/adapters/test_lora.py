"""merge_lora against PEFT's own merge in float64: every config field, family and element type."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput, UsageProblem
from tests.builders.tiny_models import save_tiny

State = dict[str, torch.Tensor]
Judged = Callable[..., tuple[Path, Path, State]]

ATTENTION = ["q_proj", "v_proj"]
FAMILIES = {
    "llama": "all-linear",
    "mistral": ATTENTION,
    "qwen2": "all-linear",
    "qwen3": ATTENTION,
    "gemma2": ["o_proj", "gate_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bloom": ["query_key_value", "dense"],
}


@pytest.fixture
def trained(tiny: Callable[[str], Path], tmp_path: Path) -> Judged:
    """`trained(model_type, dtype=…, …LoraConfig fields)`: base, random adapter, PEFT's merge in float64."""

    def make(model_type: str, dtype: torch.dtype = torch.float32, name: str = "adapter", **fields: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _train(tiny(model_type), tmp_path, name, dtype, {"r": 4, "init_lora_weights": False, **fields})

    return make


def _train(source: Path, folder: Path, name: str, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    base, adapter = folder / "base", folder / name
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(base)
    torch.manual_seed(len(name))
    peft_model = get_peft_model(model, LoraConfig(**fields))
    for key, parameter in peft_model.named_parameters():
        if "modules_to_save" in key or "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    peft_model.save_pretrained(adapter)
    exact = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    merged = PeftModel.from_pretrained(exact, adapter).double().merge_and_unload()
    return base, adapter, {key: value.clone() for key, value in merged.state_dict().items()}


def assert_rounded_once(output: Path, exact: State) -> None:
    """Every element of every tensor is the exact one, rounded."""
    for name, value in load_file(output / "model.safetensors").items():
        assert torch.equal(value, exact[name].to(value.dtype)), name


def loaded(folder: Path) -> State:
    """The state dict as transformers loads it, in float64, with no weight missing or left over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True
        )
    assert not any(loading.values()), loading
    return cast(State, model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_equals_peft(model_type: str, trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained(model_type, target_modules=FAMILIES[model_type])
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert merge.merged and not merge.replaced and not merge.added
    assert_rounded_once(tmp_path / "out", exact)
    loaded(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_half_precision_is_rounded_once(model_type: str, dtype: torch.dtype, trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained(model_type, dtype, target_modules=FAMILIES[model_type])
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"lora_alpha": 3}, id="lora_alpha"),
        pytest.param({"r": 5, "lora_alpha": 8, "use_rslora": True}, id="use_rslora"),
        pytest.param({"rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_proj": 7}}, id="rank_pattern"),
        pytest.param({"alpha_pattern": {r"layers\.[02]\..*q_proj": 32, "q_proj": 1}}, id="alpha_pattern"),
        pytest.param({"rank_pattern": {"q_proj": 2}, "use_rslora": True}, id="rank_pattern with use_rslora"),
        pytest.param({"layers_to_transform": [1]}, id="layers_to_transform"),
        pytest.param({"modules_to_save": ["lm_head", "norm"]}, id="modules_to_save"),
        pytest.param({"init_lora_weights": "gaussian"}, id="init_lora_weights"),
    ],
)
def test_a_config_field_means_what_it_means_to_peft(fields: dict[str, Any], trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("llama", target_modules=ATTENTION, **fields)
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_lora_bias_is_scaled_and_added(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("qwen2", target_modules=ATTENTION, lora_bias=True, lora_alpha=3)
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.bias" in merge.merged
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_trained_biases_replace_the_bases(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("qwen2", target_modules=ATTENTION, bias="all")
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert "model.layers.0.self_attn.k_proj.bias" in merge.replaced
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_an_untied_embedding_is_adapted(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("llama", target_modules=["embed_tokens"])
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [True, False])
def test_square_conv1d_weights_do_not_trust_fan_in_fan_out(flag: bool, trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("gpt2", target_modules=["attn.c_proj"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": flag}))
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_tied_head_is_untied_when_only_it_is_adapted(model_type: str, trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained(model_type, target_modules=["lm_head"])
    merge = merge_lora(base, [adapter], tmp_path / "out")
    before, after = loaded(base), loaded(tmp_path / "out")
    (embedding,) = (name for name in after if name.endswith(("embed_tokens.weight", "wte.weight")))
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.lm_head.lora_{part}.weight"].double() for part in "AB")
    assert merge.added == ("lm_head.weight",)
    assert merge.plan.checkpoint.config["tie_word_embeddings"] is False
    torch.testing.assert_close(after["lm_head.weight"], before[embedding] + 2 * b @ a, rtol=1e-6, atol=1e-7)
    assert torch.equal(after[embedding], before[embedding])


@pytest.mark.slow
def test_a_tied_head_keeps_its_weights_when_only_the_embedding_is_adapted(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("qwen2", target_modules=["embed_tokens"])
    merge_lora(base, [adapter], tmp_path / "out")
    after = loaded(tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], loaded(base)["lm_head.weight"])
    expected = exact["model.embed_tokens.weight"]
    torch.testing.assert_close(after["model.embed_tokens.weight"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_merged_model_computes_what_the_adapted_one_does(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("qwen2", target_modules=["embed_tokens", "q_proj"])
    merge_lora(base, [adapter], tmp_path / "out")
    ids = torch.arange(12).view(2, 6)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        expected = PeftModel.from_pretrained(model, adapter).eval()(ids).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ensure_weight_tying_changes_embedding_and_head_alike(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("qwen2", target_modules=["embed_tokens"], ensure_weight_tying=True)
    merge_lora(base, [adapter], tmp_path / "out")
    after = loaded(tmp_path / "out")
    torch.testing.assert_close(after["lm_head.weight"], after["model.embed_tokens.weight"], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_two_adapters_are_summed_with_their_weights(trained: Judged, tmp_path: Path) -> None:
    base, one, first = trained("llama", target_modules=ATTENTION, name="one")
    _, two, second = trained("llama", target_modules=["q_proj", "down_proj"], name="another", r=6)
    merge_lora(base, [one, two], tmp_path / "out", weights=[0.75, -2.0])
    plain = loaded(base)
    exact = {
        name: plain[name] + 0.75 * (first[name] - plain[name]) - 2 * (second[name] - plain[name]) for name in plain
    }
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_untouched_tensors_keep_their_bytes(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("llama", torch.bfloat16, target_modules=["q_proj"])
    merge = merge_lora(base, [adapter], tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if name not in merge.merged)


@pytest.mark.slow
def test_the_output_has_the_element_type_asked_for(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("llama", target_modules=["q_proj"])
    merge_lora(base, [adapter], tmp_path / "out", dtype="bfloat16")
    assert_rounded_once(tmp_path / "out", exact)
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.slow
def test_a_resized_vocabulary_changes_config_and_tokenizer(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("llama", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    weights = load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        if "lora" not in name:
            weights[name] = torch.cat([weights[name], torch.ones(4, 64)])
    transformers.utils.logging.set_verbosity_error()
    save_file(weights, adapter / "adapter_model.safetensors")
    (base / "tokenizer.json").write_text("old")
    (base / "generation_config.json").write_text("{}")
    (adapter / "tokenizer.json").write_text("new")
    merge = merge_lora(base, [adapter], tmp_path / "out")
    assert merge.plan.checkpoint.config["vocab_size"] == 100
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert loaded(tmp_path / "out")["lm_head.weight"].shape == (100, 64)


@pytest.mark.slow
def test_an_adapter_in_a_torch_file_is_read_too(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("llama", target_modules=["q_proj"])
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_names_that_differ_by_one_prefix_are_matched(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("gpt2", target_modules=["c_attn"])
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    save_file({name.removeprefix("transformer."): value for name, value in weights.items()}, base / "model.safetensors")
    merge_lora(base, [adapter], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_rounded_once(tmp_path / "out", {name: exact[f"transformer.{name}"] for name in found})


@pytest.mark.slow
def test_names_with_wrappers_are_matched(trained: Judged, tmp_path: Path) -> None:
    base, adapter, exact = trained("llama", target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    inner = "_checkpoint_wrapped_module.self_attn"
    save_file({f"_orig_mod.{name.replace('self_attn', inner)}": value for name, value in load_file(file).items()}, file)
    merge_lora(base, [adapter], tmp_path / "out")
    assert_rounded_once(tmp_path / "out", exact)


@pytest.mark.slow
def test_the_manifest_continues_the_bases(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("llama", target_modules=["q_proj"])
    merge_lora(base, [adapter], tmp_path / "once")
    merge_lora(tmp_path / "once", [adapter], tmp_path / "twice", weights=[0.5])
    steps = json.loads((tmp_path / "twice" / "llmconv.json").read_text())["steps"]
    assert [step["command"] for step in steps] == ["merge-lora", "merge-lora"]
    assert steps[1]["options"]["weights"] == [0.5]
    assert steps[1]["options"]["adapters"][0]["name"] == "adapter"


def test_an_option_that_does_not_exist_is_named(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no parameter `density`"):
        merge_lora(tiny("llama"), [tmp_path], tmp_path / "out", weight=[0.1], density=[0.3])  # type: ignore[call-arg]


@pytest.mark.slow
def test_a_base_that_is_not_whole_is_refused(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("llama", target_modules=["q_proj"])
    holed = shutil.copytree(base, tmp_path / "holed")
    tensors = load_file(holed / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, holed / "model.safetensors", {"format": "pt"})
    with pytest.raises(MalformedInput, match=r"missing keys: `model\.norm\.weight`"):
        merge_lora(holed, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_alpha_is_another_step_of_the_manifest(trained: Judged, tmp_path: Path) -> None:
    base, adapter, _ = trained("llama", target_modules=["q_proj"])
    louder = shutil.copytree(adapter, tmp_path / "louder" / adapter.name)
    config = json.loads((louder / "adapter_config.json").read_text())
    (louder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 80}))
    for name, lora in (("one", adapter), ("two", louder)):
        merge_lora(base, lora, tmp_path / name)
    steps = [json.loads((tmp_path / name / "llmconv.json").read_text())["steps"] for name in ("one", "two")]
    assert steps[0] != steps[1]


def test_whole_tensors_of_a_shorter_vocabulary_replace_the_longer_ones(tmp_path: Path) -> None:
    """The LoRA that `mergekit-extract-lora` makes of a model with fewer tokens, in its names."""
    base = save_tiny(tmp_path / "base", "llama")
    before = {name: tensor.read() for name, tensor in open_checkpoint(base).items()}
    rows = len(before["lm_head.weight"]) - 2
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    tuned = {name: (before[name] if "norm" in name else before[name][:rows]) + 1 for name in names}
    whole = {f"base_model.model.{name}": torch.from_numpy(one) for name, one in tuned.items()}
    q = before["model.layers.0.self_attn.q_proj.weight"]
    pair = {"A": torch.ones(2, q.shape[1]), "B": torch.ones(q.shape[0], 2)}
    factors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": one for part, one in pair.items()
    }
    (tmp_path / "lora").mkdir()
    save_file({**whole, **factors}, tmp_path / "lora" / "adapter_model.safetensors")
    kept = ["embed_tokens", "norm", "lm_head"]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "modules_to_save": kept}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    merge_lora(base, tmp_path / "lora", tmp_path / "out")
    after = open_checkpoint(tmp_path / "out")
    assert after.config["vocab_size"] == rows
    assert all(np.array_equal(after[name].read(), one) for name, one in tuned.items())
    assert np.allclose(after["model.layers.0.self_attn.q_proj.weight"].read(), q + 2)
