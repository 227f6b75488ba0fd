"""llmconv.json, the manifest of an output: the steps that made it, and the size and sha256 of every file.

    {
      "manifest_version": 1,
      "steps":  [{"command": "to-hf", "llmconv": "0.1.0", "source": "ep0-ba2-rank0.pt", "options": {…}}, …],
      "files":  {"model.safetensors": {"bytes": 123, "sha256": "…"}, …},
      "graphs": {"prefill": {"file": "prefill.onnx", …}, …},   # once exported
      "verified": {                                            # once verified: the verdict of the last `llmconv verify`
        "verdict": "pass",                                     # or fail, inconclusive
        "method": "whole",
        "suite": "quick",
        "only": ["batch of 3"],                                # if scenarios were selected
        "checks":   {"passed": 415, "failed": 0, "skipped": 0},
        "unseen":   [],
        "reference": "merged",
        "versions": {"llmconv": "0.1.0", "onnxruntime": "1.31.0", …},
        "graphs":   {"decode.onnx": "<sha256>", …},
        "weights":  {"model.safetensors": {"bytes": 123, "header_sha256": "…", "sha256": "…"}, …},
        "configs":  {"config.json": "<sha256>"}                # with those of modules and clients, if they are there
      }
    }

It contains no time, host or absolute path, so the same input gives the same bytes. `sha256` of a verified weight file
is there only if all of the file was compared with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from llmconv.checkpoint import JSON_BYTES, own_file, parse_object, read_small
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.safe_folder import Folder, is_inner
from llmconv.files.safetensors_file import HEADER_LIMIT
from llmconv.files.source_file import open_source
from llmconv.files.sources import source_name
from llmconv.not_a_model_folder import MANIFEST_BYTES
from llmconv.version import __version__

MANIFEST = "llmconv.json"
VERIFIED = "verified"  # key of the recorded verdict


@dataclass
class Manifest:
    """The content of `llmconv.json`, as in the module's docstring."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest_version: int = 1
    found: bool = False  # the folder was complete before the run, which wrote nothing; not stored in the file
    verified: Any = None  # the recorded verdict as it is in the file, unchecked; None without one

    def encode(self) -> bytes:
        """The file's bytes: stable key order, so equal manifests are equal files."""
        content = {
            "manifest_version": self.manifest_version,
            "steps": self.steps,
            "files": dict(sorted(self.files.items())),
            "graphs": self.graphs,
            **({VERIFIED: self.verified} if self.verified is not None else {}),
        }
        return (json.dumps(content, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, empty if there is none; raises MalformedInput for other forms, or a file outside."""
    if not (folder / MANIFEST).is_file():
        return Manifest()
    return parse_manifest(read_small(own_file(folder, MANIFEST), JSON_BYTES))


def parse_manifest(content: bytes) -> Manifest:
    """The manifest with this content; raises MalformedInput as `read_manifest`."""
    fields = parse_object(content, MANIFEST)
    steps, files, graphs = (fields.get(name, empty) for name, empty in (("steps", []), ("files", {}), ("graphs", {})))
    if not isinstance(steps, list) or not all(isinstance(done, dict) for done in steps):
        _refuse("`steps` is not a list of objects")
    for name, entries in (("files", files), ("graphs", graphs)):
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            _refuse(f"`{name}` is not a map of objects")
    for name, entry in files.items():
        if not is_inner(name) or not name.isprintable():
            _refuse(f"`files` names {name[:80]!r}, which is not a file of the folder")
        if not all(isinstance(entry.get(field, empty), kind) for field, kind, empty in FIELDS):
            _refuse(f"the entry of `{name[:80]}` has a field of the wrong type")
    for entry in graphs.values():  # with files of its own, of its stages, of a prefix
        stages = entry.get("stages", [entry])
        parts = [*(stages if isinstance(stages, list) else [None]), entry.get("prefix", {})]
        if not all(isinstance(part, dict) and _is_plain(part.get("file", "x")) for part in parts):
            _refuse("`graphs` does not name plain files")
    return Manifest(steps, files, graphs, verified=fields.get(VERIFIED))


FIELDS: tuple[tuple[str, type, Any], ...] = (
    ("bytes", int, 0),
    ("sha256", str, ""),
    ("link", str, ""),
    ("clone_of", str, ""),
)


def _is_plain(name: Any, may_nest: bool = False) -> bool:
    return isinstance(name, str) and is_inner(name) and (may_nest or "/" not in name) and name.isprintable()


def _refuse(problem: str) -> NoReturn:
    raise MalformedInput(f"`{MANIFEST}` is not a valid manifest: {problem}", hint="remove it, or make the folder again")


def steps_of_weights(folder: Path) -> list[dict[str, Any]]:
    """The steps that made the weights in `folder`, without exports, whose graphs are not copied with the weights."""
    return [done for done in read_manifest(folder).steps if done.get("command") != "export"]


def step(command: str, source: Path, **options: Any) -> dict[str, Any]:
    """One entry of `steps`, without options that are None, False or empty.

    Only the name of `source` is recorded; for a model of the hub `org/name@commit`.
    """
    given = {name: value for name, value in options.items() if value not in (None, (), False)}
    return {"command": command, "llmconv": __version__, "source": source_name(source), "options": given}


def file_entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def link_entry(target: str) -> dict[str, Any]:
    return {"link": target}


def is_file_entry(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value, such as one of a journal, has the form of `file_entry`."""
    if not isinstance(value, dict) or value.keys() != {"bytes", "sha256"}:
        return False
    return type(value["bytes"]) is int and _is_sha256(value["sha256"])


VERDICTS = ("pass", "fail", "inconclusive")
COUNTS = ("passed", "failed", "skipped")
SHA256 = re.compile("[0-9a-f]{64}")
WORD = re.compile(r"[a-z][a-z0-9_-]{0,39}")
TEXT_LIMIT = 1000
ITEM_LIMIT = 10_000
NUMBER_LIMIT = 2**53  # larger integers are not exact in every JSON reader


@dataclass(frozen=True)
class RecordedVerdict:
    """The verdict of a run of `verify`, and the files that it judged, with the fields of the module's docstring.

    `only` is empty if all scenarios of the suite were run; `checks` counts those that passed, failed and were skipped;
    `unseen` are kinds of faults that the run could not show; `reference` is the model that the graphs were compared
    with.
    """

    verdict: str
    method: str
    suite: str
    only: tuple[str, ...]
    checks: Mapping[str, int]
    unseen: tuple[str, ...]
    reference: str
    versions: Mapping[str, str]
    graphs: Mapping[str, str]
    weights: Mapping[str, WeightFile]
    configs: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest; equal for equal runs."""
        return {
            "verdict": self.verdict,
            "method": self.method,
            "suite": self.suite,
            **({"only": list(self.only)} if self.only else {}),
            "checks": {name: self.checks[name] for name in COUNTS},
            "unseen": list(self.unseen),
            "reference": self.reference,
            "versions": dict(self.versions),
            "graphs": dict(sorted(self.graphs.items())),
            "weights": {name: file.as_dict() for name, file in sorted(self.weights.items())},
            **({"configs": dict(sorted(self.configs.items()))} if self.configs else {}),
        }

    def contains(self, other: RecordedVerdict) -> bool:
        """Whether another verdict says less of the same files: both pass, and its run made some of the checks."""
        same = ("verdict", "reference", "versions", "graphs", "configs")
        if self.verdict != "pass" or any(getattr(self, name) != getattr(other, name) for name in same):
            return False
        files = self.weights.keys() == other.weights.keys() and all(
            one in (self.weights[name], WeightFile(self.weights[name].bytes, self.weights[name].header_sha256))
            for name, one in other.weights.items()
        )
        chosen = not self.only or {*other.only} <= {*self.only} != set()
        return files and chosen and other.checks["passed"] < self.checks["passed"]

    def changed_files(self, folder: Path) -> list[str]:
        """Names of judged files that are missing or have changed; of weights only size and header are compared."""
        whole = {**self.graphs, **self.configs}
        changed = [name for name, digest in whole.items() if graph_sha256(folder / name) != digest]
        for name, recorded in self.weights.items():
            found = weight_file(folder / name)
            if not found or (found.bytes, found.header_sha256) != (recorded.bytes, recorded.header_sha256):
                changed.append(name)
        return changed


def parse_verdict(content: object) -> RecordedVerdict:
    """The verdict in the value of `verified`; ignores unknown keys; raises MalformedInput for another form."""
    entry = _object(content, "verified")
    if entry.get("verdict") not in VERDICTS:
        _refuse_verdict("verdict")
    checks = _map(entry, "checks", _is_number)
    if checks.keys() != {*COUNTS}:
        _refuse_verdict("checks")
    stored = (".safetensors", ".gguf")
    weights = _map(entry, "weights", lambda value: isinstance(value, dict), stored)
    return RecordedVerdict(
        entry["verdict"],
        _word(entry, "method"),
        _word(entry, "suite"),
        _texts(entry, "only"),
        checks,
        _texts(entry, "unseen"),
        _text(entry.get("reference"), "reference"),
        _map(entry, "versions", _is_text),
        _map(entry, "graphs", _is_sha256, ".onnx"),
        {name: _weight_file(value) for name, value in weights.items()},
        _map({"configs": {}} | entry, "configs", _is_sha256, ".json"),
    )


def _weight_file(value: dict[str, Any]) -> WeightFile:
    size, header, whole = value.get("bytes"), value.get("header_sha256"), value.get("sha256")
    if not _is_number(size) or not _is_sha256(header) or not (whole is None or _is_sha256(whole)):
        _refuse_verdict("weights")
    return WeightFile(size, header, whole or "")


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > ITEM_LIMIT:
        _refuse_verdict(name)
    return value


def _map(
    entry: dict[str, Any], name: str, fits: Callable[[Any], bool], suffix: str | tuple[str, ...] = ""
) -> dict[str, Any]:
    """A map of names to values that fit; the names of files, which end with `suffix`, are plain."""
    found = _object(entry.get(name), name)
    if not all(_is_text(key) and fits(value) for key, value in found.items()):
        _refuse_verdict(name)
    may_nest = suffix != ".onnx"  # `2_Dense/model.safetensors` and `2_Dense/config.json`, a module after the model
    if suffix and not all(_is_plain(key, may_nest) and key.endswith(suffix) for key in found):
        _refuse_verdict(name)
    return found


def _texts(entry: dict[str, Any], name: str) -> tuple[str, ...]:
    found = entry.get(name, [])
    if not isinstance(found, list) or len(found) > ITEM_LIMIT:
        _refuse_verdict(name)
    return tuple(_text(value, name) for value in found)


def _text(value: Any, name: str) -> str:
    return value if _is_text(value) else _refuse_verdict(name)


def _word(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) and WORD.fullmatch(value) else _refuse_verdict(name)


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= TEXT_LIMIT


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= NUMBER_LIMIT


def _is_sha256(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _refuse_verdict(name: str) -> NoReturn:
    raise MalformedInput(f"invalid `{name}` in the recorded verdict", hint="run `llmconv verify` again")


@dataclass(frozen=True)
class WeightFile:
    """What identifies a safetensors file without its data."""

    bytes: int  # size of the file
    header_sha256: str  # sha256 of the 8 bytes of the header's length and of the header
    sha256: str = ""  # of the whole file; empty if it was not computed

    def as_dict(self) -> dict[str, Any]:
        whole = {"sha256": self.sha256} if self.sha256 else {}
        return {"bytes": self.bytes, "header_sha256": self.header_sha256, **whole}


def graph_sha256(path: Path) -> str:
    """The sha256 of a file; empty if it is not a regular file, or cannot be read."""
    try:
        if not path.is_file():
            return ""
        with open_source(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def weight_file(path: Path) -> WeightFile | None:
    """Identity of a safetensors file, or of a GGUF file by a sample; None if it has no header, or cannot be read."""
    try:
        if not path.is_file():
            return None
        if path.suffix == ".gguf":
            from llmconv.files.weight_ranges import sampled_sha256  # noqa: PLC0415 - few folders have such files

            return WeightFile(path.stat().st_size, sampled_sha256(path))
        size = path.stat().st_size
        with open_source(path) as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(HEADER_LIMIT, size - 8):
                return None
            return WeightFile(size, hashlib.sha256(prefix + file.read(length)).hexdigest())
    except OSError:
        return None


WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
TICK = 1000  # how much younger the new file is, in ns


def record_in_manifest(folder: Path, key: str, value: dict[str, Any]) -> str:
    """Sets `key` in the manifest of `folder` in one step, unless it has it; the reason if it cannot, else empty."""
    try:
        with Folder.open(folder) as home:
            if (found := home.find(MANIFEST)) is None or not stat.S_ISREG(found.st_mode):
                return "it is not a regular file"
            if not found.st_mode & WRITABLE:
                return "it is write-protected"
            if (old := home.read(MANIFEST, MANIFEST_BYTES)) is None:
                return "it cannot be read"
            new = (json.dumps({**parse_object(old, MANIFEST), key: value}, indent=2) + "\n").encode()
            if len(new) > MANIFEST_BYTES:
                return "it would be too large"
            return "" if new == old else _replaced(home, new, found)
    except OSError as error:
        return error.strerror or str(error)
    except InputRefused as problem:
        return problem.message


def _replaced(home: Folder, content: bytes, found: os.stat_result) -> str:
    home.sweep()
    with home.begin(MANIFEST) as new:
        new.write(content)
        os.fchmod(new.file.fileno(), stat.S_IMODE(found.st_mode))
        # `--resume` and `push` compare the age of the manifest with that of other files; copying tools see a new file
        os.utime(new.file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns + TICK))
        new.sync()
        now = home.find(MANIFEST)
        known = (found.st_mtime_ns, found.st_size)
        if now is None or not os.path.samestat(now, found) or (now.st_mtime_ns, now.st_size) != known:
            return "another process changed it meanwhile"
        new.place()
    home.sync()
    return ""


GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}
# files of graphs without a cache, by role
SINGLE_PASS_FILES = {"scoring": "scoring.onnx", "embed": "model.onnx", "classify": "model.onnx", "rerank": "model.onnx"}
EMBEDDINGS_ROLE = "embeddings"  # the role in a manifest of a separate embedding graph, see `EmbeddingGraph`
EMBEDDINGS, VISION = "embeddings.onnx", "vision.onnx"  # their files
MTP, MTP_ROLE = "mtp.onnx", "mtp"  # the graph of an MTP head, and its role in a manifest
VISION_ROLE = "vision"  # the role in a manifest of the graph of a vision tower, see `VisionGraph`


@dataclass(frozen=True)
class PrefixEntry:
    """The tuned prefix that a graph inserts before the prompt."""

    file: str  # safetensors file with the trained tensor and the keys and values computed from it
    kind: str  # training method: `prefix_tuning`, `soft_prompt` or `pre_caches`
    length: int  # number of virtual tokens, by which the cache is longer than the prompt
    first_position: int  # position of the prompt's first token


@dataclass(frozen=True)
class GraphEntry:
    """One graph of a folder."""

    role: str  # `prefill`, `decode` or `unified`
    files: tuple[str, ...]  # its file, or the files of its stages in order
    last_logits: bool | None = None  # whether it returns logits of the last position only; None without a manifest
    postprocess: str = ""  # `argmax` or `topk:K` if it returns tokens and scores; empty if it returns logits
    prefix: PrefixEntry | None = None  # its tuned prefix, if any
    # extra inputs of the family that it does not have, because they always have their default
    fixed_inputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the graph in reports: its file, or `prefill-*-of-2.onnx` for stages."""
        return self.files[0] if len(self.files) == 1 else self.files[0].replace("-1-", "-*-")

    def paths(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.files]

    def content_key(self, folder: Path) -> object:
        """Equal for graphs in a folder with the same bytes, and the same entry except for the role."""
        digests = tuple(hashlib.sha256(path.read_bytes()).digest() for path in self.paths(folder) if path.is_file())
        return digests, replace(self, role="", files=())


def graph_entries(folder: Path) -> list[GraphEntry]:
    """The decoder graphs that keep a cache, from the manifest, or by usual file names; raises MalformedInput."""
    if not (listed := read_manifest(folder).graphs):
        found = {role: name for role, name in GRAPH_FILES.items() if (folder / name).is_file()}
        return [GraphEntry(role, (name,)) for role, name in found.items()]
    others = {EMBEDDINGS_ROLE, VISION_ROLE, MTP_ROLE, *SINGLE_PASS_FILES}
    return [_read(role, content) for role, content in listed.items() if role not in others]


def single_pass_entries(folder: Path) -> list[GraphEntry]:
    """The graphs of a folder without a cache, from its manifest; raises MalformedInput for an invalid entry."""
    return [_read(role, content) for role, content in read_manifest(folder).graphs.items() if role in SINGLE_PASS_FILES]


def mtp_entry(folder: Path) -> GraphEntry | None:
    """The graph of the MTP head of a folder, from its manifest; None without one; raises MalformedInput."""
    content = read_manifest(folder).graphs.get(MTP_ROLE)
    return _read(MTP_ROLE, content) if content else None


def _read(role: str, content: dict[str, Any]) -> GraphEntry:
    """An entry of a manifest, which has only plain names of files, but need not have all that it must."""
    files = tuple(stage.get("file") for stage in content.get("stages", [content]))
    if not files or None in files:
        _invalid_entry(role, content.get("stages"))
    postprocess, fixed = content.get("postprocess", ""), content.get("fixed_inputs", [])
    if not isinstance(postprocess, str):
        _invalid_entry(role, postprocess)
    if not isinstance(fixed, list) or not all(isinstance(name, str) for name in fixed):
        _invalid_entry(role, fixed)
    prefix = None
    if (found := content.get("prefix")) is not None:
        length, first = found.get("length"), found.get("first_position")
        if found.keys() != {"file", "kind", "length", "first_position"} or not isinstance(length, int) or length < 1:
            _invalid_entry(role, found)
        if first not in (0, length):
            _invalid_entry(role, found)
        prefix = PrefixEntry(found["file"], str(found["kind"]), length, first)
    return GraphEntry(role, files, bool(content.get("last_logits")), postprocess, prefix, tuple(fixed))


def _invalid_entry(role: str, found: object) -> NoReturn:
    problem = f"invalid entry of the {role} graph in the manifest: {found!r}"
    raise MalformedInput(problem, hint="run `llmconv export` again")


def files_of(entry: dict[str, Any]) -> list[str]:
    parts = [*entry.get("stages", [entry]), entry.get("prefix", {})]
    return [part["file"] for part in parts if "file" in part]


def existing_files(
    folder: Path, recorded: Mapping[str, Any], roles: Collection[str], more: Sequence[str] = ()
) -> list[str]:
    """The graph files of these roles, by recorded manifest entries, and those of `more`, that a folder has already."""
    names = [*(name for role in roles if role in recorded for name in files_of(recorded[role])), *more]
    return [name for name in names if os.path.lexists(folder / name)]
