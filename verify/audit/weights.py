"""The weight audit: every initializer contains the tensor that it is named after, whatever the outputs are.

An initializer of an exported graph refers to a safetensors file, an offset and a length. So a wrong reference is found
in the file's header, without running the graph; weights are read only where the graph contains a copy, or where the
reference is another folder.

Notes are made on weights that hide differences: with NaN, infinity, or matrices of zeros a graph and the eager model
agree on their results, whatever the graph computes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import transformers

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused
from llmconv.files.safetensors_file import RANGES, read_exactly, read_header
from llmconv.files.weight_ranges import AdjustedTensor, Mapped
from llmconv.output.manifest import (
    EMBEDDINGS,
    MANIFEST,
    VISION,
    GraphEntry,
    mtp_entry,
    read_manifest,
    single_pass_entries,
)
from llmconv.runtime.extra_inputs import is_factor
from llmconv.runtime.onnxruntime.guard import external_fields, inner_tensors, is_external
from llmconv.tensors import Array, LazyTensor, lists_by_key
from llmconv.verify.results import Check, audited

AS_RECORDED = "sha256 as in the manifest"
"""Detail of the check of a file that was read in full and has the recorded sha256."""

READERS = 2  # files that are hashed at a time

MAPPED = (".safetensors", ".gguf")  # ends of the names of files that graphs map

ByteSpan = tuple[str, int, int]  # file name, offset and length in bytes


@dataclass(frozen=True)
class WeightSource:
    """The weights that the graphs of a folder may refer to."""

    folder: Path
    spans: Mapping[ByteSpan, str]  # names of tensors, by span in a file
    reference: Mapping[str, LazyTensor]  # tensors of the model by name
    in_place: bool  # the folder is the reference
    # names of keys and values of prefixes, by span in a file
    prefixes: Mapping[ByteSpan, str] = field(default_factory=dict)
    stored: Mapping[str, LazyTensor] = field(default_factory=dict)  # tensors of the folder by name

    @classmethod
    def of(cls, folder: Path, reference: Path, prefixes: Iterable[str] = ()) -> WeightSource:
        """Reads the headers of both folders; `prefixes` are names of prefix files in the folder of the graphs.

        Raises InputRefused: the reference has no safetensors weights.
        """
        try:
            tensors: Mapping[str, LazyTensor] = open_weights(folder)
        except InputRefused:
            tensors = {}
        spans = {span_of(tensor): name for name, tensor in tensors.items() if isinstance(tensor, Mapped)}
        in_place = folder.resolve() == reference.resolve()
        prefixed = {
            span_of(tensor): name
            for file in prefixes
            if (folder / file).is_file()
            for name, tensor in read_header(folder / file).tensors.items()
        }
        return cls(folder, spans, tensors if in_place else open_weights(reference), in_place, prefixed, tensors)


def span_of(tensor: Mapped) -> ByteSpan:
    return tensor.location, tensor.offset, tensor.nbytes


def audit_ranges(folder: Path) -> list[Check]:
    """Whether the index of ranges of a folder and its configuration are those of its GGUF file; none without index."""
    if not (folder / RANGES).is_file():
        return []
    from llmconv.convert.opening import open_training  # noqa: PLC0415 - few folders have such a file

    mapped = {name: one for name, one in open_weights(folder).items() if isinstance(one, Mapped)}
    opened = open_training(next(iter(mapped.values())).path, "gguf")
    wanted = {name: _place(one) for name, one in opened.items() if isinstance(one, Mapped)}
    found = {name: _place(one) for name, one in mapped.items()}
    odd = sorted(
        {name for name, place in {**wanted, **found}.items() if wanted.get(name) != found.get(name) or not place}
    )
    config = read_json(folder / "config.json")
    fields = [name for name, value in opened.config.items() if config.get(name) != value]
    problems = [f"`{name}` is not where its file has it" for name in odd]
    problems += [f"`{name}` of `config.json` is not that of the file" for name in sorted(fields)]
    return [audited("weights", RANGES, problems, f"{len(found)} tensors are where their file has them")]


def _place(tensor: Mapped) -> tuple[object, ...]:
    changes = (tensor.pairs, tensor.added) if isinstance(tensor, AdjustedTensor) else (0, 0.0)
    return tensor.path.name, tensor.offset, tensor.dtype.name, tensor.shape, changes


def audit_files(folder: Path) -> list[Check]:
    recorded = {
        name: entry
        for name, entry in read_manifest(folder).files.items()
        if name.endswith(".safetensors") and Path(name).name == name and (folder / name).is_file()
    }
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(_audit_file, (folder / name for name in recorded), recorded.values())
        results = zip(recorded, found, strict=True)
        return [Check("weights", name, "", verdict=verdict, detail=detail) for name, (verdict, detail) in results]


def _audit_file(path: Path, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Verdict and detail for one file; cloned files have no sha256, see `llmconv.files.copying`."""
    if "clone_of" in entry and path.stat().st_size == entry.get("bytes"):
        return "skip", f"cloned from `{entry['clone_of']}`, without a sha256"
    with open(path, "rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == entry.get("sha256")
    return ("pass", AS_RECORDED) if same else ("fail", "weights changed since the manifest was written")


def audit_weights(graph: str, model: onnx.ModelProto, source: WeightSource) -> tuple[Check, set[str]]:
    """A check of every initializer of a graph, and the names of the reference's tensors that the graph uses."""
    problems: list[str] = []
    used: set[str] = set()
    for tensor in model.graph.initializer:
        name, problem = _audit(tensor, source)
        used |= {name} if name else set()
        problems += [problem] if problem else []
    problems += hidden_weights(model)
    verdict = "fail" if problems else "pass" if used else "skip"
    detail = _text(problems, len(used)) or "no initializer is named after a tensor"
    return Check("weights", graph, "", verdict=verdict, detail=detail), used


def hidden_weights(model: onnx.ModelProto) -> list[str]:
    """Errors for weights outside the graph's initializers, and for initializers that callers may replace as inputs.

    Those of `export --lora-inputs` are empty: without an adapter they change nothing.
    """
    names = {tensor.name for tensor in model.graph.initializer}
    defaults = {tensor.name for tensor in model.graph.initializer if is_factor(tensor.name) and 0 in tensor.dims}
    replaceable = [port.name for port in model.graph.input if port.name in names - defaults]
    return [*misplaced_weights(model), *(f"`{name}` is both an initializer and an input" for name in replaceable)]


def misplaced_weights(model: onnx.ModelProto) -> list[str]:
    """Errors for weights in attributes, in subgraphs and in sparse form, which no audit compares with the model's."""
    found = [
        f"`{tensor.name}` is external data but not an initializer of the graph"
        for tensor in inner_tensors(model)
        if is_external(tensor)
    ]
    found += [f"`{sparse.values.name}` is a sparse initializer" for sparse in model.graph.sparse_initializer]
    return found


def _text(problems: Sequence[str], used: int) -> str:
    """The first problems; if there are many, the model is probably another one."""
    if len(problems) > max(5, used // 2):
        return f"{len(problems)} of {used} tensors are not the reference's: another model? First {problems[0]}"
    return "; ".join(problems[:5]) or (f"{used} tensors" if used else "")


def _audit(tensor: onnx.TensorProto, source: WeightSource) -> tuple[str, str]:
    """The reference's name of an initializer, empty if it is not one of its tensors; and an error, or empty."""
    named = reference_name(tensor.name, source.reference)
    fields = external_fields(tensor)
    if not fields.get("location", "").endswith(MAPPED):
        if fields and not named:
            return "", f"`{tensor.name}` maps `{fields.get('location')}`, but no tensor has its name"
        return named, _compare(tensor, named, source) if named else ""
    span = (fields["location"], int(fields.get("offset", 0)), int(fields.get("length", 0)))
    if source.prefixes.get(span) == tensor.name:  # their values are compared as part of the cache
        return "", ""
    if tensor.name.endswith("]"):
        return _audit_rows(tensor.name, span, source)
    bound = source.spans.get(span)
    if bound is None:
        return named, f"`{tensor.name}` maps bytes {span[1]}+{span[2]} of `{span[0]}`, which are not a tensor"
    if named and named != reference_name(bound, source.reference) and _is_another(source, named, bound):
        return named, f"`{tensor.name}` maps the bytes of `{bound}`"
    if problem := _layout_problem(tensor, source, bound):
        return named or bound, problem
    if not named and _differ(source, bound, bound):
        return bound, f"`{tensor.name}` maps `{bound}`, whose values differ from the reference"
    if named and not source.in_place:
        return named, _compare(tensor, named, source)
    return named or bound, ""


def _audit_rows(label: str, span: ByteSpan, source: WeightSource) -> tuple[str, str]:
    """The same for an initializer `name[row]` or `name[first:stop]`, which maps these rows of a tensor."""
    name, _, rest = label.removesuffix("]").rpartition("[")
    first, _, stop = rest.partition(":")
    named = reference_name(name, source.reference)
    whole = next((place for place, bound in source.spans.items() if bound == name), None)
    tensor = open_weights(source.folder).get(name) if whole else None
    if not named or whole is None or tensor is None or not first.isdigit() or (stop and not stop.isdigit()):
        return named, f"`{label}` is not part of a tensor"
    begin, end = int(first), int(stop or int(first) + 1)
    row = tensor.nbytes // max(1, tensor.shape[0])
    if end > tensor.shape[0] or span != (whole[0], whole[1] + row * begin, row * (end - begin)):
        return named, f"`{label}` maps bytes {span[1]}+{span[2]} of `{span[0]}`, which are not these rows"
    return named, f"`{name}` differs from the reference's values" if _differ(source, named, name) else ""


def reference_name(name: str, reference: Mapping[str, LazyTensor]) -> str:
    """The reference's tensor of that name, with or without the base model's prefix such as `model.`; else empty."""
    if name in reference:
        return name
    rest = name.partition(".")[2]
    if rest in reference and "." in rest:
        return rest
    return next((f"{prefix}.{name}" for prefix in ("model", "transformer") if f"{prefix}.{name}" in reference), "")


def tensors_of(model: onnx.ModelProto, source: WeightSource) -> dict[str, str]:
    """The tensor of the model that each initializer maps or is named after, by initializer; others are left out."""
    found: dict[str, str] = {}
    for tensor in model.graph.initializer:
        fields = external_fields(tensor)
        span = (fields.get("location", ""), int(fields.get("offset", 0)), int(fields.get("length", 0)))
        part = tensor.name.rpartition("[")[0] if tensor.name.endswith("]") else tensor.name
        name = source.spans.get(span) or reference_name(part, source.reference)
        found |= {tensor.name: name} if name else {}
    return found


def _layout_problem(tensor: onnx.TensorProto, source: WeightSource, bound: str) -> str:
    """An error if an initializer gives the bytes of a tensor another shape or element type; else empty."""
    stored = source.stored[bound]
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name
    if list(tensor.dims) != list(stored.shape) or kind != stored.dtype.name:
        return f"`{tensor.name}` maps `{bound}` {stored.dtype.name} {list(stored.shape)} as {kind} {list(tensor.dims)}"
    return ""


LAYER = re.compile(r"\.(\d+)\.")


def _is_another(source: WeightSource, named: str, bound: str) -> bool:
    """Whether the tensor `bound` is not `named`: a copy of equal values may stand for it, but not one of a layer."""
    layers = [match and match[1] for match in (LAYER.search(named), LAYER.search(bound))]
    return layers[0] != layers[1] or _differ(source, named, bound)


def _differ(source: WeightSource, named: str, bound: str) -> bool:
    """Whether the folder's tensor `bound` differs from the reference's tensor `named`."""
    if source.in_place:
        mine, other = source.reference[bound], source.reference[named]
    else:
        mine = source.stored[bound]
        found = reference_name(named, source.reference)
        if not found:
            return False
        other = source.reference[found]
    if mine.shape != other.shape:
        return True
    return not all(same_values(mine.rows(*rows), other.rows(*rows)) for rows in mine.blocks())


def _compare(tensor: onnx.TensorProto, named: str, source: WeightSource) -> str:
    values = initializer_values(tensor, source.folder)
    wanted = source.reference[named].read()
    if values is None:
        return ""
    if values.shape != wanted.shape and values.shape == wanted.T.shape:
        wanted = wanted.T
    if values.shape != wanted.shape:
        return f"shape mismatch for `{tensor.name}`: expected {list(wanted.shape)}, got {list(values.shape)}"
    return "" if same_values(values, wanted) else f"`{tensor.name}` differs from the reference's values"


def initializer_values(tensor: onnx.TensorProto, folder: Path) -> Array | None:
    """The values of an initializer, inline or external; None for element types without a numpy dtype."""
    fields = external_fields(tensor)
    if not fields:
        return onnx.numpy_helper.to_array(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = int(np.prod(tensor.dims, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(count, dtype=np.uint8)
    with open(folder / fields["location"], "rb", buffering=0) as file:
        read_exactly(file.fileno(), raw.data, int(fields.get("offset", 0)), folder / fields["location"])
    return raw.view(dtype).reshape(tuple(tensor.dims))


def same_values(values: Array, wanted: Array) -> bool:
    """Whether the values are equal after casting the reference `wanted` to their dtype."""
    return np.array_equal(values, wanted.astype(values.dtype), equal_nan=values.dtype.kind == "f")


NAMED = 3  # maximum number of tensors that a note names
MATRIX = 2


def odd_weights(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """A note for each kind of odd tensor; reads the tensors block by block."""
    with ThreadPoolExecutor(READERS) as pool:  # reading and numpy's loops run without the interpreter's lock
        every = zip(tensors, pool.map(lambda tensor: list(_kinds(tensor)), tensors.values()), strict=True)
        found = lists_by_key((kind, name) for name, kinds in every for kind in kinds)
    return [_note(kind, names) for kind, names in found.items()]


def _kinds(tensor: LazyTensor) -> Iterator[str]:
    finite, empty = True, len(tensor.shape) >= MATRIX and tensor.nbytes > 0
    for start, stop in tensor.blocks():
        largest, infinity = _largest(tensor.rows(start, stop))
        finite, empty = finite and largest < infinity, empty and largest == 0
    if not finite:
        yield "NaN or infinity"
    if empty:
        yield "zeros only"


INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""The bits of infinity by dtype; those of finite numbers, without their sign, are smaller, and those of NaN larger."""


def _largest(block: Array) -> tuple[float, float]:
    """The largest bits of a number without its sign, and those of infinity; of other dtypes the numbers themselves."""
    infinity = INFINITY.get(block.dtype.name)
    if infinity is None:
        finite = block.dtype.kind in "biu" or bool(np.isfinite(block).all())
        return (float(block.any()) if finite else np.inf), np.inf
    kind = np.dtype(f"u{block.dtype.itemsize}")
    bits = np.ascontiguousarray(block).view(kind)
    return int((bits & kind.type(np.iinfo(kind).max >> 1)).max(initial=0)), infinity


def _note(kind: str, names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    verb = "contains" if len(names) == 1 else "contain"
    return f"{shown}{more} {verb} {kind}: faults in results that depend on it cannot be seen"


NAME = "graph file"  # name of the check in reports
UNLISTED = "is in the folder but not listed as one of its graphs; it was not verified"

WAY_OUT = "export again, or pass `--allow-changed` to verify it as it is"


def audit_graph_files(
    folder: Path, entries: Sequence[GraphEntry], models: Mapping[str, onnx.ModelProto], *, allow_changed: bool = False
) -> tuple[list[Check], list[str]]:
    """Compares every graph file with the manifest.

    `models`: the graphs by name; contains the graph of the embedding table if there is one. `allow_changed`: a changed
    file is a note instead of a failure. Returns a check for each graph with a recorded sha256, a skipped check for each
    unlisted graph file, and notes on allowed changes, on files without a sha256, and on another version of transformers
    than that of the export.
    """
    table = {name: [folder / name] for name in (EMBEDDINGS, VISION) if name in models}
    files = {**{entry.name: entry.paths(folder) for entry in entries}, **table}
    head = mtp_entry(folder)
    others = [*single_pass_entries(folder), *([head] if head else [])]  # which have checks of their own
    listed = {path.name for paths in (*files.values(), *(entry.paths(folder) for entry in others)) for path in paths}
    unlisted = sorted(path.name for path in folder.glob("*.onnx") if path.name not in listed)
    skipped = [Check(NAME, name, "", verdict="skip", detail=UNLISTED) for name in unlisted]
    if not (folder / MANIFEST).is_file():
        return skipped, [f"no `{MANIFEST}`: changes of the graphs after their export cannot be detected"]
    manifest = read_manifest(folder)
    recorded = manifest.files
    checks: list[Check] = []
    notes = _other_version(manifest.steps)
    for graph, paths in files.items():
        changed = [path.name for path in paths if _is_changed(path, recorded)]
        unknown = [path.name for path in paths if not _sha256(path, recorded)]
        notes += [
            f"`{name}` has no sha256 in `{MANIFEST}`: a change after its export cannot be detected" for name in unknown
        ]
        if changed and allow_changed:
            notes += [f"graph changed: {_names_text(changed)}; allowed"]
        elif changed:
            checks.append(
                Check(NAME, graph, "", verdict="fail", detail=f"graph changed: {_names_text(changed)}; {WAY_OUT}")
            )
        elif not unknown:
            checks.append(Check(NAME, graph, "", detail=AS_RECORDED))

    return [*checks, *skipped], notes


def _other_version(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note if the graphs are of another version of transformers, whose code for this model may differ."""
    options = [done.get("options") for done in steps if done.get("command") == "export"]
    traced = next((str(found.get("transformers") or "") for found in options[::-1] if isinstance(found, dict)), "")
    if traced in ("", transformers.__version__):
        return []
    here = f"the eager model is that of {transformers.__version__}: the two may compute this model differently"
    return [f"the graphs were traced from transformers {traced}, and {here}"]


def _is_changed(path: Path, recorded: Mapping[str, Mapping[str, Any]]) -> bool:
    expected = _sha256(path, recorded)
    if not expected:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() != expected


def _sha256(path: Path, recorded: Mapping[str, Mapping[str, Any]]) -> str:
    entry = recorded.get(path.name, {})
    return str(entry.get("sha256") or "") if isinstance(entry, dict) else ""


def _names_text(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    if len(quoted) == 1:
        return f"{quoted[0]} is not the graph that was exported (its sha256 differs)"
    return f"{', '.join(quoted)} are not the graphs that were exported (their sha256 differ)"
