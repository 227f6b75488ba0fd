"""Several adapters in one: every method against PEFT's own functions, in float64, on dense changes of full rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoHaConfig, LoraConfig, OFTConfig, PeftConfig
from peft.utils import merge_utils
from safetensors.torch import load_file

from llmconv.convert import merge_lora
from llmconv.convert.adapters.combining import METHODS, Combination, TaskVector, combine
from llmconv.tensors import BY_NAME, in_memory
from tests.builders.tuned_models import Layers, merged_by_peft, train, train_layers

F64 = BY_NAME["float64"]
WEIGHTS = [0.5, 1.0, -0.75]
RANK = 5
LAYER = "linear.weight"
SIGNS: dict[str, tuple[str, ...]] = {name: ("total", "frequency") for name in ("ties", "dare_ties")}
CASES = [(method, sign) for method in METHODS for sign in SIGNS.get(method, ("total",))]

Changes = Sequence[torch.Tensor]


def by_peft(method: str, sign: Any, changes: Changes, density: float, masks: Changes) -> Any:
    """What PEFT makes of whole changes; where it draws, it draws `masks`."""
    weights, every = torch.tensor(WEIGHTS, dtype=torch.float64), list(changes)
    if method in ("linear", "cat", "svd"):
        total = merge_utils.task_arithmetic(every, weights)
        u, s, v = torch.linalg.svd(total)  # as `LoraModel._svd_generalized_task_arithmetic_weighted_adapter` does
        return u[:, :RANK] @ torch.diag(s[:RANK]) @ v[:RANK] if method == "svd" else total
    if not method.startswith("dare"):
        function = {"ties": merge_utils.ties, "magnitude_prune": merge_utils.magnitude_prune}[method]
        return function(every, weights, density, *([sign] if method == "ties" else []))
    drawn = iter(masks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bernoulli", lambda input: next(drawn))
        if method == "dare_linear":
            return merge_utils.dare_linear(every, weights, density)
        return merge_utils.dare_ties(every, weights, density, sign)


def options(method: str, sign: str) -> dict[str, Any]:
    return {"rank": RANK if method == "svd" else None, "majority_sign": sign}


@pytest.mark.filterwarnings("ignore:The density 1.0 is")
@pytest.mark.parametrize("zeros", [0.0, 0.2])
@pytest.mark.parametrize("density", [0.1, 0.45, 0.7, 1.0])
@pytest.mark.parametrize(("method", "sign"), CASES)
def test_a_method_on_arrays_is_pefts(method: str, sign: str, density: float, zeros: float) -> None:
    generator = np.random.default_rng(3)
    arrays = [generator.standard_normal((40, 30)) * (generator.random((40, 30)) >= zeros) for _ in WEIGHTS]
    nothing = in_memory(np.zeros((40, 30)), F64)

    def combined(kind: str, numbers: Sequence[int], weights: Sequence[float], **more: Any) -> torch.Tensor:
        pairs = zip(numbers, weights, strict=True)
        vectors = [TaskVector(in_memory(arrays[n], F64), weight, density, f"{n}") for n, weight in pairs]
        return torch.from_numpy(combine(nothing, "a.weight", vectors, Combination(kind, **more), F64).read())

    masks = [(combined("dare_linear", [number], [1.0]) != 0).double() for number in range(len(arrays))]
    expected = by_peft(method, sign, [torch.from_numpy(array) for array in arrays], density, masks)
    found = combined(method, range(len(arrays)), WEIGHTS, **options(method, sign))
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], torch.Tensor, list[torch.Tensor]]:
    """A base of float64, three adapters that change every element of one weight, that weight, and PEFT's changes."""
    folder = tmp_path_factory.mktemp("dense")
    fields = {"target_modules": ["linear"]}
    configs: list[PeftConfig] = [
        LoHaConfig(r=6, init_weights=False, **fields),
        OFTConfig(oft_block_size=8, init_weights=False, **fields),
    ]
    lora = LoraConfig(r=24, init_lora_weights=False, **fields)
    base, first, exact = train_layers(folder, lora, torch.float64)
    state = load_file(base / "model.safetensors")
    adapters, changes = [first], [exact[LAYER] - state[LAYER]]
    for number, config in enumerate(configs):
        model = Layers().double()
        model.load_state_dict(state)
        adapters.append(train(Layers(), folder / f"adapter{number}", config, seed=number))
        changes.append(merged_by_peft(model, adapters[-1])[LAYER] - state[LAYER])
    return base, adapters, state[LAYER], changes


@pytest.mark.parametrize(("method", "sign"), CASES)
def test_a_method_on_adapters_is_pefts_of_their_changes(method: str, sign: str, dense: Any, tmp_path: Path) -> None:
    base, adapters, weight, changes = dense
    assert all(np.linalg.matrix_rank(change) == min(change.shape) and change.ne(0).all() for change in changes)

    def change(name: str, chosen: list[Path], weights: list[float], **more: Any) -> Any:
        merge_lora(base, chosen, tmp_path / name, weights=weights, **more)
        return load_file(tmp_path / name / "model.safetensors")[LAYER] - weight

    drawn: dict[str, Any] = {"combine": "dare_linear", "densities": [0.45]}
    masks = [change(f"{n}", [one], [1.0], **drawn).ne(0).double() for n, one in enumerate(adapters)]
    densities = {"densities": [0.45]} if METHODS[method].prunes else {}
    found = change("out", adapters, WEIGHTS, combine=method, **densities, **options(method, sign))
    assert torch.allclose(found, by_peft(method, sign, changes, 0.45, masks), rtol=1e-12, atol=1e-14)
