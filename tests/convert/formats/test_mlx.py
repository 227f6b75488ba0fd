"""Models of mlx-lm with stacked experts: the names and the values that they had before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmconv.convert import to_hf
from llmconv.errors import InputRefused
from tests.conftest import save_tiny

GENUINE = Path(__file__).parents[2] / "fixtures" / "mlx" / "qwen3_moe_4bit"
STACKED = "model.layers.0.mlp.switch_mlp.down_proj"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "num_local_experts": 3}
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def test_codes_of_experts_have_the_values_of_mlx(tmp_path: Path) -> None:
    to_hf(GENUINE, tmp_path / "out", dtype="float32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in load_file(GENUINE / "reference.safetensors").items():
        assert torch.equal(found[name], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_stacked_experts_become_what_they_were(kind: str, tmp_path: Path) -> None:
    """As mlx-lm's `sanitize` of both families stacks them."""
    source, stacked = save_tiny(kind, tmp_path / "source", **SIZES), tmp_path / "stacked"
    before = load_file(source / "model.safetensors")
    assert any(".experts.1." in name for name in before)
    shutil.copytree(source, stacked)
    state: dict[str, Any] = {}
    for name, tensor in before.items():
        home, expert, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if not expert:
            state[name] = tensor
            continue
        stem = part.removesuffix(".weight")
        state.setdefault(f"{home}.switch_mlp.{NAMES.get(stem, stem)}.weight", {})[int(number)] = tensor
    state = {
        name: torch.stack([one[at] for at in range(len(one))]) if isinstance(one, dict) else one
        for name, one in state.items()
    }
    save_file(state, stacked / "model.safetensors", {"format": "mlx"})
    to_hf(stacked, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_bits_of_a_stack_are_those_of_each_expert(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GENUINE, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] |= {"bits": 2, STACKED: {"bits": 4, "group_size": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputRefused, match="shape mismatch") as refused:
        to_hf(folder, tmp_path / "out")
    assert "down_proj" not in refused.value.message.partition("` has")[0]


@pytest.mark.parametrize("given", [[1], "affine", 4, {"bits": 4}])
def test_settings_that_are_none_leave_codes_without_a_meaning(given: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GENUINE, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": given, "quantization_config": given}))
    with pytest.raises(InputRefused):
        to_hf(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("weight", lambda one: one[0], "not that of stacked experts"),
        ("weight", lambda one: one[:3], "missing key"),
        ("scales", lambda one: one[:, :, :0], "not that of stacked experts"),
        ("biases", None, "missing key"),
    ],
)
def test_a_damaged_stack_is_named(part: str, change: Any, named: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GENUINE, tmp_path / "model"))
    state = load_file(folder / "model.safetensors")
    tensor = state.pop(f"{STACKED}.{part}")
    if change:
        state[f"{STACKED}.{part}"] = change(tensor).clone()
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputRefused, match=named) as refused:
        to_hf(folder, tmp_path / "out")
    assert refused.value.hint and not (tmp_path / "out").exists()
