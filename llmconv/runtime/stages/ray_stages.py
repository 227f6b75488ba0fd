"""Stages in actors of a Ray cluster: Ray chooses their nodes, and hidden states go from process to process as usual."""

from __future__ import annotations

import atexit
import socket
import threading
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmconv.errors import LlmconvError, StageFailed, as_fields, raise_fields
from llmconv.progress import say, warn
from llmconv.ray_connection import connected
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, short_provider
from llmconv.runtime.stages.connection import Address
from llmconv.runtime.stages.handshake import TOKEN, token
from llmconv.runtime.stages.local_stage import LocalStage
from llmconv.runtime.stages.stage_server import StageServer
from llmconv.runtime.stages.staged_export import StagedExport

ON_RAY = "ray"
"""An address of `--stage-at`: the stages without one of their own run in actors."""

PATIENCE = 600
"""Seconds for a node to be found, and to open its stage."""

SILENCE = 10
"""Seconds after which a message reports which stage is still waited for."""

ON_GPU = ("cuda", "tensorrt", "nvtensorrtrtx", "migraphx")
"""Execution providers for which an actor asks for a GPU; Ray shows it that one alone, as device 0."""


class StageActor:
    """An actor that serves one stage to all who connect, until it is killed."""

    def serve(self, folder: str, number: int, settings: SessionSettings) -> dict[str, str]:
        """Opens the stage.

        Args:
            folder: has the files of the stage, on the node of the actor.
            number: from 1.
            settings: session settings.

        Returns:
            `address`: HOST:PORT, and `guard`: not empty if clients need a token; or the fields of an error, see
            `as_fields`.
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
    """Stages in actors, which end with it.

    Attributes:
        addresses: N=HOST:PORT of each stage.

    Args:
        export: the stages of a folder, which every node has at the same path.
        numbers: of the stages to start.
        settings: session settings; those of each stage are taken from them.

    Raises:
        InputRefused: a node does not have the files of its stage.
        OutputFailed, StageFailed: the cluster cannot be reached, or has no node for a stage.
        UnsupportedInput: ray is not installed.
    """

    def __init__(self, export: StagedExport, numbers: Collection[int], settings: SessionSettings | None) -> None:
        given = settings or SessionSettings()
        given.require_stages(export.count)
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(f"--stage-at {ON_RAY}"))
            self._actors = [self._actor(given.of_stage(number)) for number in numbers]
            stack.callback(self._kill)
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
            raise StageFailed(
                f"the node of stage {number} has no {TOKEN}, so anyone could use the stage",
                hint="set it in the environment in which every node of the cluster is started",
            )
        return str(answer["address"])

    def _kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def close(self) -> None:
        """Ends the stages."""
        self._open.close()


def _close(stages: weakref.ref[RayStages]) -> None:
    if found := stages():
        found.close()
