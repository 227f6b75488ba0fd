"""Workers: processes of this machine that plan once and write one shard after another, each named in a line of JSON.

    python -m llmconv.output.workers        reads tasks, each with the NAME of a shard, and writes {} or an error

A worker that dies is replaced, and its shard is given to another one; a shard that is refused ends the run.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from llmconv import errors
from llmconv.errors import OutputFailed
from llmconv.output.plan import Shard
from llmconv.output.repeated_call import Answer, answer_to
from llmconv.output.work import Call, Workers
from llmconv.progress import set_quiet

TRIES = 3
"""How often a shard is given to a worker that dies of it."""

JOIN = 60
"""Seconds that a worker gets to end by itself."""


def write_in_workers(call: Call, shards: Sequence[Shard], work: Workers, advance: Callable[[int], None]) -> None:
    """Writes shards in processes; returns when all are recorded in the journal of the output.

    Args:
        call: the command, which each worker repeats once.
        shards: to write.
        work: the number of processes.
        advance: called with the bytes of each finished shard.

    Raises:
        LlmconvError: the first error of a worker.
        OutputFailed: workers died of the same shard several times.
    """
    waiting: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    for shard in sorted(shards, key=lambda shard: -shard.nbytes):
        waiting.put(shard)
    with ThreadPoolExecutor(work.count) as pool:
        drivers = [_Driver(call, waiting, advance) for _ in range(min(work.count, len(shards)))]
        running = [pool.submit(driver.run) for driver in drivers]
        try:
            for run in running:
                run.result()
        except BaseException:
            for driver in drivers:
                driver.stop()
            raise


class _Driver:
    """Gives shards to one worker, and starts another when it dies."""

    def __init__(self, call: Call, waiting: queue.SimpleQueue[Shard], advance: Callable[[int], None]) -> None:
        self._call, self._waiting, self._advance = call.fields(), waiting, advance
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        """Until no shard is left."""
        try:
            while not self._stopped:
                shard = self._waiting.get_nowait()
                self._write(shard)
                self._advance(shard.nbytes)
        except queue.Empty:
            return
        finally:
            self._end()

    def _write(self, shard: Shard) -> None:
        for _ in range(TRIES):
            answer = self._ask(json.dumps({**self._call, "run": "", "shard": shard.name}))
            if answer is not None:
                return raise_if_refused(answer)
            if self._stopped:
                raise OutputFailed("a worker was stopped", hint="run again with `--resume`")
        raise OutputFailed(
            f"{TRIES} workers died while they wrote `{shard.name}`",
            hint="is memory short? give fewer `--workers`, and run again with `--resume`",
        )

    def _ask(self, line: str) -> Answer | None:
        """The worker's answer; None if it died."""
        if self._process is None:
            command = [sys.executable, "-m", "llmconv.output.workers"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer.endswith("\n"):
            return dict(json.loads(answer))
        self._process.kill()  # it may still be about to end
        self._end()
        return None

    def stop(self) -> None:
        """Ends the worker in the middle of its shard."""
        self._stopped = True
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        self._process.wait(JOIN)
        self._process = None


def raise_if_refused(answer: Answer) -> None:
    """Raises the error of an answer, if it is one; see `answer_to`."""
    if name := answer.get("error"):
        raise getattr(errors, name)(answer["message"], hint=answer["hint"])


def main() -> None:
    """Writes the shards that stdin names, until it ends."""
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        task = json.loads(line)
        set_quiet(True)
        print(json.dumps(answer_to(task)), file=out, flush=True)


if __name__ == "__main__":
    main()
