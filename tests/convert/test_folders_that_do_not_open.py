"""A Hugging Face folder is refused as a file is: what transformers cannot open is never made from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert import extract_delta, to_hf
from llmconv.errors import MalformedInput, UnsupportedInput
from tests.builders.lora_models import Case, causal_lm, train
from tests.builders.talking import save_letters

WEIGHTS = "model.safetensors"
SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
Q = "model.layers.0.self_attn.q_proj"
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A llama and an adapter of it."""
    model = causal_lm("llama", num_hidden_layers=2, num_key_value_heads=1, **SMALL)
    return train(model, tmp_path_factory.mktemp("trained"), merge=False, target_modules=["q_proj"])


def changed(base: Path, folder: Path, change: Callable[[State], State]) -> Path:
    shutil.copytree(base, folder)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    return folder


def wrapped(prefix: str, weight: str) -> Callable[[State], State]:
    """The tensors of a PEFT model that was not merged, in names that differ from one trainer to the next."""

    def change(state: State) -> State:
        factors = {f"{Q}.lora_A.default.weight": torch.ones(4, 16), f"{Q}.lora_B.default.weight": torch.ones(16, 4)}
        own = {name.replace(f"{Q}.weight", f"{Q}.{weight}"): tensor for name, tensor in state.items()}
        return {prefix + name: tensor for name, tensor in (own | factors).items()}

    return change


@pytest.mark.parametrize("command", ["to-hf", "merge-lora"])
@pytest.mark.parametrize(
    ("prefix", "weight"),
    [("base_model.model.", "base_layer.weight"), ("", "base_layer.weight"), ("", "weight")],
)
def test_an_adapter_that_is_not_merged_is_refused_by_name(
    prefix: str, weight: str, command: str, trained: Case, tmp_path: Path
) -> None:
    folder = changed(trained.base, tmp_path / "unmerged", wrapped(prefix, weight))
    words = {"to-hf": [str(folder), "--dtype", "bfloat16"], "merge-lora": [str(folder), str(trained.adapter)]}
    result = CliRunner().invoke(main, [command, *words[command], "-o", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "lora_A" in result.stderr or "base_layer" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: {name: tensor for name, tensor in state.items() if ".layers.1." not in name}, "1 layers"),
        (lambda state: {**state, f"{Q}.weight": state[f"{Q}.weight"][:8].clone()}, "shape mismatch"),
        (lambda state: {**state, f"{Q}.weight": torch.zeros(0)}, "shape mismatch"),
        (lambda state: {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, "no output head"),
    ],
)
def test_a_damaged_folder_is_refused(
    change: Callable[[State], State], named: str, trained: Case, tmp_path: Path
) -> None:
    folder = changed(trained.base, tmp_path / "damaged", change)
    with pytest.raises(MalformedInput, match=named):
        to_hf(folder, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_no_class_has_is_kept_and_named(trained: Case, tmp_path: Path) -> None:
    folder = changed(trained.base, tmp_path / "more", lambda state: {**state, "value_head.weight": torch.ones(1, 16)})
    (warning,) = to_hf(folder, tmp_path / "out", dtype="bfloat16").checkpoint.warnings
    assert "LlamaForCausalLM does not have, which are kept: `value_head.weight`" in warning
    assert "value_head.weight" in load_file(tmp_path / "out" / WEIGHTS)


def test_a_folder_of_another_class_is_compared_with_that_class(trained: Case, tmp_path: Path) -> None:
    def as_classifier(state: State) -> State:
        own = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        return {**own, "score.weight": torch.ones(3, 16)}

    folder = changed(trained.base, tmp_path / "classifier", as_classifier)
    fields = json.loads((folder / "config.json").read_text())
    labels = {str(label): f"L{label}" for label in range(3)}
    fields |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    (folder / "config.json").write_text(json.dumps(fields))
    assert to_hf(folder, tmp_path / "out", dtype="bfloat16").checkpoint.warnings == ()
    (folder / "config.json").write_text(json.dumps(fields | {"id2label": {"0": "L0"}}))
    with pytest.raises(MalformedInput, match=r"shape mismatch for `score\.weight`"):
        to_hf(folder, tmp_path / "other", dtype="bfloat16")


def peft_state(base: Path, prefix: str = "", **config: Any) -> tuple[State, Any]:
    """The state dict of a whole PeftModel of this base, whose new parts are not zero, and the model."""
    torch.manual_seed(1)
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config.pop("kind")(**config))
    for name, parameter in model.named_parameters():
        if not name.endswith(("base_layer.weight", "base_layer.bias")) and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    state = {name.removeprefix("base_model.model."): value.clone() for name, value in model.state_dict().items()}
    return {prefix + name: value for name, value in state.items()}, model


LORA: dict[str, Any] = {"kind": peft.LoraConfig, "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@PEFT_WARNS
@pytest.mark.parametrize(
    ("prefix", "more"),
    [
        ("", {}),
        ("base_model.model.", {}),
        ("", {"use_dora": True}),
        ("", {"modules_to_save": ["lm_head"]}),
        ("", {"target_modules": ["embed_tokens"]}),
    ],
    ids=["inner", "prefixed", "dora", "modules_to_save", "embedding"],
)
def test_an_adapter_that_is_not_merged_is_merged_where_its_config_is_in_the_folder(
    prefix: str, more: dict[str, Any], trained: Case, tmp_path: Path
) -> None:
    state, model = peft_state(trained.base, prefix, **LORA | more)
    folder = changed(trained.base, tmp_path / "unmerged", lambda _: state)
    model.peft_config["default"].save_pretrained(folder)
    plan = to_hf(folder, tmp_path / "out")
    assert "the LoRA adapter is merged into" in plan.checkpoint.warnings[0]
    merged = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6)


@PEFT_WARNS
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LORA, "lora_A"),
        ({"kind": peft.IA3Config, "target_modules": ["k_proj"], "feedforward_modules": []}, "ia3_l"),
        ({"kind": peft.VeraConfig, "r": 2, "target_modules": ["q_proj"]}, "vera_lambda_b"),
        ({"kind": peft.LoHaConfig, "r": 2, "target_modules": ["q_proj"]}, "hada_w1_a"),
        ({"kind": peft.OFTConfig, "oft_block_size": 4, "target_modules": ["q_proj"]}, "oft_R"),
    ],
    ids=["lora", "ia3", "vera", "loha", "oft"],
)
def test_no_command_goes_on_with_parts_of_an_adapter_beside_the_weights(
    config: dict[str, Any], named: str, trained: Case, tmp_path: Path
) -> None:
    state, _ = peft_state(trained.base, **config)
    parts = {name: value for name, value in state.items() if f".{named}" in name}
    assert parts
    folder = save_letters(changed(trained.base, tmp_path / "unmerged", lambda own: own | parts))
    out = str(tmp_path / "out")
    for words in (
        ["to-hf", str(folder), "-o", out],
        ["to-hf", str(folder), "--dtype", "bfloat16", "-o", out],
        ["export", str(folder), "-o", out],
        ["merge-lora", str(folder), str(trained.adapter), "-o", out],
        ["delta", "extract", str(trained.base), str(folder), "-o", out],
        ["delta", "extract", str(folder), str(trained.base), "-o", out],
        ["to-gguf", str(folder), "-o", f"{out}.gguf"],
        ["quantize", str(folder), "-o", out, "--scheme", "fp8-dynamic"],
        ["generate", str(folder), "a", "--backend", "torch"],
    ):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 3, words
        assert "not merged" in result.stderr and named in result.stderr, words
        assert not Path(out).exists()
    assert CliRunner().invoke(main, ["inspect", str(folder)]).exit_code == 0


def test_own_code_may_have_factors_but_no_base_layers(trained: Case, tmp_path: Path) -> None:
    own = {"model.norm.parametrizations.weight.0.lora_A": torch.ones(2, 16)}  # as in Jina's embeddings
    folder = changed(trained.base, tmp_path / "own", lambda state: state | own)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    assert own.keys() < {*open_checkpoint(folder)}
    save_file(load_file(folder / WEIGHTS) | {f"{Q}.base_layer.weight": torch.ones(2)}, folder / WEIGHTS)
    with pytest.raises(MalformedInput, match="contains 2 tensors of an adapter that is not merged"):
        open_checkpoint(folder)


@PEFT_WARNS
def test_an_adapter_of_another_kind_in_a_folder_is_refused_by_its_kind(trained: Case, tmp_path: Path) -> None:
    state, model = peft_state(trained.base, kind=peft.IA3Config, target_modules=["k_proj"], feedforward_modules=[])
    folder = changed(trained.base, tmp_path / "unmerged", lambda _: state)
    model.peft_config["default"].save_pretrained(folder)
    with pytest.raises(UnsupportedInput, match="`peft_type` 'IA3', not 'LORA'"):
        to_hf(folder, tmp_path / "out")
    with pytest.raises(UnsupportedInput, match="with an adapter that may not be merged"):
        extract_delta(trained.base, folder, tmp_path / "out")
