"""Make .venv: the packages of constraints.txt, with the CPU build of torch if pip finds one.

Run by the interpreter that .venv is to have; an older one than llmconv needs gets as far as the message.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
CONSTRAINTS = Path("constraints.txt")
HOME = Path(".venv")

CPU_INDEX = os.environ.get("TORCH_INDEX", "")
"""A package index that has CPU builds, such as the one that PyTorch's installation guide names; empty for none."""

CPU_SIZE = "about 200 MB to download"
CUDA_SIZE = "about 2.8 GB to download, 6 GB on disk"
"""What torch 2.13.0 on Linux x86-64 brings, CUDA libraries and Triton included."""

SMALLER = "    smaller: `make setup TORCH_INDEX=URL` with the URL of CPU builds from PyTorch's installation guide"

OLD_PYTHON = """\
error: llmconv needs Python 3.11 or newer; this is {version}

hint: give a newer one, such as `make setup PYTHON=python3.12`"""

NO_VENV = """\
error: {python} cannot create a virtual environment

hint: install the package of its module venv; on Debian and Ubuntu that is `apt install python3-venv`"""


def main() -> int:
    """Sets up; returns 0, or the exit code of the step that failed, whose own message is on the screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="", metavar="REQUIREMENT", help="install this build of torch")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST:
        print(OLD_PYTHON.format(version=sys.version.split()[0]), file=sys.stderr)
        return 1
    python = HOME / "bin" / "python"
    for step in (make_environment, install_torch, install_package):
        code = step(python, arguments.torch)
        if code:
            return code
    return 0


def make_environment(python: Path, torch: str) -> int:
    """Makes .venv, or makes one again that has no pip."""
    if python.exists() and not call(python, "-m", "pip", "--version", quiet=True):
        return 0
    print(f"1/3 .venv with Python {sys.version.split()[0]}", flush=True)
    if call(Path(sys.executable), "-m", "venv", "--clear", str(HOME)):
        print(NO_VENV.format(python=sys.executable), file=sys.stderr)
        return 1
    return 0


def install_torch(python: Path, torch: str) -> int:
    """Installs what `torch` names, or else the pinned version: a CPU build if there is one."""
    (pin,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if torch:
        print(f"2/3 {torch}, as asked for", flush=True)
        return install(python, torch)
    if installed_torch(python) == pin:
        return 0
    print(f"2/3 torch {pin}, the CPU build: {CPU_SIZE}", flush=True)
    for place in ([], *([["--index-url", CPU_INDEX, "--timeout", "10", "--retries", "0"]] if CPU_INDEX else [])):
        if not install(python, "--no-deps", *place, f"torch=={pin}+cpu", quiet=True):
            return install(python, f"torch=={pin}+cpu")  # its dependencies come from the default index
    print(f"    pip finds no CPU build; installing the default build: {size()}, {free()} free", flush=True)
    if not CPU_INDEX and sys.platform == "linux":
        print(SMALLER, flush=True)
    return install(python, f"torch=={pin}", talk=True)


def install_package(python: Path, torch: str) -> int:
    """Installs llmconv, editable, with what it and its development need."""
    print(f"3/3 llmconv and the packages of {CONSTRAINTS}: about 200 MB to download", flush=True)
    code = install(python, "setuptools") or install(python, "--no-build-isolation", "-e", ".[dev]")
    return code or find_first(python)


def find_first(python: Path) -> int:
    """Puts the finder of the editable package before that of folders.

    In the parent of a clone called `llmconv`, `import llmconv` would otherwise find that folder.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    home = Path(subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, check=True).stdout.decode().strip())
    order = "import sys; sys.meta_path.sort(key=lambda finder: getattr(finder, '__name__', '') != '_EditableFinder')"
    (home / "llmconv_first.pth").write_text(f"{order}\n", encoding="utf-8")
    return 0


def installed_torch(python: Path) -> str:
    """The version of torch in the environment without a local label such as `+cpu`; empty where there is none."""
    code = "from importlib.metadata import version; print(version('torch').partition('+')[0])"
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return done.stdout.decode().strip()


def size() -> str:
    """What the package index's build of torch takes on this machine: for macOS it is a CPU build."""
    return CUDA_SIZE if sys.platform == "linux" else CPU_SIZE


def free() -> str:
    """Room on the disk of .venv."""
    return f"{shutil.disk_usage(HOME).free / 1e9:.0f} GB"


def install(python: Path, *arguments: str, quiet: bool = False, talk: bool = False) -> int:
    """Runs pip under the constraints; `talk` shows each package with its size, `quiet` not even errors."""
    options = ["--disable-pip-version-check", "-c", str(CONSTRAINTS), *([] if talk else ["-qq"])]
    return call(python, "-m", "pip", "install", *options, *arguments, quiet=quiet)


def call(program: Path, *arguments: str, quiet: bool = False) -> int:
    """The exit code of a program."""
    talk = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(program), *arguments], stdout=talk, stderr=talk, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
