"""HF folder -> ONNX graphs beside the weights they map, and their entry in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from llmconv import manifest as manifests
from llmconv.checkpoint import Checkpoint, open_checkpoint, open_weights
from llmconv.errors import InputRefused
from llmconv.export.bind import bind
from llmconv.export.fake_model import load_config, period, shortened
from llmconv.export.gemm import bind_linear_layers
from llmconv.export.input_maps import InputMap, find_input_map
from llmconv.export.naming import name_everything
from llmconv.export.replicate import NotIsomorphic, replicate, warm_up
from llmconv.export.trace import OPSET, TracedGraph, trace
from llmconv.manifest import Manifest
from llmconv.progress import say
from llmconv.safetensors_io import FileTensor
from llmconv.staging import failing_safely, sync_folder, write_durably
from llmconv.storage import local_path
from llmconv.tensors import BY_NAME, cast
from llmconv.writer import plan_checkpoint, write_checkpoint

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}


@dataclass(frozen=True)
class Exported:
    """What an export made.

    Attributes:
        folder: where the graphs lie.
        graphs: role -> file name.
        graph_bytes: size of all graph files.
        mapped_bytes: weight bytes each graph maps instead of copying.
        traced_layers: how many layers were traced; the rest was replicated.
        num_layers: how many the model has.
    """

    folder: Path
    graphs: dict[str, str]
    graph_bytes: int
    mapped_bytes: int
    traced_layers: int
    num_layers: int


def export(
    model: str | Path,
    output: Path | None = None,
    *,
    prefill: bool = False,
    incremental: bool = False,
    unified: bool = False,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    resume: bool = False,
) -> Exported:
    """Exports decoder graphs: `prefill.onnx`, `decode.onnx` and, on demand, `model.onnx` for both.

    Without `output` (or with `output` naming the model folder) only graphs are written, and they map the weights in
    place. Otherwise the weights are streamed into `output` once, cast to `dtype`, and mapped there. The graphs compute in
    float32; weights stored in half precision are cast when the graph is loaded.

    Args:
        model: Hugging Face folder or hub id.
        output: folder to make.
        prefill: write `prefill.onnx` (both `prefill` and `incremental` when no graph is asked for).
        incremental: write `decode.onnx`.
        unified: write `model.onnx`, which most clients load.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: how the weights are stored.
        max_shard_size: largest safetensors file, when weights are written.
        overwrite: replace existing graphs (or an existing `output`).
        resume: continue an interrupted run.

    Raises:
        InputRefused: no weights, weights that do not fit the config, existing graphs.
        UnsupportedInput: a `model_type` without input map; quantised weights.
        OutputFailed: writing failed.
    """
    folder = local_path(model)
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint.config)
    input_map = find_input_map(config.model_type)
    roles = _roles(prefill, incremental, unified)
    in_place = output is None or output.resolve() == folder.resolve()
    if in_place:
        _require_in_place(checkpoint, dtype)
        _require_no_graphs(folder, roles, overwrite)
    traced, traced_layers = build_graph(config, input_map)
    if not in_place:
        assert output is not None
        folder = _write_weights(checkpoint, output, dtype, max_shard_size, overwrite, resume)
    mapped = bind(traced, _files(open_weights(folder)))
    sizes = _write_graphs(folder, traced.model, roles, manifests.step("export", Path(model), graphs=sorted(roles), dtype=dtype))
    return Exported(folder, {role: GRAPH_FILES[role] for role in roles}, sum(sizes), mapped, traced_layers, config.num_hidden_layers)


def build_graph(config: Any, input_map: InputMap) -> tuple[TracedGraph, int]:
    """The whole model as a graph without weights, and how many of its layers were traced.

    Three periods of layers are traced and the last is replicated; where the periods differ, all layers are traced.
    """
    total = config.num_hidden_layers
    repeat = period(config)
    few = warm_up(total, repeat) + 2 * repeat
    if few < total:
        traced = trace(shortened(config, few), input_map)
        bind_linear_layers(traced)
        try:
            replicate(traced, total, repeat)
            name_everything(traced.model)
            return traced, few
        except NotIsomorphic as difference:
            say(f"tracing all {total} layers: the layers are not alike ({difference})")
    traced = trace(config, input_map)
    bind_linear_layers(traced)
    name_everything(traced.model)
    return traced, total


def _roles(prefill: bool, incremental: bool, unified: bool) -> list[str]:
    if not (prefill or incremental or unified):
        prefill = incremental = True
    wanted = {"prefill": prefill, "decode": incremental, "unified": unified}
    return [role for role, given in wanted.items() if given]


def _require_in_place(checkpoint: Checkpoint, dtype: str) -> None:
    tensors = _files(checkpoint.tensors)
    links = sorted({tensor.path.name for tensor in tensors.values() if tensor.path.is_symlink()})
    if links:
        raise InputRefused(
            f"`{links[0]}` is a symbolic link, which ONNX runtimes refuse to map", hint="give `-o OUT`: the weights are copied there once"
        )
    stored = {tensor.dtype.name for tensor in tensors.values()}
    if dtype != "keep" and stored != {dtype}:
        raise InputRefused(
            f"the weights are {', '.join(sorted(stored))}, so `--dtype {dtype}` cannot map them in place",
            hint="give `-o OUT`: the weights are cast there once",
        )


def _require_no_graphs(folder: Path, roles: list[str], overwrite: bool) -> None:
    complete = manifests.read_manifest(folder).graphs
    existing = [GRAPH_FILES[role] for role in roles if role in complete and (folder / GRAPH_FILES[role]).exists()]
    if existing and not overwrite:
        raise InputRefused(f"`{folder / existing[0]}` already exists", hint="give `--overwrite` to replace it")


def _files(tensors: Mapping[str, Any]) -> dict[str, FileTensor]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}


def _write_weights(
    checkpoint: Checkpoint, output: Path, dtype: str, max_shard_size: str, overwrite: bool, resume: bool
) -> Path:
    """The checkpoint in `output`, cast to `dtype`."""
    sources = sorted({tensor.path for tensor in _files(checkpoint.tensors).values()})
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in checkpoint.items()}
        checkpoint = replace(checkpoint, tensors=tensors, config={**checkpoint.config, "dtype": dtype})
    steps = manifests.read_manifest(checkpoint.path).steps
    write_checkpoint(
        plan_checkpoint(checkpoint, max_shard_size), output, steps=steps, sources=sources, overwrite=overwrite, resume=resume
    )
    return output


def _write_graphs(folder: Path, model: ir.Model, roles: list[str], step: dict[str, Any]) -> list[int]:
    """Each graph by temporary file and rename; the manifest last, so that only complete sets are announced."""
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    manifest = manifests.read_manifest(folder)
    with failing_safely():
        for role in roles:
            write_durably(folder / GRAPH_FILES[role], content)
            manifest.files[GRAPH_FILES[role]] = manifests.file_entry(content)
            manifest.graphs[role] = _graph_entry(model, role)
        manifest.steps = [*manifest.steps, step]
        write_durably(folder / manifests.MANIFEST, manifest.encode())
        sync_folder(folder)
    return [len(content)] * len(roles)


def _graph_entry(model: ir.Model, role: str) -> dict[str, Any]:
    return {
        "file": GRAPH_FILES[role],
        "opset": OPSET,
        "inputs": [value.name for value in model.graph.inputs],
        "outputs": [value.name for value in model.graph.outputs],
    }


__all__ = ["Exported", "Manifest", "build_graph", "export"]
