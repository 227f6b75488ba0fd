"""A connection to a Ray cluster, for as long as a command needs it."""

from __future__ import annotations

import importlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from llmconv.errors import OutputFailed, UnsupportedInput

SECONDS = 30  # for the head of a cluster to answer


@contextmanager
def connected(option: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster of `RAY_ADDRESS`, else to one of this machine, else to a new one.

    A connection that the caller has made is used, and kept. Raises UnsupportedInput if ray, which `option` needs, is
    not installed, OutputFailed if the cluster cannot be reached.
    """
    if find_spec("ray") is None:
        raise UnsupportedInput(f"`{option}` needs ray, which is not installed", hint="`pip install ray`")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here reports to nobody
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        yield ray
        return
    _require_reachable(os.environ.get("RAY_ADDRESS", ""))
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False, **_safe_path(ray))
    except ConnectionError as error:
        raise _unreachable(error) from error
    with suppress(ValueError):  # not the main thread, where ray did not replace it either
        signal.signal(signal.SIGTERM, terminated)
    try:
        yield ray
    finally:
        ray.shutdown()


def _safe_path(ray: Any) -> dict[str, Any]:
    """Options by which workers do not import from the current folder first, which may be that of an untrusted model.

    Ray leaves it out where a job has a working folder of its own. A client (`ray://`) never sends it.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        return {}
    job = ray.job_config.JobConfig()
    job._runtime_env_has_working_dir = lambda: True
    return {"job_config": job}


def _require_reachable(address: str) -> None:
    """Tries `HOST:PORT` or `ray://HOST:PORT`, which ray itself would do for minutes, without a word."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> OutputFailed:
    problem = f"the Ray cluster cannot be reached: {error}"
    return OutputFailed(problem, hint="check `RAY_ADDRESS`, and `ray status` on its head node")
