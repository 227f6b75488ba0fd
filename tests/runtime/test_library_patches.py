"""The internals of transformers and torch that the runtime depends on are where it looks for them."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading

from llmconv.runtime import default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.library_patches import (
    KERNEL_LOGGER,
    SYNCHRONOUS_LOADING,
    TorchDispatchMode,
    continues_recurrent_state,
    load_tensors,
    loaded_names,
    reset_dynamic_rope,
    use_eager_experts,
    without_dispatch_modes,
)
from llmconv.runtime.runner import Step
from tests.conftest import DECODER, save_tiny

MIXTRAL = {**DECODER, "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def on_meta(**fields: object) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return model


def test_the_logger_of_kernels_has_the_name_of_its_module() -> None:
    assert importlib.import_module(KERNEL_LOGGER).logger.name == KERNEL_LOGGER


def test_the_modeling_file_of_mamba2_has_a_scan_that_continues_and_that_of_mamba_has_none() -> None:
    for model_type, continues in (("mamba2", True), ("mamba", False)):
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        model = type("Model", (), {"__module__": module.__name__})()
        assert continues_recurrent_state(model) is continues


def test_fused_experts_are_replaced() -> None:
    model = on_meta(model_type="mixtral", **MIXTRAL)
    model.set_experts_implementation("grouped_mm")
    use_eager_experts(model)
    assert model.config._experts_implementation == "eager"


def test_a_dynamic_rotary_embedding_is_reset(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, max_position_embeddings=4, rope_parameters=DYNAMIC)
    runner = EagerRunner(folder)
    rotary = runner.model.model.rotary_emb
    original = rotary.inv_freq.clone()

    def run() -> Step:
        mask = np.ones((1, 9), dtype=np.int64)
        return runner.prefill(mask, mask, default_positions(mask, 9))

    run()
    assert not torch.equal(rotary.inv_freq, original)
    reset_dynamic_rope(runner.model)
    assert torch.equal(rotary.inv_freq, original)


def test_some_tensors_are_loaded_in_this_thread_under_the_name_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SYNCHRONOUS_LOADING in inspect.getsource(core_model_loading)
    monkeypatch.delenv(SYNCHRONOUS_LOADING, raising=False)
    model, name, threads = on_meta(model_type="llama", **DECODER), "model.norm.weight", set[int]()

    class Stored:
        shape = (64,)

        def __getitem__(self, key: object) -> torch.Tensor:
            threads.add(threading.get_ident())
            return torch.full((64,), 3.0)

    load_tensors(model, {name: Stored()}, torch.float32)
    assert (model.get_parameter(name) == 3).all()
    assert threads == {threading.get_ident()}


def test_experts_of_a_checkpoint_are_joined_and_other_tensors_are_renamed_at_most() -> None:
    model = on_meta(model_type="mixtral", **MIXTRAL)
    stored = [f"model.layers.0.block_sparse_moe.experts.{at}.{part}.weight" for at in (0, 1) for part in ("w1", "w3")]
    sources, renamed = loaded_names(model, [*stored, "model.norm.weight"])
    joined = next(name for name in sources if "experts" in name)
    assert (sorted(sources[joined]), joined in model.state_dict()) == (stored, True)
    assert renamed == {"model.norm.weight": "model.norm.weight"}


class Names(TorchDispatchMode):
    """Records the names of operators, and copies each result without being called for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(str(func))
        with without_dispatch_modes():
            result.clone()
        return result


def test_a_dispatch_mode_sees_every_operator_once_and_nothing_while_it_is_disabled() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with torch.no_grad(), Names() as names:
        torch.relu(weight.t() + 1)
    assert names.seen == ["aten.t.default", "aten.add.Tensor", "aten.relu.default"]


def test_operators_declare_whether_they_return_views() -> None:
    assert torch.ops.aten.t.default.is_view and not torch.ops.aten.relu.default.is_view
