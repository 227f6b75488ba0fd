"""llama.cpp: its environment, whose package is built here, and GGUF files of a model, each made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import environments
from benchmarks.measure import FOLDER, run

VERSION = "0.3.36"
FLAGS = "-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=OFF"
"""For this CPU."""

SERVER_FLAGS = (
    *("-DGGML_NATIVE=ON", "-DGGML_OPENMP=OFF", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)

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


def server() -> Path | None:
    """The program `llama-server`, of the sources in the package; None, with a line on stderr, if it cannot be built.

    The first call compiles it for half an hour of CPU time, which needs cmake and a C++ compiler.
    """
    sources = Path("build/llama.cpp-sources")
    program = sources / "made/bin/llama-server"
    if program.exists():
        return program
    sources.mkdir(parents=True, exist_ok=True)
    package = [f"llama-cpp-python=={VERSION}", "--no-deps", "--no-binary", ":all:", "-d", str(sources)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *package])
    archives = list(sources.glob("*.tar.gz"))
    if not done.returncode and archives:
        shutil.unpack_archive(archives[0], sources, filter="data")
        tree = next(sources.glob("llama_cpp_python-*/vendor/llama.cpp"))
        made = [str(tree), "-B", str(sources / "made"), "-DCMAKE_BUILD_TYPE=Release", *SERVER_FLAGS]
        configured = subprocess.run(["cmake", *made])
        if not configured.returncode:
            subprocess.run(
                ["cmake", "--build", str(sources / "made"), "--target", "llama-server", "llama-imatrix", "-j", "2"]
            )
    if not program.exists():
        print("llama.cpp's server is left out: it cannot be built here", file=sys.stderr)
        return None
    return program


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
