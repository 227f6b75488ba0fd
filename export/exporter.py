"""HF folder -> ONNX graphs that map its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked, require_choice, require_least
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json
from llmconv.errors import UsageProblem
from llmconv.export.clients import Dressing, Model, by_names, roles_for
from llmconv.export.context_limit import check_context
from llmconv.export.graph_files import Drawing
from llmconv.export.graph_options import GraphOptions
from llmconv.export.graph_spec import CACHES, SHAPES, TARGETS, forms
from llmconv.export.input_maps import decoder_config
from llmconv.export.language_model import open_decoder
from llmconv.export.output import Destination, InPlace, NewFolder, Sizes
from llmconv.export.tracing.fake_model import depth
from llmconv.export.weights.bind import match_weights
from llmconv.files.paths import Written
from llmconv.files.sources import fetches, is_remote, local_path, require_own_folder
from llmconv.model_kinds import require_causal
from llmconv.output.manifest import step
from llmconv.output.plan import DEFAULT_SIZE, require_shard_size
from llmconv.progress import warn
from llmconv.runtime.context_length import context_length
from llmconv.runtime.custom_code import code_files, uses_custom_code
from llmconv.tensors import FLOATS


@dataclass(frozen=True)
class Exported:
    """What an export made, or would make.

    Attributes:
        folder: where the graphs lie.
        graphs: role (`prefill`, `decode`, `unified`, `embeddings`) -> file names, several where there are stages.
        sizes: bytes of graphs, of mapped and of written weights; None for a dry run.
        weight_bytes: bytes of the weights that the folder holds.
        weight_bytes_written: bytes of them that the export wrote, or would write: none where the folder is the model's.
        traced_layers: how many layers were traced; the rest was replicated.
        num_layers: how many the model has.
        beside: other files that clients want, by path in the folder.
    """

    folder: Path
    graphs: dict[str, list[str]]
    sizes: Sizes | None
    weight_bytes: int
    weight_bytes_written: int
    traced_layers: int
    num_layers: int
    beside: tuple[str, ...] = ()

    @property
    def weight_bytes_mapped(self) -> int:
        """Bytes of weights that the graphs map, each counted once; for a dry run, all that the folder would hold."""
        return self.sizes.mapped if self.sizes else self.weight_bytes

    def __repr__(self) -> str:
        files = ", ".join(name for names in self.graphs.values() for name in names)
        state = "a dry run" if self.sizes is None else f"{self.sizes.graphs:,} bytes"
        return f"<Exported {self.folder}: {files}; {state}, {self.weight_bytes_mapped:,} bytes of weights mapped>"


@fetches
@checked
def export(  # noqa: PLR0913 - one parameter per option of the command
    model: str | Path,
    output: Written | None = None,
    *,
    prefill: bool = False,
    incremental: bool = False,
    unified: bool = False,
    layout: str | Sequence[str] = (),
    last_logits: bool = False,
    postprocess: str | None = None,
    stages: int = 1,
    prefix: str | Path | None = None,
    opset: int | None = None,
    shapes: str = "dynamic",
    batch_size: int | None = None,
    max_seq_len: int | None = None,
    prompt_len: int | None = None,
    cache: str = "growing",
    target: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = DEFAULT_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Exports decoder graphs: `prefill.onnx`, `decode.onnx` and, on demand, `model.onnx` for both.

    Without `output` the graphs map the weights in place; otherwise those are streamed into `output` once, cast to
    `dtype`, and mapped there. The graphs compute in float32; half precision is cast when a graph is loaded.

    Args:
        model: Hugging Face folder or hub id.
        output: folder to make.
        prefill, incremental, unified: write `prefill.onnx`, `decode.onnx` (the default), `model.onnx`.
        layout: the clients that shall open the folder (one file each in `export/clients/`); some imply a graph.
        last_logits, postprocess, stages, prefix, opset: what graphs give and begin with, see `GraphOptions`.
        shapes, batch_size, max_seq_len, prompt_len, cache, target: how the cache is kept, see `form.forms`.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: how the weights are stored.
        max_shard_size: largest safetensors file, when weights are written.
        overwrite, resume: replace existing graphs or an existing `output`; continue an interrupted run.
        dry_run: build and check everything, write nothing.
        trust_remote_code: run the model's own code, which `auto_map` of `config.json` names and the folder holds.

    Raises:
        UsageProblem: options that do not fit each other.
        InputRefused: a `model_type` without input map, weights that do not fit the config, existing graphs, …
        OutputFailed: writing failed.
    """
    layouts = by_names([layout] if isinstance(layout, str) else layout)
    roles = roles_for(layouts, _asked(prefill, incremental, unified))
    _require_positive(batch_size=batch_size, max_seq_len=max_seq_len, prompt_len=prompt_len)
    _require_words(shapes, cache, target, dtype)
    require_shard_size(max_shard_size)
    if output is None:
        _require_used(max_shard_size)
    checkpoint = _open(model, output)
    folder = checkpoint.path
    options = GraphOptions.read(last_logits, postprocess, stages, local_path(prefix) if prefix else None, opset)
    code = folder if uses_custom_code(checkpoint.config, trust_remote_code) else None
    if code:
        checkpoint = replace(checkpoint, side_files={**checkpoint.side_files, **code_files(code)})
    decoder = open_decoder(checkpoint, code)
    wanted = forms(roles, shapes, cache, batch_size, max_seq_len, prompt_len, decoder.embeddings, target)
    check_context(decoder.config, context_length(folder), max_seq_len)
    dressing = Dressing(layouts, Model(decoder_config(decoder.config), decoder.input_map, _generation(folder), cache))
    drawing = Drawing(wanted, dressing, options)
    destination: Destination = InPlace(folder, dtype, overwrite or dry_run, resume)
    if output and Path(output).resolve() != folder.resolve():
        destination = NewFolder(Path(output), dtype, max_shard_size, overwrite, resume)
    destination.check(checkpoint, drawing)
    graphs, traced_layers = decoder.build(wanted)
    for traced in graphs.values():
        match_weights(traced, checkpoint)
    drawing.check(graphs)
    sizes = None
    if not dry_run:
        source = folder if is_remote(model) else Path(model)
        done = step("export", source, dtype=dtype, layers_traced=traced_layers, **drawing.recorded())
        sizes = destination.write(graphs, checkpoint, drawing, done)
    files = {role: drawing.names(role) for role in graphs}
    layers = depth(decoder.config)
    held = destination.stored(checkpoint).nbytes
    written = held if isinstance(destination, NewFolder) else 0
    return Exported(destination.folder, files, sizes, held, written, traced_layers, layers, dressing.names)


def _require_used(max_shard_size: str | int) -> None:
    """Refuses an option of weights that nobody writes.

    Raises:
        UsageProblem: it would be ignored.
    """
    if max_shard_size != DEFAULT_SIZE:
        raise UsageProblem(
            "`--max-shard-size` is for weights that are written, and none are", hint="give `-o OUT`, or leave it out"
        )


def _require_words(shapes: str, cache: str, target: str | None, dtype: str) -> None:
    """Refuses words that mean nothing; any of them would pass for the default."""
    require_choice(shapes, SHAPES, "shapes")
    require_choice(cache, CACHES, "cache")
    require_choice(target or TARGETS[0], TARGETS, "target")
    require_choice(dtype, ("keep", *FLOATS), "dtype")


def _require_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None:
            require_least(size, 1, name)


def _open(model: str | Path, output: str | Path | None) -> Checkpoint:
    """The checkpoint of a causal language model, in a folder of the user's where graphs go beside the weights."""
    if output is None:
        require_own_folder(model)
    checkpoint = open_checkpoint(local_path(model))
    require_causal(checkpoint.config, model)
    if (checkpoint.path / ADAPTER_CONFIG).is_file():
        warn(f"`{model}` contains an adapter, too; the graphs are those of the weights without it")
    return checkpoint


def _asked(prefill: bool, incremental: bool, unified: bool) -> list[str]:
    """The graphs asked for by name."""
    wanted = {"prefill": prefill, "decode": incremental, "unified": unified}
    return [role for role, given in wanted.items() if given]


def _generation(folder: Path) -> dict[str, Any] | None:
    """The content of `generation_config.json`, where there is one."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else None
