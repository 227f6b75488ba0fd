"""Scaled weights: what the real ones leave in the noise is seen at every size, and what is not run is counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest

from llmconv.export.exporter import export
from llmconv.verify import Report, verify
from llmconv.verify.reference.other_roundings import LOUDEST, loudest, scaling_of
from tests.builders.mutants.mutants import clips_dropped, epsilon_of_one_norm
from tests.builders.mutants.weights import Surgery
from tests.conftest import DECODER, save_tiny

ONE = ("prefill, 7 tokens",)
"""The scenario that runs on scaled weights."""


def with_fault(folder: Path, target: Path, fault: Surgery, graphs: Sequence[str]) -> Path:
    """A copy of an exported folder with a fault in its graphs, and a manifest that knows no hashes."""
    shutil.copytree(folder, target)
    for name in graphs:
        model = onnx.load(target / name, load_external_data=False)
        assert fault(model, target), "the graph has no place for this fault"
        onnx.save(model, target / name)
    (target / "llmconv.json").write_text(json.dumps({"graphs": {Path(n).stem: {"file": n} for n in graphs}}))
    return target


def failed(report: Report) -> set[str]:
    """The scenarios that failed."""
    return {check.name for check in report.checks if check.verdict == "fail"}


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [False, True])
def test_an_epsilon_that_large_activations_hide_is_seen_in_a_large_model(
    low_memory: bool, trained: Path, tmp_path: Path
) -> None:
    broken = with_fault(trained, tmp_path / "broken", epsilon_of_one_norm, ["prefill.onnx", "decode.onnx"])
    report = verify(broken, reference=trained, scenario=ONE, low_memory=low_memory)
    assert failed(report) == {"prefill, 7 tokens, fainter weights"}


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [False, True])
def test_a_large_model_passes_with_nothing_skipped(low_memory: bool, trained: Path) -> None:
    weights = (trained / "model.safetensors").stat().st_mtime_ns
    report = verify(trained, scenario=ONE, low_memory=low_memory)
    assert report.verdict == "pass", report.closing_lines()
    assert "0 skipped" in report.summary()
    assert any(check.name == "prefill, 7 tokens, fainter weights" for check in report.checks)
    assert (trained / "model.safetensors").stat().st_mtime_ns == weights


@pytest.fixture(scope="session")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """`clipped(limit)` is an OLMo whose queries, keys and values are clipped far above what its weights make."""
    folders: dict[float, Path] = {}

    def folder(limit: float) -> Path:
        if limit not in folders:
            folders[limit] = tmp_path_factory.mktemp("clipped") / "olmo"
            save_tiny("olmo", folders[limit], **{**DECODER, "num_hidden_layers": 2, "clip_qkv": limit})
            export(folders[limit], unified=True)
        return folders[limit]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [False, True])
def test_dropped_clips_that_no_ordinary_activation_reaches_are_detected(
    low_memory: bool, clipped: Callable[[float], Path], tmp_path: Path
) -> None:
    broken = with_fault(clipped(8.0), tmp_path / "broken", clips_dropped(1), ["model.onnx"])
    report = verify(broken, reference=clipped(8.0), scenario=ONE, low_memory=low_memory)
    assert failed(report) == {"prefill, 7 tokens, weights x 16"}


@pytest.mark.slow
def test_a_limit_that_no_weights_reach_is_skipped_and_reported(clipped: Callable[[float], Path]) -> None:
    report = verify(clipped(1e7), scenario=ONE)
    assert report.verdict == "pass"
    limits = [check for check in report.checks if check.name == "limits of the model"]
    assert [check.verdict for check in limits] == ["skip"]
    assert "max 1e+07" in limits[0].detail or "min -1e+07" in limits[0].detail
    assert report.summary().endswith("a dropped limit that no run reaches")


@pytest.mark.slow
def test_a_graph_that_maps_no_weights_is_skipped_and_reported(clipped: Callable[[float], Path], tmp_path: Path) -> None:
    folder = tmp_path / "inline"
    shutil.copytree(clipped(8.0), folder)
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    report = verify(folder, reference=clipped(8.0), scenario=ONE)
    scaled = [check for check in report.checks if check.name.startswith("prefill, 7 tokens, ")]
    assert [check.verdict for check in scaled] == ["skip", "skip"]
    assert "an activation in another form" in report.summary()
    assert "softcap" not in report.summary()  # the model has none


def test_a_scaling_is_recognized_by_the_name_of_its_scenario() -> None:
    assert scaling_of("batch of 3, weights x 16") == loudest(16.0)
    assert loudest(16.0).factor_of("model.layers.0.self_attn.v_proj.weight", (4, 4)) == 16.0
    assert loudest(16.0).factor_of("model.norm.weight", (4,)) == 1.0
    assert "v_proj" in LOUDEST


@pytest.mark.slow
def test_dropped_clamps_of_experts_are_detected(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    folder = save_tiny("gpt_oss", tmp_path / "gpt_oss", **{**DECODER, **experts, "num_hidden_layers": 2})
    export(folder, unified=True)
    broken = with_fault(folder, tmp_path / "broken", clips_dropped(), ["model.onnx"])
    assert verify(folder, scenario=ONE).verdict == "pass"
    seen = failed(verify(broken, reference=folder, scenario=ONE))
    assert "prefill, 7 tokens, weights x 16" in seen
    assert all(scaling_of(name) for name in seen)  # the weights as they are show nothing
