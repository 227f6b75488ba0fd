"""The start page: its commands are run as they are printed, up to the answer that OpenAI's client gets."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from benchmarks import environments, start_page
from tests.test_docs import ROOT, without_digits

PAGE = ROOT / "docs/start.md"


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / environments.folder("smollm2") / "complete").exists(),
    reason="needs a model of the package index in build/; `make clients` gets it",
)
def test_the_commands_of_the_start_page_give_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder, packages = tmp_path / "work", tmp_path / "packages"
    folder.mkdir()
    packages.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    steps = list(start_page.walk(folder, packages, port))
    assert {done.block.step for done in steps} >= {"Get the model", "Train an adapter", "Verify", "Serve", "Ask"}
    for done in steps:
        if done.block.shown:
            assert_shown(done.block.shown.splitlines(), done.seen.splitlines())
    assert sum(done.added for done in steps) < 1.1e9  # what the page says


def assert_shown(shown: list[str], seen: list[str]) -> None:
    """The page shows every line, but for digits of measured numbers and what it leaves out with `…`."""
    patterns = [re.escape(without_digits(line)).replace("…", ".*") for line in shown]
    assert len(patterns) == len(seen), seen
    for pattern, line in zip(patterns, seen, strict=True):
        assert re.fullmatch(pattern, without_digits(line)), line


def test_every_step_of_the_start_page_is_run_or_needs_the_hub() -> None:
    written = re.findall(r"^```(\w*)\n(.+)$", PAGE.read_text(), re.MULTILINE)
    assert {language for language, _ in written} == {"sh", "text"}
    run = [block.code.splitlines()[0] for block in start_page.blocks(PAGE.read_text())]
    assert [line for kind, line in written if kind == "sh" and line not in run] == [
        line for _, line in written if line.startswith("hf download")
    ]


def test_the_start_page_has_a_cost_for_every_step() -> None:
    measured = re.findall(r"^\| ([A-Z][\w ]+) \| \d", PAGE.read_text(), re.MULTILINE)
    steps = [block.step for block in start_page.blocks(PAGE.read_text()) if block.step != "Install"]
    assert measured == list(dict.fromkeys(steps))
