"""BenchCandidate: one folder under one runtime, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import path_of
from llmconv.files.sources import is_remote, local_path
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config

WORKER = Path(__file__).with_name("worker.py")
START = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Unlike `python FILE` it leaves the file's folder out of the path: our module names are not meant for others."""

RUNTIMES = {
    "onnx": "llmconv's loop over the graphs",
    "packed": "the same, with weights that onnxruntime has packed",
    "torch": "transformers' generate over the eager model",
    "optimum": "optimum's ORTModelForCausalLM.generate",
    "genai": "ONNX Runtime GenAI",
}


@dataclass(frozen=True)
class BenchCandidate:
    """What is measured.

    Attributes:
        kind: one of `RUNTIMES`.
        folder: of the model or the graphs.
        interpreter: a Python that has the runtime.
    """

    kind: str
    folder: Path
    interpreter: str = sys.executable

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_of(self.folder, "folder"))

    @classmethod
    def parse(
        cls, text: str, first: Path | None = None, interpreters: Mapping[str, str] | None = None
    ) -> BenchCandidate:
        """`FOLDER`, `RUNTIME:FOLDER`, or `RUNTIME` for the folder that is measured `first`.

        Raises:
            UsageProblem: it is none of these.
        """
        kind, _, rest = text.partition(":")
        if kind not in RUNTIMES or Path(text).is_dir():
            kind, rest = "onnx", text
        folder = (local_path(rest) if is_remote(rest) else Path(rest)) if rest else first
        if folder is None or not folder.is_dir():
            known = ", ".join(RUNTIMES)
            raise UsageProblem(
                f"`{rest or text}` is not a folder", hint=f"give FOLDER or RUNTIME:FOLDER; runtimes: {known}"
            )
        return cls(kind, folder, (interpreters or {}).get(kind, sys.executable))

    @property
    def name(self) -> str:
        """As it was asked for."""
        return str(self.folder) if self.kind == "onnx" else f"{self.kind}:{self.folder}"


class WorkerProcess:
    """A candidate's process.

    Attributes:
        candidate: what it runs.
        versions: of the packages that run it.

    Raises:
        InputRefused: the runtime is not installed, or does not open the folder, or the folder is hostile.
    """

    def __init__(self, candidate: BenchCandidate, threads: int) -> None:
        self.candidate = candidate
        if candidate.kind == "genai" and (candidate.folder / CONFIG).is_file():
            read_genai_config(candidate.folder)
        command = [candidate.interpreter, "-c", START, WORKER, candidate.kind, candidate.folder, threads]
        try:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            raise InputRefused(
                f"`{candidate.interpreter}` cannot be started: {error.strerror}", hint="name an interpreter of Python"
            ) from error
        answer = self._read()
        if "ready" not in answer:
            self.close()
            raise InputRefused(f"`{candidate.name}` does not open: {answer['error']}", hint=_way_out(candidate.kind))
        self.versions: dict[str, str] = answer["ready"]

    def run(self, prompts: Sequence[Sequence[int]], new: int, expected: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """What it answers to one batch, see `worker`."""
        if self._process.poll() is not None:
            return {"error": "its process has ended"}
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, "expected": expected}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"its process ended with {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _way_out(kind: str) -> str:
    packages = {"genai": "onnxruntime-genai", "optimum": "optimum-onnx", "torch": "transformers"}
    if kind not in packages:
        return "make the graphs: `llmconv export FOLDER`"
    layout = f", and the folder has `llmconv export … --layout {kind}`" if kind != "torch" else ""
    return f"see that `pip install {packages[kind]}` was done, here or where `--python {kind}=PATH` leads{layout}"
