"""Install the CPU build of the torch that constraints.txt pins, and never a CUDA build by accident."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path("constraints.txt")
PIP = (sys.executable, "-m", "pip", "install", "-qq")
CUDA = re.compile(r"(nvidia|cuda|triton)\b")
"""What a CUDA build depends on; its metadata says so before it is downloaded."""

REFUSED = """\
error: pip finds no CPU build of torch {pin}

hint: give pip a place that has one (`PIP_FIND_LINKS` or `PIP_EXTRA_INDEX_URL`), or take what it finds, several
gigabytes of CUDA libraries included, with `make setup TORCH=torch=={pin}`"""


def main() -> int:
    """Installs torch where the pinned version is missing; returns pip's exit code, or 1 when there is no CPU build."""
    pin = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0]
    if installed() == pin:
        return 0
    for label, talk in (("+cpu", subprocess.DEVNULL), ("", None)):
        needs = dependencies(f"torch=={pin}{label}", talk)
        if needs is not None and not any(map(CUDA.match, needs)):
            return subprocess.call([*PIP, "-c", CONSTRAINTS, f"torch=={pin}{label}"])
    print(REFUSED.format(pin=pin), file=sys.stderr)
    return 1


def installed() -> str | None:
    """The version of torch that is there, without a local label such as `+cpu`."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return None


def dependencies(requirement: str, talk: int | None) -> list[str] | None:
    """What the wheel that pip would take depends on; None when it finds none, and `talk` hears why."""
    command = [*PIP, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", requirement]
    plan = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=talk, check=False)
    if plan.returncode:
        return None
    needs: list[str] = json.loads(plan.stdout)["install"][0]["metadata"].get("requires_dist", [])
    return needs


if __name__ == "__main__":
    sys.exit(main())
