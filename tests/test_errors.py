"""Messages are one printable line, whatever a file contains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmconv.errors import SHOWN, InputRefused, first_line, printable, short
from llmconv.progress import warn


def test_control_characters_and_line_breaks_are_spelled_out() -> None:
    assert printable("a\x1b[2J\nb\ud800\u202e") == "a\\x1b[2J\\nb\\ud800\\u202e"
    assert printable("Grüße, 世界") == "Grüße, 世界"


def test_a_long_message_is_cut() -> None:
    error = InputRefused("x" * 10_000 + ".", hint="y" * 10_000)
    assert len(error.message) == len(error.hint) == SHOWN and error.message.endswith("…")


def test_a_message_has_no_final_period() -> None:
    assert str(InputRefused("it is broken.", hint="mend it")) == "it is broken"


def test_a_warning_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    warn("a\nhint: all is well")
    assert capsys.readouterr().err == "warning: a\\nhint: all is well\n"


@pytest.mark.parametrize(("said", "told"), [("a\nb", "a"), ("", "ValueError"), ("x" * 400, "x" * 300)])
def test_an_error_of_another_library_is_one_line(said: str, told: str) -> None:
    assert first_line(ValueError(said)) == told


ROOT = Path(__file__).parents[1]
CUT = re.compile(r"\{str\([^{}]*\)\[:\d+\](?:!r)?\}")  # a value in an f-string, cut without a sign of it


def test_a_value_that_is_cut_says_so() -> None:
    assert short("a.module.activation.openai_gelu", 20) == "a.module.activation…"
    assert (short(40 * "x"), short([1])) == (40 * "x", "[1]")
    files = [file for room in ("llmconv", "convert", "export", "verify") for file in (ROOT / room).rglob("*.py")]
    assert CUT.search('f"{str(value)[:40]}"') and len(files) > 400
    assert not [file.name for file in files if CUT.search(file.read_text(encoding="utf-8"))]
