"""Feeds every parser with changed inputs for some time and tells what went wrong; what did is kept in `corpus/`.

    python -m tests.fuzz.run --seconds 60 [--seed 1] [TARGET …]

With atheris (`pip install atheris`) the inputs follow the branches that they reach; without it, chance alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 64 << 10
"""Bytes of an input that is kept."""

LONGEST = 1 << 20
"""Bytes of an input that atheris makes."""


def main() -> int:
    """Runs the targets one after the other, each in a process of its own; returns 1 where something was found."""
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415 - a process that follows branches loads it by itself

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="of chance (default: the time)")
    given = parser.parse_args()
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]}")
    seed = int(time.time()) if given.seed is None else given.seed
    guided = importlib.util.find_spec("atheris") is not None
    print(f"seed {seed}, {'following branches with atheris' if guided else 'chance alone (atheris is not installed)'}")
    found = 0
    for name in given.targets or TARGETS:
        found += _in_process(name, given.seconds, seed, guided)
    return int(found > 0)


def _in_process(name: str, seconds: float, seed: int, guided: bool) -> int:
    """The number of findings of a target."""
    context: Any = multiprocessing.get_context("spawn" if guided else "fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=fuzz, args=(name, seconds, seed, guided, writer))
    process.start()
    writer.close()
    kinds: dict[str, str] = {}
    tried = 0
    while True:
        try:
            told = reader.recv()
        except EOFError:
            break
        if isinstance(told, int):
            tried = told
        else:
            kinds[told[0]] = told[1]
    process.join()
    if process.exitcode:
        kinds[f"exit {process.exitcode}"] = "the process ended"
    print(f"{name:15} {tried:9,} inputs, {len(kinds)} findings", flush=True)
    for kind, text in kinds.items():
        print(f"  {kind}\n    " + text.strip().replace("\n", "\n    "), flush=True)
    return len(kinds)


def fuzz(name: str, seconds: float, seed: int, guided: bool, writer: Any) -> None:
    """Reads changed inputs of a target until the time is over; sends findings, and how many inputs there were."""
    if guided:
        atheris = importlib.import_module("atheris")  # not everybody has it

        with atheris.instrument_imports(include=["llmconv"], enable_loader_override=False):
            from tests.fuzz.targets import TARGETS  # noqa: PLC0415 - seen from here on
    else:
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415 - as above
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # twice as many inputs per second as on a disk
    with tempfile.TemporaryDirectory(prefix="llmconv-fuzz-", dir=memory) as place:
        feeder = Feeder(name, TARGETS[name], Path(place), seed, writer)
        if not guided:
            feeder.run(seconds)
            return
        # atheris never returns: libFuzzer gets the time and ends the process
        limits = (f"-max_total_time={seconds:.0f}", f"-seed={seed % (1 << 31)}", f"-max_len={LONGEST}", "-verbosity=0")
        arguments = [sys.argv[0], *limits, str(feeder.write_seeds(Path(place) / "seeds"))]
        atheris.Setup(arguments, feeder.feed, custom_mutator=feeder.mutate, internal_libfuzzer=True)
        atheris.Fuzz()


class Feeder:
    """One target in one folder; findings are told once per kind, and kept."""

    def __init__(self, name: str, target: Any, place: Path, seed: int, writer: Any) -> None:
        from tests.fuzz.watch import Watched  # noqa: PLC0415 - behind what is followed

        self._name, self._target, self._writer = name, target, writer
        self._draw = random.Random(f"{name} {seed}")
        self._folder = place / "in"
        self._folder.mkdir()
        for file, content in target.siblings().items():
            (self._folder / file).write_bytes(content)
        kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
        self._seeds = [*target.seeds(), *target.refused(), *kept]
        for data in self._seeds:  # loads what is ever loaded, before anybody watches
            self._read_unseen(data)
        self._watched = Watched(place)
        self._kinds: set[str] = set()
        self._tried = 0

    def run(self, seconds: float) -> None:
        """Chance alone."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.feed(self.mutate(b"", 0, 0))
        self._writer.send(self._tried)

    def write_seeds(self, folder: Path) -> Path:
        """The inputs that atheris starts from, a file each."""
        folder.mkdir()
        for index, data in enumerate(self._seeds):
            (folder / str(index)).write_bytes(data)
        return folder

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """A changed input of at most `most` bytes (0: any); `data` is one that atheris finds worth a change."""
        from tests.fuzz.mutation import mutated  # noqa: PLC0415 - as above

        draw = random.Random(seed) if seed else self._draw
        changed = mutated([*self._seeds, *([data] * len(self._seeds) if data else [])], self._target.words, draw)
        return changed[:most] if most else changed

    def feed(self, data: bytes) -> None:
        """Reads one input."""
        from tests.fuzz.targets import run_target  # noqa: PLC0415 - as above

        self._tried += 1
        finding = self._watched.look(lambda: run_target(self._target, data, self._folder))
        if finding and finding.kind not in self._kinds:
            self._kinds.add(finding.kind)
            self._writer.send((finding.kind, finding.text))
            if len(data) <= LARGEST:
                (CORPUS / self._name).mkdir(exist_ok=True, parents=True)
                (CORPUS / self._name / sha256(data).hexdigest()[:16]).write_bytes(data)
        if self._tried % 100 == 0:
            self._writer.send(self._tried)

    def _read_unseen(self, data: bytes) -> None:
        from tests.fuzz.targets import run_target  # noqa: PLC0415 - as above

        with suppress(Exception):  # the watched run tells
            run_target(self._target, data, self._folder)


if __name__ == "__main__":
    sys.exit(main())
