"""RemoteStage: a stage of the model in another process, with the methods of a `LocalStage`."""

from __future__ import annotations

import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmconv.errors import StageFailed, first_line
from llmconv.runtime.array_cache import CacheEdit
from llmconv.runtime.runner import Cache
from llmconv.runtime.stages.connection import Address, Connection
from llmconv.runtime.stages.handshake import introduce
from llmconv.runtime.stages.local_stage import StageStep
from llmconv.runtime.stages.message import BadMessage, Message
from llmconv.runtime.stages.staged_export import StagedExport
from llmconv.tensors import Array

SILENCE = 20.0
"""Default seconds without a heartbeat after which a stage is lost."""

RESTART = "start it again with `llmconv serve-stage`, then repeat the request"


class HeldCache:
    """A cache in a stage; the stage frees it when nothing refers to it here.

    Args:
        connection: it lives as long as this.
        number: its number there.
        freed: gets the number in the end.
    """

    def __init__(self, connection: Connection, number: int, freed: deque[int]) -> None:
        self.connection, self.number = connection, number
        weakref.finalize(self, freed.append, number).atexit = False


@dataclass(frozen=True)
class RemotePart:
    """A stage's part of a cache, see `RemoteCache`.

    Attributes:
        stage: has it.
        held: what is there.
        length: number of tokens, padding included.
        is_cuttable: see `can_be_cut`.
        edits: changes that the stage applies before it continues the cache.
    """

    stage: RemoteStage
    held: HeldCache
    length: int
    is_cuttable: bool
    edits: tuple[CacheEdit, ...] = ()

    @property
    def is_lost(self) -> bool:
        """See `RemoteCache`."""
        return self.held.connection is not self.stage.connection

    def edited(self, edit: CacheEdit) -> RemotePart:
        """See `RemoteCache`."""
        length = edit.numbers[0] if edit.kind == "cut" else self.length
        return replace(self, length=length, edits=(*self.edits, edit))

    def arrays(self) -> Mapping[str, Array]:
        """Not available.

        Raises:
            StageFailed: always.
        """
        raise StageFailed(f"the cache of {self.stage} cannot be read", hint="run the model in one process")


class RemoteStage:
    """A stage that `llmconv serve-stage` serves. After it was lost, the next run connects again.

    Attributes:
        number: from 1.
        connection: None after the stage was lost.

    Args:
        address: of the stage.
        export: the stages of the folder here.
        silence: seconds without a heartbeat after which the stage is lost.

    Raises:
        StageFailed: there is no stage, or one of another model or export.
    """

    def __init__(self, address: Address, export: StagedExport, silence: float = SILENCE) -> None:
        self._address, self._export, self._silence = address, export, silence
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self.number = 0
        self.connection: Connection | None = None
        self._connect()

    def __str__(self) -> str:
        return f"stage {self.number} at {self._address}" if self.number else f"the stage at {self._address}"

    def run(self, use: str, values: Mapping[str, Array], past: Cache | None) -> StageStep:
        """See `LocalStage.run`; the stage takes what it needs of `values`.

        Args:
            use: `prefill` or `decode`.
            values: arrays by name.
            past: this stage's part of the cache.

        Raises:
            StageFailed: the stage is lost or silent, or cannot run it.
        """
        with self._lock:
            request = self._request(use, values, past)
            with self._losing():
                connection = self.connection or self._connect()
                connection.send(request)
                while (answer := connection.receive()).kind == "busy":
                    pass
                if answer.kind != "failed":
                    return self._step(use, answer, connection)
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

    def _request(self, use: str, values: Mapping[str, Array], past: Cache | None) -> Message:
        number, edits = 0, []
        if past is not None:
            if not isinstance(past, RemotePart) or past.is_lost:
                raise StageFailed(f"{self} no longer has the cache", hint="repeat the request")
            number = past.held.number
            edits = [[edit.kind, list(edit.numbers), edit.virtual] for edit in past.edits]
        free = [self._freed.popleft() for _ in range(len(self._freed))]
        fields = {"use": use, "past": number, "edits": edits, "free": free}
        return Message("run", fields, {name: values[name] for name in self._export.inputs(use, self.number)})

    def _step(self, use: str, answer: Message, connection: Connection) -> StageStep:
        if answer.kind == "refused":
            raise StageFailed(answer.text("message"), hint=answer.text("hint"))
        if answer.kind != "result" or answer.tensors.keys() != set(self._export.outputs(use, self.number)):
            raise BadMessage("the answer is not the result of the stage")
        held = HeldCache(connection, answer.number("cache"), self._freed)
        part = RemotePart(self, held, answer.number("length"), answer.fields.get("cuttable") is True)
        return StageStep(answer.tensors, part)

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
