"""Audits of a folder: checks that run no graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmconv.verify.audit.decisions.audit import audit_decisions, read_config
from llmconv.verify.audit.file_checksums import audit_graph_files
from llmconv.verify.audit.odd_weights import odd_weights
from llmconv.verify.audit.weights import WeightSource, audit_files, audit_weights
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.results.report import Checks, Report

Reads = Callable[[str], bool]


def read_all(name: str) -> bool:
    """The values of all tensors are looked at."""
    return True


def read_none(name: str) -> bool:
    """No values are looked at."""
    return False


def audit_folder(
    verified: VerifiedFolder, reference: Path, report: Report, *, allow_changed: bool, reads: Reads = read_all
) -> Checks:
    """The recorded files, every initializer, and the decisions in the graphs.

    Args:
        verified: the graphs.
        reference: the model's folder.
        report: receives notes.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
        reads: whether the values of a tensor of the model are looked at; the files are hashed if all are.
    """
    yield from audit_recorded_files(verified, report, allow_changed=allow_changed, hashes=reads is read_all)
    prefixes = [entry.prefix.file for entry in verified.entries if entry.prefix]
    source = WeightSource.of(verified.path, reference, prefixes)
    report.notes += odd_weights({name: tensor for name, tensor in source.reference.items() if reads(name)})
    used, config = set[str](), read_config(reference)
    for name, model in verified.models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        yield [check]
    models = verified.models.items()
    yield [audit_decisions(name, model, config, prefix=_prefix(verified, name)) for name, model in models]
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")


def audit_recorded_files(
    verified: VerifiedFolder, report: Report, *, allow_changed: bool, hashes: bool = True
) -> Checks:
    """The recorded files.

    Args:
        verified: the graphs.
        report: receives notes.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
        hashes: compare the sha256 of weight files, which reads all of them.
    """
    checks, notes = audit_graph_files(verified.path, verified.entries, verified.models, allow_changed=allow_changed)
    yield checks
    report.notes += notes
    report.unseen += ["graphs that are not the folder's own"] if any(c.verdict == "skip" for c in checks) else []
    if hashes:
        yield audit_files(verified.path)


def _prefix(verified: VerifiedFolder, graph: str) -> int:
    """Number of virtual tokens before a graph's input, as recorded in the manifest."""
    entries = [entry for entry in verified.entries if graph == entry.name and entry.prefix]
    return entries[0].prefix.length if entries and entries[0].prefix else 0
