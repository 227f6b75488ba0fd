"""llama.cpp: its environment, whose package is built here, and GGUF files of a model, each made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import environments
from benchmarks.measure import FOLDER, run

VERSION = "0.3.36"
FLAGS = "-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=OFF"
"""For this CPU."""

CALL = "import sys; from benchmarks import gguf_file; getattr(gguf_file, sys.argv[1])(*sys.argv[2:])"
WHOLE = "F32"


def python() -> Path | None:
    """The interpreter that has llama-cpp-python; None, with a line on stderr, if it cannot be built.

    The first call compiles llama.cpp for half an hour of CPU time, which needs a C++ compiler.
    """
    wheels, known = Path(environments.WHEELS), (environments.folder("llama.cpp") / "complete").exists()
    if not known and not list(wheels.glob(f"llama_cpp_python-{VERSION}-*.whl")):
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels)]
        done = subprocess.run([*build, f"llama-cpp-python=={VERSION}"], env={**os.environ, "CMAKE_ARGS": FLAGS})
        if done.returncode:
            print(f"llama.cpp is left out: llama-cpp-python {VERSION} cannot be built here", file=sys.stderr)
            return None
    return environments.python("llama.cpp")


def gguf(model: Path, file_type: str) -> Path:
    """The GGUF file of a model, `F32` or of another type; the environment must be there."""
    file = FOLDER / "gguf" / f"{model.name}-{file_type}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        given = ["write", model] if file_type == WHOLE else ["quantize", gguf(model, WHOLE)]
        rest = [] if file_type == WHOLE else [file_type]
        run([str(environments.python("llama.cpp")), "-c", CALL, *map(str, [*given, unfinished, *rest])])
        unfinished.rename(file)
    return file
