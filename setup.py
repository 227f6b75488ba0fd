"""The packages of the distribution, found in the tree; everything else is in pyproject.toml.

`convert/`, `export/` and `verify/` stand at the top of the repository and install as `llmconv.convert` and so on
(`package-dir` in pyproject.toml). In a checkout, links in `llmconv/` show them twice; a set counts them once.
"""

from setuptools import find_packages, setup

ROOMS = ("convert", "export", "verify")
front = find_packages(include=["llmconv", "llmconv.*"])
rooms = find_packages(include=[name for room in ROOMS for name in (room, f"{room}.*")])
setup(packages=sorted({*front, *(f"llmconv.{name}" for name in rooms)}))
