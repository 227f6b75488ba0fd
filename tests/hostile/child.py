"""Runs inspect and a conversion on many inputs in one process that records everything it does.

    python -m tests.hostile.child JOBS.json RESULTS.json

An audit hook (PEP 578) sees every open, import, exec, process, socket and foreign call, also those of CPython's C code.
What the product may load, torch and transformers included, is loaded before the hook looks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llmconv.cli.inspect import shown_rows
from llmconv.convert import apply_delta, extract_delta, from_hf, merge_lora, to_hf
from llmconv.convert.inspection import inspect
from llmconv.convert.models.meta_model import meta_model
from llmconv.errors import LlmconvError

MEMORY = 1536 << 20
SECONDS = 90
"""Seconds of wall time after which a hang ends."""
WORK_SECONDS = 0.04
"""Processor time of `slowness` on a fast idle core: limits are in seconds of such a core."""

LIBRARIES = tuple({sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), str(Path(__file__).parents[2])})
MODELS = os.path.join(*importlib.util.find_spec("transformers").submodule_search_locations)  # type: ignore[union-attr,misc]
"""Source that is read, and of which constructors are run with stand-ins."""

HARMLESS = {
    *("object.__getattr__", "object.__setattr__", "object.__delattr__", "sys._getframe", "builtins.id"),
    *(
        "_thread.start_new_thread",
        "_thread.start_joinable_thread",
        "os.listdir",
        "os.scandir",
        "fcntl.flock",
        "mmap.__new__",
    ),
    *("glob.glob", "pathlib.Path.glob", "pathlib.Path.rglob", "signal.setitimer"),
    "array.__new__",  # Pillow's, of the tables of a JPEG
}
CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
FOREIGN = {"fallocate", "mallopt", "renameat2"}
"""The only C functions that the writer calls."""

PARSED = (None, "<unknown>")
"""What `compile` calls a tree that was read before, and source that `ast.parse` only reads; `exec` shows either."""

for package in ("convert", "files", "output", "quantized_weights"):  # llmconv's own modules, loaded where they are used
    for found in pkgutil.walk_packages([str(Path(__file__).parents[2] / "llmconv" / package)], f"llmconv.{package}."):
        importlib.import_module(found.name)
meta_model({"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1})
"""torch and transformers, which build a model of shapes where the names of a model in memory are asked for."""

COMMANDS: dict[str, Callable[..., object]] = {
    "to-hf": to_hf,
    "from-hf": from_hf,
    "merge-lora": lambda adapter, output, base: merge_lora(base, [adapter], output),
    "delta": lambda delta, output, base, **options: apply_delta(base, delta, output, **options),
    "extract": lambda tuned, output, base, **options: extract_delta(base, tuned, output, **options),
}

UNPACKED = re.compile(r"/proc/self/fd/\d+")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
SAFE = os.O_EXCL | os.O_NOFOLLOW


class Watch:
    """What happened since `begin` that should not have."""

    def __init__(self) -> None:
        self.active = False
        self.readable: tuple[str, ...] = ()
        self.writable = ""
        self.temporary = tempfile.gettempdir()
        self.seen: list[str] = []

    def begin(self, source: Path, output: Path) -> None:
        """From now on only the folder of `source` may be read, and only next to `output` or in TMPDIR be written."""
        self.readable = (str(source.parent), str(output.parent), self.temporary, "/proc/meminfo", *LIBRARIES)
        self.writable = str(output.parent)
        self.seen, self.active = [], True

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook."""
        if self.active and not self._allowed(event, args):
            self.seen.append(f"{event} {args!r}"[:300])

    def _allowed(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            return self._may_open(args[0], args[2])
        if event == "os.truncate":
            return isinstance(args[0], int)  # a file that was opened before
        if event in CHANGING:
            return all(self._inside(path, self._changeable()) for path in self._named(args))
        if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            return self._inside(args[0], (self.temporary,))
        if event == "os.symlink":  # what stands for an unpacked file: a descriptor of this very process
            return UNPACKED.fullmatch(str(args[0])) is not None and self._inside(args[1], (self.temporary,))
        if event == "ctypes.dlopen":
            return args == (None,)
        if event == "ctypes.dlsym":
            return args[1] in FOREIGN
        if event == "compile":
            return args[1] in PARSED or self._inside(args[1], (MODELS,))
        if event == "exec":
            return self._inside(args[0].co_filename, (MODELS,))
        return event in HARMLESS

    def _may_open(self, path: Any, flags: int) -> bool:
        if flags & WRITING and isinstance(path, str) and path == os.path.basename(path):
            return bool(flags & SAFE)  # in an open folder, where it cannot lead elsewhere
        return isinstance(path, int) or self._inside(path, self._changeable() if flags & WRITING else self.readable)

    def _changeable(self) -> tuple[str, ...]:
        return self.writable, self.temporary

    @staticmethod
    def _named(args: tuple[Any, ...]) -> list[str]:
        """The paths among the arguments, those relative to an open folder made whole."""
        folder = args[-1] if isinstance(args[-1], int) and args[-1] >= 0 else None
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""
        return [os.path.join(base, os.fsdecode(path)) for path in args if isinstance(path, str | bytes | os.PathLike)]

    @staticmethod
    def _inside(path: Any, roots: tuple[str, ...]) -> bool:
        full = os.path.abspath(os.fsdecode(path))
        return any(full == root or full.startswith(root + "/") for root in roots if root)


def main(jobs_file: str, results_file: str) -> None:
    """Runs the jobs; the first ones are honest, and load everything that is ever loaded."""
    jobs = json.loads(Path(jobs_file).read_text())
    watch = Watch()
    sys.addaudithook(watch.hook)
    signal.signal(signal.SIGALRM, _too_long)
    honest = [job for job in jobs if job["honest"]]
    for job in honest:
        _both(job, watch, "warm")
    gc.freeze()  # the objects of torch and transformers, which every collection would look at, are not the file's cost
    limit = MEMORY + _address_space()  # torch alone reserves gigabytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    results = {job["name"]: _both(job, watch, "out") for job in jobs}
    Path(results_file).write_text(json.dumps(results))


def _address_space() -> int:
    """Bytes that this process has reserved."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Hangs(BaseException):
    """It takes too long; no OSError, as TimeoutError is, which the product explains as one of the disk."""


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Hangs


def _both(job: dict[str, Any], watch: Watch, kind: str) -> dict[str, Any]:
    source, output = Path(job["source"]), Path(job["place"]) / kind / "hf"
    output.parent.mkdir()
    convert = COMMANDS[job["command"]]
    runs = {"inspect": lambda: _inspect(source), "convert": lambda: convert(source, output, **job["options"]) and None}
    return {name: _one(run, watch, source, output) for name, run in runs.items()}


def _inspect(source: Path) -> str:
    """What both forms of the command's output are made of."""
    found = inspect(source)
    assert all(isinstance(text, str) for row in shown_rows(found) for text in row)
    return json.dumps(found.summary())


def slowness() -> float:
    """How many times as long as on a fast idle core Python takes to make objects at this moment; at least 1."""
    gc.disable()  # its time depends on what the process holds
    began = time.process_time()
    _ = {str(number): (number, str(number)) for number in range(100_000)}
    seconds = time.process_time() - began
    gc.enable()
    return max(1.0, seconds / WORK_SECONDS)


def standard_seconds(seconds: float) -> float:
    """Processor time of a run that has just ended, in seconds of a fast idle core; a short one is not converted."""
    return seconds / slowness() if seconds > 1 else seconds


def _left_temporary(folder: str) -> list[str]:
    """What lies in TMPDIR but links to files that have no name; those go with the process, however it ends."""
    files = [path for path in Path(folder).rglob("*") if not path.is_dir() or path.is_symlink()]
    left = [path for path in files if not (path.is_symlink() and UNPACKED.match(os.readlink(path)))]
    empty = [path for path in Path(folder).rglob("*") if path.is_dir() and not any(path.iterdir())]
    return sorted(map(str, left + empty))


def _one(run: Callable[[], Any], watch: Watch, source: Path, output: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"outcome": "done", "message": "", "hint": ""}
    began = time.process_time()
    signal.alarm(SECONDS)
    watch.begin(source, output)
    try:
        result["message"] = run() or ""
    except LlmconvError as error:
        result |= {"outcome": "refused", "message": error.message, "hint": error.hint, "code": error.exit_code}
    except BaseException as error:
        watch.active = False
        result |= {"outcome": "crashed", "message": "".join(traceback.format_exception(error)[-3:])[-1500:]}
    watch.active = False
    signal.alarm(0)
    left = sorted(str(path.relative_to(output.parent)) for path in output.parent.rglob("*"))
    seconds, temporary = standard_seconds(time.process_time() - began), _left_temporary(watch.temporary)
    return {**result, "seconds": seconds, "events": watch.seen, "left": left, "temporary": temporary}


if __name__ == "__main__":
    main(*sys.argv[1:])
