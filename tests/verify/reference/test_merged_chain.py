"""ExpectedOutputs of a chain's calls that were computed in one call are those of the calls one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager, ExpectedOutputs
from llmconv.verify.reference.other_roundings import (
    MergedPrefix,
    are_merged,
    merged_steps,
    outputs_of,
    run_chain,
    valid_rows,
)
from llmconv.verify.scenarios.calls import Chain
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario
from tests.conftest import DECODER, save_tiny

FIRST = ("prefill, 7 tokens",)
CHAINS = (
    "left padding",
    "right padding",
    "holes in the mask",
    "second turn",
    "pasts of 30 to 1,022 tokens",
    "batch of 3",
)
FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "bloom"))]


def planned(eager: Eager, names: tuple[str, ...]) -> list[tuple[Scenario, list[Chain]]]:
    """These scenarios, as `Eager.truths` takes them."""
    return Selection("quick", names).calls(eager.facts())


def calls_counted(eager: Eager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the number of new tokens of every call of the float64 model from now on."""
    seen: list[int] = []
    prefill = eager.runners[0].prefill  # `decode` calls it

    def counted(ids: Any, *rest: Any) -> Any:
        seen.append(ids.shape[1])
        return prefill(ids, *rest)

    monkeypatch.setattr(eager.runners[0], "prefill", counted)
    return seen


def largest_difference(eager: Eager, name: str, chains: list[Chain]) -> float:
    """Of all outputs that are compared, in units of their noise."""
    most = 0.0
    for chain in chains:
        merged, single = merged_steps(eager.runners[0], chain), run_chain(eager.runners[0], chain)
        assert merged and are_merged(merged)
        rounded = run_chain(eager.runners[1], chain)
        for call, *steps in zip(chain, merged, single, rounded, strict=True):
            ours, theirs, low = (outputs_of(step, call.known) for step in steps)
            for output in theirs:
                valid = valid_rows(call, output)
                a, b, c = (rows[output][valid] for rows in (ours, theirs, low))
                most = max(most, float(np.abs(a - b).max() / max(np.abs(b - c).max(), 1e-9)))
    return most


@pytest.mark.quick_rows("llama-right padding", "llama-holes in the mask", "llama-batch of 3")
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_call_gives_what_the_calls_give(name: str, model_type: str, eager: Callable[[str], Eager]) -> None:
    model = eager(model_type)
    ((_, chains),) = planned(model, (name,))
    assert largest_difference(model, name, chains) < 1e-5


def test_a_chain_costs_one_call_of_the_float64_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Eager(save_tiny("llama", tmp_path / "llama", num_hidden_layers=2), "float32")
    rows = planned(model, (*FIRST, "second turn"))
    seen = calls_counted(model, monkeypatch)
    for scenario, chains in rows:
        model.expected_outputs(scenario, chains)
    assert seen == [7, 19]


@pytest.mark.slow
def test_the_first_chain_is_run_call_by_call_as_no_noise_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Eager(save_tiny("llama", tmp_path / "llama", num_hidden_layers=2), "float32")
    ((scenario, chains),) = planned(model, ("second turn",))
    seen = calls_counted(model, monkeypatch)
    model.expected_outputs(scenario, chains)
    assert seen == [5, 1, 7, 1, 3, 2]


def truths_of(model: Eager) -> ExpectedOutputs:
    """Of the second turn, after a prompt."""
    return [model.expected_outputs(scenario, chains) for scenario, chains in planned(model, (*FIRST, "second turn"))][1]


def test_a_model_with_other_results_in_one_call_is_run_call_by_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path / "llama", num_hidden_layers=2)
    expected = truths_of(Eager(folder, "float32"))
    model = Eager(folder, "float32")
    prefill = model.runners[0].prefill

    def by_length(ids: Any, mask: Any, positions: Any, past: Any = None, extras: Any = None) -> Any:
        return prefill(ids, mask, positions * (1 + (ids.shape[1] == 19)), past, extras)

    monkeypatch.setattr(model.runners[0], "prefill", by_length)
    for call, wanted in zip(truths_of(model)[0], expected[0], strict=True):
        for name, truth in call.items():
            assert np.allclose(truth.exact, wanted[name].exact, rtol=0, atol=1e-12)
            assert np.isclose(truth.total_noise, wanted[name].total_noise, rtol=1e-3)


def test_frequencies_that_depend_on_the_length_are_run_call_by_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    changes = {**DECODER, "num_hidden_layers": 2, "rope_parameters": rope}
    model = Eager(save_tiny("llama", tmp_path / "llama", **changes), "float32")
    rows = planned(model, (*FIRST, "second turn"))
    seen = calls_counted(model, monkeypatch)
    for scenario, chains in rows:
        model.expected_outputs(scenario, chains)
    assert seen == [7, 5, 1, 7, 1, 3, 2]


def test_calls_that_cannot_be_merged_are_not_merged(eager: Callable[[str], Eager]) -> None:
    model = eager("llama")
    for name in ("rows exchanged", "tokens taken back", "garbage under the mask", *FIRST):
        ((_, (chain,)),) = planned(model, (name,))
        assert merged_steps(model.runners[0], chain) is None


def test_a_merged_cache_ends_where_its_call_does(eager: Callable[[str], Eager]) -> None:
    model = eager("llama")
    ((_, (chain,)),) = planned(model, ("second turn",))
    steps = merged_steps(model.runners[0], chain)
    assert steps and all(isinstance(step.present, MergedPrefix) for step in steps)
    assert [step.present.length for step in steps] == [5, 6, 13, 14, 17, 19]
    assert [step.present.arrays()["present.0.key"].shape[2] for step in steps] == [5, 6, 13, 14, 17, 19]
    assert [step.logits.shape[1] for step in steps] == [5, 1, 7, 1, 3, 2]


@pytest.mark.slow
def test_a_quick_run_reads_a_large_model_once_with_each_scaling(
    small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = EagerRunner._loaded

    def counted(runner: EagerRunner) -> Any:
        loaded.append(runner.dtype)
        return load(runner)

    monkeypatch.setattr("llmconv.runtime.eager.runner.SMALL_MODEL", 0)
    monkeypatch.setattr(EagerRunner, "_loaded", counted)
    assert verify(small("llama"), scenario=FIRST).verdict == "pass"
    assert loaded == ["float32", "float64", "float32", "float32"]
