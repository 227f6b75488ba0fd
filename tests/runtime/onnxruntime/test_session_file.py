"""Session options in a file reach onnxruntime; invalid files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime as ort
import pytest

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, StageOptions, provider_name, with_options

INI = """
[session]
intra_op_num_threads = 3
graph_optimization_level = basic
enable_cpu_mem_arena = false            ; less memory
[entries]
session.intra_op.allow_spinning = 0
[provider]
name = cpu
[free_dimensions]
batch_size = 2
"""
SECTIONS = {
    "session": {"intra_op_num_threads": 3, "graph_optimization_level": "basic", "enable_cpu_mem_arena": False},
    "entries": {"session.intra_op.allow_spinning": 0},
    "provider": {"name": "cpu"},
    "free_dimensions": {"batch_size": 2},
}


def settings(folder: Path, content: str) -> SessionSettings:
    """What a file with that content says."""
    (folder / "session.conf").write_text(content)
    return read_session_file(folder / "session.conf")


@pytest.mark.parametrize("content", [INI, json.dumps(SECTIONS)])
def test_both_forms_reach_onnxruntime(tmp_path: Path, content: str) -> None:
    found = settings(tmp_path, content)
    options = found.options()
    assert (options.intra_op_num_threads, options.enable_cpu_mem_arena) == (3, False)
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert found.providers() == [("CPUExecutionProvider", {})]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[session]\nfast = 1\n", "unknown session option `fast`"),
        ("[session]\nintra_op_num_threads = many\n", "not an integer"),
        ("[session]\nenable_cpu_mem_arena = maybe\n", "neither true nor false"),
        ("[sessions]\na = 1\n", "unknown section `sessions`"),
        ("threads = 1\n", r"not an \.ini file"),
        ('{"session": 1}', "not an object"),
        ('{"session": {"a": 1, "a": 2}}', "in `session.conf`: duplicate key `a`"),
        ('{"session"', "not valid JSON"),
    ],
)
def test_invalid_content_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(MalformedInput, match=problem):
        settings(tmp_path, content)


def test_a_file_of_the_graph_engine_is_refused_with_the_counterpart(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="`ascend_context`") as caught:
        settings(tmp_path, "[ascend_context]\nprovider=ge\n")
    assert "[provider]" in caught.value.hint


def test_a_provider_is_found_by_its_short_name() -> None:
    assert provider_name("cpu") == provider_name("CPUExecutionProvider") == "CPUExecutionProvider"
    with pytest.raises(UsageProblem, match="no provider `warp`"):
        provider_name("warp")


STAGES = """
[session]
intra_op_num_threads = 3
[entries]
session.intra_op.allow_spinning = 0
[stage 2]
intra_op_num_threads = 1
session.intra_op.allow_spinning = 1
"""


def test_a_stage_has_options_of_its_own_and_the_rest_of_the_general_ones(tmp_path: Path) -> None:
    found = settings(tmp_path, STAGES)
    first, second = found.of_stage(1).options(), found.of_stage(2).options()
    assert (first.intra_op_num_threads, second.intra_op_num_threads) == (3, 1)
    assert first.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert second.get_session_config_entry("session.intra_op.allow_spinning") == "1"


def test_a_stage_on_another_device_has_the_options_of_its_own_provider(tmp_path: Path) -> None:
    content = (
        "[provider]\nname = cuda\narena_extend_strategy = x\n[stage 1]\ndevice_id = 1\n[stage 3]\nprovider = dml\n"
    )
    found = settings(tmp_path, content)
    assert found.of_stage(1).provider_options == {"arena_extend_strategy": "x", "device_id": "1"}
    assert found.of_stage(2).provider_options == {"arena_extend_strategy": "x"}
    assert (found.of_stage(3).provider, found.of_stage(3).provider_options) == ("dml", {})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[stage 0]\nintra_op_num_threads = 1\n", "not the number of a stage"),
        ("[stage two]\n", "not the number of a stage"),
        ("[stage]\n", "not the number of a stage"),
        ("[stage 1]\nintra_op_treads = 1\n", "unknown session option `intra_op_treads`"),
        ("[stage 1]\nintra_op_num_threads = many\n", "not an integer"),
    ],
)
def test_invalid_sections_of_stages_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(MalformedInput, match=problem) as caught:
        settings(tmp_path, content)
    assert caught.value.hint


def test_a_section_of_a_stage_that_does_not_exist_is_refused() -> None:
    none = SessionSettings().of_stage(1)
    own = StageOptions(none.provider, {}, {}, {})
    with pytest.raises(UsageProblem, match=r"section `\[stage 3\]`, but the graphs have 2 stages") as caught:
        SessionSettings(stages={3: own}).require_stages(2)
    assert "numbered from 1 to 2" in caught.value.hint


@pytest.mark.parametrize("options", [{"threads": -1}, {"timeout": 0.0}, {"timeout": float("nan")}], ids=str)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageProblem, match=next(iter(options))):
        with_options(None, **{"provider": None, "threads": None, "timeout": None, **options})  # type: ignore[arg-type]
