"""Client: a program that runs the graphs of a folder, in a process and mostly in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.interpreters import child_environment, parse_interpreters, script_command
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config

WORKERS = Path(__file__).with_name("workers")
TIME_LIMIT = 3600.0
"""Seconds after which a client counts as hanging."""

ERROR_LIMIT = 300
"""Longest quoted error message, in characters."""


@dataclass(frozen=True)
class Program:
    """How a client is started: worker in `workers/`, package of an installer, and command that installs it.

    `padding` is the side on which the worker pads prompts, `left` or `right`.
    """

    worker: str
    package: str
    installer: str = "pip install"
    padding: str = "left"

    @property
    def is_node(self) -> bool:
        """Whether Node runs it, with the packages of a folder."""
        return self.worker.endswith(".mjs")


CLIENTS = {
    "genai": Program("genai_worker.py", "onnxruntime-genai", padding="right"),
    "optimum": Program("optimum_worker.py", "optimum-onnx"),
    "transformersjs": Program("transformersjs_worker.mjs", "@huggingface/transformers", "npm install"),
}
"""The clients that `verify --client` runs, by the name of their layout."""


class ClientError(Exception):
    """A client could not run the graphs; the message says why."""


@dataclass(frozen=True)
class Generation:
    """What a client generated: package versions, end tokens, and by batch the new tokens of each prompt."""

    versions: dict[str, str]
    ends: frozenset[int]
    rows: list[list[list[int]]]


@dataclass(frozen=True)
class Client:
    """A client, one of `CLIENTS`, and where it is installed.

    `interpreter` is the path of its Python; of a client of Node, the folder that has `node_modules`, empty for the
    packages that are installed for all (`npm install --global`).
    """

    name: str
    interpreter: str

    @property
    def program(self) -> Program:
        """How it is started."""
        return CLIENTS[self.name]

    def require(self) -> dict[str, str]:
        """The versions of its packages; InputRefused if it is not installed."""
        try:
            versions: dict[str, str] = self._ask(None, [], 0)["versions"]
        except ClientError as error:
            raise InputRefused(f"the client `{self.name}` cannot be started: {error}", hint=self._hint()) from error
        return versions

    def generate(self, folder: Path, batches: Sequence[Sequence[Sequence[int]]], new: int) -> Generation:
        """Greedy tokens after each prompt, from the client's own generation loop.

        The worker reads a JSON object from stdin with `folder`, `batches` [batch][prompt][token] and `new`, the number
        of new tokens; `folder` is null to ask for versions alone. It writes one to stdout with `versions`, `ends` and
        `rows` as in `Generation`, or with `missing`, the error of the import.

        Raises:
            ClientError: the client cannot open the folder, or failed.
            InputRefused: it is not installed.
            MalformedInput: its configuration in the folder would load or write other files.
        """
        if self.name == "genai" and (folder / CONFIG).is_file():
            read_genai_config(folder)
        answer = self._ask(str(folder.resolve()), batches, new)
        if not all(type(token) is int for token in answer["ends"]):
            raise ClientError(f"its end tokens are not numbers: {str(answer['ends'])[:ERROR_LIMIT]}")
        return Generation(answer["versions"], frozenset(answer["ends"]), answer["rows"])

    def _ask(self, folder: str | None, batches: Any, new: int) -> dict[str, Any]:
        request = json.dumps({"folder": folder, "batches": batches, "new": new})
        answer = self._answer(request)
        if "missing" in answer:
            raise InputRefused(f"the client `{self.name}` is not installed: {answer['missing']}", hint=self._hint())
        return answer

    def _answer(self, request: str) -> dict[str, Any]:
        worker = WORKERS / self.program.worker
        is_node = self.program.is_node
        command = ["node", str(worker), *([self.interpreter] * bool(self.interpreter))]
        if not is_node:
            command = script_command(self.interpreter, worker)
        try:
            done = subprocess.run(
                command,
                input=request,
                capture_output=True,
                text=True,
                env=child_environment(HF_HUB_OFFLINE="1"),
                timeout=TIME_LIMIT,
                check=False,
            )
        except OSError as error:
            raise ClientError(f"`{error.filename or command[0]}`: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise ClientError(f"no answer after {TIME_LIMIT:.0f} s") from error
        return _parsed(done)

    def _hint(self) -> str:
        program = self.program
        if program.is_node:
            return f"`{program.installer} {program.package}` in a folder, and give `--python {self.name}=FOLDER`"
        return f"`{program.installer} {program.package}`, or give `--python {self.name}=PATH` of a Python that has it"


def chosen_clients(names: str | Sequence[str], pythons: str | Sequence[str]) -> list[Client]:
    """The clients by name, each once.

    `pythons` are `CLIENT=PATH`; by default this Python, and Node's global packages for a client of Node.

    Raises:
        UsageProblem: an unknown client, or an interpreter for one that is not chosen.
    """
    wanted = list(dict.fromkeys([names] if isinstance(names, str) else names))
    for name in wanted:
        if name not in CLIENTS:
            raise UsageProblem(f"unknown client `{name[:40]}`", hint=f"give one of: {', '.join(CLIENTS)}")
    paths = parse_interpreters(pythons, CLIENTS)
    for name in paths:
        if name not in wanted:
            raise UsageProblem(f"`--python {name}=…` without `--client {name}`", hint=f"add `--client {name}`")
    return [Client(name, paths.get(name, "" if CLIENTS[name].is_node else sys.executable)) for name in wanted]


def _parsed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The answer on stdout; a ClientError with the last line of stderr if there is none."""
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            answer = json.loads(lines[-1])
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() & {"versions", "missing"}:
            raise ClientError(f"it is not a Python that runs a script: it printed `{lines[-1][:ERROR_LIMIT]}`")
        return answer
    raise ClientError(_last_error(done.stderr) or f"it ended with exit code {done.returncode}")


def _last_error(text: str) -> str:
    """The line of an error in what a program wrote to stderr: Node puts it first, Python last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("at ")]
    return (errors or lines or [""])[-1][:ERROR_LIMIT]
