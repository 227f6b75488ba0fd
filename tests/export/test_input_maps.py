"""The registry of families."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.errors import UnsupportedInput
from llmconv.export import INPUT_MAPS, InputMap, register_input_map
from llmconv.export.families import find_input_map
from llmconv.export.tracing.fake_model import load_config
from llmconv.runtime.images.families import IMAGE_FAMILIES
from tests.conftest import CONFIGS
from tools.state_configs import STATE_CONFIGS
from tools.tiny_models import tiny_config


def test_every_tiny_model_of_the_tests_has_an_input_map() -> None:
    assert set(CONFIGS) | set(STATE_CONFIGS) <= set(INPUT_MAPS)


def test_a_family_can_be_added_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.export.families.INPUT_MAPS", dict(INPUT_MAPS))
    register_input_map("my_model", InputMap(position_ids=False))
    assert not find_input_map("my_model").position_ids


def test_an_unknown_family_lists_close_matches() -> None:
    with pytest.raises(UnsupportedInput, match=r"qwen4.*qwen[23]") as refused:
        find_input_map("qwen4")
    assert "adding-a-family" in refused.value.hint


@pytest.mark.parametrize("kind", ["chatglm", "baichuan"])
def test_a_type_that_is_converted_only_says_so(kind: str) -> None:
    with pytest.raises(UnsupportedInput, match=f"type `{kind}` are converted, but not exported") as refused:
        find_input_map(kind)
    assert "docs/own-code.md" in refused.value.hint and "close matches" not in refused.value.message


def test_an_unknown_kind_of_cache_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedInput, match="unknown cache kind `ring`") as refused:
        _ = InputMap(cache="ring").kind
    assert "state_space" in refused.value.hint


def test_ports_follow_the_config() -> None:
    config = load_config({**CONFIGS["qwen3"], "model_type": "qwen3"})
    ports = find_input_map("qwen3").inputs(config)
    assert [port.name for port in ports[:3]] == ["input_ids", "attention_mask", "position_ids"]
    assert ports[3].axes == ("batch_size", 2, "past_sequence_length", 16)
    assert len(ports) == 3 + 2 * 4


def test_layers_may_have_different_head_sizes() -> None:
    ports = find_input_map("gemma4_text").inputs(tiny_config("gemma4_text", 4))
    assert {port.axes[-1] for port in ports if port.name.endswith(".key")} == {24, 32}


def test_a_config_of_several_models_is_read_as_its_text_model() -> None:
    ports = find_input_map("gemma3").inputs(tiny_config("gemma3", 4))
    of_text = find_input_map("gemma3_text").inputs(tiny_config("gemma3_text", 4))
    assert tuple(port for port in ports if port.name != "token_type_ids") == of_text


def test_the_families_command_lists_the_table() -> None:
    result = CliRunner().invoke(main, ["families", "--json"])
    rows = json.loads(result.stdout).items()
    assert {name for name, row in rows if "not_exported" not in row} == {*INPUT_MAPS, *IMAGE_FAMILIES}
