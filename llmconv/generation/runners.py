"""Opening what runs a model: its files, and the graphs, the eager model (`TorchOptions`), or ONNX Runtime GenAI.

Graphs for a plain model folder, or a training checkpoint converted before, are exported once into the user's cache,
where its weights are hard links; nothing is written into the folder. The cache is keyed by its path, the names, sizes,
times and inodes of its files, and llmconv's version: a changed model is exported anew, its earlier graphs are removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from llmconv.addresses import is_hub_address
from llmconv.causal_lm import language_config, length_switch, require_causal_folder
from llmconv.checkpoint import (
    has_weights,
    open_checkpoint,
    own_file,
    read_json,
    read_side_files,
    side_file_names,
    write_small,
)
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem, first_line, word
from llmconv.files.paths import kind_of, path_of
from llmconv.files.safe_folder import UNFINISHED, unfinished_folder, user_cache
from llmconv.files.sources import (
    cached_model,
    export_command,
    fetches,
    files_near,
    files_under,
    is_hub_id,
    local_path,
    model_name,
    snapshot_home,
    with_addresses,
)
from llmconv.memory import available_memory
from llmconv.not_a_model_folder import refused_model
from llmconv.output.manifest import MANIFEST, VISION, graph_entries, read_manifest, single_pass_entries
from llmconv.progress import say, warn_all
from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.onnxruntime.graph import VisionGraph, has_vision
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, load_guarded, nodes
from llmconv.runtime.onnxruntime.packed_cache import is_packed
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import (
    CPU,
    HALF_PRECISION,
    SessionSettings,
    StageAddresses,
    half_precision,
    provider_name,
)
from llmconv.runtime.runner import Runner
from llmconv.tensors import LazyTensor
from llmconv.version import __version__

if TYPE_CHECKING:
    from llmconv.generation.images import ImageEncoder
    from llmconv.runtime.eager.torch_runner import GivenModel


@dataclass(frozen=True)
class ModelFiles:
    """The files and folders of a model.

    Attributes:
        folder: has the configuration and, for the eager model, the weights.
        prefill: the prefill graph; None for the graphs in the folder's manifest.
        decode: the decode graph; None for `prefill` itself.
        tokenizer: folder of the tokenizer; None for `folder`.
        generation_config: folder of `generation_config.json`; None for `folder`.
    """

    folder: Path
    prefill: Path | None = None
    decode: Path | None = None
    tokenizer: Path | None = None
    generation_config: Path | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "folder":
                object.__setattr__(self, field.name, path_of(value, field.name))

    @classmethod
    def find(cls, model: Any) -> ModelFiles:
        """The files of a folder, a graph, a pair of them, or a name in the Hub's cache; InputRefused, UsageProblem."""
        if isinstance(model, ModelFiles):
            return model
        if isinstance(model, tuple | list):
            return cls._of_graphs(list(model))
        path = path_of(model, "model")
        if not path.exists():
            path = from_hub_cache(model) or local_path(model)
        if not path.is_dir():
            return cls._of_graphs([path])
        require_causal_folder(path)
        has_graphs = any(path.glob("*.onnx")) or (path / MANIFEST).is_file() and read_manifest(path).graphs
        # graphs of a manifest may be on other hosts
        if not has_graphs and not has_weights(path):
            raise refused_model(path)
        return cls(path)

    @classmethod
    def _of_graphs(cls, paths: list[Any]) -> ModelFiles:
        """Graphs by their paths; all other files are next to the first graph."""
        graphs = [path_of(path, "model") for path in paths]
        if len(graphs) == 2 and graphs[0].is_dir():
            problem = f"`{graphs[0]}` is a folder, which has its own decode graph"
            raise UsageProblem(problem, hint="give the folder alone, or the paths of two .onnx files")
        if not 1 <= len(graphs) <= 2:
            message = f"{len(graphs)} graphs are not a model"
            raise UsageProblem(message, hint="give the prefill graph and the decode graph")
        for path in graphs:
            if path.suffix != ".onnx" or not path.is_file():
                raise refused_model(path)
        return cls(graphs[0].parent, *graphs)


def from_hub_cache(model: Any) -> Path | None:
    """The folder of a model of the Hub, given by its name or address, fetched where it is not in the cache; else None.

    Raises InputRefused as `local_path`.
    """
    if is_hub_address(model):
        return local_path(model)
    return (cached_model(str(model)) or local_path(model)) if is_hub_id(model) else None


DTYPES = ("float32", "float16", "bfloat16")  # dtypes of the eager model


@dataclass(frozen=True)
class TorchOptions:
    """Options of the eager model: an adapter, torch's name of the device, one of `DTYPES`; None for the defaults."""

    adapter: str | Path | None = None
    device: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, adapter: str | Path | None, device: Any, dtype: Any) -> TorchOptions:
        """The options from values that transformers' pipeline accepts, too; raises UsageProblem for others.

        A device is a name, torch's object, or the number of a GPU, -1 for the CPU; a dtype is a name, torch's object,
        or `auto` for that of the weights.
        """
        if isinstance(device, int) and not isinstance(device, bool):
            device = "cpu" if device < 0 else f"cuda:{device}"
        for name, value in (("device", device), ("dtype", dtype)):
            if value is not None and not isinstance(value, str) and type(value).__module__ != "torch":
                raise UsageProblem(f"`{name}` is {kind_of(value)}", hint=f"give the name of a {name}")
        dtype = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
        return cls(adapter, None if device is None else str(device), dtype)

    def require_dtype(self) -> None:
        """Raises UsageProblem unless `dtype` is one of `DTYPES`."""
        if self.dtype not in (None, *DTYPES):
            raise UsageProblem(f"unknown dtype `{self.dtype}`", hint=f"give one of: {', '.join(DTYPES)}")

    def refuse(self) -> None:
        """Raises UsageProblem if any option is given, for graphs."""
        for name, (refusal, hint) in REFUSALS.items():
            if getattr(self, name) is not None:
                raise UsageProblem(refusal, hint=hint)


# message and hint by option, for graphs
REFUSALS = {
    "adapter": (
        "GenAI and stages in other processes take no adapter",
        "leave out `--backend genai` or `--stage-at`; or merge it: `llmconv merge-lora BASE ADAPTER -o OUT`",
    ),
    "device": (
        "`--device` is for `--backend torch`",
        "for graphs give `--provider`, such as `--provider cuda`",
    ),
    "dtype": ("`--dtype` is for `--backend torch`", "graphs compute in the type of `llmconv export --precision`"),
}


FORMS = ("auto", "mapped", "file")
"""How graphs run on the CPU: rewritten in memory to the form that is fastest there, with weights packed if they take no
more than `PACKED` of the free memory; the same with mapped weights; or as they are in the file."""
PACKED = 0.25


def load_runner(
    files: ModelFiles,
    backend: str,
    settings: SessionSettings | None = None,
    options: TorchOptions | None = None,
    stages: StageAddresses | None = None,
    *,
    trust_remote_code: bool = False,
    form: str = "file",
) -> Runner:
    """The graphs, or the eager model (torch is imported only for that); `backend` is `onnx`, `genai` or `torch`.

    Of `settings`, `torch` takes the number of threads; `options` are of the eager model, their adapter also for `onnx`;
    `stages` tells where stages run that do not run here; `trust_remote_code` runs the model code in the folder; `form`
    is one of `FORMS`. Raises InputRefused if the folder has no graphs, or transformers cannot load it; StageFailed if
    no stage of this model answers; UsageProblem for an unknown backend, device, dtype or form, or what only `torch`
    takes.
    """
    options = options or TorchOptions()
    runner: Runner
    if backend not in ("onnx", "torch", "genai"):
        raise UsageProblem(f"unknown backend `{backend}`", hint="give `onnx`, `torch` or `genai`")
    if backend != "torch":
        (options if stages or backend == "genai" else replace(options, adapter=None)).refuse()
    if stages and backend != "onnx":
        problem = f"`--stage-at` is for graphs in stages, which `--backend {backend}` does not run"
        raise UsageProblem(problem, hint="leave out `--backend`, or `--stage-at`")
    if files.prefill and (stages or backend == "genai"):
        what = "`--stage-at` needs a folder, and not" if stages else "GenAI opens folders, not"
        named = MANIFEST if stages else "genai_config.json"
        raise UsageProblem(f"{what} single graphs", hint=f"give the folder that has {named}")
    if stages:
        from llmconv.runtime.stages.staged_runner import StagedRunner  # noqa: PLC0415 - most models run here

        runner = StagedRunner.open(files.folder, stages, settings)
    elif backend == "genai":
        from llmconv.generation.genai import GenaiEngine  # noqa: PLC0415 - one backend of three

        runner = GenaiEngine.load(files.folder, settings)
    elif backend == "onnx":
        settings = replace(settings or SessionSettings(), extra_inputs=partial(_extra_inputs, files.folder))
        settings = in_form(settings, form, _graph_files(files))
        WeightMemory.of(_graph_files(files), settings).announce()
        if files.prefill:
            runner = OrtRunner.from_files(files.prefill, files.decode, settings)
        else:
            needed = "" if options.adapter is None else " --lora-inputs all-linear"
            runner = OrtRunner.from_folder(files.folder, settings, needed)
        runner = runner if options.adapter is None else with_lora(runner, files.folder, options.adapter)
    else:
        _refuse_session(settings)
        options.require_dtype()
        if has_weights(files.folder):
            open_checkpoint(files.folder)  # refuses parts of an adapter, which transformers leaves out
        from llmconv.runtime.eager.torch_runner import TorchRunner  # noqa: PLC0415 - imports torch

        runner = TorchRunner(
            files.folder,
            options.dtype or "auto",
            code=files.folder if trust_remote_code else None,
            **_tuned(files.folder, options.adapter),
            threads=settings.threads if settings else 0,
            device="cpu" if options.device is None else options.device,
            extra_inputs=_extra_inputs(files.folder),
        )
    runner.length_switch = length_switch(language_config(files.folder))
    return runner


def in_form(settings: SessionSettings, form: str, graphs: Sequence[Path]) -> SessionSettings:
    """The settings with which graphs run in one of `FORMS`; UsageProblem for another one."""
    if form not in FORMS:
        raise UsageProblem(f"`form` is {form!r:.40}", hint=f"give one of: {', '.join(FORMS)}")
    own = settings.change or settings.free_dimensions or settings.stages or provider_name(settings.provider) != CPU
    if form == "file" or own:
        return settings
    from llmconv.export.rewrite.running_form import to_running_form  # noqa: PLC0415 - of the CPU alone

    settings = replace(settings, change=to_running_form)
    packs, have = replace(settings, prepack=True), available_memory()
    if form == "mapped" or settings.packed_cache or have is None:
        return settings
    return packs if WeightMemory.of(graphs, packs).copied <= PACKED * have else settings


def _extra_inputs(folder: Path) -> tuple[ExtraInput, ...]:
    """The extra inputs of the model in a folder, from the registry that the exporter also uses."""
    from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - imports torch

    return extra_inputs_of(folder)


def is_model(value: Any) -> bool:
    """Whether a value is a torch module; torch is not imported."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module)


def load_object(model: Any, settings: SessionSettings | None = None) -> GivenModel:
    """A model of transformers in memory, in evaluation mode; UsageProblem for others or onnxruntime's settings."""
    _refuse_session(settings)
    from llmconv.runtime.eager.torch_runner import GivenModel  # noqa: PLC0415 - imports torch

    return GivenModel(model, threads=settings.threads if settings else 0)


def with_lora(runner: Runner, folder: Path, adapter: str | Path) -> OrtRunner:
    """Graphs with the factors of a LoRA adapter; they share sessions and memory with those without.

    `adapter` is a file of `llmconv onnx-adapter`, or a LoRA that `merge-lora` reads, which compares the weights of the
    base in `folder`. Raises InputRefused if it does not fit the graphs' inputs, or they have none; UnsupportedInput for
    another kind of adapter.
    """
    from llmconv.runtime.onnxruntime import lora_names  # noqa: PLC0415 - most models have no such inputs

    if not isinstance(runner, OrtRunner) or not runner.lora_inputs:
        raise lora_names.without_inputs(
            "or give `--backend torch`, or merge the adapter: `llmconv merge-lora BASE ADAPTER -o OUT`"
        )
    path = local_path(adapter)
    if path.is_file() and path.suffix == lora_names.SUFFIX:
        factors = lora_names.read_adapter(path)
    else:
        from llmconv.convert.adapter_file import lora_factors  # noqa: PLC0415 - as above

        factors = lora_factors(folder, path)
    if not factors:
        raise InputRefused(f"`{path}` has no LoRA factors", hint="write it again: `llmconv onnx-adapter`")
    return runner.with_factors(factors)


def _tuned(folder: Path, adapter: str | Path | None) -> dict[str, Any]:
    """What an adapter adds to the eager model: PEFT's layers around its own, or merged weights."""
    if adapter is None:
        return {}
    from llmconv.convert.opening_adapters import is_for_peft  # noqa: PLC0415 - most models have no adapter

    path = local_path(adapter)
    return {"adapter": path} if is_for_peft(path) else {"tensors": merged_weights(folder, path)}


def load_images(
    files: ModelFiles, backend: str, runner: Runner, settings: SessionSettings | None = None
) -> ImageEncoder | None:
    """Prepares prompts with images by the vision graph (`onnx`) or the eager tower; opened lazily; None: no images."""
    if files.prefill or backend not in ("onnx", "torch"):
        return None
    if backend == "onnx" and not has_vision(files.folder):
        return None
    from llmconv.generation.images import ImageEncoder  # noqa: PLC0415 - most models take none
    from llmconv.runtime.images.families import family_in, image_family  # noqa: PLC0415 - as above

    if backend == "onnx":
        if not (graph_family := family_in(files.folder)):
            return None
        tower = cache(lambda: partial(graph_family.features, VisionGraph(files.folder / VISION, settings).run))
        return ImageEncoder(files.folder, graph_family, tower)
    from llmconv.runtime.eager.runner import EagerRunner  # noqa: PLC0415
    from llmconv.runtime.eager.torch_runner import image_features  # noqa: PLC0415 - imports torch

    if not isinstance(runner, EagerRunner) or not (family := image_family(runner.model.config)):
        return None
    return ImageEncoder(files.folder, family, lambda: partial(image_features, runner))


def _graph_files(files: ModelFiles) -> list[Path]:
    """The graphs that a runner of these files opens."""
    if files.prefill:
        return [path for path in (files.prefill, files.decode) if path]
    entries = {entry.role: entry for entry in graph_entries(files.folder)}
    roles = ("prefill", "decode") if {"prefill", "decode"} <= entries.keys() else ("unified", *entries)[:1]
    return [path for role in roles if role in entries for path in entries[role].paths(files.folder)]


def _refuse_session(settings: SessionSettings | None) -> None:
    """Refuses settings of onnxruntime, which the eager model does not use."""
    names = [field.name for field in fields(SessionSettings) if field.name != "threads"]
    if odd := [name for name in names if settings and getattr(settings, name) != getattr(SessionSettings(), name)]:
        problem = f"`{odd[0]}` is a setting of onnxruntime, which `backend` torch does not use"
        raise UsageProblem(problem, hint="leave it out and give `device`; or leave out `backend`")


FLOATS = {onnx.TensorProto.FLOAT, *HALF_PRECISION.values()}
WORTH_SAYING = 256 << 20  # copies of fewer bytes are not mentioned
GB = 1e9
MAPPED_FLOATS = "`llmconv export MODEL -o OUT --dtype float32` writes weights that the graphs map without a copy"
MAPPED_PACKED = "`--packed-cache` writes packed weights to a file once, and maps it from then on"
LOOKUPS = {"Gather", "GatherBlockQuantized"}  # operators that read rows of a table where it is


@dataclass(frozen=True)
class WeightMemory:
    """The memory that the weights of some graphs take in onnxruntime."""

    mapped: int  # bytes of weights in files, which the system reads and discards on demand
    copied: int  # bytes that onnxruntime or llmconv copies to memory of the process
    other_way: str = MAPPED_FLOATS  # how to do without the copies

    @classmethod
    def of(cls, paths: Iterable[Path], settings: SessionSettings) -> WeightMemory:
        """The memory for graphs by their paths; graphs with the same content share it. Raises MalformedInput."""
        contents = {path.read_bytes(): path for path in paths if path.is_file()}
        models = [(path, load_guarded(path)) for path in contents.values()]
        weights = [_weights(path, model) for path, model in models]
        distinct = {place: tensor for found in weights for place, tensor in found.items()}
        mapped = sum(length for _, _, length in distinct)
        if provider_name(settings.provider) != CPU or settings.packed_cache:
            return cls(mapped, 0)
        copied, shared, packs = 0, set[Place](), False
        for (_, model), found in zip(models, weights, strict=True):
            if settings.prepack or is_packed(model):
                copied, packs = copied + _packed_bytes(model, found), True  # in each session
            else:
                shared |= set(_widened(model, found))
        copied += sum(4 * prod(distinct[place].dims) for place in shared)
        return cls(mapped, copied, MAPPED_PACKED if packs else MAPPED_FLOATS)

    def announce(self) -> None:
        """Prints what copies will be held, if they are large; raises InputRefused if they do not fit into memory."""
        if (have := available_memory()) is not None and self.copied > have:
            problem = f"the weights take {self.copied / GB:.1f} GB of memory, and {have / GB:.1f} GB are available"
            raise InputRefused(problem, hint=self.other_way)
        if self.copied > WORTH_SAYING:
            copies = f"{self.copied / GB:.1f} GB of copies in memory"
            say(f"weights: {self.mapped / GB:.1f} GB mapped, {copies}; {self.other_way}")


Place = tuple[Path, int, int]  # file, offset and length in bytes


def _weights(path: Path, model: onnx.ModelProto) -> dict[Place, onnx.TensorProto]:
    found = {}
    for tensor in external_tensors(model):
        fields = external_fields(tensor)
        file, offset = (path.parent / fields["location"]).resolve(), int(fields.get("offset") or 0)
        length = int(fields.get("length") or 0) or file.stat().st_size - offset  # optional: up to the end
        found[file, offset, length] = tensor
    return found


def _packed_bytes(model: onnx.ModelProto, weights: dict[Place, onnx.TensorProto]) -> int:
    """Bytes of a packed copy: floats in float32, codes as stored, nothing of tables that rows are looked up in."""
    multiplied = {
        name for node in nodes(model) for at, name in enumerate(node.input) if at or node.op_type not in LOOKUPS
    }
    held = [(length, tensor) for (_, _, length), tensor in weights.items() if tensor.name in multiplied]
    return sum(4 * prod(tensor.dims) if tensor.data_type in FLOATS else length for length, tensor in held)


def _widened(model: onnx.ModelProto, weights: dict[Place, onnx.TensorProto]) -> list[Place]:
    """The weights that the CPU holds in float32: those that a Cast follows, and all of a bfloat16 graph."""
    cast = {node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    is_bfloat16 = half_precision(model) == "bfloat16"
    halves = {place: tensor.name for place, tensor in weights.items() if tensor.data_type in HALF_PRECISION.values()}
    return [place for place, name in halves.items() if is_bfloat16 or name in cast]


MERGE = "merge it into a new folder: `llmconv merge-lora BASE ADAPTER -o OUT`"


def merged_weights(folder: Path, adapter: str | Path) -> Mapping[str, LazyTensor]:
    """The weights that `merge-lora` would write from a base folder and an adapter, each computed when it is read.

    Raises InputRefused, MalformedInput and UnsupportedInput as `merge-lora`, and UnsupportedInput if the adapter
    changes the model's configuration.
    """
    from llmconv.convert.adapters.base_checks import warn_of_origin  # noqa: PLC0415 - as above
    from llmconv.convert.adapters.merging import merged  # noqa: PLC0415 - as above
    from llmconv.convert.models.completeness import check_complete  # noqa: PLC0415 - as above
    from llmconv.convert.opening_adapters import open_adapters  # noqa: PLC0415 - as above

    base = open_checkpoint(folder)
    try:
        opened = open_adapters([adapter], (), base, None)
        result, edits = merged(base, opened)
    except LlmconvError as error:
        if "`--" in error.hint:
            error.hint = f"with `llmconv merge-lora BASE ADAPTER -o OUT`, {error.hint}"
        raise
    if result.config != base.config:
        raise UnsupportedInput("the adapter changes `config.json` of the model", hint=MERGE)
    incomplete = check_complete(result.tensors, result.config, folder.name)
    warn_all((*warn_of_origin(base, opened, str(folder)), *edits.warnings, *incomplete))
    return result.tensors


CONFIG, WEIGHTS = "config.json", ".safetensors"
LIBRARIES = ("transformers", "torch", "onnx", "onnx-ir")  # that decide what an export contains
# suffixes of the files besides the weights that a model needs to run
COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")


@fetches
def graphs_in_cache(folder: Path) -> Path | None:
    """The folder in the cache with the graphs of a model folder or a training checkpoint, made if it is missing.

    None if `folder` is neither: it has graphs, or code of its own. Raises InputRefused if there is no cache, or it
    cannot have links to the weights; and as `export` and `to_hf`, with a hint at the other ways.
    """
    kind = "" if _is_plain(folder) else _training_format(folder)
    if not kind and not _is_plain(folder):
        return None
    instead = _instead(folder, kind)
    try:
        cache = user_cache("exported")
    except InputRefused as error:
        error.hint = f"{error.hint}; or {instead}"
        raise
    entries = cache / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    entry = entries / _identity(folder)
    made, shown = _made_in(entry, model_name(folder) or "model"), with_addresses(str(folder))
    if made.is_dir():
        say(f"`{shown}` has no graphs; those of an earlier run are in `{made}`")
        return made
    if kind:
        say(f"`{shown}` is a training checkpoint (`{kind}`): converting and exporting it once, into `{made}`")
    else:
        say(f"`{shown}` has no graphs: exporting them once, into `{made}`, which links the weights and copies none")
    try:
        entries.mkdir(parents=True, exist_ok=True, mode=0o700)
        with unfinished_folder(entries) as unfinished:
            (_convert if kind else _export)(folder, unfinished / made.name)
            for old in entries.iterdir():
                if old != entry and not old.name.startswith(UNFINISHED):
                    shutil.rmtree(old, ignore_errors=True)
            try:
                unfinished.rename(entry)
            except OSError:
                if not made.is_dir():  # another process was faster
                    raise
    except OSError as error:
        problem = f"`{folder}` has no graphs, and none can be made in `{entries}`: {first_line(error)}"
        raise InputRefused(problem, hint=instead) from error
    return made


def _made_in(entry: Path, name: str) -> Path:
    """The folder with the graphs in an entry of the cache; made of the same files, it may have another name."""
    return next(entry.iterdir(), entry / name) if entry.is_dir() else entry / name


def _instead(folder: Path, kind: str) -> str:
    """The commands that make graphs of a model, or of a training checkpoint of a `kind`."""
    if kind == "gguf":
        return f"`llmconv export {word(folder)} -o OUT` makes graphs of it"
    if kind:
        return f"`llmconv to-hf {word(folder)} -o OUT` converts it, `llmconv export OUT` makes graphs"
    if snapshot_home(folder):
        return f"`{export_command(folder)}` makes them; or give `--backend torch`"
    return f"`{export_command(folder)}` writes them next to the weights; or give `--backend torch`"


def _is_plain(folder: Path) -> bool:
    if not folder.is_dir() or not (folder / CONFIG).is_file() or graph_entries(folder) or single_pass_entries(folder):
        return False
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")) or "auto_map" in read_json(folder / CONFIG):
        return False
    return has_weights(folder)


def _training_format(path: Path) -> str:
    """The training format of a checkpoint; empty for graphs, an adapter, or what llmconv does not know."""
    has_config = (path.parent / CONFIG).is_file() and path.suffix == WEIGHTS  # a file of a model folder
    if path.suffix == ".onnx" or has_config or graph_entries(path) or single_pass_entries(path):
        return ""
    from llmconv.convert.opening import recognized  # noqa: PLC0415 - as in `_export`

    found = recognized(path)[1]
    return found.name if found else ""


def _identity(folder: Path) -> str:
    """A digest of the versions and of all files that the export depends on; of weights no content is read."""
    known = [__version__, *(f"{name} {_version(name)}" for name in LIBRARIES)]
    near = folder if _is_plain(folder) else folder.resolve().parent if folder.is_file() else None
    files = [near / name for name in side_file_names(near) if "/" in name] if near else []  # further chat templates
    if near == folder:
        files += [path for path in sorted(folder.iterdir()) if path.suffix in (WEIGHTS, ".gguf", *COPIED)]
    else:
        homes = folder.resolve().parents[:2]  # a run of MindFormers has its YAML there
        yaml = [one for home in homes for one in sorted(home.glob("*.y*ml"))]
        files += [*files_near(folder), *yaml, *files_under(folder)]
    for path in files:
        if path.is_file():
            found = path.stat()
            known.append(repr((path.name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _export(folder: Path, made: Path) -> None:
    """Exports into a new folder that has links to the weights, and copies of the small files."""
    from llmconv.export import export  # noqa: PLC0415 - a run with graphs needs none of it

    made.mkdir()
    for path in sorted(folder.iterdir()):
        if path.suffix in (WEIGHTS, ".gguf") and path.is_file():
            os.link(path.resolve(), made / path.name)  # runtimes refuse symbolic links
        elif path.suffix in COPIED and path.name != MANIFEST and path.is_file():
            shutil.copyfile(own_file(folder, path.name), made / path.name)
    write_small(made, {name: content for name, content in read_side_files(folder).items() if "/" in name})
    with _named(made, folder, _torch_instead(folder), export_command(folder)):
        export(made)


def _torch_instead(folder: Path) -> str:
    """The way out with torch, if there is one: transformers does not load all codes that llmconv reads."""
    from llmconv.quantized_weights.float4 import has_small_exponents  # noqa: PLC0415 - as in `_export`
    from llmconv.quantized_weights.quantized_checkpoint import (  # noqa: PLC0415
        FIELD,
        UNKNOWN_TO_TRANSFORMERS,
        method_name,
    )

    config = read_json(folder / CONFIG)
    if method_name(config) not in UNKNOWN_TO_TRANSFORMERS and not has_small_exponents(config.get(FIELD)):
        return "or give `--backend torch`"
    plain = f"`llmconv to-hf {word(folder)} -o PLAIN --quant dequantize`"
    return f"or give `--backend torch` with the folder that {plain} makes"


TORCH_OF_FOLDER = "or give `--backend torch` with the folder that `llmconv to-hf` makes"


@contextmanager
def _named(made: Path, given: Path, way: str, command: str, *, converting: bool = False) -> Iterator[None]:
    """Errors name what was given, and not the folder in the cache, and the `command` whose options a hint names.

    Hints end with a `way` out, if one is.
    """
    try:
        yield
    except LlmconvError as error:
        error.message = error.message.replace(str(made), str(given))
        error.hint = error.hint.replace(str(made), str(given))
        if with_option := "`-" in error.hint:
            error.hint = f"with `{command}`, {error.hint}"
        # what is damaged runs nowhere, and a conversion needs an option that goes on
        if way and (with_option if converting else not isinstance(error, MalformedInput)):
            error.hint += f"; {way}"
        error.args = (error.message,)
        raise


def _convert(path: Path, made: Path) -> None:
    from llmconv.convert import to_hf  # noqa: PLC0415 - as in `_export`
    from llmconv.export import export  # noqa: PLC0415
    from llmconv.files.gguf_file import holds_gguf  # noqa: PLC0415

    if holds_gguf(path):
        with _named(made, path, TORCH_OF_FOLDER, export_command(path)):
            _export_gguf(path, made)
        return
    command = f"llmconv to-hf {word(path)} -o OUT"
    with _named(made, path, f"what `{command}` writes can be given here", command, converting=True):
        to_hf(path, made)
    with _named(made, path, TORCH_OF_FOLDER, "llmconv export OUT"):
        export(made)


def _export_gguf(path: Path, made: Path) -> None:
    """Graphs of a GGUF file: over its own bytes where it has values, with its codes where it has blocks."""
    from llmconv.export import export  # noqa: PLC0415 - as in `_export`
    from llmconv.files.gguf_file import is_gguf, parts_of  # noqa: PLC0415

    files = parts_of(path) if path.is_file() else [file for file in path.iterdir() if is_gguf(file)]
    with suppress(OSError):
        made.mkdir()
        for file in files:
            os.link(file.resolve(), made / file.name)  # runtimes refuse symbolic links
        with suppress(InputRefused):  # values that graphs compute from blocks
            export(made / files[0].name)
            return
    shutil.rmtree(made, ignore_errors=True)
    export(path, made)
