"""The model that is traced: few layers, fake parameters, real buffers."""

from __future__ import annotations

from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from llmconv.errors import UnsupportedInput
from llmconv.export.families import DECODER
from llmconv.export.language_model import build_graph
from llmconv.export.tracing.fake_model import build, load_config, period, shortened
from tests.conftest import CONFIGS
from tools.state_configs import STATE_CONFIGS


@pytest.mark.parametrize(("model_type", "expected"), [("llama", 1), ("gemma2", 2), ("gpt2", 1), ("bloom", 1)])
def test_the_period_is_that_of_the_layer_pattern(model_type: str, expected: int) -> None:
    config = load_config({**CONFIGS[model_type], "model_type": model_type, "num_hidden_layers": 6})
    assert period(config) == expected


def test_an_irregular_pattern_has_the_period_of_the_whole_model() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    config = load_config({**CONFIGS["qwen2"], "model_type": "qwen2", "num_hidden_layers": 5, "layer_types": kinds})
    assert period(config) > 2


def test_a_shortened_config_cuts_per_layer_lists() -> None:
    config = load_config({**CONFIGS["gemma2"], "model_type": "gemma2", "num_hidden_layers": 8})
    short = shortened(config, 6)
    assert short.num_hidden_layers == len(short.layer_types) == 6


def test_a_huge_model_costs_no_memory() -> None:
    huge = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "vocab_size": 1 << 18, "num_attention_heads": 512}
    model = build(load_config({"model_type": "llama", "num_hidden_layers": 1, **huge}))
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    assert not any(isinstance(buffer, FakeTensor) for buffer in model.buffers())


def test_a_model_type_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedInput, match="cannot read this config"):
        load_config({"model_type": "no_such_model"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "x"},
        {"num_hidden_layers": 0},
        {"hidden_act": "frob"},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "frob", "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_a_model_that_cannot_be_built_or_traced_is_refused_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInput, match="transformers and torch cannot") as refused:
        build_graph(load_config({**CONFIGS["llama"], "model_type": "llama", **wrong}), DECODER)
    assert "\n" not in refused.value.message


def test_a_list_by_part_of_a_layer_is_kept_even_if_there_are_as_many_layers() -> None:
    multipliers = [0.8, 1.1, 0.6, 1.4, 0.9]
    fields = {**STATE_CONFIGS["falcon_h1"], "num_hidden_layers": 5, "ssm_multipliers": multipliers}
    config = load_config({**fields, "model_type": "falcon_h1"})
    assert period(config) == 1 and shortened(config, 3).ssm_multipliers == multipliers
