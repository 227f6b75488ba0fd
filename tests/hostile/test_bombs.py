"""A few megabytes cost a few seconds and some hundred megabytes, whatever they declare; one process per input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import bombs
from tests.hostile.test_hostile import HONEST, ROOT, job

SECONDS, MEBIBYTES = 10, 500
"""Of a fast idle core; most need 3."""

QUICK = re.compile(
    r"name: |gguf: (many parts|a merge of)|yaml: (anchors|a deep flow)|sentencepiece: a long|tiktoken: a long"
    r"|torch file: (ten ref|an object of)|old file: views"
)
"""One of each kind, also in the quick tests."""

CASES = [
    pytest.param(*name.split(": ", 1), id=name, marks=() if QUICK.match(name) else pytest.mark.slow)
    for name in bombs.CASES
]
TOGETHER = 20
"""Bombs that one process measures, so that two test processes repeat little."""


@pytest.fixture(scope="session")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """`measured(name)`: what inspect and the conversion of a bomb cost; with the next ones that will be asked for."""
    asked = [
        item.callspec.id
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_it_costs_little
    ]
    found: dict[str, dict[str, Any]] = {}

    def result(name: str) -> dict[str, Any]:
        if name not in found:
            start = asked.index(name)
            found.update(_measure(asked[start : start + TOGETHER], tmp_path_factory.mktemp("bombs")))
        return found[name]

    return result


def _measure(names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    honest = {**HONEST, **{f"honest: {name}": case for name, case in bombs.HONEST.items()}}
    cases = {**honest, **{name: bombs.CASES[name] for name in names}}
    jobs = [job(name, case, folder / f"case{number}") for number, (name, case) in enumerate(cases.items())]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.hostile.measure", str(folder / "jobs.json"), str(folder / "results.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize(("place", "bomb"), CASES)
def test_it_costs_little(measured: Callable[[str], dict[str, Any]], place: str, bomb: str) -> None:
    name = f"{place}: {bomb}"
    for kind, run in measured(name).items():
        assert run["outcome"] in ("done", "refused"), run["message"]
        assert run["seconds"] < SECONDS, run
        assert run["mebibytes"] < MEBIBYTES, run
        if run["outcome"] == "refused":
            assert run["code"] == "3" and run["message"].isprintable() and len(run["message"]) < 600
        if kind == "convert" and (refused := bombs.CASES[name].refused):
            assert re.search(refused, run["message"]), run["message"]
