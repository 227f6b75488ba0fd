"""inspect: describes a checkpoint, model folder, adapter, tensor file, or exported graphs from headers alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import SIDE_FILES, Checkpoint, open_checkpoint, own_file, read_json, read_small
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.deltas.exact import open_exact
from llmconv.convert.exported_graphs import (
    CodesSummary,
    GraphSummary,
    VerdictSummary,
    codes_in,
    graphs_in,
    layouts_in,
    quantized_tensors,
    verdict_in,
)
from llmconv.convert.formats import Format
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import explain, open_format, recognized
from llmconv.convert.state_dicts.files import is_model_folder, raw_tensors, torch_tensors
from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.files.source_file import open_source
from llmconv.files.sources import fetching, files_under, local_path, reading_safely, with_addresses
from llmconv.files.torch_reader import is_torch_file
from llmconv.model_code import code_of
from llmconv.not_a_model_folder import ONNX_ADAPTER, is_quantized_export
from llmconv.quantized_weights.quantized_checkpoint import method_name, quantized_checkpoint
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
    if (place / DELTA_FILE).is_file():
        return _inspect_delta(place)
    if _is_adapter(place):
        return _inspect_adapter(place)
    if place.is_dir() and (place / "config.json").is_file() and any(place.glob("*.safetensors")):
        return _inspect_model(open_checkpoint(place))
    if place.is_file() and ".safetensors" in place.suffixes:
        return Inspection(place, "safetensors", {}, read_header(place).tensors)
    if is_adapter_factors(place):
        factors = factor_tensors(place)
        return Inspection(place, "onnx-adapter", {}, factors, adapter=factors_summary(factors))
    if is_torch_file(place):
        return Inspection(place, "torch-file", {}, torch_tensors(place))
    raise explain(place)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def _inspect_training(path: Path, found: Format) -> Inspection:
    """The converted checkpoint; where that needs more options, the tensors of the file and what is missing."""
    try:
        opened = settled(open_format(found, path, path.name, {}, None), sampled=True)
    except InputRefused as problem:
        tensors = _peek(path, found, problem)
        files = {tensor.path for tensor in tensors.values() if isinstance(tensor, FileTensor)}
        warning = with_addresses(f"cannot be converted as it is: {problem} ({problem.hint})")
        return Inspection(path, found.name, {}, tensors, warnings=(warning,), shards=len(files))
    return _opened(opened)


def _peek(path: Path, found: Format, problem: InputRefused) -> Mapping[str, LazyTensor]:
    """The tensors under their own names; raises `problem` if nothing can be read at all."""
    for peek in (found.peek, raw_tensors):
        try:
            if peek and (tensors := peek(path)):
                return tensors
        except InputRefused:
            continue
    raise problem


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
    found = _with_modules(_with_graphs(_with_code(_opened(opened), opened)))
    try:
        base = quantized_checkpoint(opened)
    except InputRefused as problem:
        warning = f"parameters are counted as they are packed: {problem}"
        return replace(found, warnings=(*found.warnings, warning))
    return replace(found, plain=base.plain.tensors) if base else found


def _with_code(found: Inspection, opened: Checkpoint) -> Inspection:
    """With the Python files that the model's configurations name; those that cannot be copied are a warning."""
    try:
        files = tuple(code_of(opened.path, opened.config, opened.side_files))
    except InputRefused as problem:
        return replace(found, warnings=(*found.warnings, f"the model's own code: {problem}"))
    return replace(found, code=files)


def _with_graphs(found: Inspection) -> Inspection:
    """With the graphs in the folder; a manifest that cannot be read is a warning, since the model needs none."""
    try:
        return _with_manifest(found)
    except InputRefused as problem:
        return replace(found, warnings=(*found.warnings, f"graphs are not listed: {problem}"))


def _with_manifest(found: Inspection) -> Inspection:
    graphs = graphs_in(found.path)
    verified = verdict_in(found.path, graphs)
    return replace(found, graphs=graphs, layouts=layouts_in(found.path), verified=verified)


def _with_modules(found: Inspection) -> Inspection:
    """With the modules of sentence-transformers; a list that cannot be read is a warning."""
    try:
        return replace(found, modules=modules_in(found.path))
    except InputRefused as problem:
        return replace(found, warnings=(*found.warnings, f"the modules are not listed: {problem}"))


def _inspect_codes(folder: Path) -> Inspection:
    """Graphs whose weights were quantized into files of their own."""
    config = read_json(own_file(folder, "config.json")) if (folder / "config.json").is_file() else {}
    tensors = quantized_tensors(folder)
    files = {tensor.path for tensor in tensors.values() if isinstance(tensor, FileTensor)}
    side_files = tuple(sorted(name for name in SIDE_FILES if (folder / name).is_file()))
    found = Inspection(folder, "onnx-graphs", config, tensors, side_files, shards=len(files))
    return replace(_with_modules(_with_manifest(found)), codes=codes_in(folder, tensors))


def _inspect_delta(folder: Path) -> Inspection:
    """The tensors of the tuned model; they cannot be read without the base."""
    opened = open_exact(folder)
    tensors = {name: one.over(None) for name, one in opened.stored.items()}
    files = len({one.path for one in opened.stored.values()})
    return Inspection(folder, "delta", opened.config, tensors, tuple(sorted(opened.side_files)), shards=files)


def _inspect_adapter(folder: Path) -> Inspection:
    if (file := next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)) is None:
        raise InputRefused(
            f"`{folder}` has `{ADAPTER_CONFIG}` but no weights", hint=f"it needs {' or '.join(ADAPTER_FILES)}"
        )
    tensors = torch_tensors(file) if file.suffix == ".bin" else read_header(file).tensors
    config = read_json(folder / ADAPTER_CONFIG)
    side_files = tuple(sorted(name for name in SIDE_FILES if (folder / name).is_file()))
    also = is_model_folder(folder)
    warnings = ("the folder contains a whole model, too; this is about the adapter",) if also else ()
    return Inspection(folder, "adapter", config, tensors, side_files, warnings, adapter=_adapter_of(config))


ADAPTER_FIELDS = {
    "peft_type": "peft_type",
    "base": "base_model_name_or_path",
    "r": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "modules_to_save": "modules_to_save",
}
"""What `inspect` calls the fields of PEFT's `adapter_config.json`; mlx-lm has its own in `lora_parameters`."""


def _adapter_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an adapter's config; None for those it does not contain."""
    found = {name: config.get(field) for name, field in ADAPTER_FIELDS.items()}
    parameters = config.get("lora_parameters")
    if isinstance(parameters, dict):
        found |= {"r": parameters.get("rank"), "alpha": parameters.get("alpha"), "targets": parameters.get("keys")}
        found |= {"peft_type": config.get("fine_tune_type"), "base": config.get("model")}
    for name in ("targets", "modules_to_save"):
        value = found[name]
        found[name] = sorted(map(str, value)) if isinstance(value, list) else value
    return found


def is_adapter_factors(path: Path) -> bool:
    """Whether the file is an adapter file of onnxruntime."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        return file.read(8)[4:] == ONNX_ADAPTER


def factor_tensors(path: Path) -> dict[str, LazyTensor]:
    """The factors by the names of graph inputs, float32: A [rank, in] and B [out, rank]; MalformedInput if damaged."""
    from llmconv.runtime.onnxruntime.lora_names import read_adapter  # noqa: PLC0415 - imports onnxruntime

    return {name: in_memory(array, BY_NAME["float32"]) for name, array in read_adapter(path).items()}


def factors_summary(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The `inspect` fields of an adapter from `factor_tensors`: kind, ranks, kinds and number of modules."""
    from llmconv.runtime.onnxruntime.lora_names import FACTOR_A, is_factor, module_of  # noqa: PLC0415 - imports onnx

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


def modules_in(folder: Path) -> tuple[str, ...]:
    """The kinds of modules in order, such as `Pooling`; empty without the file, MalformedInput: no list, a link out."""
    if not (folder / MODULES).is_file():
        return ()
    try:
        content: Any = json.loads(read_small(own_file(folder, MODULES)))
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{MODULES}` is not JSON", hint="copy the file again") from error
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise MalformedInput(f"`{MODULES}` is not a list of modules", hint="copy the file again")
    return tuple(str(one.get("type", "")).rpartition(".")[2][:40] for one in content)
