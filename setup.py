"""The packages of the distribution, found in the tree, and its address; everything else is in pyproject.toml.

`convert/`, `export/` and `verify/` stand at the top of the repository and install as `llmconv.convert` and so on
(`package-dir` in pyproject.toml). In a checkout, links in `llmconv/` show them twice; a set counts them once.
"""

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOMS = ("convert", "export", "verify")
PUBLIC = re.compile(r"(?:https://(?:[^/@]*@)?|git@)(?P<host>[\w.-]+)[:/](?P<path>[\w./-]+?)(?:\.git)?/?")
"""A remote of git on a host that serves pages; a name and password in it are left out."""


def project_urls() -> dict[str, str]:
    """The address that the checkout was cloned from, or in an sdist the one that it was made with; none elsewhere."""
    try:
        lines = Path("PKG-INFO").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return _of_remote()
    pairs = (line.partition(": ")[2].split(", ", 1) for line in lines if line.startswith("Project-URL: "))
    return dict(pairs)


def _of_remote() -> dict[str, str]:
    line = ["git", "config", "--get", "remote.origin.url"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = PUBLIC.fullmatch(done.stdout.strip())
    return {"Source": f"https://{found['host']}/{found['path']}"} if found else {}


front = find_packages(include=["llmconv", "llmconv.*"])
rooms = find_packages(include=[name for room in ROOMS for name in (room, f"{room}.*")])
setup(packages=sorted({*front, *(f"llmconv.{name}" for name in rooms)}), project_urls=project_urls())
