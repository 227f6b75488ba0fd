"""Options of sessions in files, and the checks of those that come with a model.

An .ini file, or a JSON file with the same sections:

[session]                   fields of onnxruntime.SessionOptions
intra_op_num_threads = 4
graph_optimization_level = extended
[entries]                   session configuration keys
session.intra_op.allow_spinning = 0
[provider]                  its name and its options
name = cuda
device_id = 0
[free_dimensions]           symbols of the graph's axes
batch_size = 1
[stage 2]                   what differs for one stage of `export --stages`: a provider and its options, fields of
provider = cuda             SessionOptions, and configuration keys (those with a dot)
device_id = 1

A checkpoint is data, so in such a file, and in `genai_config.json`, only options that neither write nor load other
files are taken, and numbers have bounds. GenAI passes session options on: `custom_ops_library` loads a shared library,
`enable_profiling` and the context cache write files, a provider's `backend_path` loads another library, and a file name
may point outside of the folder (fields: onnxruntime-genai 0.18, `src/config.cpp`).
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

import onnx
import onnxruntime as ort

from llmconv.argument_checks import MOST_THREADS
from llmconv.checkpoint import own_file, read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, short
from llmconv.files.safe_folder import user_cache
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.session_settings import (
    CPU,
    LEVELS,
    SessionSettings,
    StageOptions,
    provider_name,
    short_provider,
)

SECTIONS = ("session", "entries", "provider", "free_dimensions")
STAGE = re.compile(r"stage\s+([1-9]\d{0,5})")  # name of the section of one stage
TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

# fields of `onnxruntime.SessionOptions` that neither load nor write files
ATTRIBUTES = {
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
    *("graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level"),
    *("log_verbosity_level", "logid", "use_deterministic_compute", "use_per_session_threads"),
}
LARGEST_SIZE = 2**31 - 1  # of an axis
IN_PYTHON = "options that write or load files are set in Python: `SessionSettings(attributes=…, provider_options=…)`"

# sections of MindSpore Lite's graph engine configuration, with a hint to the equivalent for onnxruntime
COUNTERPARTS = {
    "ascend_context": "[provider] has the name and the options of what runs the graph",
    "ge_session_options": "[session] has the options of the memory arena, [provider] those of the device",
    "ge_graph_options": "[free_dimensions] fixes axes; the graphs take any size without it",
    "graph_kernel_param": "[session] has graph_optimization_level",
    "ge_global_options": "[session] and [entries] have the options of onnxruntime",
}


def read_session_file(path: Path, settings: SessionSettings | None = None) -> SessionSettings:
    """`settings` (default: onnxruntime's) updated from a file.

    Raises InputRefused for an unreadable file, another runtime's, or an option that leads to files; MalformedInput
    unless it is .ini or JSON with known sections and valid values.
    """
    content = _read(path)
    for name in content:
        if name in COUNTERPARTS:
            message = f"`{path.name}` is written for MindSpore's graph engine (section `{name}`)"
            raise InputRefused(message, hint=COUNTERPARTS[name])
        if name.startswith("stage") and not STAGE.fullmatch(name):
            problem = f"`{path.name}` has the section `{name}`, which is not the number of a stage"
            raise MalformedInput(problem, hint="stages are numbered from 1: `[stage 1]`, `[stage 2]`, …")
        if name not in SECTIONS and not STAGE.fullmatch(name):
            _malformed(path, f"has the unknown section `{name}`")
    provider = _provider_options(path, content.get("provider", {}))
    settings = settings or SessionSettings()
    name = provider.pop("name", settings.provider)
    general = replace(
        settings,
        provider=name,
        provider_options={**settings.provider_options, **provider},
        entries={**settings.entries, **_entries(path, content.get("entries", {}))},
        attributes={**settings.attributes, **_attributes(path, content.get("session", {}))},
        free_dimensions={
            name: _int(path, name, size, LARGEST_SIZE) for name, size in content.get("free_dimensions", {}).items()
        },
    )
    stages = [(match, section) for name, section in content.items() if (match := STAGE.fullmatch(name))]
    return replace(general, stages={int(match[1]): _stage(path, fields, general) for match, fields in stages})


def _stage(path: Path, fields: Mapping[str, Any], general: SessionSettings) -> StageOptions:
    """The options of a stage, those of `general` where its section has none."""
    own = {name: value for name, value in fields.items() if name != "provider"}
    provider = str(fields.get("provider", general.provider))
    same = short_provider(provider) == short_provider(general.provider)
    keys = _entries(path, {name: value for name, value in own.items() if "." in name})
    known = {name: value for name, value in own.items() if hasattr(ort.SessionOptions, name)}
    rest = _provider_options(path, {name: own[name] for name in own.keys() - keys.keys() - known.keys()})
    if rest and short_provider(provider) == short_provider(CPU):  # the CPU has no options of its own
        _malformed(path, f"has the unknown session option `{next(iter(rest))}`")
    return StageOptions(
        provider,
        {**(general.provider_options if same else {}), **rest},
        {**general.entries, **keys},
        {**general.attributes, **_attributes(path, known)},
    )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Sections by name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"`{path}` cannot be read: {error}", hint="give an .ini or a JSON file") from error
    if text.lstrip().startswith("{"):
        content = read_json(path, by_hand=True)
        if not all(isinstance(section, dict) for section in content.values()):
            _malformed(path, "has a section that is not an object")
        return content
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), inline_comment_prefixes=(";", "#"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        problem = f"`{path.name}` is not an .ini file: {str(error).splitlines()[0]}"
        raise MalformedInput(problem, hint="see docs/generation.md") from error
    return {name: dict(parser[name]) for name in parser.sections()}


def _attributes(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SessionOptions`, converted to the type of each."""
    defaults = ort.SessionOptions()
    for name in fields:
        if hasattr(defaults, name) and name not in ATTRIBUTES:
            _refuse_file(path, name)
    return {name: _value(path, name, value, getattr(defaults, name, None)) for name, value in fields.items()}


def _value(path: Path, name: str, value: Any, default: Any) -> Any:
    if name == "graph_optimization_level":
        level = LEVELS.get(str(value).lower(), str(value).upper())
        return _member(path, ort.GraphOptimizationLevel, level)
    if name == "execution_mode":
        return _member(path, ort.ExecutionMode, f"ORT_{str(value).upper().removeprefix('ORT_')}")
    if isinstance(default, bool):
        if str(value).lower() not in TRUTHS:
            _malformed(path, f"gives `{name}` the value `{value}`, which is neither true nor false")
        return TRUTHS[str(value).lower()]
    if isinstance(default, int):
        return _int(path, name, value, MOST_THREADS if name.endswith("num_threads") else LARGEST)
    if not isinstance(default, str):
        _malformed(path, f"has the unknown session option `{name}`")
    return value


def _member(path: Path, kind: Any, name: str) -> Any:
    """A value of one of onnxruntime's enumerations."""
    if not hasattr(kind, name):
        _malformed(path, f"has the unknown value `{name}`")
    return getattr(kind, name)


def _int(path: Path, name: str, value: Any, most: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        _malformed(path, f"gives `{name}` the value `{value}`, which is not an integer")
    if not -1 <= number <= most:
        _malformed(path, f"gives `{name}` the value `{short(value)}`, which is not from -1 to {most}")
    return number


def _entries(path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if name not in ENTRIES:
            _refuse_file(path, name)
        if out_of_bounds(value):
            _malformed(path, f"gives `{name}` the value `{short(value)}`, which is above {LARGEST}")
    return {name: str(value) for name, value in given.items()}


def _provider_options(path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    if name := leads_to_files(given):
        _refuse_file(path, name)
    return {name: str(value) for name, value in given.items()}


def _refuse_file(path: Path, name: str) -> NoReturn:
    problem = f"`{path.name}` has the option `{name[:80]}`, which is not among those that write and load no files"
    raise InputRefused(problem, hint=IN_PYTHON)


def _malformed(path: Path, problem: str) -> NoReturn:
    message = f"`{path.name}` {problem}"
    raise MalformedInput(message, hint=f"sections are {', '.join(SECTIONS)}, stage N; see docs/generation.md")


Options = TypeVar("Options", SessionSettings, StageOptions)


class SessionOptions(TypedDict, total=False):
    """How onnxruntime runs graphs; with the names of the options of the command line."""

    session: SessionSettings | None  # session settings of onnxruntime; the options below replace single ones
    provider: str | None  # provider of onnxruntime: `cpu`, `cuda`, …; the CPU runs the rest
    threads: int | None  # threads of onnxruntime or torch; 0 for one per core
    session_config: str | Path | None  # file of session settings, .ini or JSON
    # time limit in seconds for a run of a small graph; larger models and prompts get more (default: 60)
    timeout: float | None
    prepack: bool  # copy weights to a faster layout in memory
    packed_cache: bool  # as `prepack`, in a file that later runs map


def session_settings(options: SessionOptions) -> SessionSettings:
    """The settings of `session` or of a file with options replaced; InputRefused, UsageProblem for both."""
    session, file = options.get("session"), options.get("session_config")
    if session and file:
        raise UsageProblem("`session` and `session_config` exclude each other", hint="give one of them")
    found = session or SessionSettings()
    provider, threads = options.get("provider"), options.get("threads")
    if file:
        found = read_session_file(Path(file), found)
    stages = {number: _overridden(own, provider, threads) for number, own in found.stages.items()}
    found = replace(_overridden(found, provider, threads), stages=stages)
    changes: dict[str, Any] = {} if threads is None else {"threads": threads}
    if options.get("timeout") is not None:
        changes["timeout"] = options["timeout"]
    if options.get("prepack"):
        changes["prepack"] = True
    if options.get("packed_cache"):
        changes["packed_cache"] = user_cache("packed")
    return replace(found, **changes)


def _overridden(found: Options, provider: str | None, threads: int | None) -> Options:
    """Session settings, or those of a stage, without what single options replace."""
    if threads is not None:
        attributes = {name: value for name, value in found.attributes.items() if name != "intra_op_num_threads"}
        found = replace(found, attributes=attributes)
    if provider is not None and provider_name(provider) != found.provider:
        found = replace(found, provider=provider_name(provider), provider_options={})
    return found


CONFIG = "genai_config.json"

# session configuration keys that neither load nor write files (1.31, `session_options_config_keys.h`)
ENTRIES = {
    *("session.disable_prepacking", "session.intra_op.allow_spinning", "session.inter_op.allow_spinning"),
    *("session.force_spinning_stop", "session.set_denormal_as_zero", "session.qdq_matmulnbits_accuracy_level"),
    *("session.use_device_allocator_for_initializers", "session.dynamic_block_base", "session.use_env_allocators"),
    *("session.intra_op.spin_duration_us", "session.inter_op.spin_duration_us", "session.disable_cpu_ep_fallback"),
    *("session.intra_op_thread_affinities", "session.disable_quant_qdq", "session.enable_quant_qdq_cleanup"),
    *("session.disable_double_qdq_remover", "session.enable_dq_matmulnbits_fusion", "session.prepack.enable_parallel"),
    *("session.disable_qdq_constant_folding", "session.qdq_matmulnbits_block_size", "mlas.disable_kleidiai"),
    *("session.strict_shape_type_inference", "session.disable_aot_function_inlining", "mlas.use_lut_gemm"),
    *("session.graph_optimizations_loop_level", "memory.enable_memory_arena_shrinkage", "ep.cuda.fpa_intb_gemm"),
    *("optimization.disable_specified_optimizers", "optimization.enable_gelu_approximation"),
    "optimization.enable_cast_chain_elimination",
}
# allowed fields of `session_options`, which neither load nor write files
SESSION_OPTIONS = ENTRIES | {
    *("intra_op_num_threads", "inter_op_num_threads", "enable_cpu_mem_arena", "enable_mem_pattern", "log_id"),
    *("log_severity_level", "log_verbosity_level", "graph_optimization_level", "use_env_allocators"),
    *("disable_cpu_ep_fallback", "disable_quant_qdq", "enable_quant_qdq_cleanup", "provider_options"),
}
LARGEST = 1_000_000  # of a number in options; threads have a bound of their own
GRAPHS = (".onnx", ".graph")  # ends of the names of graphs
PROCESSOR = "config_filename"  # field with the name of a file that is not a graph
SHARED = "data_file"  # field of `shared_initializers` with the name of a weight file
# refused in names and values of provider options
LEADS_TO_FILES = re.compile(r"path|file|dir|librar|cache|dump|context|profil|\.(so|dll|dylib)\b|[/\\]", re.IGNORECASE)


def read_genai_config(folder: Path) -> dict[str, Any]:
    """The section `model` of a checked `genai_config.json`; MalformedInput for a form, an option or a graph."""
    content = read_json(own_file(folder, CONFIG))
    for name, value in _fields(content):
        if name == "session_options":
            _check_session(value)
        elif name.endswith(("filename", SHARED)):
            if not isinstance(value, str) or not value or Path(value).name != value or not value.isprintable():
                _refuse(f"`{name}` is {short(value, 80)!r}, which is not a plain file name")
            if value.endswith(GRAPHS) and (folder / value).exists():
                load_guarded(folder / value)
    model = content.get("model")
    if not isinstance(model, dict):
        _refuse("missing object `model`")
    return model


def named_files(folder: Path) -> list[str]:
    """The distinct names of graphs, adapters and weight files in `genai_config.json`; raises as `read_genai_config`."""
    read_genai_config(folder)
    fields = _fields(read_json(own_file(folder, CONFIG)))
    wanted = ((name, value) for name, value in fields if name.endswith(("filename", SHARED)) and name != PROCESSOR)
    return list(dict.fromkeys(str(value) for _, value in wanted))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Every field of every object, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name, inner
        yield from _fields(inner)
    for item in value if isinstance(value, list) else ():
        yield from _fields(item)


def _check_session(options: Any) -> None:
    if not isinstance(options, dict):
        _refuse("`session_options` is not an object")
    if unknown := sorted(options.keys() - SESSION_OPTIONS):
        _refuse(f"unsupported session option `{unknown[0][:80]}`")
    for name, value in options.items():
        most = MOST_THREADS if name.endswith("num_threads") else LARGEST
        if out_of_bounds(value, most):
            _refuse(f"`{name}` is {short(value)}, above {most}")
    providers = options.get("provider_options", [])
    if not isinstance(providers, list) or not all(isinstance(provider, dict) for provider in providers):
        _refuse("`provider_options` is not a list of objects")
    for given in (given for provider in providers for given in provider.values()):
        if not isinstance(given, Mapping):
            _refuse("provider options are not an object")
        if name := leads_to_files(given):
            _refuse(f"unsupported provider option `{name[:80]}`")


def leads_to_files(options: Mapping[str, Any]) -> str:
    """The first provider option that loads or writes a file, as far as its name or value shows; empty for none."""
    return next((name for name, value in options.items() if LEADS_TO_FILES.search(f"{name} {value}")), "")


def out_of_bounds(value: Any, most: int = LARGEST) -> bool:
    """Whether a value is a number, or digits, outside of -`most` to `most`."""
    if isinstance(value, str):
        digits = value.strip().removeprefix("-")
        return digits.isdecimal() and (len(digits) > len(str(most)) or int(digits) > most)
    return isinstance(value, int | float) and not -most <= value <= most


def _refuse(problem: str) -> NoReturn:
    message = f"`{CONFIG}` is refused: {problem}"
    raise MalformedInput(message, hint="remove it, or write the file again: `llmconv export --layout genai`")


def returns_last_logits(folder: Path, model: Mapping[str, Any]) -> bool:
    """Whether a graph that takes prompts returns logits `[batch, 1, vocabulary]`, those of the last column.

    GenAI pads a batch at the end, so the last column of a shorter prompt is padding. `model` is the section of the
    configuration, which was checked.
    """
    decoder = model.get("decoder")
    if not isinstance(decoder, Mapping):
        return False
    outputs, stages = decoder.get("outputs"), decoder.get("pipeline")
    name = outputs.get("logits", "logits") if isinstance(outputs, Mapping) else "logits"
    parts = [decoder, *(part for stage in stages or () if isinstance(stage, Mapping) for part in stage.values())]
    files = [folder / str(part["filename"]) for part in parts if isinstance(part, Mapping) and "filename" in part]
    return any(_is_last(onnx.load(file, load_external_data=False).graph, name) for file in files if file.is_file())


def _is_last(graph: onnx.GraphProto, logits: str) -> bool:
    """Whether a graph takes several tokens, and returns the logits of one."""
    outputs = [port for port in graph.output if port.name == logits and len(port.type.tensor_type.shape.dim) > 1]
    lengths = [port.type.tensor_type.shape.dim[1] for port in (*graph.input[:1], *outputs)]
    return len(lengths) == 2 and lengths[0].dim_value != 1 and lengths[1].dim_value == 1
