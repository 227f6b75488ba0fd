"""Runs commands on folders in which links are planted at every name that they write, under an audit hook.

    python -m tests.builders.planted JOBS.json RESULTS.json

A job is run once in a clean copy of its inputs, to learn which names it writes, and once in a copy in which each of
them is a link to a victim. Loaded as a process of its own: an audit hook (PEP 578) cannot be removed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmconv.cli import main
from llmconv.output.manifest import MANIFEST

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SAFE = os.O_EXCL | os.O_NOFOLLOW
"""A name without a folder is looked up in an open one; one of these keeps it from leading elsewhere."""

PARTIAL = ".{}.llmconv-partial"
OLD = "{}.part"
"""How files were once called while they were written."""


class Watch:
    """What was opened for writing outside of `root`."""

    def __init__(self) -> None:
        self.root = ""
        self.temporary = tempfile.gettempdir()
        self.seen: list[str] = []

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook."""
        if self.root and event == "open" and isinstance(args[0], str | bytes) and args[2] & WRITING:
            path = os.fsdecode(args[0])
            inside = f"{os.path.realpath(path)}/".startswith((f"{self.root}/", f"{self.temporary}/", "/dev/null"))
            if not (inside if os.path.isabs(path) else args[2] & SAFE):
                self.seen.append(f"{path} {args[2]:o}")


def run(arguments: list[str], place: Path, watch: Watch) -> tuple[int, list[str]]:
    """Exit code of a command whose words may name the `{place}`, and what it opened for writing elsewhere."""
    watch.seen, watch.root = [], str(place)
    try:
        main([word.format(place=place) for word in arguments], prog_name="llmconv")
    except SystemExit as done:
        return int(done.code or 0), watch.seen
    finally:
        watch.root = ""
    raise AssertionError("the command does not end")


def names_in(place: Path) -> set[str]:
    """Every file and link below a folder."""
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_symlink() or not path.is_dir()}


def plant(place: Path, written: set[str], victims: Path) -> None:
    """Links to victims at every written name, and at what it is called while it is written."""
    for number, name in enumerate(sorted({*written, *(OLD.format(name) for name in written)})):
        victim = victims / f"{number}"
        victim.write_text("dear")
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(victim)


def one(job: dict[str, Any], place: Path, watch: Watch) -> dict[str, Any]:
    """Runs a job clean and planted."""
    for kind in ("clean", "planted"):
        shutil.copytree(job["inputs"], place / kind, symlinks=True)
    before = names_in(place / "clean")
    contents = {name: (place / "clean" / name).stat().st_mtime_ns for name in before}
    code, seen = run(job["arguments"], place / "clean", watch)
    after = names_in(place / "clean")
    written = {name for name in after if name not in before or contents[name] != _changed(place / "clean" / name)}
    victims = place / "victims"
    victims.mkdir()
    if job["output"]:  # a folder made anew: the links lie in the folder in which it is made
        partial = PARTIAL.format(job["output"])
        inner = {name.removeprefix(f"{job['output']}/") for name in written} | {"journal.jsonl", "lock"}
        written_there = {f"{partial}/{name}" for name in inner}
    else:
        # a manifest is read before it is written, and refused as a link
        written_there = {name for name in written if Path(name).name != MANIFEST}
    plant(place / "planted", written_there, victims)
    names = sorted(path.name for path in victims.iterdir())
    again, seen_again = run(job["arguments"], place / "planted", watch)
    left = {name for name in names_in(place / "planted") if ".llmconv-" in name}
    return {
        "codes": [code, again],
        "written": sorted(written),
        "outside": [*seen, *seen_again],
        "victims": [path.name for path in victims.iterdir() if path.read_text() != "dear"],
        "new": sorted({path.name for path in victims.iterdir()} - {*names}),
        "links": sorted(name for name in written if _leads_out(place / "planted" / name, place / "planted")),
        "left": sorted(left - written_there),
    }


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def _leads_out(path: Path, root: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(root)


def each(jobs_file: str, results_file: str) -> None:
    """Runs all jobs."""
    watch = Watch()
    sys.addaudithook(watch.hook)
    jobs = json.loads(Path(jobs_file).read_text())
    places = [Path(results_file).parent / f"place{number}" for number in range(len(jobs))]
    results = [one(job, place, watch) for job, place in zip(jobs, places, strict=True)]
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    each(*sys.argv[1:])
