"""Compares the tokens of clients with the likeliest ones, each after the tokens that the client itself chose.

The logits that a client's tokens are judged by: of the eager model, or of the same graphs in llmconv's own loop.

The client's tokens are fed, so one that is chosen by a near-tie does not make all tokens after it differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmconv.causal_lm import context_length, language_config
from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.interpreters import child_environment, parse_interpreters, script_command
from llmconv.output.manifest import VISION
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.session_file import CONFIG, read_genai_config
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.runtime.tokenizer import random_prompts, usable_tokens
from llmconv.tensors import Array
from llmconv.verify.clients.client_files import ClientFiles, padding_checks
from llmconv.verify.reference.cost_estimate import CostEstimate
from llmconv.verify.results import Check, Checks
from llmconv.verify.sigma import ExpectedOutput, NoiseFloor

LENGTHS = (1, 7, 40)  # tokens of the prompts
NEW = 16  # new tokens after each prompt
ENDS = "end tokens"


@dataclass
class ClientChecks:
    """Runs clients on a folder with graphs and client files, and judges what they generate."""

    clients: Sequence[Client]
    folder: Path
    model: Path
    source: Callable[[], LogitsSource]  # opens what the tokens are judged by; called once
    # compares the files that a client opens with the verified ones; None to compare none
    files: ClientFiles | None = None

    @cached_property
    def judge(self) -> LogitsSource:
        return self.source()

    @cached_property
    def batches(self) -> list[list[list[int]]]:
        """Each prompt alone, then all together."""
        context = context_length(self.model)
        lengths = [length for length in LENGTHS if context is None or length + NEW <= context]
        tokens = usable_tokens(self.model)[:-1]  # GenAI pads with the last token where a model has no padding token
        alone = [random_prompts(tokens, 1, length) for length in lengths]
        return [*alone, [row for rows in alone for row in rows]] if len(alone) > 1 else alone

    @property
    def _vocabulary(self) -> int:
        return int(language_config(self.model)["vocab_size"])

    def checks(self) -> Checks:
        for client in self.clients:
            yield list(self._checks_of(client))

    def _checks_of(self, client: Client) -> Iterator[Check]:
        yield from self.files.checks(client.name) if self.files else []
        if detail := self._obstacle(client):
            yield Check("generation", client.name, "", verdict="skip", detail=detail)
            return
        try:
            found = client.generate(self.folder, self.batches, NEW)
        except ClientError as error:
            yield Check("generation", client.name, "tokens", verdict="fail", detail=f"the client failed: {error}")
            return
        yield self._ends(client, found)
        yield from padding_checks(self.folder, self.model) if client.name == "genai" else []
        for prompts, rows in zip(self.batches, found.rows, strict=True):
            yield self._batch(client, prompts, rows, found.ends)

    def _obstacle(self, client: Client) -> str:
        if self.files and VISION in self.files.verified.models and client.program.is_node:
            return "models with images do not run in its text generation"
        return "" if self.batches else f"the context has no room for {NEW} new tokens"

    def _ends(self, client: Client, found: Generation) -> Check:
        known = end_tokens(self.model)
        packages = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        if client.name == "genai" and frozenset() in known:
            known.append(frozenset({self._vocabulary - 1}))  # it needs one: export takes the last token
        others = f"{client.name} ends at {sorted(found.ends)}, the model at {sorted(known[0])}"
        if found.ends not in known:
            return Check(ENDS, client.name, "", verdict="fail", detail=others)
        shown = f"{client.name}: {packages}"
        return Check(ENDS, client.name, "", detail=shown if found.ends == known[0] else f"{shown}; {others}")

    def _batch(self, client: Client, prompts: list[list[int]], rows: list[list[int]], ends: frozenset[int]) -> Check:
        one = f"1 prompt of {len(prompts[0])} token{'s' * (len(prompts[0]) > 1)}"
        name = f"generation, {f'{len(prompts)} prompts' if len(prompts) > 1 else one}"
        kept = [up_to_end(row, ends) for row in rows]
        problem = lengths_problem(prompts, rows, kept, ends) or self._outside(kept)
        detail = ""
        if not problem:
            batch = PaddedBatch(prompts, kept, client.program.padding)
            problem, detail = judged(self.judge.logits(batch), batch, self.judge.title)
        if problem:
            return Check(name, client.name, "tokens", verdict="fail", detail=problem)
        return Check(name, client.name, "tokens", detail=detail)

    def _outside(self, rows: Sequence[Sequence[int]]) -> str:
        """Names a token that is not in the vocabulary; empty if all are."""
        outside = [token for row in rows for token in row if not 0 <= token < self._vocabulary]
        return f"token {outside[0]} is outside the vocabulary" if outside else ""


def judged(expected: ExpectedOutput, batch: PaddedBatch, model: str) -> tuple[str, str]:
    """A description of wrong tokens in a batch (empty if there are none), and of right ones.

    A token is right if it is the likeliest, or if its logit is below the largest by no more than noise. `expected` has
    the logits before each new token, [prompts, new, vocabulary]; `model` describes what computed them.
    """
    tokens = batch.ids[:, batch.longest :]
    with np.errstate(invalid="ignore"):  # of infinite logits, which make no token right
        margins = expected.exact.max(axis=-1) - np.take_along_axis(expected.exact, tokens[..., None], -1)[..., 0]
    right = (margins <= expected.near_tie) & np.isfinite(expected.near_tie)
    if wrong := np.argwhere(~right & expected.valid).tolist():
        row, at = min(wrong, key=lambda place: place[::-1])
        best = int(expected.exact[row, at].argmax())
        text = (
            f"prompt {row}, new token {at}: {tokens[row, at]} instead of {best}, whose logit in {model} is larger by "
        )
        return f"{text}{margins[row, at]:.3g} (noise explains {expected.near_tie[row, at]:.1g})", ""
    count, ties = int(expected.valid.sum()), int(((margins > 0) & expected.valid).sum())
    return "", f"{count} tokens" + (f", {ties} of them by a near-tie" if ties else "")


def up_to_end(row: Sequence[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, which is included."""
    stop = next((at for at, token in enumerate(row, 1) if token in ends), len(row))
    return list(row[:stop])


def lengths_problem(
    prompts: Sequence[object], rows: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], ends: frozenset[int]
) -> str:
    """A description of a wrong shape of a batch; empty if the shape is right.

    `rows` are the new tokens of each prompt, in a batch of several with padding after the end token; `kept` the same up
    to the end token.
    """
    if len(rows) != len(prompts):
        return f"{len(rows)} rows for {len(prompts)} prompts"
    for row, tokens in zip(rows, kept, strict=True):
        if len(row) > NEW:
            return f"{len(row)} new tokens where {NEW} were asked for"
        if len(tokens) < NEW and not ends.intersection(tokens):
            return f"it stopped after {len(tokens)} new token{'s' * (len(tokens) != 1)} without an end token"
        if len(prompts) == 1 and len(row) > len(tokens):
            return "it went on after an end token"
    return ""


def end_tokens(folder: Path) -> list[frozenset[int]]:
    """The sets of end tokens that a model folder may mean, the plainest first.

    `generation_config.json` decides. Without any there, transformers does not end; others use those of `config.json`.
    Raises MalformedInput: they are not numbers.
    """
    path = folder / "generation_config.json"
    own = _ids(read_json(path)) if path.is_file() else None
    if own:
        return [own]
    return list(dict.fromkeys([*([] if own is None else [own]), _ids(language_config(folder))]))


def _ids(fields: Mapping[str, Any]) -> frozenset[int]:
    given = fields.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in listed):
        raise MalformedInput("`eos_token_id` is not a token id or a list of them", hint="fix the model's configuration")
    return frozenset(listed)


WORKERS = Path(__file__).with_name("workers")
TIME_LIMIT = 3600.0  # seconds after which a client counts as hanging
ERROR_LIMIT = 300  # longest quoted error message, in characters


@dataclass(frozen=True)
class Program:
    """How a client is started."""

    worker: str  # file in `workers/`
    package: str  # of the installer
    installer: str = "pip install"  # command that installs it
    padding: str = "left"  # side on which the worker pads prompts, `left` or `right`

    @property
    def is_node(self) -> bool:
        return self.worker.endswith(".mjs")


LLAMA_CPP = "llamacpp"  # opens GGUF files
VLLM = "vllm"  # opens Hugging Face folders
OF_WEIGHTS = {LLAMA_CPP: "GGUF files", VLLM: "Hugging Face folders"}  # what clients open that run no graphs
CLIENTS = {  # the clients that `verify --client` runs; those of graphs by the name of their layout
    "genai": Program("genai_worker.py", "onnxruntime-genai", padding="right"),
    "optimum": Program("optimum_worker.py", "optimum-onnx"),
    "transformersjs": Program("transformersjs_worker.mjs", "@huggingface/transformers", "npm install"),
    LLAMA_CPP: Program("llamacpp_worker.py", "llama-cpp-python"),
    VLLM: Program("vllm_worker.py", "vllm"),
}


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
    """A client, one of `CLIENTS`, and where it is installed."""

    name: str
    # path of its Python; of a client of Node, the folder that has `node_modules`, empty for the packages that are
    # installed for all (`npm install --global`)
    interpreter: str

    @property
    def program(self) -> Program:
        return CLIENTS[self.name]

    def require(self) -> dict[str, str]:
        """The versions of its packages; InputRefused if it is not installed."""
        try:
            versions: dict[str, str] = self.ask(folder=None)["versions"]
        except ClientError as error:
            raise InputRefused(f"the client `{self.name}` cannot be started: {error}", hint=self._hint()) from error
        return versions

    def generate(self, folder: Path, batches: Sequence[Sequence[Sequence[int]]], new: int) -> Generation:
        """Greedy tokens after each prompt, from the client's own generation loop.

        The worker reads a JSON object from stdin with `folder`, `batches` [batch][prompt][token] and `new`, the number
        of new tokens; `folder` is null to ask for versions alone. It writes one to stdout with `versions`, `ends` and
        `rows` as in `Generation`, or with `missing`, the error of the import. Raises ClientError: the client cannot
        open the folder, or failed; InputRefused: it is not installed; MalformedInput: its configuration in the folder
        would load or write other files.
        """
        if self.name == "genai" and (folder / CONFIG).is_file():
            read_genai_config(folder)
        answer = self.ask(folder=str(folder.resolve()), batches=batches, new=new)
        if not all(type(token) is int for token in answer["ends"]):
            raise ClientError(f"its end tokens are not numbers: {str(answer['ends'])[:ERROR_LIMIT]}")
        return Generation(answer["versions"], frozenset(answer["ends"]), answer["rows"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of the worker to a request, see `generate`; raises as that."""
        worker = WORKERS / self.program.worker
        command = ["node", str(worker), *([self.interpreter] * bool(self.interpreter))]
        if not self.program.is_node:
            command = script_command(self.interpreter, worker)
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request),
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
        answer = _parsed(done)
        if "missing" in answer:
            raise InputRefused(f"the client `{self.name}` is not installed: {answer['missing']}", hint=self._hint())
        return answer

    def _hint(self) -> str:
        program = self.program
        if program.is_node:
            return f"`{program.installer} {program.package}` in a folder, and give `--python {self.name}=FOLDER`"
        return f"`{program.installer} {program.package}`, or give `--python {self.name}=PATH` of a Python that has it"


def chosen_clients(names: str | Sequence[str], pythons: str | Sequence[str]) -> list[Client]:
    """The clients by name, each once.

    `pythons` are `CLIENT=PATH`; by default this Python, and Node's global packages for a client of Node. Raises
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


class LogitsSource(Protocol):
    """Computes the logits before each new token; `title` is the model's in reports."""

    title: str

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        """The logits [prompts, new, vocabulary] after each prompt and all but the last of its new tokens."""


class EagerLogits:
    """The eager model in float64; the noise is that of the eager model in the graphs' dtype.

    `dtype` is its numpy name; `code` is a trusted folder whose own code builds the model, None to run no code of it.
    """

    title = "the eager model"

    def __init__(self, folder: Path, dtype: str, code: Path | None) -> None:
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone

        estimate = CostEstimate.of(open_weights(folder), 1)
        kind = StreamedRunner if estimate.lacking(estimate.whole) else EagerRunner
        options: dict[str, Any] = {"code": code, "extra_inputs": extra_inputs_of(folder)}
        self._runners = [kind(folder, name, **options) for name in ("float64", dtype)]
        width = int(getattr(self._runners[0].config, "hidden_size", 0) or 0)
        self._floor = NoiseFloor(dtype, width)

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        ids, mask = batch.ids[:, :-1], batch.mask[:, :-1]
        positions = default_positions(mask, mask.shape[1])
        exact, rounded = (_before_new(batch, run.prefill(ids, mask, positions).logits) for run in self._runners)
        return self._floor.truth("logits", exact, rounded, _valid(batch))


@dataclass
class OwnLogits:
    """The graphs of the folder in llmconv's own loop, for codes whose cost is judged elsewhere.

    Each token is computed twice: by one call over all tokens before it, and by a step after the step before. The
    difference is the noise.
    """

    runner: Runner
    title = "llmconv's own loop over the graphs"

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        first = np.concatenate([self._of_prompt(prompt) for prompt in batch.prompts])
        exact = np.stack([first, *self._calls(batch)], axis=1).astype(np.float64)
        rounded = np.stack([first, *self._steps(batch)], axis=1)
        return NoiseFloor("float32").truth("logits", exact, rounded, _valid(batch))

    def _of_prompt(self, prompt: Sequence[int]) -> Array:
        """The logits after a prompt without padding, [1, vocabulary]; a graph may return no others."""
        mask = np.ones((1, len(prompt)), dtype=np.int64)
        return _last(self.runner.prefill(np.array([prompt]), mask, default_positions(mask, len(prompt))))

    def _calls(self, batch: PaddedBatch) -> Iterator[Array]:
        """The logits after each new token but the last, each from a call over all tokens."""
        for length in range(batch.longest + 1, batch.longest + batch.new):
            mask = batch.mask[:, :length]
            yield _last(self.runner.prefill(batch.ids[:, :length], mask, default_positions(mask, length)))

    def _steps(self, batch: PaddedBatch) -> Iterator[Array]:
        """The same logits, each from a step."""
        mask = batch.mask[:, : batch.longest]
        step = self.runner.prefill(batch.ids[:, : batch.longest], mask, default_positions(mask, batch.longest))
        for length in range(batch.longest + 1, batch.longest + batch.new):
            mask, new = batch.mask[:, :length], batch.ids[:, length - 1 : length]
            step = self.runner.decode(new, mask, default_positions(mask, 1), step.present)
            yield _last(step)


def _last(step: Step) -> Array:
    return step.logits[:, -1].astype(np.float32)


def _before_new(batch: PaddedBatch, logits: Array) -> Array:
    """The logits before each new token, [prompts, new, vocabulary], from those of all tokens of a padded batch."""
    ends = [batch.longest if batch.side == "left" else len(prompt) for prompt in batch.prompts]
    first = logits[np.arange(len(ends)), np.array(ends) - 1][:, None]
    return np.concatenate([first, logits[:, batch.longest :]], axis=1)


def _valid(batch: PaddedBatch) -> Array:
    """Which new tokens there are, bool [prompts, new]."""
    valid: Array = batch.mask[:, batch.longest :] == 1
    return valid


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of prompts (token ids), padded on one side, and the new tokens after them."""

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Sequence[int]]
    # `left` or `right`, where the padding stays between prompt and new tokens, and a sliding window counts it
    side: str

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def new(self) -> int:
        return max(map(len, self.rows))

    @property
    def ids(self) -> Array:
        """Token ids, int64 [prompts, longest + new]; 0 for padding."""
        return self._filled(self.prompts, self.rows)

    @property
    def mask(self) -> Array:
        """1 for tokens, 0 for padding, int64 [prompts, longest + new]."""
        return self._filled(*([[1] * len(row) for row in some] for some in (self.prompts, self.rows)))

    def _filled(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> Array:
        found = []
        for prompt, row in zip(prompts, rows, strict=True):
            padding = [0] * (self.longest - len(prompt))
            start = [*padding, *prompt] if self.side == "left" else [*prompt, *padding]
            found.append([*start, *row, *[0] * (self.new - len(row))])
        return np.array(found, dtype=np.int64)
