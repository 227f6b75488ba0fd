"""Records the verdict of a verification in the manifest of the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from llmconv.errors import LlmconvError
from llmconv.files.hub import source_name
from llmconv.output.manifest import MANIFEST, VERIFIED, read_manifest
from llmconv.output.recorded_verdict import (
    RecordedVerdict,
    WeightFile,
    graph_sha256,
    parse_verdict,
    record_in_manifest,
    weight_file,
)
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors
from llmconv.runtime.onnxruntime.vision import VISION
from llmconv.verify.audit.weights import AS_RECORDED
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.images import FEATURES
from llmconv.verify.results.report import LINE_LIMIT, Report, clean


@contextmanager
def recording(
    verified: VerifiedFolder,
    reference: Path,
    report: Report,
    only: Sequence[str] = (),
    *,
    hashed: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Records the verdict in `llmconv.json` when the block ends without an error.

    The files are identified before the block, so that one which changes during the run is out of date afterwards. A
    folder without a manifest stays as it is; a manifest that cannot be written is a note in the report.

    Args:
        verified: the folder.
        reference: the model that its graphs are compared with.
        report: to be complete when the block ends.
        only: names of the selected scenarios.
        hashed: sha256 of weight files, by name, of which the run read all bytes; it may be filled within the block.
    """
    if not (verified.path / MANIFEST).is_file():
        yield
        return
    graphs = {path.name: graph_sha256(path) for path in _graph_files(verified)}
    weights = {name: weight_file(verified.path / name) for name in _weight_files(verified)}
    recorded = {name: str(entry.get("sha256", "")) for name, entry in read_manifest(verified.path).files.items()}
    yield
    known = {name: recorded.get(name, "") for name in _unchanged(report)} | {**(hashed or {})}
    files = {name: WeightFile(f.bytes, f.header_sha256, known.get(name, "")) for name, f in weights.items() if f}
    judged = {name: sha256 for name, sha256 in graphs.items() if name != VISION or _saw_images(report)}
    verdict = _verdict(report, reference, only, judged, files)
    if (earlier := _recorded(verified.path)) and earlier.contains(verdict):
        report.notes.append(f"`{MANIFEST}` keeps the verdict on these files by {earlier.checks['passed']} checks")
        return
    if problem := record_in_manifest(verified.path, VERIFIED, verdict.as_dict()):
        report.notes.append(f"the verdict is not recorded in `{MANIFEST}`: {problem}")


def _recorded(folder: Path) -> RecordedVerdict | None:
    """The verdict that the manifest has; None if there is none, or none of its form."""
    with suppress(LlmconvError):
        found = read_manifest(folder).verified
        return None if found is None else parse_verdict(found)
    return None


def _verdict(
    report: Report,
    reference: Path,
    only: Sequence[str],
    graphs: Mapping[str, str],
    weights: Mapping[str, WeightFile],
) -> RecordedVerdict:
    verdicts = [check.verdict for check in report.checks]
    return RecordedVerdict(
        report.verdict,
        report.method,
        report.suite,
        tuple(only),
        {name: verdicts.count(key) for name, key in (("passed", "pass"), ("failed", "fail"), ("skipped", "skip"))},
        tuple(clean(text, LINE_LIMIT) for text in dict.fromkeys(report.unseen)),
        clean(source_name(Path(os.path.abspath(reference)))),
        report.versions,
        graphs,
        weights,
    )


def _graph_files(verified: VerifiedFolder) -> list[Path]:
    """All graph files, also those of stages, of an embedding table and of a vision tower."""
    parts = [verified.path / name for name in (EMBEDDINGS, VISION) if name in verified.models]
    return [*(path for entry in verified.entries for path in entry.paths(verified.path)), *parts]


def _saw_images(report: Report) -> bool:
    """Whether the vision tower ran: layer by layer it is skipped."""
    return any(check.name == FEATURES and check.verdict != "skip" for check in report.checks)


def _weight_files(verified: VerifiedFolder) -> set[str]:
    """Names of the safetensors files that the graphs map."""
    tensors = (tensor for model in verified.models.values() for tensor in external_tensors(model))
    names = {external_fields(tensor).get("location", "") for tensor in tensors}
    return {name for name in names if name.endswith(".safetensors")}


def _unchanged(report: Report) -> list[str]:
    """Names of the weight files whose sha256 the run compared with the manifest."""
    return [check.graph for check in report.checks if check.name == "weights" and check.detail == AS_RECORDED]
