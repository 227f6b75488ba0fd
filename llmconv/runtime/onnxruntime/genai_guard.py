"""Checks a folder's `genai_config.json` before ONNX Runtime GenAI reads it.

GenAI passes session options on: `custom_ops_library` loads a shared library, `enable_profiling` and the context cache
write files, a provider's `backend_path` loads another library, and a file name may point outside of the folder (fields:
onnxruntime-genai 0.18, `src/config.cpp`). A checkpoint is data, so only fields known to be harmless are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import onnx

from llmconv.argument_checks import MOST_THREADS
from llmconv.checkpoint import own_file, read_json
from llmconv.errors import MalformedInput
from llmconv.runtime.onnxruntime.guard import load_guarded

CONFIG = "genai_config.json"

ENTRIES = {
    *("session.disable_prepacking", "session.intra_op.allow_spinning", "session.inter_op.allow_spinning"),
    *("session.force_spinning_stop", "session.set_denormal_as_zero", "session.qdq_matmulnbits_accuracy_level"),
    *("session.use_device_allocator_for_initializers", "session.dynamic_block_base", "session.use_env_allocators"),
    *("session.intra_op.spin_duration_us", "session.inter_op.spin_duration_us", "session.disable_cpu_ep_fallback"),
    *("session.intra_op_thread_affinities", "session.disable_quant_qdq", "session.enable_quant_qdq_cleanup"),
    *("session.disable_double_qdq_remover", "session.enable_dq_matmulnbits_fusion", "session.prepack.enable_parallel"),
    *(
        "session.disable_qdq_constant_folding",
        "session.qdq_matmulnbits_block_size",
        "session.strict_shape_type_inference",
    ),
    *("session.disable_aot_function_inlining", "session.graph_optimizations_loop_level"),
    *("optimization.disable_specified_optimizers", "optimization.enable_gelu_approximation"),
    *("optimization.enable_cast_chain_elimination", "mlas.disable_kleidiai", "mlas.use_lut_gemm"),
    *("memory.enable_memory_arena_shrinkage", "ep.cuda.fpa_intb_gemm"),
}
"""Session configuration keys that neither load nor write files (1.31, `session_options_config_keys.h`)."""

SESSION_OPTIONS = ENTRIES | {
    *("intra_op_num_threads", "inter_op_num_threads", "enable_cpu_mem_arena", "enable_mem_pattern", "log_id"),
    *("log_severity_level", "log_verbosity_level", "graph_optimization_level", "use_env_allocators"),
    *("disable_cpu_ep_fallback", "disable_quant_qdq", "enable_quant_qdq_cleanup", "provider_options"),
}
"""Allowed fields of `session_options`, which neither load nor write files."""

LARGEST = 1_000_000
"""Of a number in options; threads have a bound of their own."""

GRAPHS = (".onnx", ".graph")
"""Ends of the names of graphs."""

PROCESSOR = "config_filename"
"""Field with the name of a file that is not a graph."""

SHARED = "data_file"
"""Field of `shared_initializers` with the name of a weight file."""

LEADS_TO_FILES = re.compile(r"path|file|dir|librar|cache|dump|context|profil|\.(so|dll|dylib)\b|[/\\]", re.IGNORECASE)
"""Refused in names and values of provider options."""


def read_genai_config(folder: Path) -> dict[str, Any]:
    """The section `model` of `genai_config.json`, after the whole file was checked.

    Raises MalformedInput for another form, an option that loads or writes files, or a graph that `guard` refuses.
    """
    content = read_json(own_file(folder, CONFIG))
    for name, value in _fields(content):
        if name == "session_options":
            _check_session(value)
        elif name.endswith(("filename", SHARED)):
            _check_file(folder, name, value)
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
    unknown = sorted(options.keys() - SESSION_OPTIONS)
    if unknown:
        _refuse(f"unsupported session option `{unknown[0][:80]}`")
    for name, value in options.items():
        most = MOST_THREADS if name.endswith("num_threads") else LARGEST
        if out_of_bounds(value, most):
            _refuse(f"`{name}` is {str(value)[:40]}, above {most}")
    providers = options.get("provider_options", [])
    if not isinstance(providers, list) or not all(isinstance(provider, dict) for provider in providers):
        _refuse("`provider_options` is not a list of objects")
    for provider in providers:
        for provider_options in provider.values():
            _check_provider(provider_options)


def _check_provider(options: Any) -> None:
    if not isinstance(options, Mapping):
        _refuse("provider options are not an object")
    if name := leads_to_files(options):
        _refuse(f"unsupported provider option `{name[:80]}`")


def leads_to_files(options: Mapping[str, Any]) -> str:
    """The first provider option that loads or writes a file, as far as its name or value shows; empty for none."""
    found = (name for name, value in options.items() if LEADS_TO_FILES.search(f"{name} {value}"))
    return next(found, "")


def out_of_bounds(value: Any, most: int = LARGEST) -> bool:
    """Whether a value is a number, or digits, outside of -`most` to `most`."""
    if isinstance(value, str):
        digits = value.strip().removeprefix("-")
        return digits.isdecimal() and (len(digits) > len(str(most)) or int(digits) > most)
    return isinstance(value, int | float) and not -most <= value <= most


def _check_file(folder: Path, name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or Path(value).name != value or not value.isprintable():
        _refuse(f"`{name}` is {str(value)[:80]!r}, which is not a plain file name")
    if value.endswith(GRAPHS) and (folder / value).exists():
        load_guarded(folder / value)


def _refuse(problem: str) -> NoReturn:
    raise MalformedInput(
        f"`{CONFIG}` is refused: {problem}", hint="remove it, or write the file again: `llmconv export --layout genai`"
    )


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
    lengths = [port.type.tensor_type.shape.dim[1] for port in (*graph.input[:1], *_named(graph, logits))]
    return len(lengths) == 2 and lengths[0].dim_value != 1 and lengths[1].dim_value == 1


def _named(graph: onnx.GraphProto, name: str) -> list[onnx.ValueInfoProto]:
    return [port for port in graph.output if port.name == name and len(port.type.tensor_type.shape.dim) > 1]
