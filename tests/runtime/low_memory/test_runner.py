"""The eager model that runs layer by layer gives the results of the whole model, and never holds it in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.errors import UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.low_memory.weights import PlannedCall
from llmconv.runtime.runner import Cache, Step, default_positions
from llmconv.tensors import Array
from tests.builders.layered_models import LAYERED
from tests.conftest import CONFIGS, DECODER, save_tiny

MORE: dict[str, dict[str, Any]] = {
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
    "lfm2": {**DECODER, "layer_types": ["full_attention", "conv"] * 2},
    "falcon_h1": {
        **DECODER,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
    "gemma3n_text": LAYERED["gemma3n_text"],
    "zamba2": {
        **DECODER,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
}
"""Experts, states, convolutions, both kinds, layers that share keys, layers that share weights."""

CALLS = [(0, 6, None), (6, 1, 0), (7, 2, 1), (0, 9, None), (3, 1, None)]
"""First token, new tokens, the call that it continues."""

FAMILIES = [
    pytest.param(name, marks=() if name in {"llama", "mixtral", "mamba"} else pytest.mark.slow)
    for name in [*CONFIGS, *MORE]
]


@pytest.fixture(scope="session")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(model_type)` is a tiny model, of those of all tests or of `MORE`."""
    made: dict[str, Path] = {}

    def find(model_type: str) -> Path:
        if model_type in CONFIGS:
            return tiny(model_type)
        if model_type not in made:
            made[model_type] = save_tiny(
                model_type, tmp_path_factory.mktemp("streamed") / model_type, **MORE[model_type]
            )
        return made[model_type]

    return find


def planned() -> list[PlannedCall]:
    """A few calls on a padded batch of two."""
    mask = np.array([[0, 0, 0, *[1] * 6], [1] * 9], dtype=np.int64)
    ids = np.random.default_rng(0).integers(0, 96, mask.shape)
    positions = default_positions(mask, 9)
    calls = []
    for first, new, parent in CALLS:
        tokens, seen = slice(first, first + new), slice(0 if parent is not None or first == 0 else first, first + new)
        calls.append(PlannedCall(ids[:, tokens], mask[:, seen], positions[:, tokens], None, parent))
    return calls


def one_by_one(runner: EagerRunner) -> list[Step]:
    """The same calls on the whole model."""
    steps: list[Step] = []
    for call in planned():
        past: Cache | None = None if call.parent is None else steps[call.parent].present
        steps.append(runner.prefill(call.input_ids, call.attention_mask, call.position_ids, past))
    return steps


def outputs(step: Step) -> dict[str, Array]:
    """All that a call gave."""
    return {"logits": step.logits, **step.present.arrays()}


@pytest.mark.quick_rows("mamba-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_results_are_those_of_the_whole_model(model_type: str, dtype: str, folder: Callable[[str], Path]) -> None:
    wanted = one_by_one(EagerRunner(folder(model_type), dtype))
    found = StreamedRunner(folder(model_type), dtype, resident=0).run_all(planned())
    for one, other in zip(wanted, found, strict=True):
        assert list(outputs(one)) == list(outputs(other))
        for name, array in outputs(one).items():
            assert np.array_equal(array, outputs(other)[name], equal_nan=True), name


@pytest.mark.slow
def test_half_precision_equals_the_whole_model(folder: Callable[[str], Path]) -> None:
    wanted = one_by_one(EagerRunner(folder("llama"), "bfloat16"))
    found = StreamedRunner(folder("llama"), "bfloat16", resident=0).run_all(planned())
    assert all(np.array_equal(one.logits, other.logits) for one, other in zip(wanted, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_one_layer_is_in_memory_at_a_time(model_type: str, folder: Callable[[str], Path]) -> None:
    runner = StreamedRunner(folder(model_type), "float64", resident=0)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in runner.model.model.layers)
    seen = []

    def count(*_: object) -> None:
        seen.append(sum(p.numel() for p in runner.model.parameters() if not p.is_meta))

    for layer in runner.model.model.layers:
        layer.self_attn.register_forward_pre_hook(count)
    runner.run_all(planned())
    final_norm = 64
    assert len(seen) == 4 * len(CALLS)
    assert set(seen) == {largest + final_norm}


def test_each_layer_is_read_once_for_all_calls(folder: Callable[[str], Path]) -> None:
    runner = StreamedRunner(folder("llama"), "float32", resident=0)
    order: list[int] = []
    for index, layer in enumerate(runner.model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: order.append(index))
    runner.run_all(planned())
    assert order == sorted(order)


@pytest.mark.slow
def test_afterwards_no_layer_is_in_memory(folder: Callable[[str], Path]) -> None:
    runner = StreamedRunner(folder("llama"), "float32")
    runner.run_all(planned())
    assert all(p.is_meta for layer in runner.model.model.layers for p in layer.parameters())


def test_a_model_whose_code_needs_all_weights_is_refused(folder: Callable[[str], Path]) -> None:
    runner = StreamedRunner(folder("llama"), "float32", resident=0)
    runner.model.model.norm.forward = lambda hidden: hidden * runner.model.model.layers[0].mlp.up_proj.weight.sum()
    with pytest.raises(UnsupportedInput, match="cannot run layer by layer"):
        runner.run_all(planned())


def test_calls_that_run_different_layers_are_refused(folder: Callable[[str], Path]) -> None:
    runner = StreamedRunner(folder("llama"), "float32")
    first, *others = runner.model.model.layers

    def skip(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] == 1:
            others[0](*inputs)

    first.register_forward_pre_hook(skip)
    with pytest.raises(UnsupportedInput, match="in the same order"):
        runner.run_all(planned())
