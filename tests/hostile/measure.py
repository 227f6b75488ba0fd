"""Runs inspect and a conversion on one input after the other, each in a process of its own, and prints their cost.

    python -m tests.hostile.measure JOBS.json RESULTS.json

The processes are forks of one that has loaded everything, so that what they need is the input's doing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmconv.errors import LlmconvError
from tests.hostile.child import COMMANDS, _inspect, standard_seconds

SECONDS = 120
"""Of processor time, before a process is ended."""

MEMORY = 4 << 30


def main(jobs_file: str, results_file: str) -> None:
    """Runs the jobs; the first ones are honest, and load everything that is ever loaded."""
    jobs = json.loads(Path(jobs_file).read_text())
    for job in jobs:
        if job["honest"]:
            for run in _runs(job, "warm").values():
                _outcome(run)
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        results[job["name"]] = {kind: _forked(run) for kind, run in _runs(job, "out").items()}
        print(job["name"], results[job["name"]], flush=True)
    Path(results_file).write_text(json.dumps(results))


def _runs(job: dict[str, Any], kind: str) -> dict[str, Callable[[], Any]]:
    source, output = Path(job["source"]), Path(job["place"]) / kind / "hf"
    output.parent.mkdir(parents=True)
    convert = COMMANDS[job["command"]]
    return {"inspect": lambda: _inspect(source), "convert": lambda: convert(source, output, **job["options"])}


def _outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What became of it, and its cost: seconds of a fast idle core, and MiB of memory above those at the start."""
    before, began = _resident(), time.process_time()
    try:
        run()
        result = {"outcome": "done", "message": ""}
    except LlmconvError as error:
        result = {"outcome": "refused", "message": error.message, "code": str(error.exit_code)}
    except BaseException as error:
        result = {"outcome": "crashed", "message": "".join(traceback.format_exception(error)[-3:])[-1500:]}
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**result, "seconds": standard_seconds(seconds), "mebibytes": (peak - before) >> 10}


def _resident() -> int:
    """KiB of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * (resource.getpagesize() >> 10)


def _forked(run: Callable[[], Any]) -> dict[str, Any]:
    """The outcome in a process of its own; what is too large or takes too long for that tells nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_outcome(run), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    ended = {"outcome": "crashed", "message": f"ended by {status}", "seconds": SECONDS, "mebibytes": MEMORY >> 20}
    return json.loads(written) if written else ended


if __name__ == "__main__":
    main(*sys.argv[1:])
