"""inspect: describes a checkpoint, model folder, adapter, tensor file, or exported graphs from headers alone.

Of graphs it lists what the manifest of their folder says, and the codes that they map.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import (
    Checkpoint,
    is_model_folder,
    open_checkpoint,
    open_shards,
    own_file,
    read_json,
    read_small,
    side_file_names,
)
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.deltas.exact import open_exact
from llmconv.convert.formats import Format
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import explain, open_format, recognized
from llmconv.convert.state_dicts.files import raw_tensors, torch_tensors
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.files.source_file import open_source
from llmconv.files.sources import fetching, files_under, local_path, reading_safely, with_addresses
from llmconv.files.torch_reader import is_torch_file
from llmconv.model_code import code_of
from llmconv.not_a_model_folder import ONNX_ADAPTER, SINGLE, described, is_quantized_export
from llmconv.output.manifest import Manifest, RecordedVerdict, parse_verdict, read_manifest
from llmconv.quantized_weights.quantized_checkpoint import method_name, quantized_checkpoint
from llmconv.runtime.extra_inputs import FACTOR_A, is_factor
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")


@dataclass(frozen=True)
class Inspection:
    """What a path is.

    Attributes:
        path: the file or folder.
        format: `composer`, `meta`, …, or `hf`, `adapter`, `delta`, `safetensors`, `torch-file`,
            `onnx-graphs`, `onnx-adapter`.
        config: its configuration, empty where there is none.
        tensors: its tensors, in the names a conversion would give them.
        side_files: names of the tokenizer and generation files.
        warnings: what a conversion would warn of.
        version: the writer that the files name, such as `composer 0.32.1`; empty where they name none.
        shards: files that the weights lie in; 0 where that is not known.
        dropped: content of the files that would not be converted, one phrase each.
        kind: the model's type, and what its writer calls it where that differs, such as `chatglm_v2 as glm`.
        plain: of quantized weights, the tensors of the model that they stand for; empty where there are none.
        adapter: of an adapter: `peft_type`, `base`, `r`, `alpha`, `targets`, `modules_to_save`; else empty.
        graphs: that llmconv exported into the folder.
        layouts: the clients that they were exported for, other than onnxruntime.
        codes: the quantized weights of such graphs in a folder of their own; None for any other path.
        verified: the recorded verdict on the graphs; None if there is none.
        modules: of an embedding model or a reranker, the kinds of its modules, such as `Pooling`.
        code: of a Hugging Face folder, the Python files of the model's own code, which are not executed.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    side_files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    version: str = ""
    shards: int = 1
    dropped: tuple[str, ...] = ()
    kind: str = ""
    plain: Mapping[str, LazyTensor] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    graphs: tuple[GraphSummary, ...] = ()
    layouts: tuple[str, ...] = ()
    codes: CodesSummary | None = None
    verified: VerdictSummary | None = None
    modules: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kind = f", {self.kind}" if self.kind else ""
        return f"<Inspection {self.path}: {self.format}{kind}, {len(self.tensors)} tensors, {self.nbytes:,} bytes>"

    @property
    def quantization(self) -> str | None:
        """The method that its weights are quantized with, as its configuration calls it; of graphs, the preset."""
        return self.codes.preset if self.codes else method_name(self.config)

    @property
    def parameters(self) -> int:
        """Elements of all tensors; where they are quantized, of the plain model's."""
        if self.codes:
            return self.codes.parameters
        return sum(prod(tensor.shape) for tensor in (self.plain or self.tensors).values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of the file, or of the files of the folder."""
        return sum(file.stat().st_size for file in files_under(self.path))

    @property
    def dtypes(self) -> dict[str, int]:
        """Number of tensors of each element type, most frequent first."""
        return dict(Counter(tensor.dtype.name for tensor in self.tensors.values()).most_common())

    def summary(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "version": self.version,
            "shards": self.shards,
            "model_type": self.config.get("model_type"),
            "architectures": self.config.get("architectures"),
            "quantization": self.quantization,
            "parameters": self.parameters,
            "tensors": len(self.tensors),
            "dtypes": self.dtypes,
            "bytes": self.nbytes,
            "file_bytes": self.file_bytes,
            "dropped": list(self.dropped),
            "side_files": list(self.side_files),
            **({"code": list(self.code)} if self.code else {}),
            **({"adapter": dict(self.adapter)} if self.adapter else {}),
            "graphs": [asdict(graph) for graph in self.graphs],
            "layouts": list(self.layouts),
            **({"modules": list(self.modules)} if self.modules else {}),
            **({"codes": self.codes.fields()} if self.codes else {}),
            **({"verified": self.verified.fields()} if self.verified else {}),
            "warnings": list(self.warnings),
        }


def inspect(path: str | Path) -> Inspection:
    """Describes `path`: a training checkpoint, a Hugging Face folder, an adapter, a file of tensors, or graphs.

    Raises:
        InputRefused: nothing that llmconv can read, or something malformed.
    """
    with fetching() as fetched, reading_safely(path):
        given = local_path(path, in_parts=True, headers=True)
        found = replace(_inspect(given), path=given)
        fetched.keep_for(found)
    return found


def _inspect(place: Path) -> Inspection:
    place, found = recognized(place)
    if found:
        return _inspect_training(place, found)
    if is_quantized_export(place):
        return _inspect_codes(place)
    if (place / DELTA_FILE).is_file():  # the tensors of the tuned model, which cannot be read without the base
        delta = open_exact(place)
        tensors = {name: one.over(None, delta.other_base) for name, one in delta.stored.items()}
        files = len({one.path for one in delta.stored.values()})
        return Inspection(place, "delta", delta.config, tensors, tuple(sorted(delta.side_files)), shards=files)
    if (place / ADAPTER_CONFIG).is_file():
        return _inspect_adapter(place)
    if is_model_folder(place) or (place / "config.json").is_file() and any(place.glob("*.safetensors")):
        return _inspect_model(open_checkpoint(place))
    if place.is_file() and ".safetensors" in place.suffixes:
        return Inspection(place, "safetensors", {}, read_header(place).tensors)
    if place.is_file() and _head(place)[4:] == ONNX_ADAPTER:
        from llmconv.runtime.onnxruntime.lora_names import read_adapter  # noqa: PLC0415 - imports onnxruntime

        factors = {name: in_memory(array, BY_NAME["float32"]) for name, array in read_adapter(place).items()}
        return Inspection(place, "onnx-adapter", {}, factors, adapter=factors_summary(factors))
    if is_torch_file(place):
        return Inspection(place, "torch-file", {}, torch_tensors(place))
    raise explain(place)


def _inspect_codes(folder: Path) -> Inspection:
    """Graphs whose weights were quantized into files of their own."""
    if (folder / INDEX).is_file():
        tensors = open_shards(folder, INDEX)
    elif (folder / SINGLE).is_file():
        tensors = dict(read_header(folder / SINGLE).tensors)
    else:
        raise MalformedInput(f"`{folder}` lacks `{INDEX}`, which lists its shards", hint="copy the folder again")
    config = read_json(own_file(folder, "config.json")) if (folder / "config.json").is_file() else {}
    found = replace(_bare(folder, "onnx-graphs", config, tensors), codes=codes_in(folder, tensors), **_graphs(folder))
    return _with(found, "the modules are not listed", _modules)


def _head(path: Path) -> bytes:
    with open_source(path) as file:
        return file.read(8)


def _bare(
    folder: Path, kind: str, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *warnings: str
) -> Inspection:
    """A folder with tensors in some files and the side files of a model."""
    files = {tensor.path for tensor in tensors.values() if isinstance(tensor, FileTensor)}
    side_files = tuple(sorted(side_file_names(folder)))
    return Inspection(folder, kind, config, tensors, side_files, warnings, shards=len(files))


def _with(found: Inspection, problem: str, fields: Callable[[Path], Mapping[str, Any]]) -> Inspection:
    """With more fields; content that cannot be read is a warning that `problem` begins, since the model needs none."""
    try:
        return replace(found, **fields(found.path))
    except InputRefused as error:
        return replace(found, warnings=(*found.warnings, f"{problem}: {error}"))


def _graphs(folder: Path) -> dict[str, Any]:
    """The graphs in the manifest of a folder, their clients and the verdict; MalformedInput if it is invalid.

    For the verdict graphs are read, of weights size and header.
    """
    manifest = read_manifest(folder)
    graphs = tuple(_graph(role, entry) for role, entry in manifest.graphs.items())
    layouts = _export_options(manifest).get("layouts")
    verified = None
    if manifest.verified is not None:
        try:
            recorded = parse_verdict(manifest.verified)
            unjudged = sorted({name for graph in graphs for name in graph.files} - recorded.graphs.keys())
            verified = VerdictSummary(recorded, tuple(recorded.changed_files(folder)), tuple(unjudged))
        except MalformedInput as problem:
            verified = VerdictSummary(None, problem=problem.message)
    named = tuple(str(name)[:40] for name in layouts) if isinstance(layouts, list) else ()
    return {"graphs": graphs, "layouts": named, "verified": verified}


def _inspect_training(path: Path, found: Format) -> Inspection:
    """The converted checkpoint; where that needs more options, the tensors of the file and what is missing."""
    try:
        opened = settled(open_format(found, path, path.name, {}, None), sampled=True)
    except InputRefused as problem:
        tensors: Mapping[str, LazyTensor] = {}  # under their own names
        for peek in (found.peek, raw_tensors):
            with suppress(InputRefused):
                tensors = tensors or (peek(path) if peek else {})
        if not tensors:
            raise
        warning = with_addresses(f"cannot be converted as it is: {problem} ({problem.hint})")
        return replace(_bare(path, found.name, {}, tensors, warning), side_files=())
    return _opened(opened)


def _opened(opened: Checkpoint) -> Inspection:
    return Inspection(
        opened.path,
        opened.format,
        opened.config,
        opened.tensors,
        tuple(sorted(opened.side_files)),
        opened.warnings,
        opened.version,
        opened.shards,
        opened.dropped,
        opened.kind,
    )


def _inspect_model(opened: Checkpoint) -> Inspection:
    """A Hugging Face folder, whose weights may be quantized, and which may contain graphs."""
    found = _opened(opened)
    parts: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        "the model's own code": lambda folder: {"code": tuple(code_of(folder, opened.config, opened.side_files))},
        "graphs are not listed": _graphs,
        "the modules are not listed": _modules,
    }
    for problem, fields in parts.items():
        found = _with(found, problem, fields)
    try:
        base = quantized_checkpoint(opened)
    except InputRefused as problem:
        warning = f"parameters are counted as they are packed: {problem}"
        return replace(found, warnings=(*found.warnings, warning))
    return replace(found, plain=base.plain.tensors) if base else found


def _inspect_adapter(folder: Path) -> Inspection:
    if (file := next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)) is None:
        raise InputRefused(
            f"`{folder}` has `{ADAPTER_CONFIG}` but no weights", hint=f"it needs {' or '.join(ADAPTER_FILES)}"
        )
    tensors = torch_tensors(file) if file.suffix == ".bin" else read_header(file).tensors
    config = read_json(folder / ADAPTER_CONFIG)
    also = ["the folder contains a whole model, too; this is about the adapter"] * is_model_folder(folder)
    fields = {name: config.get(field) for name, field in ADAPTER_FIELDS.items()}
    parameters = config.get("lora_parameters")
    if isinstance(parameters, dict):
        fields |= {"r": parameters.get("rank"), "alpha": parameters.get("alpha"), "targets": parameters.get("keys")}
        fields |= {"peft_type": config.get("fine_tune_type"), "base": config.get("model")}
    for name in ("targets", "modules_to_save"):
        value = fields[name]
        fields[name] = sorted(map(str, value)) if isinstance(value, list) else value
    return replace(_bare(folder, "adapter", config, tensors, *also), adapter=fields, shards=1)


ADAPTER_FIELDS = {
    "peft_type": "peft_type",
    "base": "base_model_name_or_path",
    "r": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "modules_to_save": "modules_to_save",
}
"""What `inspect` calls the fields of PEFT's `adapter_config.json`; mlx-lm has its own in `lora_parameters`."""


def factors_summary(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The `inspect` fields of an adapter from `factor_tensors`: kind, ranks, kinds and number of modules."""
    from llmconv.runtime.onnxruntime.lora_names import module_of  # noqa: PLC0415 - imports onnx

    modules = {module_of(name) for name in tensors if is_factor(name)}
    shapes = [tensor.shape for name, tensor in tensors.items() if name.endswith(FACTOR_A) and tensor.shape]
    ranks = sorted({shape[0] for shape in shapes})
    return {
        "peft_type": "LORA",
        "r": ranks[0] if len(ranks) == 1 else ranks,
        "targets": sorted({module.rpartition(".")[2] for module in modules}),
        "modules": len(modules),
    }


MODULES = "modules.json"


def _modules(folder: Path) -> dict[str, Any]:
    """The kinds of modules in order, such as `Pooling`; empty without the file, MalformedInput: no list, a link out."""
    if not (folder / MODULES).is_file():
        return {}
    try:
        content: Any = json.loads(read_small(own_file(folder, MODULES)))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{MODULES}` is not JSON", hint="copy the file again") from error
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise MalformedInput(f"`{MODULES}` is not a list of modules", hint="copy the file again")
    return {"modules": tuple(str(one.get("type", "")).rpartition(".")[2][:40] for one in content)}


INDEX = "quantized.safetensors.index.json"
CODES, ZEROS = ".codes", ".zeros"
# Suffixes of the tensors that are stored instead of a weight, or with it
PARTS = (CODES, ".scales", ZEROS, ".smoothing", ".smoothing_outputs", ".importance", ".order")
PRESETS = {"int8": 32, "int4": 32, "int4-mixed": 32, "int4-small": 128, "a8w8": 32}
WITH_TEXT = {**PRESETS, "int4": 64}
"""Default block sizes by preset, and of codes that were chosen on a text; other names are of methods, whose blocks are
those of the model."""


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


def _graph(role: str, entry: Mapping[str, Any]) -> GraphSummary:
    from llmconv.runtime.extra_inputs import is_past, is_present  # noqa: PLC0415 - imports onnxruntime

    form = entry.get("form")
    form = form if isinstance(form, dict) else {}
    prefix = entry.get("prefix")
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
        length if isinstance(length := prefix.get("length") if isinstance(prefix, dict) else None, int) else 0,
    )


def _word(fields: Mapping[str, Any], name: str, default: str = "") -> str:
    """A short text; the default if it is something else."""
    value = fields.get(name, default)
    return value if isinstance(value, str) and len(value) <= 40 and value.isprintable() else default


def _words(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Short texts; none if the field is not a list of them."""
    value = fields.get(name)
    return tuple(filter(None, (_word({"": one}, "") for one in value))) if isinstance(value, list) else ()


def codes_in(folder: Path, tensors: Mapping[str, LazyTensor]) -> CodesSummary:
    """The quantized weights of a folder, from its tensors as stored; MalformedInput for impossible shapes of codes."""
    options = _export_options(read_manifest(folder))
    preset = _word(options, "quant", "unknown")
    block = options.get("quant_block")
    sizes = WITH_TEXT if options.get("calibrate") else PRESETS
    size = block if isinstance(block, int) else sizes.get(preset)
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
        recorded = self.recorded
        passed, failed, skipped = (recorded.checks[name] for name in ("passed", "failed", "skipped"))
        count = f"{failed:,} of {passed + failed:,} checks differ" if failed else f"{passed:,} checks"
        parts = [recorded.verdict, f"method {recorded.method}", f"suite {recorded.suite}"]
        if recorded.only:
            parts.append(f"{len(recorded.only):,} selected scenario{'s' * (len(recorded.only) != 1)}")
        parts += [count, *([f"{skipped:,} skipped"] if skipped else [])]
        line = ", ".join([*parts, *(f"{one} {recorded.versions[one]}" for one in SHOWN if one in recorded.versions)])
        return [f"out of date: {'; '.join(stale)}", f"before: {line}"] if stale else [line]

    def fields(self) -> dict[str, Any]:
        if self.recorded is None:
            return {"unreadable": self.problem}
        stale = {"out_of_date": bool(self.changed or self.unjudged)}
        return {**self.recorded.as_dict(), **stale, "changed": list(self.changed), "unjudged": list(self.unjudged)}
