"""What quantized graphs are compared with: folders and files of one model, made once; the process that runs each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environments, llama_cpp
from benchmarks.measure import FOLDER, INSTALLED, llmconv, remove, run
from benchmarks.smollm2 import smollm2

THREADS = 2
FOR_CPU = ("--target", "ort-cpu", "--cache", "shared-buffer")
A8W8_LAST, FLOAT32_LAST = "llmconv `a8w8`, `--last-logits`", "llmconv float32, `--last-logits`"
INT4, INT4_LAST, GENAI, Q4_0, Q4_K_M = (
    "llmconv `int4`",
    "llmconv `int4`, `--last-logits`",
    "ONNX Runtime GenAI, its builder's int4",
    "llama.cpp Q4_0",
    "llama.cpp Q4_K_M",
)
FLOAT32, INT8, A8W8, A8W8_CALIBRATED, INT4_SEARCH, INT4_AWQ, INT4_HEAD, INT4_32, INT4_32_HEAD = (
    "llmconv float32",
    "llmconv `int8`",
    "llmconv `a8w8`",
    "llmconv `a8w8`, calibrated",
    "llmconv `int4`, `--method search`: by the weights alone",
    "llmconv `int4`, `--method awq --calibrate default`",
    "llmconv `int4`, head of 8 bits",
    "llmconv `int4`, blocks of 32",
    "llmconv `int4`, blocks of 32, head of 8 bits",
)
SMALL, SMALL_LAST, MIXED, MIXED_LAST = (
    "llmconv `int4-small`",
    "llmconv `int4-small`, `--last-logits`",
    "llmconv `int4-mixed`",
    "llmconv `int4-mixed`, `--last-logits`",
)
HEAD = ("--quant-bits", "lm_head=8")

EXPORTS: dict[str, tuple[str, ...]] = {
    FLOAT32: (),
    INT8: ("--quant", "int8"),
    FLOAT32_LAST: ("--last-logits",),
    A8W8: ("--quant", "a8w8"),
    A8W8_LAST: ("--quant", "a8w8", "--last-logits"),
    INT4: ("--quant", "int4"),
    INT4_LAST: ("--quant", "int4", "--last-logits"),
    A8W8_CALIBRATED: ("--quant", "a8w8", "--calibrate", "default"),
    INT4_SEARCH: ("--quant", "int4", "--method", "search"),
    INT4_AWQ: ("--quant", "int4", "--calibrate", "default", "--method", "awq"),
    INT4_HEAD: ("--quant", "int4", *HEAD),
    INT4_32: ("--quant", "int4", "--quant-block", "32"),
    INT4_32_HEAD: ("--quant", "int4", "--quant-block", "32", *HEAD),
    SMALL: ("--quant", "int4-small"),
    SMALL_LAST: ("--quant", "int4-small", "--last-logits"),
    MIXED: ("--quant", "int4-mixed"),
    MIXED_LAST: ("--quant", "int4-mixed", "--last-logits"),
}
"""Candidate to the options of its export, after `FOR_CPU`."""

LLAMA_TYPES = {Q4_0: "Q4_0", Q4_K_M: "Q4_K_M"}

BUILD = """
import runpy, sys
sys.path.append(sys.argv.pop(1))  # for onnxruntime_genai, whose environment has no torch
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""
START = "import sys; from benchmarks.token_worker import main; main(*sys.argv[1:])"


@dataclass(frozen=True)
class Candidate:
    """One way to run the model.

    Attributes:
        kind: one of `token_worker.KINDS`.
        path: its folder or file.
        weights: the file with the quantized weights.
        interpreter: of its environment.
    """

    kind: str
    path: Path
    weights: Path
    interpreter: Path


def candidates(wanted: Sequence[str]) -> dict[str, Candidate]:
    """Name to candidate, without those of llama.cpp if it cannot be built; what is not there is made now (minutes)."""
    llama = llama_cpp.python() if LLAMA_TYPES.keys() & wanted else None
    return {name: _candidate(name, llama) for name in wanted if llama or name not in LLAMA_TYPES}


def _candidate(name: str, llama: Path | None) -> Candidate:
    if name in LLAMA_TYPES:
        assert llama
        file = llama_cpp.gguf(smollm2(), LLAMA_TYPES[name])
        return Candidate("llama.cpp", file, file, llama)
    if name == GENAI:
        folder = _genai_folder()
        return Candidate("genai", folder, folder / "model.onnx.data", environments.python("genai"))
    options = (*FOR_CPU, *EXPORTS[name])
    folder = _made("-".join(EXPORTS[name]) or "float32", lambda at: llmconv("export", smollm2(), "-o", at, *options))
    return Candidate("graphs", folder, next(folder.glob("*.safetensors")), Path(sys.executable))


def _genai_folder() -> Path:
    environments.python("genai")
    packages = next(environments.folder("genai").glob("lib/*/site-packages"))
    start = [sys.executable, "-c", BUILD, str(packages), "-i", str(smollm2()), "-p", "int4", "-e", "cpu"]
    return _made("genai", lambda at: [*start, "-o", str(at), "-c", str(FOLDER / "hub")])


def _made(name: str, command: Callable[[Path], list[str]]) -> Path:
    """The folder that a command makes, unless it is there."""
    folder = FOLDER / "quantized" / name
    if not (folder / "complete").exists():
        remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(command(folder))
        (folder / "complete").touch()
    return folder


class Worker:
    """The process of a candidate; see `token_worker`.

    Args:
        candidate: what it runs.
    """

    def __init__(self, candidate: Candidate) -> None:
        command = [candidate.interpreter, "-c", START, candidate.kind, candidate.path, THREADS]
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**INSTALLED, "OMP_NUM_THREADS": str(THREADS)},
        )
        self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
