"""How many product files a command runs through: what a reader has to open to follow it.

`python -m tools.touched` runs the README's session and prints one row per command; `--check`, which `make check` runs,
only the two that need neither torch nor onnxruntime. A file counts once a function or the
body of a class of it ran; the second number leaves out what only runs when a module is imported.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/tiny-llama"
COMMANDS = {
    "to-hf": (f"{EXAMPLE}/ep4-ba2400-rank0.pt", "-o", "base"),
    "merge-lora": ("base", f"{EXAMPLE}/adapter", "-o", "merged"),
    "export": ("merged", "--prefill", "--incremental", "-o", "graphs"),
    "generate": ("graphs", "Once upon a time", "--max-new-tokens", "4"),
    "verify": ("graphs",),
}
MOST = {"to-hf": 54, "merge-lora": 46, "export": 70, "generate": 45, "verify": 127}
"""Files that each command may run through. `generate` makes a form of the graph first: fewer later."""
QUICK = ("to-hf", "merge-lora")
NO_FUNCTIONS = ("<module>", "<listcomp>", "<genexpr>", "<lambda>")


def watch(command: list[str]) -> None:
    """Runs llmconv in this process and prints the files that it ran through, and the number of functions."""
    functions, steps = set(), set()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in NO_FUNCTIONS and _is_product(code.co_filename):
            function = code.co_filename, code.co_qualname
            functions.add(function)
            if function not in steps and not _is_import(frame):
                steps.add(function)

    sys.argv = ["llmconv", *command]
    from llmconv.__main__ import main  # noqa: PLC0415 - its own imports are no part of the command

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = {str(Path(name).resolve().relative_to(ROOT)) for name, _ in functions}
    run = {name for name, _ in steps}
    print(f"touched: {len(files)} {len(run)} {len(functions)} {' '.join(sorted(files))}")


def _is_import(frame: FrameType) -> bool:
    """Whether a call is a class body, or made by one or by the top of a module: a definition, and no step."""
    at: FrameType | None = frame
    while at is not None and at.f_code is not watch.__code__:
        if not at.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        at = at.f_back
    return False


def _is_product(name: str) -> bool:
    return name.startswith(f"{ROOT}/") and "/.venv/" not in name and not name.startswith(f"{ROOT}/tools/")


def main() -> int:
    """Prints one row per command; returns 1 if one runs through more files than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only the commands that take a second or two")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--watch", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch:
        watch(given.watch)
        return 0
    over = 0
    with TemporaryDirectory() as folder:
        for command in QUICK if given.check else COMMANDS:
            places = [
                str(Path(folder, word)) if word in ("base", "merged", "graphs") else word for word in COMMANDS[command]
            ]
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            words = [sys.executable, "-m", "tools.touched", "--watch", command, *places]
            done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            files, run, functions, *names = done.stdout.rpartition("touched: ")[2].split()
            lines = sum(len((ROOT / name).read_text().splitlines()) for name in names)
            over += int(files) > MOST[command]
            print(
                f"{command}: {files} files (at most {MOST[command]}), {run} without those whose classes alone are "
                f"defined, {functions} functions, {lines} lines in them"
            )
            if given.list:
                print("\n".join(f"  {name}" for name in names))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
