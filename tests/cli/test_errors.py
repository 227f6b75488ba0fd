"""Every error is a line and a hint, with the exit code of the contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.push
import llmconv.runtime.chat_templates
import llmconv.runtime.tokenizer
import llmconv.steps.run_file
import llmconv.verify
from llmconv.cli.command_group import BUG_EXIT_CODE
from llmconv.errors import InputRefused, LlmconvError


def test_a_refusal_is_one_line_and_a_hint(tmp_path: Path) -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", str(tmp_path / "nothing")])
    message, blank, hint = done.stderr.splitlines()
    assert done.exit_code == InputRefused.exit_code == 3
    assert message.startswith("error: ")
    assert not message.endswith(".")
    assert (blank, hint[:6]) == ("", "hint: ")


def test_a_traceback_is_shown_on_demand_only(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    for flags, shown in ([], False), (["-v"], True), (["-qv"], True):
        done = CliRunner().invoke(llmconv.cli.main, ["inspect", missing, *flags])
        assert ("Traceback" in done.stderr) == shown


def test_the_exit_codes_are_those_of_the_contract() -> None:
    codes = {kind.__name__: kind.exit_code for kind in every_kind(LlmconvError)}
    assert codes == {
        "UsageProblem": 2,
        "InputRefused": 3,
        "MalformedInput": 3,
        "Mistakes": 3,
        "RenderLimitExceeded": 3,
        "TwoCopies": 3,
        "UnsupportedInput": 3,
        "OutputFailed": 4,
        "OutOfMemory": 4,
        "TooManyTokens": 3,
        "StageFailed": 4,
        "Inconclusive": 5,
    }


def every_kind(kind: type[LlmconvError]) -> list[type[LlmconvError]]:
    """All subclasses of `kind`."""
    return [found for child in kind.__subclasses__() for found in (child, *every_kind(child))]


UNFORESEEN = [
    (RuntimeError("a defect"), 70),
    (AssertionError(), 70),
    (RecursionError("maximum recursion depth exceeded"), 70),
    (MemoryError(), 4),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), 4),
    (OSError(28, "No space left on device"), 4),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("raised", "code"), UNFORESEEN)
def test_an_unexpected_error_is_neither_a_traceback_nor_a_difference(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr(sys.modules["llmconv.convert.inspection"], "inspect", fail)
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything"])
    assert done.exit_code == code
    assert done.stderr.startswith("error: ") and "\n\nhint: " in done.stderr and "Traceback" not in done.stderr


def test_a_bug_has_its_own_exit_code_and_one_line_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise KeyError("half\nof \x1b[2J it")

    monkeypatch.setattr(sys.modules["llmconv.convert.inspection"], "inspect", fail)
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything"], prog_name="llmconv")
    line, blank, hint = done.stderr.splitlines()
    assert done.exit_code == BUG_EXIT_CODE == 70
    assert line.startswith(f"error: llmconv {llmconv.__version__} has a bug: llmconv inspect: KeyError: ")
    assert line.isprintable() and "test_errors.py:" in line and not blank
    assert hint.startswith("hint: report this line and the command that you ran; `-v` ")
    shown = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything", "-v"])
    assert shown.exit_code == 70 and "Traceback" in shown.stderr


@pytest.mark.slow_rows("llmconv.convert.inspection")
@pytest.mark.parametrize("module", ["llmconv.cli", "click", "llmconv.cli.inspect", "llmconv.convert.inspection"])
def test_ctrl_c_is_no_traceback_while_the_program_starts(module: str) -> None:
    code = f"""
import os, signal, sys
import llmconv.__main__

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
for name in [name for name in sys.modules if name == {module!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Interrupting())
sys.argv = ["llmconv", "inspect", "nothing"]
llmconv.__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and not done.stdout
    assert done.stderr == "error: interrupted\n\nhint: run the same command again\n"
