"""What an export left in a folder: its graphs, from the manifest, and the codes that they map, from headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import open_shards
from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import read_header
from llmconv.not_a_model_folder import SINGLE, described
from llmconv.output.manifest import Manifest, RecordedVerdict, parse_verdict, read_manifest
from llmconv.tensors import LazyTensor

INDEX = "quantized.safetensors.index.json"
CODES, ZEROS = ".codes", ".zeros"
PARTS = (CODES, ".scales", ZEROS, ".smoothing", ".order")
"""Suffixes of the tensors that are stored instead of a weight, or with it."""

PRESETS = {"int8": 32, "int4": 32, "int4-mixed": 32, "int4-small": 128, "a8w8": 32}
"""Default block sizes by preset; other names are of methods, whose blocks are those of the model."""


@dataclass(frozen=True)
class GraphSummary:
    """A graph in the manifest."""

    role: str  # `prefill`, `decode`, `unified`, `embeddings`, or that of a graph without a cache, such as `embed`
    files: tuple[str, ...]  # its file, or those of its stages
    opset: int | None  # version of the standard operators; None if it is not recorded
    precision: str  # dtype that it computes in
    cache: str  # `growing`, `shared-buffer`, `static` or `none`; followed by ` int8` where keys and values are codes
    target: str  # provider of onnxruntime that it is for; empty for any
    extra_inputs: tuple[str, ...] = ()  # its inputs other than tokens, mask, positions and cache
    outputs: tuple[str, ...] = ()  # its outputs other than the cache
    lora_inputs: tuple[str, ...] = ()  # the modules that it takes LoRA factors for, as given to `--lora-inputs`
    prefix_tokens: int = 0  # number of virtual tokens that it puts before a prompt, see `--prefix`

    @property
    def line(self) -> str:
        opset = f", opset {self.opset}" if self.opset else ""
        target = f", for {self.target}" if self.target else ""
        cache = "no cache" if self.cache == "none" else f"{self.cache} cache"
        more = f", inputs {', '.join(self.extra_inputs)}" if self.extra_inputs else ""
        more += f", LoRA inputs for {', '.join(self.lora_inputs)}" if self.lora_inputs else ""
        more += f", a prefix of {self.prefix_tokens:,} tokens" if self.prefix_tokens else ""
        more += f", outputs {', '.join(self.outputs)}" if self.outputs not in ((), ("logits",)) else ""
        return f"{self.role}: {', '.join(self.files)}{opset}, {self.precision}, {cache}{target}{more}"


@dataclass(frozen=True)
class CodesSummary:
    """The quantized weights of a folder."""

    preset: str  # value of `--quant`, or the method of a model that was quantized already
    method: str  # how codes were chosen; empty if it is not recorded
    symmetric: bool  # there are no zero points
    calibrated: bool  # column weights or ranges come from a calibration text
    # number of weights by bits and size of a block, which is 0 for one scale per column
    matrices: Mapping[tuple[int, int], int]
    plain: int  # number of tensors that are not quantized
    parameters: int

    @property
    def line(self) -> str:
        how = [*filter(None, [self.method]), *["symmetric"] * self.symmetric, *["calibrated"] * self.calibrated]
        more = f" ({', '.join(how)})" if how else ""
        tensors = f"{self.plain:,} tensor{'s' * (self.plain != 1)} as {'they are' if self.plain != 1 else 'it is'}"
        return f"{self.preset}{more}: {described(self.matrices)}; {tensors}"

    def fields(self) -> dict[str, Any]:
        matrices = [{"bits": bits, "block": size, "count": count} for (bits, size), count in self.matrices.items()]
        return {**{name: value for name, value in asdict(self).items() if name != "parameters"}, "matrices": matrices}


USUAL = ("input_ids", "attention_mask", "position_ids")  # inputs of almost every graph, which are not shown
WITHOUT_CACHE = ("embeddings", "vision")  # roles of graphs whose entries declare no cache, because they never have one


def graphs_in(folder: Path) -> tuple[GraphSummary, ...]:
    """The graphs in the manifest of a folder; MalformedInput if it is invalid."""
    return tuple(_graph(role, entry) for role, entry in read_manifest(folder).graphs.items())


def layouts_in(folder: Path) -> tuple[str, ...]:
    """The clients that the last export into a folder was for; MalformedInput if the manifest is invalid."""
    found = _export_options(read_manifest(folder)).get("layouts")
    return tuple(str(name)[:40] for name in found) if isinstance(found, list) else ()


def _graph(role: str, entry: Mapping[str, Any]) -> GraphSummary:
    from llmconv.runtime.cache_names import is_past, is_present  # noqa: PLC0415 - imports onnxruntime

    form = entry.get("form")
    form = form if isinstance(form, dict) else {}
    files = [part["file"] for part in entry.get("stages", [entry]) if "file" in part]
    opset = entry.get("opset")
    usual = "none" if role in WITHOUT_CACHE else "growing"
    cache = _word(form, "cache", usual) + (f" {_word(form, 'kv_cache')}" if form.get("kv_cache") else "")
    return GraphSummary(
        role[:40],
        tuple(files),
        opset if isinstance(opset, int) else None,
        _word(entry, "precision", "float32"),
        cache,
        _word(form, "target"),
        tuple(name for name in _words(entry, "inputs") if name not in USUAL and not is_past(name)),
        tuple(name for name in _words(entry, "outputs") if not is_present(name)),
        _words(entry, "lora_inputs"),
        _prefix_tokens(entry),
    )


def _prefix_tokens(entry: Mapping[str, Any]) -> int:
    """The number of virtual tokens before a prompt; 0 if the field is something else."""
    prefix = entry.get("prefix")
    length = prefix.get("length") if isinstance(prefix, dict) else None
    return length if isinstance(length, int) else 0


def _word(fields: Mapping[str, Any], name: str, default: str = "") -> str:
    """A short text; the default if it is something else."""
    value = fields.get(name, default)
    return value if isinstance(value, str) and len(value) <= 40 and value.isprintable() else default


def _words(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Short texts; none if the field is not a list of them."""
    value = fields.get(name)
    return tuple(filter(None, (_word({"": one}, "") for one in value))) if isinstance(value, list) else ()


def quantized_tensors(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder of quantized graphs, as stored; MalformedInput for an invalid header or index."""
    if (folder / INDEX).is_file():
        return open_shards(folder, INDEX)
    if (folder / SINGLE).is_file():
        return dict(read_header(folder / SINGLE).tensors)
    raise MalformedInput(f"`{folder}` lacks `{INDEX}`, which lists its shards", hint="copy the folder again")


def codes_in(folder: Path, tensors: Mapping[str, LazyTensor]) -> CodesSummary:
    """The quantized weights of a folder, from its tensors as stored; MalformedInput for impossible shapes of codes."""
    options = _export_options(read_manifest(folder))
    preset = _word(options, "quant", "unknown")
    block = options.get("quant_block")
    size = block if isinstance(block, int) else PRESETS.get(preset)
    weights = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
    kinds = {name: _kind(name, tensors, size) for name in weights}
    plain = [name for name in tensors if not name.endswith(PARTS)]
    stored = sum(prod(tensors[name].shape) for name in plain)
    most = stored + sum(_elements(tensors[name + CODES], kinds[name], fewest=False) for name in weights)
    least = stored + sum(_elements(tensors[name + CODES], kinds[name], fewest=True) for name in weights)
    recorded = options.get("parameters")
    return CodesSummary(
        preset,
        _word(options, "method", "search" if preset.startswith("int4") else ""),
        options.get("symmetric") is True,
        "calibrate" in options,
        dict(Counter(kinds.values()).most_common()),
        len(plain),
        recorded if isinstance(recorded, int) and least <= recorded <= most else most,
    )


def _export_options(manifest: Manifest) -> Mapping[str, Any]:
    found: Iterator[Any] = (done.get("options") for done in reversed(manifest.steps) if done.get("command") == "export")
    options = next(found, None)
    return options if isinstance(options, dict) else {}


def _kind(name: str, tensors: Mapping[str, LazyTensor], size: int | None) -> tuple[int, int]:
    """Bits and block size of a weight (0: a scale per column); without a size, bits follow from a row's zero points."""
    codes = tensors[name + CODES]
    if codes.dtype.name == "int8":
        return 8, 0
    if len(codes.shape) < 3 or codes.dtype.name != "uint8" or not codes.shape[-1]:
        raise MalformedInput(f"`{name + CODES}` has no shape of codes", hint="make the folder again")
    blocks, nbytes = codes.shape[-2:]
    if size and nbytes * 8 in (4 * size, 8 * size):
        return nbytes * 8 // size, size
    zeros = tensors.get(name + ZEROS)
    is_eight = zeros is not None and bool(zeros.shape) and blocks > 1 and zeros.shape[-1] == blocks
    return (8, nbytes) if is_eight else (4, 2 * nbytes)


def _elements(codes: LazyTensor, kind: tuple[int, int], *, fewest: bool) -> int:
    """Elements of a weight; the last block of a row may contain one element, or be full."""
    if not (size := kind[1]):
        return prod(codes.shape)
    *outer, blocks, _ = codes.shape
    columns = blocks * size - (size - 1 if fewest and blocks else 0)
    return prod(outer) * columns


SHOWN = ("llmconv", "onnxruntime")  # libraries whose versions the table shows


@dataclass(frozen=True)
class VerdictSummary:
    """The verdict of the last `llmconv verify` in the manifest."""

    recorded: RecordedVerdict | None  # the verdict; None if it is malformed
    changed: tuple[str, ...] = ()  # names of judged files that have changed since, or are missing
    unjudged: tuple[str, ...] = ()  # names of graph files in the manifest that the run did not judge
    problem: str = ""  # why it cannot be read; empty if it can

    @property
    def lines(self) -> list[str]:
        """The verdict, or first why it is out of date."""
        if self.recorded is None:
            return [f"unreadable: {self.problem}"]
        stale = [f"{', '.join(self.changed)} changed since"] if self.changed else []
        stale += [f"{', '.join(self.unjudged)} not verified"] if self.unjudged else []
        line = _line(self.recorded)
        return [f"out of date: {'; '.join(stale)}", f"before: {line}"] if stale else [line]

    def fields(self) -> dict[str, Any]:
        if self.recorded is None:
            return {"unreadable": self.problem}
        stale = {"out_of_date": bool(self.changed or self.unjudged)}
        return {**self.recorded.as_dict(), **stale, "changed": list(self.changed), "unjudged": list(self.unjudged)}


def verdict_in(folder: Path, graphs: Sequence[GraphSummary]) -> VerdictSummary | None:
    """The recorded verdict, or None; MalformedInput: invalid manifest. Graphs are read, of weights size and header."""
    if (content := read_manifest(folder).verified) is None:
        return None
    try:
        recorded = parse_verdict(content)
    except MalformedInput as problem:
        return VerdictSummary(None, problem=problem.message)
    listed = {name for graph in graphs for name in graph.files}
    unjudged = sorted(listed - recorded.graphs.keys())
    return VerdictSummary(recorded, tuple(recorded.changed_files(folder)), tuple(unjudged))


def _line(recorded: RecordedVerdict) -> str:
    """Everything in one line, such as `pass, method whole, suite quick, 415 checks, llmconv 0.1.0`."""
    passed, failed, skipped = (recorded.checks[name] for name in ("passed", "failed", "skipped"))
    count = f"{failed:,} of {passed + failed:,} checks differ" if failed else f"{passed:,} checks"
    return ", ".join(
        [
            recorded.verdict,
            f"method {recorded.method}",
            f"suite {recorded.suite}",
            *([f"{len(recorded.only):,} selected scenario{'s' * (len(recorded.only) != 1)}"] if recorded.only else []),
            count,
            *([f"{skipped:,} skipped"] if skipped else []),
            *(f"{name} {recorded.versions[name]}" for name in SHOWN if name in recorded.versions),
        ]
    )
