"""StagedRunner: runs a model over stages, of which some or all are in other processes."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.errors import (
    LlmconvError,
    OutputFailed,
    StageFailed,
    UnsupportedInput,
    UsageProblem,
    as_fields,
    first_line,
    raise_fields,
)
from llmconv.progress import say, warn
from llmconv.ray_connection import connected
from llmconv.runtime.extra_inputs import ExtraValues, ModelCall
from llmconv.runtime.onnxruntime.graph import extra_names, step_of
from llmconv.runtime.onnxruntime.session_settings import REMOTE_SILENCE, SessionSettings, StageAddresses, short_provider
from llmconv.runtime.runner import Cache, CacheEdit, Extras, PlacedEmbeddings, RemoteCache, Runner, Step, refuse_placed
from llmconv.runtime.stages.connection import TOKEN, Address, BadMessage, Connection, Message, introduce, token
from llmconv.runtime.stages.stage_server import LocalStage, StagedExport, StageServer, StageStep, is_cuttable
from llmconv.tensors import Array

RESTART = "start it again with `llmconv serve-stage`, then repeat the request"


class HeldCache:
    """A cache in a stage, freed when nothing here refers to it, or the connection ends; `freed` gets its number."""

    def __init__(self, connection: Connection, number: int, freed: deque[int]) -> None:
        self.connection, self.number = connection, number
        weakref.finalize(self, freed.append, number).atexit = False


@dataclass(frozen=True)
class RemotePart:
    """A stage's part of a cache, as for `RemoteCache`."""

    stage: RemoteStage
    held: HeldCache  # the cache in the stage
    length: int  # number of tokens, padding included
    is_cuttable: bool  # result of `can_be_cut`
    edits: tuple[CacheEdit, ...] = ()  # changes that the stage applies before it continues the cache

    @property
    def is_lost(self) -> bool:
        return self.held.connection is not self.stage.connection

    def edited(self, edit: CacheEdit) -> RemotePart:
        length = edit.numbers[0] if edit.kind == "cut" else self.length
        return replace(self, length=length, edits=(*self.edits, edit))

    def arrays(self) -> Mapping[str, Array]:
        """Not available: always raises StageFailed."""
        raise StageFailed(f"the cache of {self.stage} cannot be read", hint="run the model in one process")


class RemoteStage:
    """A stage, numbered from 1, that `llmconv serve-stage` serves. After it was lost, the next run connects again.

    `connection` is None after the stage was lost: `silence` seconds without a heartbeat. Raises StageFailed if there is
    no stage, or one of another model or export.
    """

    def __init__(self, address: Address, export: StagedExport, silence: float = REMOTE_SILENCE) -> None:
        self._address, self._export, self._silence = address, export, silence
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self.number = 0
        self.connection: Connection | None = None
        self._connect()

    def __str__(self) -> str:
        return f"stage {self.number} at {self._address}" if self.number else f"the stage at {self._address}"

    def run(self, use: str, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """As `LocalStage.run`; the stage takes what it needs of `values`; raises StageFailed if it is lost or fails."""
        with self._lock:
            number, edits = 0, []
            if past is not None:
                if not isinstance(past, RemotePart) or past.is_lost:
                    raise StageFailed(f"{self} no longer has the cache", hint="repeat the request")
                number = past.held.number
                edits = [[edit.kind, list(edit.numbers), edit.virtual] for edit in past.edits]
            free = [self._freed.popleft() for _ in range(len(self._freed))]
            fields = {"use": use, "past": number, "edits": edits, "free": free}
            request = Message("run", fields, {name: values[name] for name in self._export.inputs(use, self.number)})
            with self._losing():
                connection = self.connection or self._connect()
                connection.send(request)
                while (answer := connection.receive()).kind == "busy":
                    pass
                if answer.kind != "failed":
                    if answer.kind == "refused":
                        raise StageFailed(answer.text("message"), hint=answer.text("hint"))
                    if answer.kind != "result" or answer.tensors.keys() != set(self._export.outputs(use, self.number)):
                        raise BadMessage("the answer is not the result of the stage")
                    held = HeldCache(connection, answer.number("cache"), self._freed)
                    part = RemotePart(self, held, answer.number("length"), answer.fields.get("cuttable") is True)
                    return StageStep(answer.tensors, part)
            raise StageFailed(f"{self} failed: {answer.fields.get('message')}", hint=str(answer.fields.get("hint")))

    def close(self) -> None:
        """Closes the connection; the stage frees its caches."""
        connection, self.connection = self.connection, None
        if connection:
            connection.close()

    def _connect(self) -> Connection:
        with self._losing():
            made = socket.create_connection((self._address.host, self._address.port), timeout=self._silence)
            self.connection = Connection(made, self._silence)
            number = introduce(self.connection, self._export.fingerprints, self._silence)
            if self.number not in (0, number):
                raise StageFailed(f"it is stage {number} now", hint=RESTART)
            self.number, self._freed = number, deque()
            return self.connection

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Context in which the stage may be lost: whatever ends it early leaves no connection in an unknown state."""
        try:
            yield
        except StageFailed as error:
            self.close()
            raise StageFailed(f"{self} cannot be used: {error.message}", hint=error.hint) from error
        except (OSError, EOFError, BadMessage) as error:
            self.close()
            hint = f"see whether it can be reached; {RESTART}"
            raise StageFailed(f"{self} is lost: {self._reason(error)}", hint=hint) from error
        except BaseException:
            self.close()
            raise

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer for {self._silence:g} s"
        return (isinstance(error, OSError) and error.strerror) or first_line(error)


OPTION = "--stage-at"


@dataclass(frozen=True)
class StagedCache:
    """The cache of a model in stages, `parts` in their order, see `RemoteCache`; `length` counts padding, too."""

    parts: Sequence[Cache]
    length: int

    @property
    def is_lost(self) -> bool:
        return any(isinstance(part, RemoteCache) and part.is_lost for part in self.parts)

    @property
    def is_cuttable(self) -> bool:
        return all(part.is_cuttable if isinstance(part, RemoteCache) else is_cuttable(part) for part in self.parts)

    def edited(self, edit: CacheEdit) -> StagedCache:
        length = edit.numbers[0] if edit.kind == "cut" else self.length
        return StagedCache([edit.applied(part) for part in self.parts], length)

    def arrays(self) -> Mapping[str, Array]:
        """The arrays of all parts; raises StageFailed if a part is in another process."""
        return {name: array for part in self.parts for name, array in part.arrays().items()}


class StagedRunner(Runner):
    """Runs stages in order, which pass on only hidden states, mask and positions; closing it closes `opened`."""

    def __init__(
        self, stages: Sequence[LocalStage | RemoteStage], export: StagedExport, opened: ExitStack | None = None
    ) -> None:
        self._stages, self._opened = stages, opened or ExitStack()
        self._prefix = export.entries["prefill"].prefix
        self._result_names = ["logits"] if "logits" in export.outputs("decode", export.count) else ["tokens", "scores"]

    @classmethod
    def open(cls, folder: Path, at: StageAddresses, settings: SessionSettings | None = None) -> StagedRunner:
        """The stages of a folder: those at the given addresses, and the others in this process, with `settings`.

        Raises InputRefused if the graphs are not in stages, or files are missing; StageFailed if no stage of this model
        answers; UnsupportedInput for inputs other than tokens, mask and positions; UsageProblem for an invalid or a
        repeated address.
        """
        export = StagedExport.read(folder)
        # refuses inputs that only some families have: a stage takes tokens, mask, positions and hidden states
        for use in export.entries:
            names = [name for number in range(1, export.count + 1) for name in export.inputs(use, number)]
            passed = {name for number in range(1, export.count + 1) for name in export.outputs(use, number)}
            if extra := [name for name in extra_names(dict.fromkeys(names, ())) if name not in passed]:
                problem = f"stages in other processes do not take the input `{extra[0]}` of this family"
                raise UnsupportedInput(problem, hint=f"leave out `{OPTION}`: in one process they do")
        if not export.knows_weights:
            warn(NO_CHECKSUMS)
        stages: dict[int, LocalStage | RemoteStage] = {}
        with ExitStack() as opened:
            for text in at.addresses:
                if text != ON_RAY:
                    _connect(text, export, at.timeout, stages, opened)
            missing = [number for number in range(1, export.count + 1) if number not in stages]
            if ON_RAY in at.addresses and missing:
                for text in opened.enter_context(closing(RayStages(export, missing, settings))).addresses:
                    _connect(text, export, at.timeout, stages, opened)
            for number in [number for number in missing if number not in stages]:
                stages[number] = LocalStage(export, number, settings)
                opened.callback(stages[number].close)
            return cls([stages[number] for number in range(1, export.count + 1)], export, opened.pop_all())

    @property
    def virtual_tokens(self) -> int:
        return self._prefix.length if self._prefix else 0

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        refuse_placed(placed)
        return self._run("prefill", call, past, extras)

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        return self._run("prefill" if self._prefix and past is None else "decode", call, past, extras)

    def _run(self, use: str, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        if self._prefix and past is not None:
            call = call.after(self._prefix.length, self._prefix.first_position)
        values = {name: array.astype("int64", copy=False) for name, array in call.named.items()}
        values |= ExtraValues(given=extras or {}).of(call)
        parts = past.parts if isinstance(past, StagedCache) else [past] * len(self._stages)
        present = []
        for stage, part in zip(self._stages, parts, strict=True):
            step = stage.run(use, values, part)
            values.update(step.results)
            present.append(step.present)
        results = [values[name] for name in self._result_names]
        return step_of(self._result_names, results, StagedCache(present, max(part.length for part in present)))

    def close(self) -> None:
        self._opened.close()


NO_CHECKSUMS = (
    "llmconv.json has no checksums of the weights, so stages of another model of the same shapes are not recognized: "
    "`llmconv export MODEL --stages K -o OUT` records them"
)


def _connect(
    text: str, export: StagedExport, silence: float, stages: dict[int, LocalStage | RemoteStage], opened: ExitStack
) -> None:
    """Connects to the stage at an address and adds it to `stages`, and what closes it to `opened`."""
    before, equals, address = text.rpartition("=")
    wanted = 0
    if equals:
        with suppress(ValueError):
            wanted = int(before)
        if not 1 <= wanted <= export.count:
            raise UsageProblem(f"`{OPTION} {text}`: there is no stage `{before}`", hint=_numbered(export))
    stage = RemoteStage(Address.parse(address, OPTION), export, silence)
    problem = ""
    if wanted not in (0, stage.number):
        problem = f"`{OPTION} {text}`: that is stage {stage.number}"
    elif stage.number in stages:
        problem = f"two addresses have stage {stage.number}"
    if problem:
        stage.close()
        raise UsageProblem(problem, hint=f"give the address of each stage once; {_numbered(export)}")
    stages[stage.number] = stage
    opened.callback(stage.close)


def _numbered(export: StagedExport) -> str:
    return f"the stages of `{export.folder}` are numbered from 1 to {export.count}"


ON_RAY = "ray"  # an address of `--stage-at`: the stages without one of their own run in actors
PATIENCE = 600  # seconds for a node to be found, and to open its stage
SILENCE = 10  # seconds after which a message reports which stage is still waited for
# execution providers for which an actor asks for a GPU; Ray shows it that one alone, as device 0
ON_GPU = ("cuda", "tensorrt", "nvtensorrtrtx", "migraphx")


class StageActor:
    """An actor that serves one stage to all who connect, until it is killed."""

    def serve(self, folder: str, number: int, settings: SessionSettings) -> dict[str, str]:
        """Opens the stage with this number, from 1, of a folder on the node of the actor.

        Returns `address`, HOST:PORT, and `guard`, not empty if clients need a token; or the fields of an error
        (`as_fields`).
        """
        import ray  # noqa: PLC0415 - an extra

        host = ray.util.get_node_ip_address()
        try:
            export = StagedExport.read(Path(folder))
            stage = LocalStage(export, number, settings)
        except LlmconvError as error:
            fields = as_fields(error)
            return {**fields, "message": f"on node {host}: {fields['message']}"}
        listener = socket.create_server((host, 0), backlog=128)
        server = StageServer(stage, export, token())
        threading.Thread(target=server.serve, args=(listener, lambda: False), daemon=True).start()
        return {"address": str(Address(*listener.getsockname()[:2])), "guard": TOKEN if token() else ""}


class RayStages:
    """Stages with these numbers in actors, which end with it; every node has the folder at the same path.

    `addresses` are N=HOST:PORT of each stage. Raises InputRefused if a node lacks the files of its stage, OutputFailed
    or StageFailed if the cluster cannot be reached or has no node for a stage, UnsupportedInput if ray is not
    installed.
    """

    def __init__(self, export: StagedExport, numbers: Collection[int], settings: SessionSettings | None) -> None:
        given = settings or SessionSettings()
        given.require_stages(export.count)
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(f"--stage-at {ON_RAY}"))
            self._actors = [self._actor(given.of_stage(number)) for number in numbers]
            for actor in self._actors:
                stack.callback(self._ray.kill, actor)
            folder = str(export.folder.absolute())
            calls = zip(self._actors, numbers, strict=True)
            starting = [actor.serve.remote(folder, number, given.of_stage(number)) for actor, number in calls]
            self.addresses = [f"{n}={self._address(call, n)}" for n, call in zip(numbers, starting, strict=True)]
            self._open = stack.pop_all()
        atexit.register(_close, weakref.ref(self))  # before ray's own exit, in which nothing can be closed
        if not token():
            warn(f"anyone who can reach the nodes of the cluster can use the stages: set {TOKEN} on all of them")

    def _actor(self, settings: SessionSettings) -> Any:
        gpus = int(short_provider(settings.provider) in ON_GPU)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(StageActor).options(**options).remote()

    def _address(self, call: Any, number: int) -> str:
        try:
            if not self._ray.wait([call], timeout=SILENCE)[0]:
                say(f"waiting for stage {number}, up to {PATIENCE} seconds: it needs a processor (and GPU) of its own")
                say("`ray status` shows what the cluster has free")
            answer = self._ray.get(call, timeout=PATIENCE)
        except self._ray.exceptions.RayError as error:
            raise StageFailed(
                f"stage {number} did not start in the Ray cluster: {type(error).__name__}",
                hint="does `ray status` show a free processor (and GPU) for it? is llmconv installed on every node?",
            ) from error
        raise_fields(answer)
        if token() and not answer["guard"]:
            problem = f"the node of stage {number} has no {TOKEN}, so anyone could use the stage"
            raise StageFailed(problem, hint="set it in the environment in which every node of the cluster is started")
        return str(answer["address"])

    def close(self) -> None:
        self._open.close()


def _close(stages: weakref.ref[RayStages]) -> None:
    if found := stages():
        found.close()


LOCAL = ("127.0.0.1", "::1", "localhost")


def serve_stage(
    folder: Path,
    number: int,
    listen: str,
    settings: SessionSettings | None = None,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serves the stage `number`, from 1, until SIGINT or SIGTERM, at `listen`, HOST:PORT.

    `folder` has llmconv.json, the graphs of the stage and their weights; the stage's own are taken from `settings`;
    `on_ready` is called with the address and the number of stages when clients are accepted. Raises InputRefused if the
    folder has no graphs in stages, or files of the stage are missing or were changed; OutputFailed if the address is
    not available; UsageProblem for no such stage, or an invalid address.
    """
    address, export = Address.parse(listen, "--listen"), StagedExport.read(folder)
    if address.host not in LOCAL and not token():
        warn(f"anyone who can reach {address.host} can use the stage: set {TOKEN}, and use a private network")
    if not export.knows_weights:
        warn(NO_CHECKSUMS)
    stopped = threading.Event()
    with _listen(address) as listener:
        server = StageServer(LocalStage(export, number, settings), export, token())
        for sent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sent, lambda *_: stopped.set())
        if on_ready:
            on_ready(str(Address(*listener.getsockname()[:2])), export.count)
        server.serve(listener, stopped.is_set)
    if server.is_running:  # a step takes too long, and its thread cannot be stopped
        sys.stdout.flush()
        os._exit(0)


def _listen(address: Address) -> socket.socket:
    try:
        family, _, _, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[:2], family=family, backlog=128)
    except OSError as error:
        problem = f"cannot listen on {address}: {error.strerror or error}"
        raise OutputFailed(problem, hint="give another `--listen` (port 0 for any)") from error
