"""Steps are named on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from llmconv.progress import CLEAR, say, set_quiet, status, step


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What two steps and a message write."""
    monkeypatch.setattr(sys, "stderr", stream)
    with step("loading torch"), step("tracing"):
        say("a message")
    return stream.getvalue()


def test_steps_are_the_last_line_of_a_terminal_and_leave_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(Terminal(), monkeypatch)
    assert text.split(CLEAR) == ["", "loading torch …", "tracing …", "a message\n", "tracing …", "loading torch …", ""]


def test_steps_are_not_written_to_a_file_nor_with_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(io.StringIO(), monkeypatch) == "a message\n"
    set_quiet(True)
    try:
        assert not written(Terminal(), monkeypatch)
    finally:
        set_quiet(False)


def test_a_step_that_fails_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(OSError), step("writing"):
        raise OSError
    assert stream.getvalue().endswith(CLEAR)


def test_a_message_is_written_above_the_line_that_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    status("scenario 2 of 29")
    say("a message")
    status("")
    assert stream.getvalue().split(CLEAR) == ["", "scenario 2 of 29", "a message\n", "scenario 2 of 29", ""]
    say("another")
    assert stream.getvalue().endswith(f"{CLEAR}another\n") and stream.getvalue().count(CLEAR) == 4
