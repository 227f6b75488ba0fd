"""Several adapters in one: what must not count, what is refused, and what the methods are by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import HRAConfig, LoHaConfig, LoraConfig
from safetensors.torch import load_file

from llmconv.cli import main
from llmconv.cli.merge_lora import COMBINATIONS
from llmconv.convert import merge_lora
from llmconv.convert.adapters.combining import METHODS, Combination, TaskVector, combine, kth_largest
from llmconv.errors import UsageProblem
from llmconv.tensors import BY_NAME, Array, in_memory
from tests.builders.tuned_models import Layers, merged_by_peft, train, train_layers, wrong

F64, F32 = BY_NAME["float64"], BY_NAME["float32"]
SHAPE = (40, 30)
WEIGHTS = [0.5, 1.0, -0.75]


def random_vectors(density: float, shape: tuple[int, ...] = SHAPE) -> list[TaskVector]:
    """Three changes with many zeros, and their weights."""
    generator = np.random.default_rng(3)
    deltas = [generator.standard_normal(shape) * (generator.random(shape) < 0.8) for _ in WEIGHTS]
    return [
        TaskVector(in_memory(delta, F64), weight, density, f"key{number}")
        for number, (delta, weight) in enumerate(zip(deltas, WEIGHTS, strict=True))
    ]


def combined(vectors: list[TaskVector], method: str, **options: Any) -> Array:
    """The combined change alone: of a weight of zeros."""
    zero = in_memory(np.zeros(vectors[0].delta.shape), F64)
    return combine(zero, "a.weight", vectors, Combination(method, **options), F64).read()


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_a_share_and_divides_by_it(method: str) -> None:
    vector = TaskVector(in_memory(np.ones((300, 300)), F64), 2.0, 0.25, "key")
    found = combined([vector], method)
    assert set(np.unique(found)) == {0.0, 8.0}
    assert abs((found > 0).mean() - 0.25) < 0.01


@pytest.mark.parametrize("what", ["seed", "name", "key"])
def test_what_is_drawn_depends_on_seed_name_and_adapter(what: str) -> None:
    ones = in_memory(np.ones(SHAPE), F64)
    zero = in_memory(np.zeros(SHAPE), F64)
    draws = [
        combine(
            zero,
            f"{other}.weight" if what == "name" else "a.weight",
            [TaskVector(ones, 1.0, 0.5, f"{other}" if what == "key" else "key")],
            Combination("dare_linear", seed=other if what == "seed" else 0),
            F64,
        ).read()
        for other in (1, 2)
    ]
    assert 0.4 < (draws[0] == draws[1]).mean() < 0.6


@pytest.mark.parametrize("shape", [SHAPE, (4, 12, 10), (6, 5, 3, 3)])
def test_svd_is_the_best_approximation_of_the_sum(shape: tuple[int, ...]) -> None:
    vectors = random_vectors(1.0, shape)
    total = torch.from_numpy(sum(vector.weight * vector.delta.read() for vector in vectors))
    matrix = total.reshape(len(total), -1) if total.ndim > 3 else total
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    expected = (u[..., :3] * s[..., None, :3]) @ v[..., :3, :]
    assert np.allclose(combined(vectors, "svd", rank=3), expected.reshape(total.shape).numpy(), atol=1e-12)


def test_svd_of_factors_is_svd_of_the_product() -> None:
    generator = np.random.default_rng(0)
    pairs = [(generator.standard_normal((40, 3)), generator.standard_normal((3, 30))) for _ in WEIGHTS]
    whole = [TaskVector(in_memory(a @ b, F64), w, 1.0, f"{w}") for (a, b), w in zip(pairs, WEIGHTS, strict=True)]
    thin = [replace(vector, factors=partial(pair_of, *pair)) for vector, pair in zip(whole, pairs, strict=True)]
    assert np.allclose(combined(thin, "svd", rank=4), combined(whole, "svd", rank=4), atol=1e-12)
    assert np.allclose(combined(thin, "svd", rank=9), combined(whole, "linear"), atol=1e-12)
    assert np.allclose(combined(thin, "svd", rank=99), combined(whole, "linear"), atol=1e-12)


def pair_of(left: Array, right: Array) -> tuple[Array, Array]:
    """The two."""
    return left, right


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    method=st.sampled_from(sorted(METHODS)),
    order=st.permutations(range(3)),
    cuts=st.sets(st.integers(1, 39), max_size=3),
)
def test_neither_order_nor_the_division_into_rows_counts(method: str, order: list[int], cuts: set[int]) -> None:
    base = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    vectors, options = random_vectors(0.4), Combination(method, rank=4 if method == "svd" else None)
    one = combine(in_memory(base, F32), "a.weight", vectors, options, F32)
    other = combine(in_memory(base, F32), "a.weight", [vectors[number] for number in order], options, F32)
    edges = [0, *sorted(cuts), SHAPE[0]]
    parts = [other.rows(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    assert np.concatenate(parts).tobytes() == one.read().tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), data=st.data())
def test_the_kth_largest_is_that_of_the_sorted_magnitudes(values: list[float], data: Any) -> None:
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(map(abs, values))[-count]
    assert kth_largest(in_memory(np.array(values), F64), count) == expected


def test_nothing_is_kept_of_none() -> None:
    assert kth_largest(in_memory(np.ones(3), F64), 0) == np.inf


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base, three adapters of different kinds, its tensors in float64, and the change that each adapter makes."""
    folder = tmp_path_factory.mktemp("adapted")
    lora = {"r": 3, "target_modules": ["linear", "square"], "init_lora_weights": False}
    base, first, exact = train_layers(folder, LoraConfig(**lora))
    plain = {name: value.double() for name, value in load_file(base / "model.safetensors").items()}
    adapters, changes = [first], [{name: exact[name] - plain[name] for name in plain}]
    kinds = [LoHaConfig(r=2, target_modules=["linear"], init_weights=False), HRAConfig(r=2, target_modules=["square"])]
    for number, config in enumerate(kinds):
        model = Layers().double()
        model.load_state_dict(plain)
        adapters.append(train(Layers(), folder / f"adapter{number}", config, seed=number))
        merged = merged_by_peft(model, adapters[-1])
        changes.append({name: merged[name] - plain[name] for name in plain})
    return base, adapters, plain, changes


@pytest.mark.parametrize("method", ["linear", "cat"])
def test_the_sum_of_adapters_of_several_kinds_is_exact(method: str, adapted: Any, tmp_path: Path) -> None:
    base, adapters, plain, changes = adapted
    merge_lora(base, adapters, tmp_path / "out", weights=WEIGHTS, combine=method)
    exact = plain
    for weight, change in zip(WEIGHTS, changes, strict=True):
        exact = {name: value + weight * change[name] for name, value in exact.items()}
    assert not wrong(tmp_path / "out", exact)


def test_the_command_offers_every_method() -> None:
    assert list(METHODS) == COMBINATIONS


@pytest.mark.slow_rows("magnitude_prune")
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_adapters_does_not_count(method: str, adapted: Any, tmp_path: Path) -> None:
    base, adapters, *_ = adapted
    options: Any = {"combine": method, "densities": [] if method in ("linear", "cat", "svd") else [0.5]}
    merge_lora(base, adapters, tmp_path / "one", weights=WEIGHTS, **options)
    merge_lora(base, adapters[::-1], tmp_path / "other", weights=WEIGHTS[::-1], **options)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize("method", ["ties", "magnitude_prune", "dare_linear", "dare_ties"])
def test_one_adapter_kept_whole_is_merged_as_without(method: str, adapted: Any, tmp_path: Path) -> None:
    base, adapters, *_ = adapted
    merge_lora(base, adapters[:1], tmp_path / "plain")
    merge_lora(base, adapters[:1], tmp_path / "out", combine=method, densities=[1.0])
    exact = {name: value.double() for name, value in load_file(tmp_path / "plain" / "model.safetensors").items()}
    assert not wrong(tmp_path / "out", exact)


def test_the_default_rank_of_svd_is_the_largest(adapted: Any, tmp_path: Path) -> None:
    base, adapters, plain, changes = adapted
    merge_lora(base, adapters[:2], tmp_path / "out", combine="svd")
    found = load_file(tmp_path / "out" / "model.safetensors")
    u, s, v = torch.linalg.svd(changes[0]["linear.weight"] + changes[1]["linear.weight"])
    expected = plain["linear.weight"] + u[:, :3] * s[:3] @ v[:3]
    assert torch.allclose(found["linear.weight"].double(), expected, rtol=0, atol=1e-7)


def test_the_manifest_says_how_adapters_were_combined(adapted: Any, tmp_path: Path) -> None:
    base, adapters, *_ = adapted
    merge_lora(base, adapters, tmp_path / "out", combine="dare_ties", densities=[0.5, 0.6, 0.7], seed=9)
    manifest = (tmp_path / "out" / "llmconv.json").read_text()
    assert '"dare_ties"' in manifest and '"seed": 9' in manifest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"combine": "ties"}, "got 0"),
        ({"combine": "ties", "densities": [0.5, 0.5]}, "got 2"),
        ({"densities": [0.5]}, "does not apply"),
        ({"combine": "ties", "densities": [0.0]}, "density"),
        ({"combine": "ties", "densities": [1.5]}, "density"),
        ({"combine": "ties", "densities": [float("nan")]}, "density"),
        ({"combine": "slerp"}, "slerp"),
        ({"combine": "ties", "densities": [0.5], "majority_sign": "mean"}, "mean"),
        ({"rank": 3}, "--rank 3"),
        ({"combine": "svd", "rank": 0}, "--rank 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], named: str, adapted: Any, tmp_path: Path
) -> None:
    base, adapters, *_ = adapted
    with pytest.raises(UsageProblem, match=named):
        merge_lora(base, adapters, tmp_path / "out", **options)


def test_svd_of_adapters_without_a_rank_wants_one(adapted: Any, tmp_path: Path) -> None:
    base, adapters, *_ = adapted
    with pytest.raises(UsageProblem, match="no adapter has a rank"):
        merge_lora(base, adapters[1:], tmp_path / "out", combine="svd")


def test_the_command_combines(adapted: Any, tmp_path: Path) -> None:
    base, adapters, *_ = adapted
    options = ["--combine=ties", "--density=0.4", "--majority-sign=frequency", "--weight=1", "--weight=2"]
    command = ["merge-lora", str(base), *map(str, adapters[:2]), "-o", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    merge_lora(
        *(base, adapters[:2], tmp_path / "same"),
        weights=[1, 2],
        combine="ties",
        densities=[0.4],
        majority_sign="frequency",
    )
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "same")]
    assert files[0] == files[1]
