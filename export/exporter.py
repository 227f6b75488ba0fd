"""HF folder -> ONNX graphs that map its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, open_checkpoint, read_json
from llmconv.errors import MalformedInput
from llmconv.export.bind import match_weights
from llmconv.export.destination import GRAPH_FILES, Destination, InPlace, NewFolder, Sizes
from llmconv.export.fake_model import depth, load_config
from llmconv.export.graph import build_graph
from llmconv.export.input_maps import decoder_config, find_input_map
from llmconv.export.layouts import DEFAULT, Dressing, Layout, Model, by_names, roles_for
from llmconv.manifest import step
from llmconv.storage import local_path


@dataclass(frozen=True)
class Exported:
    """What an export made, or would make.

    Attributes:
        folder: where the graphs lie.
        graphs: role (`prefill`, `decode`, `unified`) -> file name.
        sizes: bytes of graphs, of mapped and of copied weights; None for a dry run.
        weight_bytes: bytes of the model's weights.
        traced_layers: how many layers were traced; the rest was replicated.
        num_layers: how many the model has.
        beside: other files that clients want, by path in the folder.
    """

    folder: Path
    graphs: dict[str, str]
    sizes: Sizes | None
    weight_bytes: int
    traced_layers: int
    num_layers: int
    beside: tuple[str, ...] = ()


def export(  # noqa: PLR0913 - one parameter per option of the command
    model: str | Path,
    output: Path | None = None,
    *,
    prefill: bool = False,
    incremental: bool = False,
    unified: bool = False,
    layout: str | Sequence[str] = (),
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Exported:
    """Exports decoder graphs: `prefill.onnx`, `decode.onnx` and, on demand, `model.onnx` for both.

    Without `output` the graphs map the weights in place; otherwise those are streamed into `output` once, cast to
    `dtype`, and mapped there. The graphs compute in float32; half precision is cast when a graph is loaded.

    Args:
        model: Hugging Face folder or hub id.
        output: folder to make.
        prefill, incremental, unified: write `prefill.onnx`, `decode.onnx` (the default), `model.onnx`.
        layout: the clients that shall open the folder (one file each in `export/layouts/`); some imply a graph.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: how the weights are stored.
        max_shard_size: largest safetensors file, when weights are written.
        overwrite, resume: replace existing graphs or an existing `output`; continue an interrupted run.
        dry_run: build and check everything, write nothing.

    Raises:
        UsageProblem: an unknown layout, or one that can do nothing with the graphs asked for.
        InputRefused: a `model_type` without input map, weights that do not fit the config, existing graphs, …
        OutputFailed: writing failed.
    """
    layouts = by_names([layout] if isinstance(layout, str) else layout)
    roles = roles_for(layouts, _asked(prefill, incremental, unified))
    folder = local_path(model)
    checkpoint = open_checkpoint(folder)
    input_map = find_input_map(model_type_of(checkpoint))
    config = load_config(checkpoint.config)
    dressing = Dressing(layouts, Model(decoder_config(config), input_map, _generation(folder)))
    dressing.check()
    destination: Destination = InPlace(folder, dtype, overwrite or dry_run)
    if output and output.resolve() != folder.resolve():
        destination = NewFolder(output, dtype, max_shard_size, overwrite, resume)
    destination.check(checkpoint, roles, dressing)
    traced, traced_layers = build_graph(config, input_map)
    match_weights(traced, checkpoint)
    sizes = None
    if not dry_run:
        done = _step(model, roles, layouts, dtype, traced_layers)
        sizes = destination.write(traced, checkpoint, roles, dressing, done)
    files = {role: GRAPH_FILES[role] for role in roles}
    return Exported(destination.folder, files, sizes, checkpoint.nbytes, traced_layers, depth(config), dressing.names)


def _step(
    model: str | Path, roles: Sequence[str], layouts: Sequence[Layout], dtype: str, traced_layers: int
) -> dict[str, Any]:
    """What the manifest says of the export."""
    names = tuple(layout.name for layout in layouts if layout.name != DEFAULT)
    return step("export", Path(model), graphs=roles, layouts=names, dtype=dtype, layers_traced=traced_layers)


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of `config.json`.

    Raises:
        MalformedInput: it has none.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedInput("`config.json` names no `model_type`", hint="copy the config of the original model again")
    return model_type


def _asked(prefill: bool, incremental: bool, unified: bool) -> list[str]:
    """The graphs asked for by name."""
    wanted = {"prefill": prefill, "decode": incremental, "unified": unified}
    return [role for role, given in wanted.items() if given]


def _generation(folder: Path) -> dict[str, Any] | None:
    """The content of `generation_config.json`, where there is one."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else None
