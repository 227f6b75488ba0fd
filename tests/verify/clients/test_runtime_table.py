"""Which options each runtime opens and computes as the eager model does: the cells of the table in docs/graphs.md.

Each test is one cell. `WRITE_RUNTIMES=1 ROWS=all pytest tests/verify/clients/test_runtime_table.py` writes the page
from what the cells gave, in this run or an earlier one (`KEPT`). Tiny models of three families, because each breaks
runtimes of its own: shared keys and values (llama), windows and scaled norms (gemma3_text), learned positions and
biases (gpt2).
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from benchmarks import environments
from llmconv.errors import LlmconvError
from llmconv.export import export
from llmconv.verify import Report, verify
from tests.export.test_openvino import openvino_problem
from tests.verify.clients.test_browser import webgpu_problem
from tools.clients import no_adapter
from tools.marked_page import MarkedPage
from tools.tiny_models import depth, save_tiny

ROOT = Path(__file__).parents[3]
PAGE = MarkedPage(ROOT / "docs/graphs.md", "<!-- runtimes: written by the slow tests -->", "<!-- end of runtimes -->")
FAMILIES = ("llama", "gemma3_text", "gpt2")
OPTIONS: dict[str, dict[str, Any]] = {
    "`--opset 21`": {"opset": 21},
    "`--opset 23`": {"opset": 23},
    "`--opset 24`": {"opset": 24},
    "`--precision float16`": {"precision": "float16"},
    "`--quant int4`": {"quant": "int4", "quant_block": 16},
    "`--cache shared-buffer`": {"cache": "shared-buffer"},
}
"""Column to options of `export`; others have the defaults of the row."""

Judge = Callable[[Path, Path, dict[str, Any]], str]
"""Of graphs, the model and the options: how the numbers differ from the model's; empty if they do not."""

pytestmark = pytest.mark.slow


def first_difference(lines: list[str]) -> str:
    """The first failed check of a report."""
    return next((line for line in lines if line.startswith("FAILED")), "")


def on_cpu(out: Path, model: Path, options: dict[str, Any]) -> str:
    return first_difference(verify(out, reference=model, record=False).lines())


def of_client(name: str) -> Judge:
    home = ROOT / environments.folder(name)
    python = home if name == "transformersjs" else home / "bin/python"

    def judge(out: Path, model: Path, options: dict[str, Any]) -> str:
        report: Report = verify(out, reference=model, record=False, clients=name, pythons=f"{name}={python}")
        return first_difference(report.lines())

    return judge


IN_WEBGPU = """
import json, site, sys
site.addsitedir(sys.argv[1])
from llmconv.verify import verify
report = verify(sys.argv[2], reference=sys.argv[3], provider="webgpu", method="whole", record=False)
print(json.dumps(report.lines()))
"""


def on_webgpu(out: Path, model: Path, options: dict[str, Any]) -> str:
    python = ROOT / environments.folder("webgpu") / "bin/python"
    environment = {"XDG_RUNTIME_DIR": "/tmp", **os.environ, "PYTHONPATH": str(ROOT)}
    line = [str(python), "-c", IN_WEBGPU, sysconfig.get_path("purelib"), str(out), str(model)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return first_difference(json.loads(done.stdout.splitlines()[-1]))


def in_chromium(out: Path, model: Path, options: dict[str, Any]) -> str:
    dtype = "q4" if "quant" in options else "fp16" if "precision" in options else "fp32"
    return webgpu_problem(out, model, dtype, out.parent)


def on_openvino(out: Path, model: Path, options: dict[str, Any]) -> str:
    return openvino_problem(out, model, 0.05 if "precision" in options else 1e-4)


def pinned(package: str) -> str:
    """Name and version of a package in the environments of `make clients`."""
    pip = [one for steps in environments.ENVIRONMENTS.values() for step in steps for one in step]
    given = [*pip, *(one for packages in environments.NODE.values() for one in packages)]
    return next(
        f"{package} {one[len(package) :].lstrip('=@')}"
        for one in given
        if one.startswith((f"{package}==", f"{package}@"))
    )


PAIR: dict[str, Any] = {"prefill": True, "incremental": True}
ROWS: dict[str, tuple[str, Judge, dict[str, Any], tuple[str, ...]]] = {
    "onnxruntime, CPU": (f"onnxruntime {ort.__version__}", on_cpu, PAIR, ()),
    "onnxruntime, WebGPU": (pinned("onnxruntime-webgpu"), on_webgpu, PAIR, ("webgpu",)),
    "onnxruntime, WebGPU, `--target ort-webgpu`": (
        pinned("onnxruntime-webgpu"),
        on_webgpu,
        {**PAIR, "target": "ort-webgpu"},
        ("webgpu",),
    ),
    "ONNX Runtime GenAI": (pinned("onnxruntime-genai"), of_client("genai"), {"layout": "genai"}, ("genai",)),
    "optimum": (pinned("optimum-onnx"), of_client("optimum"), {"layout": "optimum"}, ("optimum",)),
    "transformers.js, Node": (
        pinned("@huggingface/transformers"),
        of_client("transformersjs"),
        {"layout": "transformersjs"},
        ("transformersjs",),
    ),
    "transformers.js, WebGPU": (
        f"{pinned('@huggingface/transformers')}, {pinned('@sparticuz/chromium')}",
        in_chromium,
        {"layout": "transformersjs"},
        ("transformersjs", "chromium"),
    ),
    "OpenVINO, CPU, `--opset 21`": (pinned("openvino"), on_openvino, {**PAIR, "opset": 21}, ("openvino",)),
}
"""Runtime to its version, what judges it, the options that it always has, and its environments."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_tiny(family, home / family, depth(family))
    return {family: home / family for family in FAMILIES}


KEPT = ROOT / "build/runtimes.json"
CELLS: dict[str, tuple[str, str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
"""By row and column what the table says, and the reason of what is not right."""


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[None]:
    """Writes the page after the last cell, if that is asked for and all were made."""
    yield
    if os.environ.get("WRITE_RUNTIMES"):
        KEPT.write_text(json.dumps(CELLS))
        assert PAGE.update(table()) == 0


def table() -> str:
    """The page's part: the table, then the reasons."""
    lines = [f"| runtime | tried with | {' | '.join(OPTIONS)} |", "| --- " * (len(OPTIONS) + 2) + "|"]
    notes: dict[str, int] = {}
    for row, (version, *_) in ROWS.items():
        cells = []
        for column in OPTIONS:
            text, reason = CELLS[f"{row}, {column}"]
            number = notes.setdefault(reason, len(notes) + 1) if reason else 0
            cells.append(f"{text} [{number}]" if number else text)
        lines.append(f"| {row} | {version} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in notes.items())])


@pytest.mark.parametrize("column", OPTIONS)
@pytest.mark.parametrize("row", ROWS)
def test_a_cell_says_what_the_runtime_does(row: str, column: str, models: dict[str, Path], tmp_path: Path) -> None:
    _, judge, always, needs = ROWS[row]
    if missing := [name for name in needs if not (ROOT / environments.folder(name) / "complete").exists()]:
        pytest.skip(f"`make clients` makes {missing}")
    if "webgpu" in needs and (problem := no_adapter(ROOT / environments.folder("webgpu"))):
        pytest.skip(f"no adapter of WebGPU: {problem}")
    wrong: dict[str, str] = {}
    for family, model in models.items():
        out = tmp_path / family / "out"
        try:
            export(model, out, **{**always, **OPTIONS[column]})
        except LlmconvError as error:
            wrong[family] = f"refused: {error.message}"
            continue
        if problem := judge(out, model, OPTIONS[column]):
            wrong[family] = problem
    CELLS[f"{row}, {column}"] = found = _cell(wrong)
    if not os.environ.get("WRITE_RUNTIMES"):
        lines = [one for one in PAGE.page.read_text().splitlines() if one.startswith(f"| {row} | ")]
        line = max(lines, key=lambda one: one.count("|"))  # other tables have fewer columns
        said = line.split("|")[3 + [*OPTIONS].index(column)].partition("[")[0].strip()
        assert said == found[0], wrong


def _cell(wrong: dict[str, str]) -> tuple[str, str]:
    if not wrong:
        return "yes", ""
    refused = all(problem.startswith("refused") for problem in wrong.values())
    first = next(iter(wrong.values())).removeprefix("refused: ").removeprefix("FAILED | ").removeprefix("-- ")
    text = "refused" if refused else "no"
    return (text if len(wrong) == len(FAMILIES) else f"{text} for {', '.join(wrong)}"), first.replace(" | ", ", ")
