"""Session options in a file reach onnxruntime; invalid files are refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.runtime.onnxruntime.session_file import ENTRIES, read_session_file
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


@pytest.mark.parametrize(
    "options", [{"threads": -1}, {"threads": 1_000_000}, {"timeout": 0.0}, {"timeout": float("nan")}], ids=str
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageProblem, match=next(iter(options))):
        with_options(None, **{"provider": None, "threads": None, "timeout": None, **options})  # type: ignore[arg-type]


FIELDS = [
    name for name in dir(ort.SessionOptions()) if isinstance(getattr(ort.SessionOptions(), name), str | bool | int)
]
"""Every field of the installed onnxruntime that a file could set."""


@pytest.mark.parametrize("section", ["session", "stage 1"])
@pytest.mark.parametrize("name", [name for name in FIELDS if re.search("file|path|profil|dir|librar", name)])
def test_an_option_that_writes_a_file_is_refused_by_name(section: str, name: str, tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("mine")
    with pytest.raises(InputRefused, match=f"option `{name}`") as caught:
        settings(tmp_path, json.dumps({section: {name: str(victim)}}))
    assert "SessionSettings" in (caught.value.hint or "")
    assert victim.read_text() == "mine"


def keys_of_the_library() -> set[str]:
    """The session configuration keys that the installed onnxruntime knows, read from its binary."""
    (library,) = Path(ort.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    found = re.findall(rb"\0((?:session|ep|optimization|memory|mlas)\.[a-z][a-z0-9_.]{3,})\0", library.read_bytes())
    return {name.decode() for name in found}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the library of Linux wheels")
def test_no_key_that_names_a_file_is_allowed() -> None:
    keys = keys_of_the_library()
    files = {name for name in keys if re.search("file|path|folder|dir$|librar|profil|context|external", name)}
    assert {"session.optimized_model_filepath", "ep.context_file_path"} <= files
    assert not files & ENTRIES


@pytest.mark.parametrize(
    "content",
    [
        {"entries": {"session.optimized_model_filepath": "x"}},
        {"entries": {"session.collect_node_memory_stats_to_file": "x"}},
        {"entries": {"ep.context_enable": "1"}},
        {"stage 1": {"ep.context_file_path": "x"}},
        {"provider": {"name": "cuda", "trt_engine_cache_path": "x"}},
        {"provider": {"name": "qnn", "backend_path": "libQnnHtp.so"}},
        {"stage 1": {"provider": "cuda", "profile_to": "x"}},
    ],
    ids=str,
)
def test_keys_and_provider_options_that_lead_to_files_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="which is not among those that write and load no files"):
        settings(tmp_path, json.dumps(content))


@pytest.mark.parametrize(
    "content",
    [
        {"session": {"intra_op_num_threads": 1_000_000}},
        {"session": {"inter_op_num_threads": 1025}},
        {"session": {"log_verbosity_level": 10**30}},
        {"entries": {"session.intra_op.spin_duration_us": "99999999999"}},
        {"free_dimensions": {"batch_size": 2**31}},
        {"stage 1": {"intra_op_num_threads": 1_000_000}},
    ],
    ids=str,
)
def test_a_number_beyond_any_use_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="which is (not from -1 to|above) "):
        settings(tmp_path, json.dumps(content))
