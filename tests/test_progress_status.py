"""The line of progress: on a terminal only, replaced by the next one, and gone before anything else is printed."""

from __future__ import annotations

import io

import pytest

from llmconv import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_shows_the_line(stream: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    progress.status("scenario 2 of 29: left padding")
    assert ("scenario 2 of 29: left padding" in stream.getvalue()) is shown
    progress.say("a message")
    assert stream.getvalue().endswith("\r\x1b[2Ka message\n" if shown else "a message\n")


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    monkeypatch.setitem(progress._level, "quiet", True)
    progress.status("scenario 2 of 29")
    assert stream.getvalue() == ""
