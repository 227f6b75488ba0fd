"""Runs the steps of a run file that are not done, each as a process of its own, and sums up what was done.

The record of a run, which steps are done and the stamps of the files that they read and wrote, lies next to the run
file as `.FILE.llmconv-run`; without it every step is done again.

    {
      "record_version": 2,
      "steps": {"to-hf": {"llmconv": "0.1.0", "command": "<sha256>", "read": {…}, "written": {…}, "earlier": {…}}, …}
    }

A stamp tells whether a file has changed, without reading it: of a local file its size and its time of change, as of
`make`; of an object in a store its ETag; of a model on the Hub its commit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.addresses import (
    HubAddress,
    hub_address,
    is_hub_address,
    is_store_address,
    parse_address,
    parse_hub_address,
)
from llmconv.convert.models.config_file import YAML_LIMIT
from llmconv.errors import LlmconvError, OutputFailed
from llmconv.files.paths import follow_local, is_address, without_credentials
from llmconv.files.safe_folder import replace_file
from llmconv.files.sources import PARTIAL, files_near, files_under, is_hub_id
from llmconv.interpreters import child_environment
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.steps.run_file import RunFile, overlap, taken_for_hub_models
from llmconv.steps.step import Step
from llmconv.version import __version__

# by path, relative to the folder of the run file, or by address. An empty stamp never equals another run's
Stamps = dict[str, str]
UNKNOWN = ""
MANIFEST_STAMP = "manifest"  # of every `llmconv.json`: each command adds to it, and what it lists has stamps of its own
STEPS = re.compile(r"^steps\s*:", re.MULTILINE)
# what file systems of fsspec call the property that changes with the content
TAGS = ("ETag", "etag", "e_tag", "md5Hash", "LastModified", "mtime", "last_modified", "created")
SECONDS = 30.0  # timeout of the Hub


def stamps(names: Iterable[str], home: Path, *, are_read: bool = False) -> Stamps:
    """The stamps of all files of some inputs or outputs (paths, URIs or Hub ids); none of those that do not exist.

    With `are_read`, they are inputs: files are read with others near them, and a name such as `org/name` that does not
    exist here is a model on the Hub.
    """
    found: Stamps = {}
    for name in names:
        path = home / name
        if is_address(name):
            found |= _remote_stamps(name)
        elif os.path.lexists(target := follow_local(path)):
            for file in (*_files(target), *(_read_with(target) if are_read else ()), *_files(path)):
                status = file.stat()
                stamp = MANIFEST_STAMP if file.name == MANIFEST else f"{status.st_size}:{status.st_mtime_ns}"
                found[os.path.relpath(file, home)] = stamp
        elif are_read and is_hub_id(name):
            found[name] = _commit(hub_address(name))
    return found


def _files(path: Path) -> Iterator[Path]:
    """A file, or the files of a folder at any depth, also behind links to folders."""
    if not path.is_dir():
        yield from [path] if path.is_file() else ()
        return
    seen: set[str] = set()
    for folder, below, names in os.walk(path, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen or folder.endswith(PARTIAL):
            below.clear()
            continue
        seen.add(place)
        yield from (file for name in names if (file := Path(folder) / name).is_file())


def _read_with(path: Path) -> list[Path]:
    """The other parts of a file, and the configurations and tokenizers that formats look for around a path."""
    parts: list[Path] = []
    with suppress(LlmconvError):  # of a missing part; the step itself reports it
        parts = [one for one in files_under(path) if one != path] if path.is_file() else []
    return [*parts, *(one for one in files_near(path) if not _is_run_file(one))]


def _is_run_file(path: Path) -> bool:
    """Whether a file has steps, and so is not read by one."""
    is_yaml = path.suffix in (".yaml", ".yml") and path.stat().st_size <= YAML_LIMIT
    return is_yaml and bool(STEPS.search(path.read_text("utf-8", "replace")))


def _remote_stamps(uri: str) -> Stamps:
    """A stamp for each object below a URI; `UNKNOWN` if its store does not tell whether one has changed."""
    shown = without_credentials(uri)
    try:
        if is_hub_address(uri):
            return {shown: _commit(parse_hub_address(uri))}
        listed = _in_store(uri) if is_store_address(uri) else _in_file_system(uri)
        return {f"{shown}#{key}": stamp for key, stamp in listed}
    except (LlmconvError, OSError, ImportError, ValueError):  # the step itself reports what is wrong
        return {shown: UNKNOWN}


def _commit(address: HubAddress) -> str:
    """The commit that a revision is now."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - 0.3 s that a local path does not pay

    try:
        return HfApi().model_info(address.repository, revision=address.revision or None, timeout=SECONDS).sha or UNKNOWN
    except Exception as error:  # the class for "no connection" differs between versions
        if isinstance(error, MemoryError):
            raise
        return UNKNOWN


def _in_store(uri: str) -> Iterator[tuple[str, str]]:
    from llmconv.stores.object_store import ObjectStore  # noqa: PLC0415 - an extra

    address = parse_address(uri)
    heads = [*ObjectStore(address).list()]
    if not heads and address.key:
        head = ObjectStore(address.parent).head(address.name)
        heads = [head] if head else []
    for head in heads:
        is_manifest = head.key.rpartition("/")[2] == MANIFEST
        yield head.key, MANIFEST_STAMP if is_manifest else head.e_tag or f"{head.size}:{head.modified}"


def _in_file_system(uri: str) -> Iterator[tuple[str, str]]:
    import fsspec  # noqa: PLC0415 - not needed for local paths

    filesystem, place = fsspec.url_to_fs(uri)
    found: dict[str, Any] = filesystem.find(place, detail=True) or {place: filesystem.info(place)}
    for key, info in found.items():
        tag = next((info[name] for name in TAGS if info.get(name)), None)
        yield key.removeprefix(place), UNKNOWN if tag is None else f"{info.get('size')}:{tag}"


# suffix of the lock file. The run file cannot be locked itself: editors and git replace it by a new file
LOCK_SUFFIX = ".llmconv-run.lock"


@contextmanager
def run_lock(file: Path) -> Iterator[int]:
    """Locks a file next to a run file (`flock(2)`), inherited by steps as a descriptor; OutputFailed, OSError."""
    path = file.absolute().with_name(f".{file.name}{LOCK_SUFFIX}")
    descriptor = _locked(path, file.name)
    try:
        yield descriptor
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path, name: str) -> int:
    """The descriptor of the locked file, which is still at its path: the run before may have removed it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            hint = "wait until it ends; a step of a run that was killed goes on to its end"
            raise OutputFailed(f"another run of `{name}` is not finished", hint=hint) from error
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


VERDICTS = {0: "pass", 1: "fail", 5: "inconclusive"}  # of `verify`, by its exit code
REPORT_FILES = ("run.json", "run.md")  # files of the report of a run, which may lie in the folder of a step's report
DONE, UNCHANGED, FAILED, LEFT, PLANNED = "done", "unchanged", "failed", "not run", "to do"
GRACE = 30  # seconds that an interrupted step has to end


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: Step
    status: str  # `done`, `unchanged`, `failed`, `not run`, or in a plan `to do`
    reason: str = ""  # why it was done; empty if it was not
    seconds: float = 0.0  # that it took
    exit_code: int = 0  # of its process; 0 if it had none
    verdict: str = ""  # of `verify`; empty for other commands


class Execution:
    """A run of a file; the steps inherit `lock`, the descriptor of its `run_lock` (None for a plan).

    `force` does all steps, whatever is done; `quiet` and `github` are given to every step, or `verify`; `stdout` is a
    descriptor or file for what the steps print, None for this process's own.
    """

    def __init__(
        self,
        file: RunFile,
        lock: int | None = None,
        *,
        force: bool = False,
        quiet: bool = False,
        github: bool = False,
        stdout: int | None = None,
    ) -> None:
        self._file, self._force, self._stdout = file, force, stdout
        self._quiet, self._github = quiet, github
        self._record = Record.beside(file.path)
        self._changed: list[str] = []
        self._inherited = () if lock is None else (lock,)

    def plan(self) -> Iterator[Outcome]:
        """What a run would do. A step that reads what an earlier one will write is to be done."""
        written: list[str] = []
        for step in self._file.steps:
            reason = self._reason(step)
            self._changed += step.changes if reason else ()
            from_hub = taken_for_hub_models(step, written, self._file.home) if reason else []
            written += step.changes
            notes = [f"`{name}` is not here, so it is a model of the Hub" for name in from_hub]
            notes += self._obstacles(step) if reason else []
            yield Outcome(step, PLANNED if reason else UNCHANGED, "; ".join([reason, *notes]))

    def run(self, announce: Callable[[int, Step, str], None]) -> Iterator[Outcome]:
        """Does the steps until one fails; `announce` gets each one's number, from 1, the step and its reason."""
        self._record.keep(self._file.steps)
        failed = False
        for number, step in enumerate(self._file.steps, 1):
            reason = "" if failed else self._reason(step)
            if failed or not reason:
                yield Outcome(step, LEFT if failed else UNCHANGED, verdict="" if failed else verdict_of(step, 0))
                continue
            announce(number, step, reason)
            outcome = self._do(step, reason)
            failed = outcome.status == FAILED
            self._changed += step.changes
            yield outcome

    def _reason(self, step: Step) -> str:
        """Why a step is to be done; empty if nothing has changed."""
        if reason := "--force" if self._force else always(step):
            return reason
        for read in step.inputs:
            if any(overlap(read, one, self._file.home) for one in self._changed):
                return f"reads `{read}`, which is new"
        if (recorded := self._recorded_verdict(step)) not in ("", VERDICTS[0]):
            return f"the recorded verdict is `{recorded}`"
        return self._record.change(step, self._file.steps, self._read(step), self._written(step.outputs))

    def _obstacles(self, step: Step) -> list[str]:
        """The outputs that a step will not replace, because no run of this file made them."""
        may_replace = "--overwrite" in step.arguments or not step.can_overwrite or self._record.is_begun(step)
        if may_replace or self._record.is_own(step, there := self._written(step.outputs)) or not there:
            return []
        return [f"`{name}` exists, and no run of this file made it: it is refused" for name in step.outputs]

    def _read(self, step: Step) -> Stamps:
        return stamps(step.inputs, self._file.home, are_read=True)

    def _written(self, names: Iterable[str]) -> Stamps:
        """The stamps of outputs, without the report of a run."""
        found = stamps(names, self._file.home)
        return {name: stamp for name, stamp in found.items() if os.path.basename(name) not in REPORT_FILES}

    def _do(self, step: Step, reason: str) -> Outcome:
        """Does a step, and records it."""
        start = time.monotonic()
        there = self._written(step.changes)
        before = self._read(step) | there
        is_own = self._record.is_own(step, there)
        resumes = self._record.is_begun(step)
        is_known = is_own or resumes or not there or not step.outputs
        first = self._record.begin(step, before) if is_known else before
        # what was begun is continued, unless what it reads has changed since
        is_old = resumes and any(first.get(name) != stamp for name, stamp in self._read(step).items())
        code = self._call(step, overwrite=is_own or (is_old and not step.can_resume), resume=resumes)
        seconds = time.monotonic() - start
        if code:
            if not is_known:
                self._record.forget(step)
            return Outcome(step, FAILED, reason, seconds, code, verdict_of(step, code))
        changed = self._written(step.changes)
        self._record.end(step, first, before, self._read(step) | changed, changed)
        return Outcome(step, DONE, reason, seconds, 0, verdict_of(step, 0))

    def _call(self, step: Step, *, overwrite: bool, resume: bool) -> int:
        """Runs the process of a step, and ends it if this one is interrupted; returns its exit code."""
        own = ["--overwrite"] * (overwrite and step.can_overwrite) + ["--resume"] * (resume and step.can_resume)
        given = [option for option in own if option not in step.arguments]
        given += ["--quiet"] * self._quiet + ["--github"] * (self._github and step.command == "verify")
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "llmconv", *step.command.split(), *given, *step.arguments],
            cwd=self._file.home,
            env=child_environment(),
            stdout=self._stdout,
            pass_fds=self._inherited,
        ) as done:
            try:
                code = done.wait()
            except BaseException:
                done.terminate()
                with suppress(subprocess.TimeoutExpired):
                    done.wait(GRACE)
                raise
        return code if code >= 0 else 128 - code

    def _recorded_verdict(self, step: Step) -> str:
        """The verdict that is recorded in a verified folder; empty if there is none."""
        if step.command != "verify" or not step.positional:
            return ""
        with suppress(LlmconvError, OSError):
            recorded = read_manifest(self._file.home / step.positional[0]).verified
            if isinstance(recorded, dict) and isinstance(recorded.get("verdict"), str):
                return str(recorded["verdict"])
        return ""


def verdict_of(step: Step, code: int) -> str:
    """The verdict of a step that ended with an exit code; empty for other commands than `verify`, and for errors."""
    return VERDICTS.get(code, "") if step.command == "verify" else ""


def always(step: Step) -> str:
    """Why a step is repeated each time; empty if it is not."""
    if step.command == "push":
        return "asks the Hub"
    if any(word.startswith("--client=") for word in step.arguments):
        return "runs other programs"
    return ""


VERSION = 2
SUFFIX = ".llmconv-run"
WEIGHTS = (".safetensors", ".safetensors.index.json")
LIMIT = 256 << 20  # maximum bytes of a record; a million files take some 100 MB


@dataclass(frozen=True)
class Done:
    """A step that was done."""

    llmconv: str  # version that did it
    command: str  # sha256 of its command line, which may contain credentials
    read: Stamps  # stamps of its inputs, without what it wrote itself
    written: Stamps  # stamps of what it wrote or changed
    earlier: Stamps  # stamps of what it wrote before that, to outputs that it no longer has


@dataclass
class Record:
    """The steps that were done, by name in the order of the run file, and the path of the record."""

    path: Path
    steps: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def beside(cls, file: Path) -> Record:
        """The record of a run file; empty if there is none, or none that can be read."""
        path = file.absolute().with_name(f".{file.name}{SUFFIX}")
        try:
            content = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= LIMIT else {}
        except (OSError, ValueError, RecursionError):
            content = {}
        listed = content.get("steps") if isinstance(content, dict) and content.get("record_version") == VERSION else {}
        items = listed.items() if isinstance(listed, dict) else ()
        return cls(path, {name: done for name, fields in items if (done := _done(fields))})

    def save(self) -> None:
        content = {"record_version": VERSION, "steps": {name: asdict(done) for name, done in self.steps.items()}}
        replace_file(self.path, json.dumps(content, indent=1).encode())

    def is_own(self, step: Step, outputs: Stamps) -> bool:
        """Whether an earlier run made what lies at a step's outputs (stamps): a file there is as that run left it."""
        written = self._all_written(step)
        return any(outputs.get(name) == stamp not in (UNKNOWN, MANIFEST_STAMP) for name, stamp in written.items())

    def keep(self, steps: Iterable[Step]) -> None:
        """Forgets steps that the file no longer has, and puts the others in its order."""
        self.steps = {step.name: self.steps[step.name] for step in steps if step.name in self.steps}

    def is_begun(self, step: Step) -> bool:
        """Whether a step began, and did not end."""
        return step.name in self.steps and not self.steps[step.name].command

    def begin(self, step: Step, before: Stamps) -> Stamps:
        """Records that a step is under way: if it does not end, it is not done.

        Returns the stamps of its inputs and outputs at its first begin (now: `before`): a step that was interrupted is
        continued, and wrote what differs from them.
        """
        if self.is_begun(step):
            return self.steps[step.name].read
        places = [name if is_address(name) else os.path.normpath(name) for name in step.changes]
        self.steps[step.name] = Done(__version__, "", before, dict.fromkeys(places, UNKNOWN), self._all_written(step))
        self.save()
        return before

    def _all_written(self, step: Step) -> Stamps:
        """The latest stamps of everything that a step ever wrote."""
        done = self.steps.get(step.name)
        return {} if done is None else done.earlier | done.written

    def forget(self, step: Step) -> None:
        self.steps.pop(step.name, None)
        self.save()

    def end(self, step: Step, first: Stamps, before: Stamps, after: Stamps, changed: Stamps) -> None:
        """Records that a step is done; `first` is what `begin` returned.

        `before` and `after` are the stamps of its inputs and outputs: an input that changed meanwhile keeps the earlier
        one, so that the step is done again. `changed` are those of the places that it writes into, afterwards.
        """
        written = changed
        if not step.outputs:  # an export into the model's folder, which never writes weights
            own = {name: stamp for name, stamp in changed.items() if not name.endswith(WEIGHTS)}
            written = {name: stamp for name, stamp in own.items() if first.get(name) != stamp}
        read = {name: before.get(name, UNKNOWN) for name in {**before, **after} if name not in written}
        home = self.path.parent
        kept = {name: stamp for name, stamp in self._all_written(step).items() if name not in written}
        earlier = {name: stamp for name, stamp in kept.items() if is_address(name) or (home / name).is_file()}
        self.steps[step.name] = Done(__version__, command_sha256(step), read, written, earlier)
        self.save()

    def change(self, step: Step, steps: Sequence[Step], inputs: Stamps, outputs: Stamps) -> str:
        """Why a step is to be done: what differs from the last time in inputs, outputs, options; empty if nothing."""
        if (done := self.steps.get(step.name)) is None:
            return "not done yet"
        if not done.command:
            return "was not finished"
        if done.llmconv != __version__:
            return f"was done by llmconv {done.llmconv}"
        if done.command != command_sha256(step):
            return "options changed"
        later: Stamps = {}  # a later step may write into the folders of this one
        for one in steps[steps.index(step) + 1 :]:
            later |= self.steps[one.name].written if one.name in self.steps else {}
        known, now = done.read | done.written, inputs | outputs
        for name in (*known, *(name for name in inputs if name not in known and name not in later)):
            stamp = later.get(name, known.get(name))
            if now.get(name) != stamp or stamp in (None, UNKNOWN):
                return f"`{name}` " + ("is new" if name not in known else "changed" if name in now else "is gone")
        return ""


def command_sha256(step: Step) -> str:
    """What identifies the command line of a step."""
    return hashlib.sha256("\0".join([step.command, *step.arguments]).encode()).hexdigest()


def _done(fields: Any) -> Done | None:
    """An entry of `steps`; None if it is not of the form in the module's docstring."""
    names = ("llmconv", "command", "read", "written", "earlier")
    if not isinstance(fields, dict) or fields.keys() != {*names}:
        return None
    version, command, *both = (fields[name] for name in names)
    texts = [version, command, *(text for one in both if isinstance(one, dict) for text in one.values())]
    is_sound = all(isinstance(one, dict) for one in both) and all(isinstance(text, str) for text in texts)
    return Done(version, command, *both) if is_sound else None


COLUMNS = ("step", "status", "time", "why")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """That of the step that failed; 0 if none did."""
    return next((one.exit_code for one in outcomes if one.status == FAILED), 0)


def summary_dict(file: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The content of `--json` and of `run.json`."""
    steps = []
    for one in outcomes:
        named = {"name": one.step.name, "command": one.step.line, "status": one.status, "reason": one.reason}
        verdict = {"verdict": one.verdict} if one.verdict else {}
        steps.append({**named, "seconds": round(one.seconds, 3), "exit_code": one.exit_code, **verdict})
    return {"llmconv": __version__, "file": file, "exit_code": exit_code(outcomes), "steps": steps}


def summary_table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each step, in columns."""
    rows = [COLUMNS, *(_row(one) for one in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(one: Outcome) -> tuple[str, str, str, str]:
    seconds = f"{one.seconds:.1f} s" if one.seconds else ""
    failure = f"exit code {one.exit_code}" if one.status == FAILED else ""
    verdict = f"verdict: {one.verdict}" if one.verdict and one.status != LEFT else ""
    return one.step.name, one.status, seconds, "; ".join(filter(None, (failure or one.reason, verdict)))


def markdown(file: str, outcomes: Sequence[Outcome]) -> str:
    """The table and the commands, for the summary of a CI job."""
    code = exit_code(outcomes)
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(one) for one in outcomes)]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    result = f"failed with exit code {code}" if code else "all steps are done"
    return "\n".join([f"# {file}: {result}", "", *lines, "", "```sh", *(one.step.line for one in outcomes), "```", ""])


def write_summary(folder: Path, file: str, outcomes: Sequence[Outcome]) -> None:
    texts = json.dumps(summary_dict(file, outcomes), indent=2) + "\n", markdown(file, outcomes)
    for name, text in zip(REPORT_FILES, texts, strict=True):
        replace_file(folder / name, text.encode())
