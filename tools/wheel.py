"""Build the sdist and from it the wheel, compare the wheel with the tree, and use it in a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

BUILD = Path("build/wheel")
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Keeps the tree off the path, where pip would find llmconv installed."""
ROOMS = ("convert", "export", "verify")
CHECKPOINT = Path("examples/tiny-llama")


def main() -> int:
    """Builds, compares and uses; returns 1 where the wheel and the tree differ."""
    shutil.rmtree(BUILD, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", BUILD, ".")
    (wheel,) = BUILD.glob("*.whl")
    if difference := names(wheel) ^ modules():
        print(f"error: only in {wheel.name} or only in the tree: {', '.join(sorted(difference))}", file=sys.stderr)
        return 1
    use(wheel)
    print(f"{wheel}: {len(names(wheel))} files, {wheel.stat().st_size:,} bytes")
    return 0


def names(wheel: Path) -> set[str]:
    """The files of the wheel, without its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def modules() -> set[str]:
    """What the wheel should hold: the page, and every module as it is imported; a compiled one has a stub."""
    page = {str(path) for kind in ("html", "css", "js") for path in Path("llmconv/serve").glob(f"*.{kind}")}
    texts = {str(path) for kind in ("sample_texts/*.txt", "cli/*.toml") for path in Path("llmconv").glob(kind)}
    front = {str(path) for path in Path("llmconv").rglob("*.py")} | {"llmconv/py.typed"} | page | texts
    stubs = [path for place in (*ROOMS, "llmconv") for path in Path(place).rglob("*.pyi")]
    compiled = [path.with_suffix(".abi3.so") for path in stubs]
    rooms = [path for room in ROOMS for kind in ("py", "json", "mjs") for path in Path(room).rglob(f"*.{kind}")]
    return front | {f"llmconv/{str(path).removeprefix('llmconv/')}" for path in (*rooms, *stubs, *compiled)}


def use(wheel: Path) -> None:
    """Installs the wheel alone into a fresh environment that borrows the dependencies of this one, and converts."""
    place = (BUILD / "venv").resolve()
    run(sys.executable, "-m", "venv", place)
    run(place / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = place / "bin/llmconv"
    (checkpoint,) = CHECKPOINT.glob("*.pt")
    run(command, "--help")
    run(command, "to-hf", checkpoint.resolve(), "-o", place / "base")


def run(*command: str | Path) -> None:
    """Runs a command quietly; its output is shown when it fails.

    Raises:
        SystemExit: it failed.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=ALONE, check=False, **pipes)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")


if __name__ == "__main__":
    sys.exit(main())
