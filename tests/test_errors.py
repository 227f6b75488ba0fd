"""Messages are one printable line, whatever a file contains."""

from __future__ import annotations

import pytest

from llmconv.errors import SHOWN, InputRefused, first_line, printable
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
