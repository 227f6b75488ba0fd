"""Out-of-memory errors, and the available memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from llmconv import memory
from llmconv.errors import MalformedInput, OutOfMemory
from llmconv.memory import available_memory, is_out_of_memory, reporting_out_of_memory

ERRORS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("unable to mmap 100 bytes from file: Cannot allocate memory (12)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:20])
def test_an_out_of_memory_error_is_reported_as_such(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="memory ran out here") as caught, reporting_out_of_memory("here"):
        raise error
    assert caught.value.exit_code == 4


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="no header"), reporting_out_of_memory("here"):
        raise ValueError("no header")


def test_the_cause_of_an_error_counts() -> None:
    error = MalformedInput("`a.onnx` fails", hint="")
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_the_smallest_limit_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = available_memory()
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 4000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    for name, text in {"max": "1000000", "current": "700000", "stat": "inactive_file 100000\n"}.items():
        (groups / "a" / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "PROC", proc)
    monkeypatch.setattr(memory, "CGROUPS", groups)
    assert available_memory() == 400_000
    assert machine is None or machine > 400_000
