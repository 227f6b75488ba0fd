"""Links planted at every name that a command writes lead none of it elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile.honest import composer, save

ROOT = Path(__file__).parents[1]


def results_of(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the child saw."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder / "tmp"),
        "MPLCONFIGDIR": str(folder / "tmp"),
    }
    command = [sys.executable, "-m", "tests.builders.planted", str(folder / "jobs.json"), str(folder / "results.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def require_untouched(result: dict[str, Any], names: set[str]) -> None:
    """The clean run wrote `names`; the planted one was as good and touched nothing else."""
    assert names <= {*result["written"]}, result["written"]
    assert result["codes"] == [0, 0]
    assert (result["victims"], result["new"], result["links"], result["outside"]) == ([], [], [], [])
    assert result["left"] == []


def test_a_folder_made_anew_is_not_led_elsewhere_by_links_in_its_partial_folder(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    source = save(inputs, composer())
    tuned = composer({"model.model.norm.weight": torch.ones(4)})
    save(inputs, tuned, "tuned.pt")
    jobs = [
        {"inputs": str(inputs), "output": "out", "arguments": ["to-hf", "{place}/" + source.name, "-o", "{place}/out"]},
        {
            "inputs": str(inputs),
            "output": "out",
            "arguments": ["delta", "extract", "{place}/x.pt", "{place}/tuned.pt", "-o", "{place}/out"],
        },
    ]
    converted, extracted = results_of(jobs, tmp_path)
    require_untouched(converted, {"out/config.json", "out/model.safetensors", "out/llmconv.json"})
    require_untouched(extracted, {"out/config.json", "out/llmconv.json"})


LAYOUTS = ["--layout", "genai", "--layout", "transformersjs", "--layout", "optimum"]
GRAPHS = {"prefill.onnx", "decode.onnx", "model.onnx", "onnx/model.onnx", "genai_config.json", "llmconv.json"}
GENERATE = ["--prompt", "ab", "--max-new-tokens", "2", "--overwrite", "--output-file", "{place}/m/o.jsonl"]

LINES: dict[str, tuple[str, list[str], set[str]]] = {
    "export": (
        "",
        ["export", "{place}/m", "--prefill", "--incremental", "--unified", "--overwrite", *LAYOUTS],
        {f"m/{name}" for name in GRAPHS},
    ),
    "export -o": (
        "out",
        ["export", "{place}/m", "-o", "{place}/out", "--prefill", "--incremental", "--unified", *LAYOUTS],
        {f"out/{name}" for name in {*GRAPHS, "model.safetensors"}},
    ),
    "from-hf": (
        "out",
        ["from-hf", "{place}/m", "-o", "{place}/out", "--to", "meta"],
        {"out/params.json", "out/consolidated.00.pth"},
    ),
    "generate": ("", ["generate", "{place}/m", *GENERATE], {"m/o.jsonl", "m/.o.jsonl.options.json"}),
    "verify": (
        "",
        ["verify", "{place}/m", "--report", "{place}/m/report"],
        {f"m/report/{name}" for name in ("report.html", "report.json", "junit.xml", "summary.md")},
    ),
}
"""A command to the folder that it makes, its words, and some of the names that it writes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_links_in_a_model_folder_lead_no_command_elsewhere(name: str, talking: Path, tmp_path: Path) -> None:
    output, arguments, names = LINES[name]
    made = () if name in ("generate", "verify") else ("*.onnx", "llmconv.json")
    shutil.copytree(talking, tmp_path / "inputs" / "m", ignore=shutil.ignore_patterns(*made))
    job = {"inputs": str(tmp_path / "inputs"), "output": output, "arguments": arguments}
    (result,) = results_of([job], tmp_path)
    require_untouched(result, names)
