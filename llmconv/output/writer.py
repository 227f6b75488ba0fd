"""Writes a planned Checkpoint as a folder: shards, small files, manifest; here, or as tasks of a Ray cluster.

No tensor is read before every name, shape and dtype is known and the free space was checked. All Destinations (a local
folder, a folder in an object store) keep the same promises: a reader sees all of an output or nothing; what a failed
run finished is kept for `--resume`; two runs never mix.

With Ray every shard is a task, which opens the sources and the output by itself. Neither weights nor credentials pass
through Ray: a task gets the arguments of the command and the name of a shard, and answers when the journal of the
output has the shard. So what the driver of a killed run leaves is for `--resume`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmconv.addresses import HubAddress, StoreAddress
from llmconv.errors import KEPT, InputRefused, OutputFailed, UnsupportedInput, UsageProblem, as_fields
from llmconv.files import mirror, source_file
from llmconv.files.paths import WEIGHT_SUFFIXES, is_address
from llmconv.files.safe_folder import Link
from llmconv.files.source_file import checked_reading
from llmconv.output.local_folder import LocalFolder, SingleFile
from llmconv.output.manifest import Manifest, file_entry, link_entry
from llmconv.output.plan import Destination, Plan, Shard, ShardContent, UnfinishedOutput, failing_safely
from llmconv.output.work import (
    TRIES,
    Answer,
    Call,
    Part,
    Ray,
    Shards,
    Work,
    Workers,
    answer_to,
    current_call,
    take_answer,
    write_in_workers,
)
from llmconv.progress import bytes_bar, say, set_quiet, warn_all
from llmconv.ray_connection import connected
from llmconv.version import __version__

NETWORK = "llmconv_nic"  # custom resource of a node: how many tasks it runs at once, for `ray start --resources`
CPUS = 2  # of a task on a node without that resource: one computes and writes, one hashes
PATIENCE = 30  # seconds for tasks to end that were stopped


def write_in_ray(call: Call, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
    """Writes shards in a cluster, whose processes repeat `call` once; returns when all are in the output's journal.

    `advance` is called with the bytes of each. Raises the first error of a task; OutputFailed if tasks of one shard, or
    the cluster, were lost; UnsupportedInput without ray, or for another version of llmconv on a node; UsageProblem for
    a credential in an argument.
    """
    for value in call.arguments.values():
        for text in value if isinstance(value, list | tuple) else [value]:
            parts = urlsplit(str(text)) if isinstance(text, str | Path) and is_address(text) else None
            if parts and (parts.query or parts.password):
                hint = "give every node the credential in its environment, and the plain URI here"
                raise UsageProblem("a URI with a credential in it is not sent to a cluster", hint=hint)
    with connected("--engine ray") as ray, _failing(ray):
        tasks = _Tasks(ray, call)
        try:
            tasks.run(shards, advance)
        except BaseException:
            tasks.stop()
            raise


class _Tasks:
    """The tasks of one call that are not done."""

    def __init__(self, ray: Any, call: Call) -> None:
        self._ray = ray
        self._task = {**call.fields(), "run": secrets.token_hex(8), "folder": os.getcwd(), "version": __version__}
        self._remote = ray.remote(**_resources(ray), max_retries=TRIES - 1, scheduling_strategy="SPREAD")(write_shard)
        self._running: dict[Any, Shard] = {}

    def run(self, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
        """Writes shards, the largest first; a store or disk that failed on one node is tried on another."""
        failures: dict[str, int] = {}
        warned: set[str] = set()
        for shard in sorted(shards, key=lambda shard: -shard.nbytes):
            self._start(shard)
        while self._running:
            [done], _ = self._ray.wait([*self._running], num_returns=1)
            shard, answer = self._running.pop(done), self._ray.get(done)
            failures[shard.name] = failures.get(shard.name, 0) + (answer.get("error") == OutputFailed.__name__)
            if "error" in answer and 0 < failures[shard.name] < TRIES:
                self._start(shard)
                continue
            take_answer(answer, warned)
            advance(shard.nbytes)

    def _start(self, shard: Shard) -> None:
        name = f"llmconv {shard.name}"
        self._running[self._remote.options(name=name).remote({**self._task, "shard": shard.name})] = shard

    def stop(self) -> None:
        """Ends all tasks, so that none holds the output."""
        with suppress(self._ray.exceptions.RayError):
            for task in self._running:
                self._ray.cancel(task, force=True)
            self._ray.wait([*self._running], num_returns=len(self._running), timeout=PATIENCE) if self._running else ()


def write_shard(task: dict[str, Any]) -> Answer:
    """A task, on any node; see `answer_to`."""
    if task["version"] != __version__:
        problem = f"a node has llmconv {__version__}, not {task['version']} as the driver"
        return as_fields(UnsupportedInput(problem, hint="install the same version on all nodes"))
    set_quiet(True)
    with suppress(FileNotFoundError):  # needed for relative paths alone, which then do not exist either
        os.chdir(task["folder"])
    return answer_to(task)


def _resources(ray: Any) -> dict[str, Any]:
    """What a task takes of a node: its share of the network if nodes have that resource, or of the processors."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(NETWORK in node for node in nodes):
        return {"num_cpus": 0, "resources": {NETWORK: 1}}
    return {"num_cpus": min(CPUS, max((node.get("CPU", 0) for node in nodes), default=0) or CPUS)}


@contextmanager
def _failing(ray: Any) -> Iterator[None]:
    """Turns Ray's errors into llmconv's."""
    errors = ray.exceptions
    try:
        yield
    except errors.RayTaskError as error:
        raise OutputFailed(
            f"a task of the Ray cluster failed: {str(error).strip().rpartition(chr(10))[2]}",
            hint=f"is llmconv {__version__} installed on every node? the logs of the cluster say more",
        ) from error
    except errors.RayError as error:
        problem = f"the Ray cluster lost a shard {TRIES} times: {type(error).__name__}"
        raise OutputFailed(problem, hint="is memory short on its nodes? run again with `--resume`") from error


CONFIG = "config.json"
UNCHECKED = "`{}` was saved without checksums, so damage to it cannot be detected"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_BYTES = 256 << 20  # freed memory that glibc may keep (`mallopt(3)`); a block is far smaller
Identity = tuple[str | int, ...]
Stats = Mapping[Path, Identity]  # the sources of an output, and what they were when it was planned
# where an output can be made: a local folder, one in an object store, or a repository on the Hugging Face Hub
Place = Path | StoreAddress | HubAddress


def destination_of(output: Place) -> Destination:
    if isinstance(output, HubAddress):
        from llmconv.output.hub_folder import HubFolder  # noqa: PLC0415 - most outputs are local

        return HubFolder(output)
    if isinstance(output, StoreAddress):
        from llmconv.output.store_folder import StoreFolder  # noqa: PLC0415 - as above

        return StoreFolder(output)
    return LocalFolder(output)


def write_checkpoint(  # noqa: PLR0913 - what is written, and how
    plan: Plan,
    output: Place,
    *,
    steps: Sequence[dict[str, Any]],
    sources: Sequence[Path],
    overwrite: bool = False,
    resume: bool = False,
    more_files: Mapping[str, bytes | Link] | None = None,
    graphs: dict[str, dict[str, Any]] | None = None,
    work: Work | None = None,
) -> Manifest:
    """Writes the folder `output`, for which `check_output` was called: shards, small files, manifest, in that order.

    `steps` are the provenance, oldest first; `resume` continues an interrupted run, unless size or time of the
    `sources`, or what was measured, have changed, and keeps an `output` that is complete and of the same inputs and
    options. `more_files`, by path, replace those of the plan; `graphs` are their manifest entries; `work` tells which
    shards this process writes, and whether it publishes (None: all, and it does). Raises InputRefused if a source is
    damaged, or `output` appeared; OutputFailed if writing failed.
    """
    target = destination_of(output)
    if resume and not overwrite and target.is_complete():
        return _same_as_before(plan, target, steps, more_files or {}, work)
    # makes glibc reuse freed row blocks: new pages for each cost a tenth of a run (measured)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, HEAP_BYTES)
    stats = {source: _identity(source) for source in sources}
    key = _fingerprint(plan, steps, [(*stat, _sample(source)) for source, stat in stats.items()])
    files = [*(shard.name for shard in plan.shards), *plan.small_files, *(more_files or {})]
    manifest = Manifest(list(steps), graphs=graphs or {})
    if isinstance(work, Part | Shards):
        for chosen in [work.chosen(plan.shards)] if isinstance(work, Part) else ({name} for name in work.names):
            part = replace(plan, shards=tuple(shard for shard in plan.shards if shard.name in chosen))
            with _noting_what_stays(target.share(key, files, chosen)) as folder:
                _write_shards(part, folder, target.name, stats)
        return manifest  # only a part was written, and nothing is published
    if isinstance(work, Workers | Ray):
        _write_elsewhere(plan, target, key, files, work, overwrite=overwrite, resume=resume)
    if work:
        making = target.finish(key, files, overwrite=overwrite, trusted=isinstance(work, Workers | Ray))
    else:
        making = target.begin(key, files, overwrite=overwrite, resume=resume)
    with _noting_what_stays(making) as folder:
        _require_parts(plan, folder, target) if work else _write_shards(plan, folder, target.name, stats)
        for name, content in (*plan.small_files.items(), *(more_files or {}).items()):
            folder.write_file(name, content)
        folder.commit(manifest)
    return manifest


def write_file(plan: Plan, path: Path, *, sources: Sequence[Path], overwrite: bool = False) -> None:
    """Writes the only shard of a plan as the file `path`, and nothing else; raises as `write_checkpoint`."""
    stats = {source: _identity(source) for source in sources}
    with SingleFile(path, replaces=overwrite) as file:
        _write_shards(plan, file, path.name, stats)


@contextmanager
def _noting_what_stays(making: UnfinishedOutput) -> Iterator[UnfinishedOutput]:
    """The unfinished output; an interrupt gets the note `KEPT` where finished files stay for `--resume`."""
    with making as folder:
        try:
            yield folder
        except KeyboardInterrupt as interrupt:
            if folder.finished:
                interrupt.add_note(KEPT)
            raise


def _write_elsewhere(
    plan: Plan,
    target: Destination,
    key: str,
    files: Sequence[str],
    work: Workers | Ray,
    *,
    overwrite: bool,
    resume: bool,
) -> None:
    """Writes the unfinished shards in other processes, of this machine or of a cluster."""
    target.require_shared()
    with target.begin(key, files, overwrite=overwrite, resume=resume) as folder:
        finished = {*folder.finished}
        folder.leave()
    with bytes_bar(f"writing {target.name}", plan.nbytes) as advance:
        for shard in plan.shards:
            advance(shard.nbytes if shard.name in finished else 0)
        unfinished = [shard for shard in plan.shards if shard.name not in finished]
        try:
            if isinstance(work, Ray) and unfinished:  # a connection takes seconds
                write_in_ray(current_call(), unfinished, advance)
            elif isinstance(work, Workers):
                write_in_workers(current_call(), unfinished, work, advance)
        except BaseException:
            with _noting_what_stays(target.finish(key, files, overwrite=overwrite, trusted=True)):
                raise  # keeps or deletes what is finished, as after an error of this process


def _require_parts(plan: Plan, folder: UnfinishedOutput, target: Destination) -> None:
    """Raises OutputFailed if the parts have not written all shards."""
    if missing := [shard.name for shard in plan.shards if shard.name not in folder.finished]:
        raise OutputFailed(
            f"shards of `{target}` are missing ({len(missing)} of {len(plan.shards)}), such as `{missing[0]}`",
            hint="run the parts that failed again, with the same options and into the same place, then finish; or "
            "complete it alone with `--resume`",
        )


def _write_shards(plan: Plan, folder: UnfinishedOutput, name: str, sources: Stats) -> None:
    """Writes the unfinished shards; `name` is the title of the progress bar."""
    crowded = not source_file.fits(plan.nbytes)
    with bytes_bar(f"writing {name}", plan.nbytes) as advance, checked_reading() as checks:
        for shard in plan.shards:
            if shard.name in folder.finished:
                advance(shard.nbytes)
                continue
            entry = folder.make_shard(shard, advance)
            checks.finish()
            for source, before in sources.items():
                if (source.suffix in WEIGHT_SUFFIXES or len(sources) == 1) and not (
                    source.exists() and _identity(source) == before
                ):
                    problem = f"`{source.name}` changed while it was read"
                    raise InputRefused(problem, hint="make sure that nothing writes to it, and run again")
            folder.record(shard.name, entry)
            if crowded:
                folder.release(shard.name, [*sources])
    warn_all(UNCHECKED.format(name) for name in sorted(checks.unchecked))


def _same_as_before(
    plan: Plan,
    output: Destination,
    steps: Sequence[dict[str, Any]],
    more: Mapping[str, bytes | Link],
    work: Work | None,
) -> Manifest:
    """The manifest of a complete folder, if this run would make the same one.

    The shards are computed again and compared by their sha256: the manifest has no place and no time of its inputs, and
    another checkpoint may have the same name and an older file. Of a part only its own are.
    """
    manifest = output.manifest()
    small = {
        name: file_entry(content) if isinstance(content, bytes) else link_entry(content.target)
        for name, content in {**plan.small_files, **more}.items()
    }
    given, before = json.loads(json.dumps(list(steps))), manifest.steps
    same = before == given and small.items() <= manifest.files.items()
    other = _other_shard(plan, output, manifest, work) if same else ""
    if other or not same:
        why = "it was made from another input or with other options" + (f": `{other}` would differ" if other else "")
        if before[: len(given)] == given != before:
            why = f"`{before[-1].get('command')}` has changed it since"
        problem = f"`{output}` is complete, but {why}"
        raise InputRefused(problem, hint="choose another `-o`, or give `--overwrite` to make it again")
    output.tidy()
    say(f"`{output}` is complete: nothing to resume")
    return replace(manifest, found=True)


def _other_shard(plan: Plan, output: Destination, manifest: Manifest, work: Work | None) -> str:
    """The first planned shard that a complete folder has otherwise, or not at all; of a part's own; empty if none."""
    if missing := [shard.name for shard in plan.shards if shard.name not in manifest.files]:
        return missing[0]
    if isinstance(work, Shards):  # the first process has compared them
        return ""
    mine = work.chosen(plan.shards) if isinstance(work, Part) else {shard.name for shard in plan.shards}
    shards = [shard for shard in plan.shards if shard.name in mine]
    with (
        bytes_bar(f"comparing {output.name}", sum(shard.nbytes for shard in shards)) as advance,
        checked_reading() as checks,
        failing_safely(),
    ):
        for shard in shards:
            # a clone was not read when it was made
            made = manifest.files[shard.name].get("sha256") or _sha256(output.address / shard.name)
            if shard.copy_of:
                found = _sha256(shard.copy_of)
                advance(shard.nbytes)
            else:
                content = ShardContent(shard)
                for block in content.blocks():
                    advance(len(block))
                found = content.entry["sha256"]
            checks.finish()
            if found != made:
                return shard.name
    return ""


def _sha256(path: Path) -> str:
    with source_file.open_source(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_output(
    plan: Plan,
    output: Place,
    overwrite: bool,
    inputs: Sequence[Path],
    *,
    resume: bool = False,
    work: Work | None = None,
) -> None:
    """Checks before a run that its output can be written; for a worker the first process has checked.

    Raises InputRefused if `output` exists and may not be replaced (with `resume` it may be complete), lies in one of
    the `inputs` that the run reads, or no space is left.
    """
    if isinstance(work, Shards):  # a disk that has filled up since is a failed write, which can be resumed
        return
    target = destination_of(output)
    target.require_free(overwrite, inputs, resume=resume)
    if not (resume and not overwrite and target.is_complete()):
        target.require_space(plan)


def _fingerprint(plan: Plan, steps: Sequence[dict[str, Any]], stats: Sequence[Identity]) -> str:
    """A hash of everything that determines the output's bytes."""
    layout = [[(name, t.dtype.name, t.shape) for name, t in shard.tensors.items()] for shard in plan.shards]
    config = plan.small_files.get(CONFIG, b"").decode()  # numbers of heads, say, which may come from outside of `stats`
    return hashlib.sha256(json.dumps([list(steps), layout, stats, plan.measured, config]).encode()).hexdigest()


SAMPLE = 4096  # bytes of a source that are part of the fingerprint, from its middle


def _sample(source: Path) -> str:
    """Some content of a local file: those of two models have one size, and in an archive perhaps one time.

    None of code, which stays closed where nobody trusts it.
    """
    if source.suffix == ".py" or mirror.e_tag(source) is not None:
        return ""
    with suppress(OSError), open(source, "rb") as file:  # what is not read need not be readable
        file.seek(max(0, (source.stat().st_size - SAMPLE) // 2))
        return hashlib.sha256(file.read(SAMPLE)).hexdigest()
    return ""


def _identity(source: Path) -> Identity:
    """What changes with a source: its time, and in a store its ETag."""
    tag, found = mirror.e_tag(source), source.stat()
    return source.name, found.st_size, found.st_mtime_ns, *([tag] if tag else [])
