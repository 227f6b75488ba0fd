"""BenchCandidate and WorkerProcess: a folder with one of the runtimes, and the process that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.hub import snapshot_home, source_name
from llmconv.files.paths import path_of
from llmconv.files.sources import is_remote, local_path
from llmconv.interpreters import child_environment, script_command
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config
from llmconv.runtime.onnxruntime.session_settings import short_provider

WORKER = Path(__file__).with_name("worker.py")
RUNTIMES = {
    "onnx": "llmconv's loop over the graphs",
    "packed": "the same, with weights packed by onnxruntime",
    "torch": "transformers' generate over the eager model",
    "optimum": "optimum's ORTModelForCausalLM.generate",
    "genai": "ONNX Runtime GenAI",
}


@dataclass(frozen=True)
class BenchCandidate:
    """A folder to measure, and its runtime.

    Attributes:
        kind: one of `RUNTIMES`.
        folder: has the model or the graphs.
        interpreter: path of a Python that has the runtime.
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
        """Parses `FOLDER`, `RUNTIME:FOLDER`, or `RUNTIME` alone.

        Args:
            text: to parse.
            first: the folder for `RUNTIME` alone.
            interpreters: runtime to path of a Python; default: this one.


        Raises:
            UsageProblem: the folder does not exist.
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
        """The folder, with the runtime before it unless that is `onnx`."""
        folder = source_name(self.folder) if snapshot_home(self.folder) else str(self.folder)
        return folder if self.kind == "onnx" else f"{self.kind}:{folder}"


class WorkerProcess:
    """The process of a candidate on a provider of onnxruntime, or torch's device of that name.

    `versions` are those of the packages that run it. Raises InputRefused if the runtime is not installed or cannot open
    the folder, or the folder is unsafe.
    """

    def __init__(self, candidate: BenchCandidate, threads: int, provider: str = "cpu") -> None:
        self.candidate = candidate
        if candidate.kind == "genai" and (candidate.folder / CONFIG).is_file():
            read_genai_config(candidate.folder)
        arguments = candidate.kind, candidate.folder, threads, short_provider(provider)
        try:
            self._process = subprocess.Popen(
                script_command(candidate.interpreter, WORKER, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=child_environment(OMP_NUM_THREADS=str(threads)),
            )
        except OSError as error:
            raise InputRefused(
                f"`{candidate.interpreter}` cannot be started: {error.strerror}", hint="give the path of a Python"
            ) from error
        answer = self._read()
        if "ready" not in answer:
            self.close()
            raise InputRefused(
                f"`{candidate.name}` cannot be measured: {answer['error']}", hint=answer.get("hint") or _hint(candidate)
            )
        self.versions: dict[str, str] = answer["ready"]

    def run(self, prompts: Sequence[Sequence[int]], new: int, expected: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """The answer to one batch, in the format of `worker`; prompts are token ids, all of one length.

        `expected` are the new tokens of the first candidate; empty if this is the first.
        """
        if self._process.poll() is not None:
            return {"error": "the process has ended"}
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
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _hint(candidate: BenchCandidate) -> str:
    kind = candidate.kind
    packages = {"genai": "onnxruntime-genai", "optimum": "optimum-onnx", "torch": "transformers"}
    if kind not in packages:
        return f"export the graphs: `llmconv export {candidate.folder}`"
    layout = f", and export with `llmconv export … --layout {kind}`" if kind != "torch" else ""
    return f"`pip install {packages[kind]}` here, or give `--python {kind}=PATH` of a Python that has it{layout}"
