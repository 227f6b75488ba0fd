"""`--quant a8w8 --calibrate`: norms divided by powers of two, matrices multiplied with them; verify finds faults."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import SINGLE, open_weights
from llmconv.convert import to_hf
from llmconv.export import export, quantize
from llmconv.export.quantization.smoothing import Smoothing, measure_smoothing
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.sample_texts import calibration_text
from llmconv.tensors import Array
from llmconv.verify import verify
from llmconv.verify.results import Report
from tests.builders.safetensors import change_tensor
from tests.builders.talking import save_letters
from tests.verify.test_quantized_folder import damaged
from tools.tiny_models import depth, save_tiny

NORM, OTHER = "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"
QUERY, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
SMOOTHING = ".smoothing"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "phi3", "bloom")]
FIRST = ("prefill, 7 tokens",)


def uneven(model: Path, folder: Path) -> Path:
    """A copy of a model whose norms have outliers, as those of real models."""
    shutil.copytree(model, folder)
    random = np.random.default_rng(0)
    for name, tensor in open_weights(folder).items():
        if len(tensor.shape) == 1 and name.endswith("weight"):
            change_tensor(folder / SINGLE, name, lambda values: values * np.exp(random.normal(size=values.shape)))
    return folder


@pytest.fixture(scope="module")
def model(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with outliers and a tokenizer."""
    return uneven(talking, tmp_path_factory.mktemp("uneven") / "llama")


def tiny_talking(model_type: str, home: Path) -> Path:
    """A tiny model of any type, with outliers and a tokenizer."""
    save_tiny(model_type, home / "even", depth(model_type))
    save_letters(home / "even")
    return uneven(home / "even", home / "model")


def exported(model: Path, folder: Path) -> Path:
    export(model, folder, incremental=True, quant="a8w8", calibrate="default")
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs of a Llama with smoothed norms."""
    return exported(model, tmp_path_factory.mktemp("smooth") / "out")


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[str, Array]:
    return load_file(folder / "quantized.safetensors")


@pytest.mark.slow
def test_verify_accepts_it(model: Path, folder: Path) -> None:
    report = verify(folder, reference=model)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", *OTHERS])
def test_other_families_have_factors_and_pass(model_type: str, tmp_path: Path) -> None:
    source = tiny_talking(model_type, tmp_path)
    made = exported(source, tmp_path / "out")
    assert any(name.endswith(SMOOTHING) for name in load_file(made / "quantized.safetensors"))
    assert verify(made, reference=source).verdict == "pass"


@pytest.mark.slow
def test_factors_are_the_root_of_both_ranges_as_a_power_of_two(model: Path, stored: dict[str, Array]) -> None:
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    attention, largest = eager.model.layers[1].self_attn, torch.zeros(())

    def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal largest
        largest = torch.maximum(largest, inputs[0].abs().flatten(0, -2).amax(0))

    attention.k_proj.register_forward_pre_hook(see)
    ids = torch.tensor(load_tokenizer(model)(calibration_text())["input_ids"][:4096])[None]
    with torch.no_grad():
        for piece in torch.split(ids, 512, 1):
            eager(piece)
    weights = torch.stack([one.weight.abs().amax(0) for one in (attention.q_proj, attention.k_proj, attention.v_proj)])
    expected = torch.exp2(torch.round(torch.log2((largest / weights.amax(0)).sqrt())))
    found = stored[QUERY + SMOOTHING]
    assert (
        np.mean(found == expected.detach().numpy()) > 0.95 and len(set(found)) > 1
    )  # a ratio near the middle may go either way


def test_a_norm_is_stored_as_its_exact_quotient(model: Path, stored: dict[str, Array]) -> None:
    original = open_weights(model)[NORM].read()
    assert stored[NORM].dtype == np.float32
    assert np.array_equal(stored[NORM] * stored[NORM + SMOOTHING], original.astype(np.float32))


def test_all_products_behind_a_norm_have_its_factors(stored: dict[str, Array]) -> None:
    for norm, names in ((NORM, ("self_attn.q", "self_attn.k", "self_attn.v")), (OTHER, ("mlp.gate", "mlp.up"))):
        for name in names:
            assert np.array_equal(stored[f"model.layers.1.{name}_proj.weight{SMOOTHING}"], stored[norm + SMOOTHING])


def test_other_products_have_no_factors(stored: dict[str, Array]) -> None:
    names = {name.split(".")[-3] for name in stored if name.endswith(SMOOTHING) and "proj" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@pytest.mark.slow
def test_graphs_for_a_target_have_the_same_factors(model: Path, stored: dict[str, Array], tmp_path: Path) -> None:
    """Their norms are other operators."""
    export(model, tmp_path / "out", incremental=True, quant="a8w8", calibrate="default", target="ort-cpu")
    made = load_file(tmp_path / "out" / "quantized.safetensors")
    assert made.keys() == stored.keys() and all(np.array_equal(made[name], stored[name]) for name in stored)
    assert verify(tmp_path / "out", reference=model, scenario=FIRST).verdict == "pass"


@pytest.mark.slow
def test_a_norm_that_a_router_reads_is_left_alone(tmp_path: Path) -> None:
    made = load_file(exported(tiny_talking("mixtral", tmp_path), tmp_path / "out") / "quantized.safetensors")
    assert NORM + SMOOTHING in made and OTHER + SMOOTHING not in made


@pytest.mark.slow
def test_a_product_that_stays_as_it_is_keeps_its_norm(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", quant="a8w8", calibrate="default", quant_exclude=["1.self_attn.k_proj"])
    made = load_file(tmp_path / "out" / "quantized.safetensors")
    assert NORM + SMOOTHING not in made and QUERY + SMOOTHING not in made and OTHER + SMOOTHING in made


@pytest.mark.slow
def test_a_norm_that_adds_one_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = exported(tiny_talking("gemma2", tmp_path), tmp_path / "out")
    assert not any(name.endswith(SMOOTHING) for name in load_file(made / "quantized.safetensors"))
    assert "SmoothQuant does not fit this model" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_of_half_precision_keep_exact_quotients(model: Path, tmp_path: Path) -> None:
    to_hf(model, tmp_path / "half", dtype="bfloat16")
    export(tmp_path / "half", tmp_path / "out", incremental=True, quant="a8w8", calibrate="default")
    assert load_file(tmp_path / "out" / "quantized.safetensors")[NORM].dtype == np.float32


@pytest.mark.slow
def test_two_exports_are_equal(model: Path, folder: Path, tmp_path: Path) -> None:
    again = exported(model, tmp_path / "again") / "quantized.safetensors"
    assert again.read_bytes() == (folder / "quantized.safetensors").read_bytes()


def doubled(values: Array, at: int) -> Array:
    values[at] *= 2
    return values


def replaced(_: Array, other: Array) -> Array:
    return other


def failures(report: Report) -> str:
    return "; ".join(check.detail for check in report.checks if check.verdict == "fail" and check.name == "weights")


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUERY, GATE, NORM])
def test_a_wrong_factor_is_named(name: str, model: Path, folder: Path, tmp_path: Path) -> None:
    broken = damaged(folder, tmp_path / "broken", name + SMOOTHING, partial(doubled, at=5))
    assert name in failures(verify(broken, reference=model, scenario=FIRST))


@pytest.mark.slow
def test_a_norm_that_was_not_divided_is_named(model: Path, folder: Path, tmp_path: Path) -> None:
    original = open_weights(model)[NORM].read()
    broken = damaged(folder, tmp_path / "broken", NORM, partial(replaced, other=original))
    assert NORM in failures(verify(broken, reference=model, scenario=FIRST))


@pytest.mark.parametrize("wrong", [3.0, -2.0, 0.0, np.inf, np.nan, 2.0**-100])
def test_a_factor_that_is_no_power_of_two_is_named(wrong: float, model: Path, folder: Path, tmp_path: Path) -> None:
    broken = damaged(
        folder, tmp_path / "broken", QUERY + SMOOTHING, lambda values: np.r_[np.float32(wrong), values[1:]]
    )
    report = verify(broken, reference=model, scenario=FIRST)
    assert f"`{QUERY}{SMOOTHING}` has factors that are not powers of two" in failures(report)


def without_norms(found: Smoothing) -> Smoothing:
    return replace(found, norms={})


def with_norms_of_ones(found: Smoothing) -> Smoothing:
    return replace(found, norms={name: np.ones_like(factors) for name, factors in found.norms.items()})


def of_the_other_norm(found: Smoothing) -> Smoothing:
    return replace(found, norms={**found.norms, NORM: found.norms[OTHER]})


def with_one_more_product(found: Smoothing) -> Smoothing:
    name = "model.layers.1.self_attn.o_proj.weight"
    return replace(found, matrices={**found.matrices, name: 2 * np.ones(found.matrices[QUERY].shape, np.float32)})


def with_one_product_less(found: Smoothing) -> Smoothing:
    return replace(found, matrices={name: factors for name, factors in found.matrices.items() if name != QUERY})


FAULTS = [without_norms, with_norms_of_ones, of_the_other_norm, with_one_more_product, with_one_product_less]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_factors_that_do_not_cancel_fail_in_the_scenarios(
    fault: Callable[[Smoothing], Smoothing], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is consistent in itself: codes, norms and recorded factors agree."""
    monkeypatch.setattr(quantize, "measure_smoothing", lambda *given: fault(measure_smoothing(*given)))
    report = verify(exported(model, tmp_path / "out"), reference=model, scenario=FIRST)
    assert not failures(report)
    assert any(check.verdict == "fail" and check.name.startswith(FIRST) for check in report.checks)
