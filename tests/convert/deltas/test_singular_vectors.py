"""The product that an adapter holds of one matrix: the best of its rank, or nearly, for any size and spectrum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import extract_delta, merge_lora
from tests.builders.delta_models import relative

State = dict[str, torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor]

Saver = Callable[..., Path]


def product_of(folder: Path) -> torch.Tensor:
    """B·A of the adapter of the one weight `a`, in float64."""
    stored = load_file(folder / "adapter_model.safetensors")
    a, b = (stored[f"base_model.model.a.lora_{part}.weight"].double() for part in "AB")
    return b @ a


def extracted(change: torch.Tensor, rank: int, save_tensors: Saver, folder: Path) -> float:
    """The share that the adapter of a weight of zeros that became `change` holds; it lies in `folder`."""
    base = save_tensors("base", {"a.weight": torch.zeros_like(change)}, {"config.json": {"model_type": "made_up"}})
    tuned = save_tensors("tuned", {"a.weight": change}, {"config.json": {"model_type": "made_up"}})
    return extract_delta(base, tuned, folder, rank=rank).captured["a.weight"]


@pytest.mark.quick_rows("shape2")
@pytest.mark.parametrize("shape", [(900, 700), (1200, 1000), (1000, 1200)])
def test_a_change_of_low_rank_is_held_down_to_its_small_singular_values(
    shape: tuple[int, int], save_tensors: Saver, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 5, generator=generator))[0] for n in shape)
    change = left @ torch.diag(torch.tensor([1.0, 0.5, 1e-2, 1e-3, 1e-4])) @ right.T
    assert extracted(change, 5, save_tensors, tmp_path / "out") > 1 - 1e-6
    assert (product_of(tmp_path / "out") - change).norm() < 1e-5  # a tenth of the smallest singular value


def spectrum(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and its squared singular values: noise (flat), or 50 that fall as 1/n, or three."""
    generator = torch.Generator().manual_seed(0)
    if kind == "flat":
        change = torch.randn(rows, columns, generator=generator)
        wide = change.double() if rows <= columns else change.double().T
        return change, torch.linalg.eigvalsh(wide @ wide.T).flip(0)
    values = 1 / torch.arange(1, 51) if kind == "falling" else torch.ones(3)
    left, right = (torch.linalg.qr(torch.randn(n, len(values), generator=generator))[0] for n in (rows, columns))
    return left * values @ right.T, values.double() ** 2


@pytest.mark.slow_rows("flat")
@pytest.mark.parametrize("kind", ["flat", "falling", "of low rank"])
def test_up_to_a_million_elements_the_product_is_the_best_there_is(
    kind: str, save_tensors: Saver, tmp_path: Path
) -> None:
    change, squares = spectrum(kind, 600, 700)
    share = extracted(change, 8, save_tensors, tmp_path / "out")
    assert share == pytest.approx(float(squares[:8].sum() / squares.sum()) ** 0.5, rel=1e-5)


@pytest.mark.quick_rows("shape0-of low rank-1e-06")
@pytest.mark.parametrize(("kind", "short"), [("flat", 3e-3), ("falling", 1e-4), ("of low rank", 1e-6)])
@pytest.mark.parametrize("shape", [(1200, 1000), (1000, 1200)])
def test_a_larger_one_holds_nearly_as_much_and_what_it_says_that_it_holds(
    kind: str, short: float, shape: tuple[int, int], save_tensors: Saver, tmp_path: Path
) -> None:
    change, squares = spectrum(kind, *shape)
    share = extracted(change, 8, save_tensors, tmp_path / "out")
    best = float(squares[:8].sum() / squares.sum()) ** 0.5
    assert (1 - short) * best < share < (1 + 1e-6) * best
    left_over = float((change - product_of(tmp_path / "out")).norm() / change.double().norm())
    assert left_over**2 == pytest.approx(1 - share**2, abs=1e-6)


@pytest.mark.quick_rows("0.0", "1e-20")
@pytest.mark.parametrize("size", [0.0, 1e-35, 1e-20, 1e20, 1e34])
def test_changes_of_any_size_have_a_product(size: float, save_tensors: Saver, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((1200, 3), (3, 1000)))
    change = left @ right * size
    change[0, 0] = change[0, 0] or -0.0  # other bits than the base's, the same value
    assert extracted(change, 4, save_tensors, tmp_path / "out") == pytest.approx(1, abs=1e-5)
    assert (product_of(tmp_path / "out") - change).norm() <= 1e-5 * change.double().norm()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_adapter_of_a_merged_adapter_merges_to_the_same_within_one_rounding(
    dtype: torch.dtype, save_tensors: Saver, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"A.weight": (8, 1000), "B.weight": (1200, 8)}
    factors = {f"base_model.model.a.lora_{k}": torch.randn(s, generator=generator) * 0.02 for k, s in shapes.items()}
    weight = (torch.randn(1200, 1000, generator=generator) * 0.02).to(dtype)
    base = save_tensors("base", {"a.weight": weight}, {"config.json": {"model_type": "made_up"}})
    lora = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["a"]}
    (adapter := tmp_path / "lora").mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    merge_lora(base, [adapter], tmp_path / "tuned")
    made = extract_delta(base, tmp_path / "tuned", tmp_path / "again", rank=8)
    merge_lora(base, [tmp_path / "again"], tmp_path / "out")
    tuned, found = (load_file(tmp_path / name / "model.safetensors")["a.weight"] for name in ("tuned", "out"))
    assert dtype != torch.float32 or min(made.captured.values()) > 0.9999
    assert not torch.equal(tuned, weight)
    step = torch.maximum(tuned.abs(), weight.abs()).double().clamp(min=0.02) * torch.finfo(dtype).eps
    assert bool(((found.double() - tuned.double()).abs() <= step).all())
    assert relative(found.double(), tuned.double()) < torch.finfo(dtype).eps / 4


@pytest.mark.slow
def test_a_matrix_of_many_blocks_is_factored_as_one(save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    for number, shape in enumerate([(9000, 130), (130, 9000)]):
        change = torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
        base = save_tensors(
            f"base{number}", {"a.weight": torch.zeros(shape)}, {"config.json": {"model_type": "made_up"}}
        )
        tuned = save_tensors(f"tuned{number}", {"a.weight": change}, {"config.json": {"model_type": "made_up"}})
        extract_delta(base, tuned, tmp_path / f"out{number}", rank=2)
        stored = load_file(tmp_path / f"out{number}/adapter_model.safetensors")
        a, b = (stored[f"base_model.model.a.lora_{part}.weight"] for part in "AB")
        np.testing.assert_allclose(b @ a, change, atol=1e-4)
        assert open_checkpoint(base)["a.weight"].nbytes > 4 << 20
