"""delta extract --rank: PEFT loads the adapter, its merge is what was captured, the full rank is the tuned model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.cli import main
from llmconv.convert import extract_delta, merge_lora
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from tests.builders.delta_models import relative
from tests.builders.tiny_models import FIELDS

State = dict[str, torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor]


def noise(name: str, value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(value.shape, generator=generator) * 0.05


def of_rank(rank: int) -> Change:
    """A change of linear weights by a product of this rank, and of nothing else."""

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() != 2 or "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
            return torch.zeros_like(value)
        generator = torch.Generator().manual_seed(len(name))
        rows, columns = value.shape
        left, right = (torch.randn(shape, generator=generator) for shape in ((rows, rank), (rank, columns)))
        return left @ right * 0.01

    return change


def tune(base: Path, folder: Path, change: Change, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(change(name, parameter))
    model.to(dtype).save_pretrained(folder)
    return folder


def merged(base: Path, adapter: Path) -> State:
    """PEFT's merge in float64; every tensor of the adapter must have found its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        peft_model = PeftModel.from_pretrained(model, adapter).double()
        places = {name.replace(".default", "").replace(".modules_to_save", "") for name in peft_model.state_dict()}
        assert load_file(adapter / "adapter_model.safetensors").keys() <= places
        return dict(peft_model.merge_and_unload().state_dict())


def state_of(folder: Path) -> State:
    """As transformers loads it, in float64."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2", "gpt2", "bloom"])
def test_at_full_rank_peft_makes_the_tuned_model(model_type: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tuned = tune(tiny(model_type), tmp_path / "tuned", noise)
    made = extract_delta(tiny(model_type), tuned, tmp_path / "adapter", rank=1000)
    found, expected = merged(tiny(model_type), tmp_path / "adapter"), state_of(tuned)
    assert found.keys() == expected.keys()
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-6
    assert made.captured_overall == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning", "ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2"])
def test_with_the_adapter_peft_gives_the_logits_of_the_base_plus_the_products(
    model_type: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny(model_type)
    tuned = tune(base, tmp_path / "tuned", noise)
    made = extract_delta(base, tuned, tmp_path / "adapter", rank=3)
    before, after = state_of(base), state_of(tuned)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    products = {name: best_of_rank(after[name] - before[name], 3) for name in made.captured}
    plain.load_state_dict({name: before[name] + products.get(name, after[name] - before[name]) for name in before})
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), tmp_path / "adapter"
    )
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert relative(model.double().eval()(ids).logits, plain.eval()(ids).logits) < 1e-5


def best_of_rank(change: torch.Tensor, rank: int) -> torch.Tensor:
    """By Eckart and Young, from all singular triples."""
    left, values, right = torch.linalg.svd(change.double(), full_matrices=False)
    return torch.as_tensor((left[:, :rank] * values[:rank]) @ right[:rank])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_our_own_merge_of_it_is_the_best_approximation_of_that_rank(
    model_type: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny(model_type)
    tuned = tune(base, tmp_path / "tuned", noise)
    made = extract_delta(base, tuned, tmp_path / "adapter", rank=5)
    merge_lora(base, [tmp_path / "adapter"], tmp_path / "out")
    found, before, after = state_of(tmp_path / "out"), state_of(base), state_of(tuned)
    for name in made.captured:
        change = after[name] - before[name]
        assert relative(found[name] - before[name], best_of_rank(change, 5)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2"])
def test_our_own_merge_makes_the_tuned_model_too(model_type: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tuned = tune(tiny(model_type), tmp_path / "tuned", noise)
    extract_delta(tiny(model_type), tuned, tmp_path / "adapter", rank=1000)
    merge_lora(tiny(model_type), [tmp_path / "adapter"], tmp_path / "out")
    found, expected = state_of(tmp_path / "out"), state_of(tuned)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_what_peft_merges_is_the_best_approximation_and_its_share_is_told(
    model_type: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny(model_type)
    tuned = tune(base, tmp_path / "tuned", noise)
    made = extract_delta(base, tuned, tmp_path / "adapter", rank=5)
    found, before, after = merged(base, tmp_path / "adapter"), state_of(base), state_of(tuned)
    held = change = 0.0
    for name, share in made.captured.items():
        values = torch.linalg.svdvals(after[name] - before[name])
        best = values[:5].norm() / values.norm()
        assert share == pytest.approx(float(best), rel=1e-5)
        assert float((found[name] - before[name]).norm() / values.norm()) == pytest.approx(share, rel=1e-5)
        assert relative(found[name] - before[name], after[name] - before[name]) == pytest.approx(
            float(values[5:].norm() / values.norm()), rel=1e-4
        )
        held, change = held + float(values[:5].norm()) ** 2, change + float(values.norm()) ** 2
    assert made.captured_overall == pytest.approx((held / change) ** 0.5, rel=1e-5)
    assert all(torch.equal(found[name].float(), after[name].float()) for name in made.whole)


def test_a_change_of_low_rank_is_held_by_that_rank_alone(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tuned = tune(tiny("llama"), tmp_path / "tuned", of_rank(3))
    made = extract_delta(tiny("llama"), tuned, tmp_path / "adapter", rank=3)
    assert len(made.captured) == 28 and not made.whole
    assert min(made.captured.values()) > 0.99999
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"], config["bias"]) == (3, 3, None, "none")


def test_only_what_changed_is_in_the_adapter(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return noise(name, value) if "layers.1.self_attn.q_proj" in name else torch.zeros_like(value)

    tuned = tune(tiny("qwen2"), tmp_path / "tuned", change)
    made = extract_delta(tiny("qwen2"), tuned, tmp_path / "adapter", rank=4)
    module = "model.layers.1.self_attn.q_proj"
    assert list(made.captured) == [f"{module}.weight"] and made.whole == (f"{module}.bias",)
    names = {f"base_model.model.{module}.{part}" for part in ("lora_A.weight", "lora_B.weight", "base_layer.bias")}
    assert load_file(tmp_path / "adapter/adapter_model.safetensors").keys() == names


def test_a_base_of_another_type_is_compared_by_value(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tune(tiny("llama"), tmp_path / "base", lambda name, value: torch.zeros_like(value), torch.bfloat16)
    wide = tune(base, tmp_path / "wide", lambda name, value: torch.zeros_like(value))
    with pytest.raises(UnsupportedInput, match="no linear weight changed"):
        extract_delta(base, wide, tmp_path / "adapter", rank=4)
    tuned = tune(base, tmp_path / "tuned", of_rank(2))
    assert min(extract_delta(base, tuned, tmp_path / "adapter", rank=2).captured.values()) > 0.9999


def test_a_dtype_is_that_of_the_factors(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tuned = tune(tiny("llama"), tmp_path / "tuned", noise)
    extract_delta(tiny("llama"), tuned, tmp_path / "adapter", rank=4, dtype="bfloat16")
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


def test_a_larger_vocabulary_goes_along_whole_with_a_warning(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.resize_token_embeddings(99, mean_resizing=False)
    model.model.layers[0].mlp.up_proj.weight.data += 0.1
    model.save_pretrained(tmp_path / "tuned")
    (tmp_path / "tuned/tokenizer.json").write_text("{}")
    made = extract_delta(tiny("llama"), tmp_path / "tuned", tmp_path / "adapter", rank=1)
    assert set(made.whole) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert "`resize_token_embeddings(99)`" in capsys.readouterr().err
    merge_lora(tiny("llama"), [tmp_path / "adapter"], tmp_path / "out")
    assert relative(state_of(tmp_path / "out")["lm_head.weight"], state_of(tmp_path / "tuned")["lm_head.weight"]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_what_an_adapter_cannot_hold_is_refused(
    tiny: Callable[[str], Path], save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    zeros, ones = torch.zeros(4, 4), torch.ones(4, 4)
    cases = {
        "an expert": ({"a.experts.0.w1.weight": zeros}, {"a.experts.0.w1.weight": ones}, "no adapter has the change"),
        "a parameter": ({"a.sinks": zeros[0]}, {"a.sinks": ones[0]}, "no adapter has the change"),
        "a shape": ({"a.weight": zeros}, {"a.weight": ones[:2]}, "no adapter has the change"),
        "names": ({"a.weight": zeros}, {"b.weight": ones}, "only one of the two models has `a.weight`"),
        "no number": ({"a.weight": zeros}, {"a.weight": ones / 0}, "the change of `a.weight` is not finite"),
    }
    for number, (below, above, reason) in enumerate(cases.values()):
        base = save_tensors(f"base{number}", below, {"config.json": {"model_type": "made_up"}})
        tuned = save_tensors(f"tuned{number}", above, {"config.json": {"model_type": "made_up"}})
        with pytest.raises(UnsupportedInput, match=reason):
            extract_delta(base, tuned, tmp_path / f"out{number}", rank=2)
        assert not (tmp_path / f"out{number}").exists()


def test_no_rank_and_quantized_models_are_refused(save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    base = save_tensors("base", {"a.weight": torch.zeros(2, 2)}, {"config.json": {"model_type": "made_up"}})
    packed = save_tensors(
        "q",
        {"a.weight": torch.ones(2, 2)},
        {"config.json": {"model_type": "made_up", "quantization_config": {"bits": 4}}},
    )
    with pytest.raises(UsageProblem, match="`--rank 0`"):
        extract_delta(base, base, tmp_path / "out", rank=0)
    with pytest.raises(InputRefused, match="`q` is quantized"):
        extract_delta(base, packed, tmp_path / "out", rank=1)


def test_what_else_changed_in_the_config_is_told(
    save_tensors: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tensors(
        "base", {"a.weight": torch.zeros(2, 2)}, {"config.json": {"model_type": "made_up", "rope_theta": 1e4}}
    )
    tuned = save_tensors(
        "tuned", {"a.weight": torch.ones(2, 2)}, {"config.json": {"model_type": "made_up", "rope_theta": 1e6}}
    )
    extract_delta(base, tuned, tmp_path / "out", rank=1, dry_run=True)
    assert "other changes of the config: `rope_theta`" in capsys.readouterr().err


def test_the_command_prints_the_share_of_every_weight(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tuned = tune(tiny("llama"), tmp_path / "tuned", of_rank(8))
    command = ["delta", "extract", str(tiny("llama")), str(tuned), "--rank", "4", "-o"]
    told = json.loads(CliRunner().invoke(main, [*command, str(tmp_path / "a"), "--json"]).stdout)
    shown = CliRunner().invoke(main, [*command, str(tmp_path / "b")]).stdout
    assert told["kind"] == "low-rank" and 0.5 < told["captured_overall"] < 1
    for name, share in told["captured"].items():
        assert f"{share:7.2%}  {name}\n" in shown
    assert "of the norm of all 28 changes" in shown


SPARSE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save_model(folder: Path, model_type: str, **changes: Any) -> Path:
    settings = {**FIELDS["llama"], **changes}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).save_pretrained(folder)
    return folder


def but_experts(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value) if ".experts." in name else noise(name, value)


@pytest.mark.slow
def test_what_chooses_among_experts_is_saved_whole(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3_moe", **SPARSE_EXPERTS)
    tuned = tune(base, tmp_path / "tuned", but_experts)
    made = extract_delta(base, tuned, tmp_path / "adapter", rank=1000)
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"} <= set(made.whole)
    found, expected = merged(base, tmp_path / "adapter"), state_of(tuned)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize(
    ("model_type", "changes", "name"),
    [("mixtral", {"num_local_experts": 4}, "block_sparse_moe.gate.weight"), ("gpt_neox", {}, "embed_out.weight")],
)
def test_what_transformers_knows_by_another_name_is_refused(
    model_type: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", model_type, **changes)
    tuned = tune(base, tmp_path / "tuned", but_experts)
    with pytest.raises(UnsupportedInput, match=rf"transformers has other names .*{name}"):
        extract_delta(base, tuned, tmp_path / "adapter", rank=4)


@pytest.mark.slow
def test_attention_alone_of_a_model_with_experts_has_an_adapter(tmp_path: Path) -> None:
    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return noise(name, value) if "self_attn" in name else torch.zeros_like(value)

    base = save_model(tmp_path / "base", "mixtral", num_local_experts=4)
    tuned = tune(base, tmp_path / "tuned", change)
    extract_delta(base, tuned, tmp_path / "adapter", rank=1000)
    found, expected = merged(base, tmp_path / "adapter"), state_of(tuned)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-6
