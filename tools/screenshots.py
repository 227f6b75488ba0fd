"""Make docs/pictures/report.png and chat.png: the report of a faulty graph, and the chat page, of the example model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

from benchmarks import environments

PICTURES = Path("docs/pictures").absolute()
SCRIPT = Path(__file__).with_name("screenshots.mjs")
EXAMPLE = Path("examples/tiny-llama").absolute()
COMMAND = str(Path(sys.executable).with_name("llmconv"))


def main() -> None:
    """Makes both pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "tiny-llama"
        run("to-hf", EXAMPLE / "ep4-ba2400-rank0.pt", "-o", model)
        run("export", model)
        chat(model)
        report(model)


def run(*words: object, code: int = 0) -> None:
    """Runs a command of llmconv, which must end with an exit code."""
    done = subprocess.run([COMMAND, *map(str, words)], stdout=subprocess.DEVNULL, check=False)
    if done.returncode != code:
        raise SystemExit(f"exit code {done.returncode}: llmconv {' '.join(map(str, words))}")


def shoot(*words: object) -> None:
    """A screenshot; see the script for its arguments."""
    subprocess.run(["node", SCRIPT, *map(str, words)], cwd=environments.node("chromium"), check=True)


def chat(model: Path) -> None:
    """The chat page, which continues a text."""
    command = [COMMAND, "serve", str(model), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        shoot(address, PICTURES / "chat.png", "Once there was a clever")
        server.terminate()


def report(model: Path) -> None:
    """The report of a graph in which the epsilon of one norm is ten times too large."""
    shutil.copyfile(model / "prefill.onnx", model / "faulty.onnx")
    graph = onnx.load(model / "faulty.onnx", load_external_data=False)
    norms = [node for node in graph.graph.node if node.op_type == "RMSNormalization"]
    next(one for one in norms[2].attribute if one.name == "epsilon").f *= 10
    onnx.save(graph, model / "faulty.onnx")
    pages = model.parent / "report"
    run("verify", "--graph", model / "faulty.onnx", "--reference", model, "--bisect", "--report", pages, code=1)
    shoot((pages / "report.html").as_uri(), PICTURES / "report.png")


if __name__ == "__main__":
    main()
