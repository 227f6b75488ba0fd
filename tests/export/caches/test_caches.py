"""Layers that keep states: their graphs equal the eager model in every scenario, and a lost state is detected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.errors import UnsupportedInput
from llmconv.export import INPUT_MAPS, export
from llmconv.export.caches import CACHE_KINDS
from llmconv.export.families import DECODER
from llmconv.export.language_model import build_graph
from llmconv.export.tracing.fake_model import load_config
from llmconv.output.manifest import read_manifest
from llmconv.runtime import OrtGraph, OrtRunner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.verify import verify
from tests.conftest import save_tiny
from tools.state_configs import STATE_CONFIGS

QUICK = ("mamba",)
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STATE_CONFIGS]
SHOWN = [pytest.param("lfm2", marks=pytest.mark.slow), "mamba"]
STATES = {"lfm2": "past_conv.2", "mamba": "past_recurrent.2"}


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`stateful(model_type)` is the folder of a tiny model with its two graphs; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            path = save_tiny(model_type, tmp_path_factory.mktemp("stateful") / model_type, **STATE_CONFIGS[model_type])
            export(path, prefill=True, incremental=True)
            folders[model_type] = path
        return folders[model_type]

    return folder


@pytest.mark.slow
@pytest.mark.one_row_in(18)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_scenario_passes(stateful: Callable[[str], Path], model_type: str) -> None:
    every = os.environ.get("ROWS") == "all" and model_type not in QUICK
    report = verify(stateful(model_type), suite="full" if every else "quick")
    assert report.verdict == "pass", report.closing_lines()
    outputs = {check.output for check in report.checks}
    assert any(output.startswith("present_") for output in outputs)


@pytest.mark.one_row_in(18)
@pytest.mark.slow_rows("mamba")
@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family.values[0] != "zamba2"])
def test_layers_beyond_the_traced_ones_are_replicated(stateful: Callable[[str], Path], model_type: str) -> None:
    traced = read_manifest(stateful(model_type)).steps[-1]["options"]["layers_traced"]
    assert traced < load_config({"model_type": model_type, **STATE_CONFIGS[model_type]}).num_hidden_layers


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", SHOWN)
@pytest.mark.parametrize("side", ["read", "written"])
def test_a_lost_state_is_detected(stateful: Callable[[str], Path], tmp_path: Path, model_type: str, side: str) -> None:
    folder = Path(shutil.copytree(stateful(model_type), tmp_path / model_type))
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    past, present = STATES[model_type], STATES[model_type].replace("past", "present")
    old, new = (past, past.replace("2", "0")) if side == "read" else (present, present.replace("2", "0"))
    for node in model.graph.node:
        ports = node.input if side == "read" else node.output
        ports[:] = [{old: new, new: old}.get(name, name) for name in ports]
    onnx.save(model, folder / "decode.onnx")
    report = verify(folder, allow_changed=True)
    assert report.verdict == "fail"
    assert report.where and report.where.layer in {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SHOWN)
def test_a_padded_batch_equals_its_rows_alone(stateful: Callable[[str], Path], model_type: str) -> None:
    runner = OrtRunner.from_folder(stateful(model_type))
    ids = np.random.default_rng(0).integers(3, 96, (2, 7))
    mask = np.array([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    together = runner.prefill(ids, mask, default_positions(mask, 7))
    alone = runner.prefill(ids[:1, 3:], mask[:1, 3:], default_positions(mask[:1, 3:], 4))
    np.testing.assert_allclose(together.logits[0, 3:], alone.logits[0], atol=1e-5)
    name = STATES[model_type].replace("past", "present")
    np.testing.assert_allclose(together.present.arrays()[name][0], alone.present.arrays()[name][0], atol=1e-5)


@pytest.mark.parametrize("model_type", SHOWN)
def test_a_cache_of_states_can_move_between_runners(stateful: Callable[[str], Path], model_type: str) -> None:
    eager, graphs = EagerRunner(stateful(model_type)), OrtRunner.from_folder(stateful(model_type))
    ids, mask = np.random.default_rng(0).integers(3, 96, (2, 6)), np.ones((2, 6), dtype=np.int64)
    prompt, step = (ids[:, :5], mask[:, :5], default_positions(mask, 6)[:, :5]), (ids[:, 5:], mask)
    for first, second in ((eager, graphs), (graphs, eager)):
        past = first.prefill(*prompt).present
        positions = default_positions(mask, 1)
        here, there = first.decode(*step, positions, past), second.decode(*step, positions, past)
        np.testing.assert_allclose(here.logits, there.logits, atol=1e-5)


@pytest.mark.slow
def test_a_state_has_fixed_axes_and_its_own_name(stateful: Callable[[str], Path]) -> None:
    graph = OrtGraph(stateful("lfm2") / "decode.onnx")
    assert graph.past_names[:3] == ["past_conv.0", "past_key_values.1.key", "past_key_values.1.value"]
    assert graph.present_names[:3] == ["present_conv.0", "present.1.key", "present.1.value"]
    assert graph.inputs["past_conv.0"] == graph.outputs["present_conv.0"] == ["batch_size", 64, 3]


def test_a_scan_is_defined_once_and_called_by_every_layer(stateful: Callable[[str], Path]) -> None:
    path = stateful("mamba") / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    assert [function.name for function in model.functions] == ["SelectiveScan"]
    calls = [node.name for node in model.graph.node if node.op_type == "SelectiveScan"]
    assert calls == [f"backbone.layers.{layer}.mixer/SelectiveScan" for layer in range(4)]
    onnx.checker.check_model(str(path))


@pytest.mark.slow
def test_a_limited_time_step_is_limited_in_prompts_and_not_in_steps(tmp_path: Path) -> None:
    """As transformers does it, whose cache is then wrong; these limits bind in every token."""
    fields = {**STATE_CONFIGS["mamba2"], "time_step_limit": [0.02, 0.03]}
    folder = save_tiny("mamba2", tmp_path / "model", **fields)
    export(folder, prefill=True, incremental=True)
    report = verify(folder)
    assert {check.name for check in report.checks if check.verdict != "pass"} == {"the model's own cache"}


def test_a_family_whose_input_map_lacks_its_states_is_refused() -> None:
    config = load_config({"model_type": "lfm2", **STATE_CONFIGS["lfm2"]})
    with pytest.raises(UnsupportedInput, match="layers of type `conv` keep a state"):
        build_graph(config, DECODER)


def test_every_input_map_has_a_known_cache_kind() -> None:
    assert {row.cache for row in INPUT_MAPS.values()} <= set(CACHE_KINDS)
