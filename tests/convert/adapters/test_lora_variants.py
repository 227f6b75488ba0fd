"""Kinds of LoRA with a rule of their own, against PEFT in float64: changed bases, replicated layers, blocks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file

from llmconv.cli import main
from llmconv.convert import merge_lora
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from tests.builders.lora_models import Case, State, assert_equal, shake, train


@pytest.fixture
def loaded(tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """`loaded(model_type)` is a tiny model."""

    def load(model_type: str = "llama", **options: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tiny(model_type), **options)

    return load


@pytest.mark.quick_rows("BD-LoRA", "VeLoRA")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"use_bdlora": BdLoraConfig(["q_proj"], ["o_proj"], 2)}, id="BD-LoRA"),
        pytest.param({"monteclora_config": MontecloraConfig()}, id="MonteCLoRA"),
        pytest.param({"velora_config": VeloraConfig()}, id="VeLoRA"),
        pytest.param({"init_lora_weights": "mica"}, id="MiCA"),
        pytest.param({"init_lora_weights": "orthogonal"}, id="orthogonal"),
        pytest.param({"init_lora_weights": "eva"}, id="EVA"),
        pytest.param({"exclude_modules": ["layers.0.self_attn.q_proj"]}, id="exclude_modules"),
        pytest.param({"target_modules": r".*layers\.[13].*\.(up|o)_proj"}, id="regular expression"),
        pytest.param({"layers_to_transform": [0, 3], "layers_pattern": "layers"}, id="layers_pattern"),
        pytest.param({"target_parameters": ["q_proj.weight"], "target_modules": []}, id="a parameter of a layer"),
    ],
)
def test_a_variant_means_what_it_means_to_peft(
    fields: dict[str, Any], loaded: Callable[..., Any], tmp_path: Path
) -> None:
    case = train(loaded(), tmp_path, **{"target_modules": ["q_proj", "o_proj"], **fields})
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_replicated_layers_equal_peft(model_type: str, loaded: Callable[..., Any], tmp_path: Path) -> None:
    modules = ["q_proj", "down_proj"]
    layers = [[0, 3], [1, 4]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loaded(model_type)
        model.save_pretrained(tmp_path / "base")
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=modules, layer_replication=layers)
        peft_model = get_peft_model(model, config)
        shake(peft_model)
        peft_model.save_pretrained(tmp_path / "adapter")
        expected = peft_model.eval()(torch.arange(12).view(2, 6)).logits
    merge = merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    assert merge.plan.checkpoint.config["num_hidden_layers"] == 6
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(found(torch.arange(12).view(2, 6)).logits, expected, rtol=1e-5, atol=1e-5)


def test_lists_of_layers_in_the_config_follow(loaded: Callable[..., Any], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 4]]}
    case = train(loaded("gemma2"), tmp_path, merge=False, **fields)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (case.base, tmp_path / "out"))
    assert after["layer_types"] == [before["layer_types"][layer] for layer in (0, 1, 1, 2, 3)]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(6)[None])


@pytest.mark.slow
def test_replicated_layers_are_exact(loaded: Callable[..., Any], tmp_path: Path) -> None:
    case = train(loaded(), tmp_path, target_modules=["q_proj"], layer_replication=[[0, 2], [1, 4]], merge=False)
    state = load_file(case.base / "model.safetensors")
    factors = load_file(case.adapter / "adapter_model.safetensors")
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for new, old in enumerate([0, 1, 1, 2, 3]):
        path = f"base_model.model.model.layers.{new}.self_attn.q_proj"
        a, b = (factors[f"{path}.lora_{part}.weight"].double() for part in "AB")
        exact = state[f"model.layers.{old}.self_attn.q_proj.weight"].double() + 2 * b @ a
        assert torch.equal(found[f"model.layers.{new}.self_attn.q_proj.weight"], exact.float())
        name = "mlp.up_proj.weight"
        assert torch.equal(found[f"model.layers.{new}.{name}"], state[f"model.layers.{old}.{name}"])
    assert "model.layers.5.mlp.up_proj.weight" not in found


Started = Callable[..., tuple[Case, Path, State]]


@pytest.fixture
def started(loaded: Callable[..., Any], tmp_path: Path) -> Started:
    """`started(init)`: base, trained and initial adapter, and the trained model's weights in float64."""

    def make(init: str, model_type: str = "llama", **fields: Any) -> tuple[Case, Path, State]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = loaded(model_type)
            model.save_pretrained(tmp_path / "base")
            config = {"r": 4, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": init, **fields}
            peft_model = get_peft_model(model, LoraConfig(**config))
            peft_model.save_pretrained(tmp_path / "initial")
            moved = peft_model.unload()
            moved.save_pretrained(tmp_path / "moved")
            peft_model = get_peft_model(moved, LoraConfig(**config | {"init_lora_weights": False}))
            initial = load_file(tmp_path / "initial" / "adapter_model.safetensors")
            factors = {name.replace(".weight", ".default.weight"): one for name, one in initial.items()}
            peft_model.load_state_dict(factors, strict=False)
            shake(peft_model)
            peft_model.peft_config["default"].init_lora_weights = init
            peft_model.save_pretrained(tmp_path / "adapter")
        exact = {name: one.double() for name, one in load_file(tmp_path / "base" / "model.safetensors").items()}
        return Case(tmp_path / "base", tmp_path / "adapter", tmp_path / "moved"), tmp_path / "initial", exact

    return make


def difference(trained: Path, initial: Path, scale: float) -> State:
    """s·(B·A − B₀·A₀) by name of the weight."""
    after, before = (load_file(folder / "adapter_model.safetensors") for folder in (trained, initial))
    result = {}
    for name in after:
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            change = after[other].double() @ after[name].double() - before[other].double() @ before[name].double()
            result[name.removeprefix("base_model.model.").replace(".lora_A", "")] = scale * change
    return result


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_a_changed_base_is_exact_with_the_initial_adapter(init: str, started: Started, tmp_path: Path) -> None:
    case, initial, exact = started(init)
    merge_lora(case.base, [case.adapter], tmp_path / "out", initial_adapters=[initial])
    for name, change in difference(case.adapter, initial, 2).items():
        exact[name] += change
    assert_equal(tmp_path / "out", exact)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_it_is_what_training_ended_with(init: str, started: Started, tmp_path: Path) -> None:
    case, initial, _ = started(init)
    merge_lora(case.base, [case.adapter], tmp_path / "out", initial_adapters=[initial])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = json.loads((case.adapter / "adapter_config.json").read_text()) | {"init_lora_weights": True}
        (case.adapter / "adapter_config.json").write_text(json.dumps(config))
        moved = transformers.AutoModelForCausalLM.from_pretrained(case.merged, dtype=torch.float64)
        expected = PeftModel.from_pretrained(moved, case.adapter).double().merge_and_unload().state_dict()
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_dora_over_a_changed_base_is_exact_too(started: Started, tmp_path: Path) -> None:
    case, initial, exact = started("pissa", use_dora=True)
    merge_lora(case.base, [case.adapter], tmp_path / "out", initial_adapters=[initial])
    factors = load_file(case.adapter / "adapter_model.safetensors")
    for name, change in difference(case.adapter, initial, 2).items():
        magnitude = factors[f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"].double()
        whole = exact[name] + change
        exact[name] = magnitude[:, None] / whole.norm(dim=1, keepdim=True) * whole
    assert_equal(tmp_path / "out", exact)


def test_the_command_takes_one_per_adapter(started: Started, tmp_path: Path) -> None:
    case, initial, _ = started("pissa")
    arguments = ["merge-lora", str(case.base), str(case.adapter), "-o", str(tmp_path / "out")]
    assert CliRunner().invoke(main, [*arguments, "--initial-adapter", str(initial)]).exit_code == 0
    (step,) = json.loads((tmp_path / "out" / "llmconv.json").read_text())["steps"]
    assert step["options"]["initial_adapters"][0]["name"] == "initial"
    result = CliRunner().invoke(main, [*arguments, "--initial-adapter", "-", "--initial-adapter", "-"])
    assert result.exit_code == 2 and "2 initial adapters" in result.stderr


def refusal(base: Path, adapter: Path, out: Path, **options: Any) -> LlmconvError:
    """The error, after which there is no output."""
    with pytest.raises(LlmconvError) as caught:
        merge_lora(base, [adapter], out, **options)
    assert caught.value.hint and not out.exists()
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "loftq", "corda", "lora_ga"])
def test_a_changed_base_without_the_initial_adapter_is_refused(init: str, started: Started, tmp_path: Path) -> None:
    case, _, _ = started("pissa")
    config = json.loads((case.adapter / "adapter_config.json").read_text()) | {"init_lora_weights": init}
    (case.adapter / "adapter_config.json").write_text(json.dumps(config))
    error = refusal(case.base, case.adapter, tmp_path / "out")
    assert isinstance(error, UnsupportedInput) and init in error.message
    assert ("quantized" if init == "loftq" else "--initial-adapter") in error.hint


@pytest.mark.slow
def test_loftq_is_refused_with_the_initial_adapter_too(started: Started, tmp_path: Path) -> None:
    case, initial, _ = started("pissa")
    config = json.loads((case.adapter / "adapter_config.json").read_text()) | {"init_lora_weights": "loftq"}
    (case.adapter / "adapter_config.json").write_text(json.dumps(config))
    error = refusal(case.base, case.adapter, tmp_path / "out", initial_adapters=[initial])
    assert "quantized" in error.hint


@pytest.mark.parametrize("change", ["missing", "rank"])
def test_an_initial_adapter_of_another_training_is_refused(change: str, started: Started, tmp_path: Path) -> None:
    case, initial, _ = started("pissa")
    file = initial / "adapter_model.safetensors"
    state = {name: one for name, one in load_file(file).items() if change == "rank" or "layers.0" not in name}
    if change == "rank":
        state = {name: (one[:2] if "lora_A" in name else one[:, :2]).contiguous() for name, one in state.items()}
        config = json.loads((initial / "adapter_config.json").read_text()) | {"r": 2}
        (initial / "adapter_config.json").write_text(json.dumps(config))
    save_file(state, file)
    error = refusal(case.base, case.adapter, tmp_path / "out", initial_adapters=[initial])
    assert isinstance(error, MalformedInput) and "layers.0" in error.message


@pytest.mark.slow
def test_as_many_initial_adapters_as_adapters_are_needed(started: Started, tmp_path: Path) -> None:
    case, initial, _ = started("pissa")
    error = refusal(case.base, case.adapter, tmp_path / "out", initial_adapters=[initial, initial])
    assert isinstance(error, UsageProblem)


@pytest.mark.quick_rows(
    "layer_replication-value2",
    "use_bdlora-value4",
    "use_bdlora-2",
    "target_parameters-q_proj.weight",
)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 9]]),
        ("layer_replication", [[2, 2]]),
        ("layer_replication", [1, 2]),
        ("layer_replication", "all"),
        ("use_bdlora", {"nblocks": 0}),
        ("use_bdlora", {"nblocks": 3, "target_modules_bd_a": ["q_proj"]}),
        ("use_bdlora", 2),
        ("target_parameters", "q_proj.weight"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    field: str, value: Any, loaded: Callable[..., Any], tmp_path: Path
) -> None:
    case = train(loaded(), tmp_path, target_modules=["q_proj"])
    config = json.loads((case.adapter / "adapter_config.json").read_text())
    (case.adapter / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    assert isinstance(refusal(case.base, case.adapter, tmp_path / "out"), MalformedInput)


def test_layers_that_the_config_numbers_are_not_replicated(loaded: Callable[..., Any], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 4]]}
    case = train(loaded(), tmp_path, merge=False, **fields)
    config = json.loads((case.base / "config.json").read_text())
    (case.base / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1]}))
    assert "mlp_only_layers" in refusal(case.base, case.adapter, tmp_path / "out").message


def test_multihead_attention_is_refused_by_name(save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {"attn.in_proj_weight": torch.ones(12, 4), "attn.out_proj.weight": torch.ones(4, 4)}
    base = save_tensors("base", tensors, {"config.json": {"model_type": "clip"}})
    factors = {"attn.lora_A.weight": torch.ones(2, 4), "attn.lora_B.weight": torch.ones(12, 2)}
    config = {"adapter_config.json": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}}
    adapter = save_tensors("adapter", factors, config, weights="adapter_model.safetensors")
    error = refusal(base, adapter, tmp_path / "out")
    assert isinstance(error, UnsupportedInput) and "MultiheadAttention" in error.message
