"""`enable_lora`: factors of parts of one matrix, as PEFT before 0.3 saved them, against a convolution with groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput
from tests.builders.lora_models import causal_lm

GPT2: dict[str, Any] = {"vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
NEOX: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODULES = {"gpt2": "transformer.h.0.attn.c_attn", "gpt_neox": "gpt_neox.layers.0.attention.query_key_value"}
RANK, ALPHA, WIDTH = 2, 8, 16


def saved(folder: Path, kind: str, enabled: list[bool], groups: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """A base and an adapter; returns its factors."""
    causal_lm(kind, **{"gpt2": GPT2, "gpt_neox": {**NEOX, "intermediate_size": 24}}[kind]).save_pretrained(
        folder / "base"
    )
    used = sum(enabled)
    a = torch.randn(shapes.get("a", (RANK * used, WIDTH)))
    b = torch.randn(shapes.get("b", (WIDTH * used, RANK * used // groups, 1)))
    (folder / "adapter").mkdir()
    names = {part: f"base_model.model.{MODULES[kind]}.lora_{part}.weight" for part in "AB"}
    torch.save({names["A"]: a, names["B"]: b}, folder / "adapter/adapter_model.bin")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "enable_lora": enabled, "merge_weights": False}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config | {"target_modules": ["c_attn"]}))
    return {"a": a, "b": b}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("enabled", "groups"),
    [([True, False, True], 2), ([True, True, True], 3), ([False, False, True], 1), ([False, True, False], 2)],
)
def test_the_update_is_that_of_the_convolution(tmp_path: Path, kind: str, enabled: list[bool], groups: int) -> None:
    factors = saved(tmp_path, kind, enabled, groups)
    merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    hidden = torch.nn.functional.linear(torch.eye(WIDTH), factors["a"])
    outputs = torch.nn.functional.conv1d(hidden.T, factors["b"], groups=groups).T
    update = torch.zeros(WIDTH, 3, WIDTH)
    update[:, torch.tensor(enabled)] = outputs.reshape(WIDTH, sum(enabled), WIDTH)
    update = update.reshape(WIDTH, 3 * WIDTH) * ALPHA / RANK
    base, found = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    name = next(name for name in found if name.endswith(f"{MODULES[kind].removeprefix('transformer.')}.weight"))
    assert (found[name] - base[name] - (update if kind == "gpt2" else update.T)).abs().max() < 1e-5


@pytest.mark.parametrize("shapes", [{"a": (5, WIDTH)}, {"b": (WIDTH * 2 + 1, RANK, 1)}, {"b": (WIDTH * 2, RANK, 3)}])
def test_other_shapes_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    saved(tmp_path, "gpt2", [True, False, True], 2, **shapes)
    with pytest.raises(MalformedInput):
        merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")


@pytest.mark.parametrize("value", [[False, False], [1, 0], "all"])
def test_another_value_is_refused(tmp_path: Path, value: Any) -> None:
    saved(tmp_path, "gpt2", [True, False, True], 2)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"enable_lora": value}))
    with pytest.raises(MalformedInput, match="enable_lora"):
        merge_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
