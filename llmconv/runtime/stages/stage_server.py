"""One stage of a model, of which only its own graphs and weights are opened, and the server that runs it for others."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem, first_line
from llmconv.memory import reporting_out_of_memory
from llmconv.output.manifest import MANIFEST, GraphEntry, Manifest, graph_entries, read_manifest
from llmconv.progress import say
from llmconv.runtime.extra_inputs import is_past, is_present, is_state
from llmconv.runtime.onnxruntime.graph import LENGTH_AXIS, OrtCache, OrtGraph, refusing
from llmconv.runtime.onnxruntime.session_settings import (
    TENSOR_DTYPES,
    SessionSettings,
    WidenedWeights,
    for_concurrent_use,
)
from llmconv.runtime.runner import EDITS, Cache, CacheEdit, can_be_cut
from llmconv.runtime.stages.connection import DTYPES, BadMessage, Connection, Message, Refused, as_number, greet
from llmconv.tensors import Array


@dataclass(frozen=True)
class StageStep:
    """What one run of a stage returns: outputs other than the cache by name, and its part of the cache."""

    results: Mapping[str, Array]
    present: Cache


class StageGraph(OrtGraph):
    """A graph of some layers, which takes and returns hidden states; `taken` are shapes of inputs but the cache."""

    def __init__(self, path: Path, settings: SessionSettings, entry: GraphEntry) -> None:
        super().__init__(path, settings, entry=entry)
        self.result_names = [name for name in self.outputs if not is_present(name)]
        declared = {name: shape for name, shape in self.inputs.items() if not is_past(name)}
        self.taken: dict[str, list[int | str]] = {**declared, MASK: self.inputs.get(MASK, ["batch", "total"])}

    def run_stage(self, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs the layers on arrays by name, None is an empty past; MalformedInput if onnxruntime cannot."""
        with refusing(self.name, self._hint):
            results, present = self._run_growing({name: values[name] for name in self.taken}, past)
        return StageStep(dict(zip(self.result_names, results, strict=True)), present)


class LocalStage:
    """One stage, numbered from 1, opened; its graphs are by use, `prefill` and `decode`.

    `settings` are those of the whole model. Raises MalformedInput if a graph was changed since the export, or
    onnxruntime cannot open it; UsageProblem if the stage, or one in the settings, does not exist.
    """

    def __init__(self, export: StagedExport, number: int, settings: SessionSettings | None = None) -> None:
        settings = settings or SessionSettings()
        settings.require_stages(export.count)
        export.require(number)
        self.number = number
        self.graphs = _open(export, number, for_concurrent_use(settings.of_stage(number)))

    def run(self, use: str, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """Runs a graph of the stage, `prefill` or `decode`, as `StageGraph.run_stage`."""
        return self.graphs[use].run_stage(values, past)

    def close(self) -> None:
        """Does nothing: the sessions end with the process."""


def _open(export: StagedExport, number: int, settings: SessionSettings) -> dict[str, StageGraph]:
    """The graphs of a stage; one session for both uses if they have the same content."""
    first, second = (export.stage(use, number) for use in ("prefill", "decode"))
    if first.content_key(export.folder) == second.content_key(export.folder):
        graph = StageGraph(export.folder / second.files[0], settings, second)
        return {"prefill": graph, "decode": graph}
    settings = replace(settings, widened=WidenedWeights())
    entries = {"prefill": first, "decode": second}
    return {use: StageGraph(export.folder / entry.files[0], settings, entry) for use, entry in entries.items()}


def is_cuttable(cache: Cache) -> bool:
    """As `can_be_cut`, by the shapes alone: arrays on a device are not copied."""
    if not isinstance(cache, OrtCache):
        return False
    named = zip(cache.names, cache.values, strict=True)
    return all(not is_state(name) and value.shape()[LENGTH_AXIS] == cache.length for name, value in named)


# an input of every stage, even if its graph does not read it: the mask has the length of the cache
MASK = "attention_mask"
Ports = tuple[tuple[str, ...], tuple[str, ...]]  # names of inputs and of outputs
AGAIN = "export the graphs again, and copy llmconv.json and the files of each stage to its host"


@dataclass(frozen=True)
class StagedExport:
    """The stages of an exported folder; files of stages that are on other hosts may be missing."""

    folder: Path  # has llmconv.json
    entries: Mapping[str, GraphEntry]  # entries of the graphs in it, by use: `prefill` and `decode`
    count: int
    # hash of everything that identifies a stage, for each stage in order: its graphs, all weights, and the entries of
    # the graphs
    fingerprints: tuple[str, ...]
    knows_weights: bool  # whether llmconv.json has checksums of the weights, which `export -o OUT` writes
    ports: Mapping[str, Sequence[Ports]]  # names of inputs and outputs of each stage in order, by use

    @classmethod
    def read(cls, folder: Path) -> StagedExport:
        """The stages of a folder; raises InputRefused unless llmconv.json has checksums of graphs in stages."""
        if not folder.is_dir():
            raise InputRefused(
                f"`{folder}` is not a folder", hint="give the OUT of `llmconv export MODEL --stages K -o OUT`"
            )
        manifest, found = read_manifest(folder), {entry.role: entry for entry in graph_entries(folder)}
        if not found or len(next(iter(found.values())).files) == 1:
            problem = f"`{folder}` has no graphs in stages"
            raise InputRefused(problem, hint="run `llmconv export MODEL --stages K -o OUT`, and give OUT")
        both = {"prefill", "decode"} <= found.keys()
        single = found.get("unified") or next(iter(found.values()))
        entries = {use: found[use] if both else single for use in ("prefill", "decode")}
        counts = {len(entry.files) for entry in entries.values()}
        if len(counts) > 1:
            raise MalformedInput(f"the graphs in `{MANIFEST}` have different numbers of stages", hint=AGAIN)
        weights = {name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")}
        count, ports = counts.pop(), {use: _ports(manifest.graphs[entry.role]) for use, entry in entries.items()}
        prints = tuple(_fingerprint(manifest, entries, at, weights) for at in range(count))
        return cls(folder, entries, count, prints, any("sha256" in entry for entry in weights.values()), ports)

    def stage(self, use: str, number: int) -> GraphEntry:
        return replace(self.entries[use], files=(self.entries[use].files[number - 1],))

    def inputs(self, use: str, number: int) -> list[str]:
        """The inputs of a stage other than its cache, and the attention mask."""
        return list(dict.fromkeys(name for name in (*self.ports[use][number - 1][0], MASK) if not is_past(name)))

    def outputs(self, use: str, number: int) -> list[str]:
        return [name for name in self.ports[use][number - 1][1] if not is_present(name)]

    def require(self, number: int) -> None:
        """Requires the stage (UsageProblem), and its graphs as they were exported (MalformedInput)."""
        if not 1 <= number <= self.count:
            problem = f"`{self.folder}` has no stage {number}"
            raise UsageProblem(problem, hint=f"its stages are numbered from 1 to {self.count}")
        files = read_manifest(self.folder).files
        for name in {self.stage(use, number).files[0] for use in self.entries}:
            path = self.folder / name
            if not path.is_file():
                raise MalformedInput(f"`{name}` is missing from `{self.folder}`", hint=AGAIN)
            if hashlib.sha256(path.read_bytes()).hexdigest() != files[name].get("sha256"):
                raise MalformedInput(f"`{name}` is not the graph that `{MANIFEST}` lists", hint=AGAIN)


def _ports(entry: Mapping[str, Any]) -> list[Ports]:
    """Names of inputs and outputs of each stage in a graph's entry."""
    found = [(stage.get("inputs"), stage.get("outputs")) for stage in entry["stages"]]
    names = [name for ports in found for one in ports for name in (one if isinstance(one, list) else [None])]
    if not all(isinstance(name, str) for name in names):
        raise MalformedInput(f"`{MANIFEST}` does not list the inputs and outputs of the stages", hint=AGAIN)
    return [(tuple(inputs), tuple(outputs)) for inputs, outputs in found]


def _fingerprint(manifest: Manifest, entries: Mapping[str, GraphEntry], at: int, weights: Mapping[str, Any]) -> str:
    """A hash of everything that identifies stage `at` (from 0)."""
    graphs = {}
    for use, entry in entries.items():
        name = entry.files[at]
        if not (digest := manifest.files.get(name, {}).get("sha256")):
            raise MalformedInput(f"`{MANIFEST}` has no checksum of `{name}`", hint=AGAIN)
        graphs[use] = [digest, manifest.graphs[entry.role]]
    content = json.dumps({"stage": at + 1, "graphs": graphs, "weights": weights}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


log = logging.getLogger("llmconv.stages")
MAX_CLIENTS = 64
MAX_GREETERS = 256  # connections that have not proved that they are clients; beyond that the oldest is closed
POLL = 0.2  # seconds between two looks at whether the server has to stop
PATIENCE = 30.0  # seconds that a client may take for the rest of a message that it has begun
HELLO_SECONDS = 10.0  # time limit of the whole answer to the greeting
SIGNS = 4  # heartbeats, during a run, in the time of silence that a client accepts


class StageServer:
    """Serves one stage, one request at a time; `shared` is the token that clients must have, or empty."""

    def __init__(self, stage: LocalStage, export: StagedExport, shared: str = "") -> None:
        self._stage, self._export, self._shared = stage, export, shared
        self._worker = ThreadPoolExecutor(1, "llmconv-stage")
        self._greeters: dict[Connection, None] = {}  # in the order of their arrival
        self._clients: set[Connection] = set()
        self._change = threading.Lock()
        self._running: Future[Message] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def serve(self, listener: socket.socket, stop: Callable[[], bool]) -> None:
        """Accepts clients until `stop`, called a few times per second, returns true; then closes their connections."""
        listener.settimeout(POLL)
        while not stop():
            with suppress(OSError):  # nobody came, or the client is gone already
                accepted, address = listener.accept()
                self._start(accepted, f"{address[0]}:{address[1]}")
        with self._change:
            connections = [*self._greeters, *self._clients]
        for connection in connections:
            connection.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _start(self, accepted: socket.socket, name: str) -> None:
        connection = Connection(accepted, HELLO_SECONDS)
        with self._change:
            self._greeters[connection] = None
            if oldest := next(iter(self._greeters)) if len(self._greeters) > MAX_GREETERS else None:
                del self._greeters[oldest]
        if oldest:
            oldest.close()
        threading.Thread(target=self._serve_client, args=(connection, name), daemon=True).start()

    def _serve_client(self, connection: Connection, name: str) -> None:
        """Answers one client until it leaves, which frees its caches."""
        caches, reason = HeldCaches(self._stage), "the server stops"
        try:
            prints, number = self._export.fingerprints, self._stage.number
            silence = greet(connection, number, prints, self._shared, HELLO_SECONDS)
            # makes a client of a connection that has greeted; raises Refused if there are too many
            with self._change:
                if len(self._clients) >= MAX_CLIENTS:
                    raise Refused(f"the stage has {MAX_CLIENTS} clients", "try again later, or start another stage")
                self._greeters.pop(connection, None)
                self._clients.add(connection)
            connection.send(Message("stage", {"number": number, "fingerprint": prints[number - 1]}))
            connection.seconds = PATIENCE
            say(f"client {name}: connected")
            while True:
                self._running = running = self._worker.submit(_answer, caches, connection.receive(idle=True))
                connection.send(_awaited(running, connection, max(silence / SIGNS, 0.05)))
        except Refused as refusal:
            reason = str(refusal)
            with suppress(OSError):
                connection.send(refusal.answer())
        except BadMessage as error:
            reason = f"invalid message: {first_line(error)}"
            with suppress(OSError):
                connection.send(Refused(reason, "both sides need the same version of llmconv").answer())
        except EOFError:
            reason = "it left"
        except OSError as error:
            reason = error.strerror or first_line(error)
        except (CancelledError, RuntimeError):  # the worker has ended
            pass
        finally:
            connection.close()
            with self._change:
                self._greeters.pop(connection, None)
                self._clients.discard(connection)
            say(f"client {name}: disconnected ({reason}), {len(caches)} caches freed")


def _awaited(running: Future[Message], connection: Connection, every: float) -> Message:
    """The result of a run; until it is there, the client gets heartbeats."""
    while True:
        try:
            return running.result(every)
        except TimeoutError:
            if running.done():
                return running.result()
            connection.send(Message("busy"))


def _answer(caches: HeldCaches, asked: Message) -> Message:
    """The answer to a request; errors of the run are answers, too. Raises BadMessage if it is not a request."""
    try:
        with reporting_out_of_memory("in a stage"):
            return caches.run(asked)
    except BadMessage:
        raise
    except LlmconvError as error:
        return Message("failed", {"message": error.message, "hint": error.hint})
    except Exception:
        log.exception("a request failed")
        return Message("failed", {"message": "internal error", "hint": "see the log of the stage"})


MAX_CACHES = 1024  # caches of one client
MAX_EDITS, MAX_ROWS = 64, 1 << 16
MAX_LENGTH = 1 << 40


class HeldCaches:
    """The caches of one client by their numbers, which `stage` continues."""

    def __init__(self, stage: LocalStage) -> None:
        self._stage, self._numbers = stage, count(1)
        self._held: dict[int, Cache] = {}

    def __len__(self) -> int:
        return len(self._held)

    def run(self, asked: Message) -> Message:
        """Frees the caches that the client no longer needs, runs the stage, and keeps its new cache.

        `asked` has `use`, the number of the cache to continue (0 for none), its `edits`, the numbers to `free`;
        tensors. Raises BadMessage for another request, LlmconvError if the stage cannot run it.
        """
        self._free(asked.fields.get("free"))
        use = asked.text("use")
        if asked.kind != "run" or use not in self._stage.graphs:
            raise BadMessage("the request is not a run of the stage")
        graph, past = self._stage.graphs[use], self._past(asked)
        # checks names, dtypes and fixed axes of what a client sends
        if asked.tensors.keys() != graph.taken.keys():
            raise BadMessage(f"the inputs are not {', '.join(graph.taken)}")
        for name, array in asked.tensors.items():
            shape, kind = graph.taken[name], graph.types.get(name, "tensor(int64)")
            dtype = DTYPES["int64"] if kind == "tensor(int64)" else TENSOR_DTYPES.get(kind)
            shape = shape or list(array.shape)  # quantized graphs do not declare that of a hidden state
            if array.dtype != dtype or array.ndim != len(shape):
                raise BadMessage(f"`{name}` has another dtype, or another number of axes")
            if any(isinstance(axis, int) and axis != size for axis, size in zip(shape, array.shape, strict=True)):
                raise BadMessage(f"`{name}` has the shape {list(array.shape)} instead of {shape}")
            if not array.ndim or not array.size or len(array) != len(next(iter(asked.tensors.values()))):
                raise BadMessage("the batch is empty, or not of one size")
        if len(self._held) >= MAX_CACHES:
            raise InputRefused(f"the client keeps {MAX_CACHES} caches", hint="keep fewer conversations")
        return self._answer(self._stage.run(use, asked.tensors, past))

    def _free(self, numbers: Any) -> None:
        if not isinstance(numbers, list):
            raise BadMessage("`free` is not a list")
        for number in numbers:
            self._held.pop(as_number(number, "a cache"), None)

    def _past(self, asked: Message) -> Cache | None:
        """The cache that a request continues, after its edits."""
        number, edits = asked.number("past"), asked.fields.get("edits")
        if not isinstance(edits, list) or len(edits) > MAX_EDITS:
            raise BadMessage("`edits` is not a list of a few changes")
        if number == 0:
            return None
        if (cache := self._held.get(number)) is None:
            raise BadMessage(f"unknown cache {number}")
        for fields in edits:
            cache = _edit(fields, cache).applied(cache)
        return cache

    def _answer(self, step: StageStep) -> Message:
        number = next(self._numbers)
        self._held[number] = step.present
        fields = {"cache": number, "length": step.present.length, "cuttable": is_cuttable(step.present)}
        # only the last logits are sent: nothing reads those of earlier tokens while text is generated
        sent = {name: array[:, -1:] if name == "logits" else array for name, array in step.results.items()}
        return Message("result", fields, sent)


def _edit(fields: Any, cache: Cache) -> CacheEdit:
    """A change of a cache, checked against it."""
    if not isinstance(fields, list) or len(fields) != 3:
        raise BadMessage("a change of a cache is not a list of three")
    kind, numbers, virtual = fields
    is_known = isinstance(kind, str) and kind in EDITS
    if not is_known or not isinstance(numbers, list) or not 1 <= len(numbers) <= MAX_ROWS:
        raise BadMessage("a change of a cache is of no known kind")
    rows = min((len(array) for array in cache.arrays().values()), default=1)
    most = rows - 1 if kind == "rows" else cache.length if kind == "cut" else MAX_LENGTH
    found = tuple(as_number(number, "a number in a change of a cache", most) for number in numbers)
    if kind != "rows" and not can_be_cut(cache):
        raise BadMessage("the cache cannot be cut")
    if (kind == "cut" and len(found) > 1) or (kind == "moved" and rows != 1):
        raise BadMessage("the change does not fit the cache")
    return CacheEdit(kind, found, as_number(virtual, "a number in a change of a cache", cache.length))
