"""Session options in a file reach onnxruntime; invalid files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime as ort
import pytest

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.runtime.onnxruntime.session_file import read_session_file
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, provider_name

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
