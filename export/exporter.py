"""HF folder -> ONNX graphs that map its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.errors import MalformedInput
from llmconv.export.bind import match_weights
from llmconv.export.destination import Destination, InPlace, NewFolder, Sizes
from llmconv.export.drawing import Drawing
from llmconv.export.fake_model import load_config
from llmconv.export.graph import build_graph
from llmconv.export.graph_options import GraphOptions
from llmconv.export.input_maps import find_input_map
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
    """

    folder: Path
    graphs: dict[str, list[str]]
    sizes: Sizes | None
    weight_bytes: int
    traced_layers: int
    num_layers: int


def export(  # noqa: PLR0913 - one parameter per option of the command
    model: str | Path,
    output: Path | None = None,
    *,
    prefill: bool = False,
    incremental: bool = False,
    unified: bool = False,
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

    Without `output` (or with `output` naming the model folder) only graphs are written, and they map the weights in
    place. Otherwise the weights are streamed into `output` once, cast to `dtype`, and mapped there. The graphs compute
    in float32; weights stored in half precision are cast when the graph is loaded.

    Args:
        model: Hugging Face folder or hub id.
        output: folder to make.
        prefill, incremental: write `prefill.onnx`, `decode.onnx` (both when no graph is asked for).
        unified: write `model.onnx`, which most clients load.
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
        InputRefused: a `model_type` without input map, weights that do not fit the config, existing graphs, …
        OutputFailed: writing failed.
    """
    choice = Choice.parse(postprocess) if postprocess else None
    options = GraphOptions(last_logits, choice, stages, open_prefix(prefix) if prefix else None, opset)
    drawing = Drawing(_roles(prefill, incremental, unified), options)
    folder = local_path(model)
    checkpoint = open_checkpoint(folder)
    input_map = find_input_map(model_type_of(checkpoint))
    config = load_config(checkpoint.config)
    destination: Destination = InPlace(folder, dtype, overwrite or dry_run)
    if output is not None and output.resolve() != folder.resolve():
        destination = NewFolder(output, dtype, max_shard_size, overwrite, resume)
    destination.check(checkpoint, drawing)
    traced, traced_layers = build_graph(config, input_map)
    match_weights(traced, checkpoint)
    drawing.check(traced)
    sizes = None
    if not dry_run:
        given = {"graphs": list(drawing.roles), "dtype": dtype, "layers_traced": traced_layers, **options.recorded()}
        given |= {"stages": stages if stages > 1 else None, "prefix": prefix.name if prefix else None}
        given |= {"opset": opset if opset != OPSET else None}
        sizes = destination.write(traced, checkpoint, drawing, step("export", Path(model), **given))
    files = {role: drawing.names(role) for role in drawing.roles}
    return Exported(destination.folder, files, sizes, checkpoint.nbytes, traced_layers, config.num_hidden_layers)


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of `config.json`.

    Raises:
        MalformedInput: it has none.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedInput("`config.json` names no `model_type`", hint="copy the config of the original model again")
    return model_type


def _roles(prefill: bool, incremental: bool, unified: bool) -> tuple[str, ...]:
    """The graphs asked for, in the order they are written."""
    if not (prefill or incremental or unified):
        prefill = incremental = True
    wanted = {"prefill": prefill, "decode": incremental, "unified": unified}
    return tuple(role for role, given in wanted.items() if given)
