"""HF folder -> ONNX graphs that map its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, open_checkpoint, read_json
from llmconv.errors import MalformedInput
from llmconv.export.bind import match_weights
from llmconv.export.destination import Destination, InPlace, NewFolder, Sizes
from llmconv.export.drawing import Drawing
from llmconv.export.fake_model import depth, load_config
from llmconv.export.graph import build_graph
from llmconv.export.graph_options import GraphOptions
from llmconv.export.input_maps import find_input_map
from llmconv.export.layouts import Dressing, Model, by_names, roles_for
from llmconv.export.passes.choice import Choice
from llmconv.export.prefixes import open_prefix
from llmconv.export.trace import OPSET
from llmconv.manifest import step
from llmconv.storage import local_path


@dataclass(frozen=True)
class Exported:
    """What an export made, or would make.

    Attributes:
        folder: where the graphs lie.
        graphs: role (`prefill`, `decode`, `unified`) -> file names, several where there are stages.
        sizes: bytes of graphs, of mapped and of copied weights; None for a dry run.
        weight_bytes: bytes of the model's weights.
        traced_layers: how many layers were traced; the rest was replicated.
        num_layers: how many the model has.
        beside: other files that clients want, by path in the folder.
    """

    folder: Path
    graphs: dict[str, list[str]]
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
    last_logits: bool = False,
    postprocess: str | None = None,
    stages: int = 1,
    prefix: Path | None = None,
    opset: int = OPSET,
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
        last_logits: run the head on the last position only: `logits` are `[batch_size, 1, vocab]`.
        postprocess: `argmax` or `topk:K`: outputs `tokens` and `scores` instead of `logits`, see `passes.choice`.
        stages: write each graph as a chain of so many, each with some of the layers, see `llmconv.export.stages`.
        prefix: adapter of prefix tuning or prompt tuning, which the graphs of a prompt begin with.
        opset: 21 spells newer operators out, for older runtimes; 23 or 24.
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
    choice = Choice.parse(postprocess) if postprocess else None
    options = GraphOptions(last_logits, choice, stages, open_prefix(prefix) if prefix else None, opset)
    folder = local_path(model)
    checkpoint = open_checkpoint(folder)
    input_map = find_input_map(model_type_of(checkpoint))
    config = load_config(checkpoint.config)
    drawing = Drawing(tuple(roles), Dressing(layouts, Model(config, input_map, _generation(folder))), options)
    destination: Destination = InPlace(folder, dtype, overwrite or dry_run)
    if output and output.resolve() != folder.resolve():
        destination = NewFolder(output, dtype, max_shard_size, overwrite, resume)
    destination.check(checkpoint, drawing)
    traced, traced_layers = build_graph(config, input_map)
    match_weights(traced, checkpoint)
    drawing.check(traced)
    sizes = None
    if not dry_run:
        done = step("export", Path(model), graphs=roles, dtype=dtype, layers_traced=traced_layers, **drawing.recorded())
        sizes = destination.write(traced, checkpoint, drawing, done)
    files = {role: drawing.names(role) for role in roles}
    beside = drawing.dressing.names
    return Exported(destination.folder, files, sizes, checkpoint.nbytes, traced_layers, depth(config), beside)


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
