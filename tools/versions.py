"""Run the demo and the quick tests with other versions of the dependencies and of Python; kept in docs/versions.md.

An environment in build/versions/ borrows the packages of .venv and replaces some; one of another Python has its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILD = Path("build/versions")
PAGE = Path("docs/versions.md")
START, END = "<!-- versions: written by `make versions` -->", "<!-- end of versions -->"
HEADER = ("environment", "Python", "in place of the pinned versions", "`make demo`", "quick tests")
TESTS = (
    "tests/convert/test_to_hf.py",
    "tests/export/test_export.py",
    "tests/export/test_library_patches.py",
    "tests/verify/test_cli.py",
    "tests/verify/test_verdict.py",
    "tests/runtime/low_memory",
)

MINORS = ("5.16.0", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.24.0")
"""Of transformers: the oldest, and the last release of each minor version; the pinned one is `make test`'s."""

PYTHONS = ("3.12", "3.13", "3.14")
NEWEST = ("transformers", "huggingface_hub", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy", "safetensors")
TORCH = ("torch==2.13.0",)
"""The only version here; other environments borrow it."""


@dataclass(frozen=True)
class Environment:
    """Versions that the tests run with.

    Attributes:
        name: of the row.
        packages: requirements in place of the pinned versions.
        python: `3.12` for example; empty for the interpreter of .venv, whose packages are borrowed.
        upgrade: the newest versions of `packages`.
    """

    name: str
    packages: tuple[str, ...]
    python: str = ""
    upgrade: bool = False


def environments() -> Iterator[Environment]:
    """All rows of the page."""
    for version in MINORS:
        yield Environment(f"transformers {version}", (f"transformers=={version}",))
    yield Environment("lowest", tuple(lowest()))
    yield Environment("newest", NEWEST, upgrade=True)
    for version in PYTHONS:
        yield Environment(f"Python {version}", (), version)


def lowest() -> Iterator[str]:
    """The lower bound of each requirement in pyproject.toml, but for torch."""
    for line in requirements():
        found = re.match(r"([\w-]+)>=([\d.]+)", line)
        if found and found[1] != "torch":
            yield f"{found[1]}~={found[2]}.0" if found[2].count(".") < 2 else f"{found[1]}=={found[2]}"


def requirements() -> list[str]:
    """What pyproject.toml requires of a user."""
    found: list[str] = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    return found


def main() -> int:
    """Runs the chosen environments; returns 1 if anything failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="one environment; may be repeated")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="folders or files of quick tests")
    parser.add_argument("--workers", default="2")
    given = parser.parse_args()
    failed = False
    for environment in environments():
        if given.only and environment.name not in given.only:
            continue
        if environment.python and not interpreter(environment.python):
            print(f"{environment.name} | not on this machine: nothing was run", flush=True)
            continue
        row = result(environment, given.tests, given.workers)
        failed |= "failed" in " ".join(row)
        print(" | ".join(row), flush=True)
        PAGE.write_text(with_row(PAGE.read_text(), row))
    return 1 if failed else 0


def result(environment: Environment, tests: list[str], workers: str) -> tuple[str, ...]:
    """One row: what was installed, and what came of the demo and of the tests."""
    try:
        python = make(environment)
    except subprocess.CalledProcessError as error:
        return environment.name, environment.python, "", "not run", f"failed to install: {error.cmd[-1]}"
    version = output(python, "-c", "import platform; print(platform.python_version())").strip()
    packages = ", ".join(differing(python))
    demo = "passes" if not call(python, "examples/demo.py", log="demo", name=environment.name) else "failed"
    arguments = (
        "-n",
        workers,
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *tests,
    )
    call(python, "-m", "pytest", *arguments, log="tests", name=environment.name)
    lines = (BUILD / f"{slug(environment.name)}-tests.log").read_text().strip().splitlines()
    counts = re.sub(r" in .*|=+ ?", "", lines[-1]) if lines else "failed to start"
    shown = ", ".join(path.removeprefix("tests/") for path in tests)
    return environment.name, version, packages, demo, counts if tuple(tests) == TESTS else f"{counts} ({shown})"


def make(environment: Environment) -> Path:
    """The interpreter of an environment, which is made on first use."""
    home = BUILD / slug(environment.name)
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    base = interpreter(environment.python) if environment.python else sys.executable
    subprocess.run([base, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if environment.python:
        subprocess.run([*pip, *TORCH], check=True)
        subprocess.run([*pip, "-c", "constraints.txt", "setuptools", "-e", ".[dev]"], check=True)
    else:
        borrow(home)
        upgrade = ["--upgrade"] if environment.upgrade else []
        subprocess.run([*pip, *upgrade, *TORCH, *environment.packages], check=True)
    (home / "complete").touch()
    return python


def interpreter(version: str) -> str:
    """A Python of this version: on the path, or one that pyenv has and does not show; empty if there is none."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(name), *sorted(map(str, pyenv.glob(f"{version}.*/bin/{name}")))]
    return next((path for path in found if path and call_succeeds(path)), "")


def call_succeeds(path: str) -> bool:
    """Whether a program starts; pyenv has one for each version that it could show."""
    return not subprocess.run([path, "--version"], capture_output=True, check=False).returncode


def borrow(home: Path) -> None:
    """Lets an environment import the packages of .venv that it does not have itself, and run `llmconv`."""
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    script = home / "bin" / "llmconv"
    script.write_text(f"#!{(home / 'bin/python').absolute()}\nfrom llmconv.__main__ import main\n\nmain()\n")
    script.chmod(0o755)


def differing(python: Path) -> Iterator[str]:
    """The direct dependencies whose version is not the pinned one."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", Path("constraints.txt").read_text().lower(), re.MULTILINE))
    names = [re.split(r"[>;<=~ ]", line)[0] for line in requirements()]
    code = "import sys; from importlib.metadata import version; [print(version(name)) for name in sys.argv[1:]]"
    for name, found in zip(names, output(python, "-c", code, *names).split(), strict=True):
        pin = pins.get(name, pins.get(name.replace("_", "-"), ""))
        if found.partition("+")[0] != pin:
            yield f"{name} {found}"


def call(python: Path, *arguments: str, log: str, name: str) -> int:
    """The exit code of a program, whose output goes into a file."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (BUILD / f"{slug(name)}-{log}.log").open("w") as file:
        done = subprocess.run(
            [str(python.absolute()), *arguments], stdout=file, stderr=file, env=variables, check=False
        )
    return done.returncode


def output(python: Path, *arguments: str) -> str:
    """What a program prints."""
    return subprocess.run([str(python), *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def slug(name: str) -> str:
    """The name of an environment's folder."""
    return name.replace(" ", "-")


def with_row(page: str, row: tuple[str, ...]) -> str:
    """The page with a row in place of the one of that name, in the order of `environments`."""
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    rows = {cells[0]: cells for line in table.splitlines() if len(cells := cells_of(line)) == len(HEADER)}
    for name in (HEADER[0], "---"):
        rows.pop(name, None)
    rows[row[0]] = row
    order = [one.name for one in environments()]
    kept = sorted(rows.values(), key=lambda cells: order.index(cells[0]) if cells[0] in order else len(order))
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADER, ("---",) * len(HEADER), *kept)]
    return "\n".join([before + START, "", *lines, "", END + after])


def cells_of(line: str) -> tuple[str, ...]:
    """The cells of a row of a table."""
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


if __name__ == "__main__":
    sys.exit(main())
