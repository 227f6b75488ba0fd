"""Ray tasks: every shard of an output is a task of a Ray cluster, which opens the sources and the output by itself.

Neither weights nor credentials pass through Ray: a task gets the arguments of the command and the name of a shard, and
answers when the journal of the output has the shard. So what the driver of a killed run leaves is for `--resume`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmconv.errors import OutputFailed, UnsupportedInput, UsageProblem, as_fields
from llmconv.files.paths import is_address
from llmconv.output.plan import Shard
from llmconv.output.work import TRIES, Answer, Call, answer_to, take_answer
from llmconv.progress import set_quiet
from llmconv.ray_connection import connected
from llmconv.version import __version__

NETWORK = "llmconv_nic"
"""Custom resource of a node: how many tasks it runs at once, for `ray start --resources`."""

CPUS = 2
"""Of a task on a node without that resource: one computes and writes, one hashes."""

PATIENCE = 30
"""Seconds for tasks to end that were stopped."""


def write_in_ray(call: Call, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
    """Writes shards in a cluster, whose processes repeat `call` once; returns when all are in the output's journal.

    Args:
        advance: called with the bytes of each finished shard.

    Raises:
        LlmconvError: the first error of a task.
        OutputFailed: tasks of one shard were lost several times, or the cluster was.
        UnsupportedInput: ray is not installed here, or a node has another version of llmconv.
        UsageProblem: an argument contains a credential.
    """
    _require_public(call)
    with connected("--engine ray") as ray, _failing(ray):
        tasks = _Tasks(ray, call)
        try:
            tasks.run(shards, advance)
        except BaseException:
            tasks.stop()
            raise


class _Tasks:
    """The tasks of one call that are not done."""

    def __init__(self, ray: Any, call: Call) -> None:
        self._ray = ray
        self._task = {**call.fields(), "run": secrets.token_hex(8), "folder": os.getcwd(), "version": __version__}
        self._remote = ray.remote(**_resources(ray), max_retries=TRIES - 1, scheduling_strategy="SPREAD")(write_shard)
        self._running: dict[Any, Shard] = {}

    def run(self, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
        """Writes shards, the largest first; a store or disk that failed on one node is tried on another."""
        failures: dict[str, int] = {}
        warned: set[str] = set()
        for shard in sorted(shards, key=lambda shard: -shard.nbytes):
            self._start(shard)
        while self._running:
            [done], _ = self._ray.wait([*self._running], num_returns=1)
            shard, answer = self._running.pop(done), self._ray.get(done)
            failures[shard.name] = failures.get(shard.name, 0) + (answer.get("error") == OutputFailed.__name__)
            if "error" in answer and 0 < failures[shard.name] < TRIES:
                self._start(shard)
                continue
            take_answer(answer, warned)
            advance(shard.nbytes)

    def _start(self, shard: Shard) -> None:
        name = f"llmconv {shard.name}"
        self._running[self._remote.options(name=name).remote({**self._task, "shard": shard.name})] = shard

    def stop(self) -> None:
        """Ends all tasks, so that none holds the output."""
        with suppress(self._ray.exceptions.RayError):
            for task in self._running:
                self._ray.cancel(task, force=True)
            self._ray.wait([*self._running], num_returns=len(self._running), timeout=PATIENCE) if self._running else ()


def write_shard(task: dict[str, Any]) -> Answer:
    """A task, on any node; see `answer_to`."""
    if task["version"] != __version__:
        return as_fields(
            UnsupportedInput(
                f"a node has llmconv {__version__}, not {task['version']} as the driver",
                hint="install the same version on all nodes",
            )
        )
    set_quiet(True)
    with suppress(FileNotFoundError):  # needed for relative paths alone, which then do not exist either
        os.chdir(task["folder"])
    return answer_to(task)


def _resources(ray: Any) -> dict[str, Any]:
    """What a task takes of a node: its share of the network if nodes have that resource, or of the processors."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(NETWORK in node for node in nodes):
        return {"num_cpus": 0, "resources": {NETWORK: 1}}
    most = max((node.get("CPU", 0) for node in nodes), default=0)
    return {"num_cpus": min(CPUS, most or CPUS)}


def _require_public(call: Call) -> None:
    """Refuses a URI with a user, password or signature, which the logs of a cluster would show."""
    for value in call.arguments.values():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path) and is_address(text) and _has_credential(str(text)):
                raise UsageProblem(
                    "a URI with a credential in it is not sent to a cluster",
                    hint="give every node the credential in its environment, and the plain URI here",
                )


def _has_credential(uri: str) -> bool:
    parts = urlsplit(uri)
    return bool(parts.query or parts.password)


@contextmanager
def _failing(ray: Any) -> Iterator[None]:
    """Turns Ray's errors into llmconv's."""
    errors = ray.exceptions
    try:
        yield
    except errors.RayTaskError as error:
        raise OutputFailed(
            f"a task of the Ray cluster failed: {str(error).strip().rpartition(chr(10))[2]}",
            hint=f"is llmconv {__version__} installed on every node? the logs of the cluster say more",
        ) from error
    except errors.RayError as error:
        raise OutputFailed(
            f"the Ray cluster lost a shard {TRIES} times: {type(error).__name__}",
            hint="is memory short on its nodes? run again with `--resume`",
        ) from error
