"""HF folder -> ONNX graphs that map its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.errors import MalformedInput
from llmconv.export.bind import match_weights, require_language_model_used
from llmconv.export.destination import GRAPH_FILES, Destination, InPlace, NewFolder, Sizes
from llmconv.export.fake_model import load_config
from llmconv.export.form import cache_kind, forms
from llmconv.export.graph import build_embeddings, build_graph
from llmconv.export.input_maps import InputMap, find_input_map
from llmconv.export.multimodal import MULTI_MODAL, MultiModal
from llmconv.manifest import step
from llmconv.progress import say
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
    """

    folder: Path
    graphs: dict[str, str]
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
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    shapes: str = "dynamic",
    batch_size: int | None = None,
    max_seq_len: int | None = None,
    prompt_len: int | None = None,
    cache: str = "growing",
    target: str | None = None,
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
        dtype: `keep`, `float32`, `float16` or `bfloat16`: how the weights are stored.
        max_shard_size: largest safetensors file, when weights are written.
        overwrite, resume: replace existing graphs or an existing `output`; continue an interrupted run.
        dry_run: build and check everything, write nothing.
        shapes: `dynamic`, or `static`: every axis is a number, and the cache lies in a buffer that is filled in place.
        batch_size, max_seq_len, prompt_len: sizes of static graphs: sequences (1 when left out), tokens that the cache
            holds, new tokens of one call of the prefill graph (see `form.forms`).
        cache: of dynamic graphs: `growing`, or `shared-buffer`: past and present are one buffer that is filled in
            place, as ORT-GenAI's `past_present_share_buffer` wants it.
        target: `ort-cpu` uses operators that onnxruntime alone has, where they were measured to be faster.

    Raises:
        UsageProblem: sizes that do not fit each other.
        InputRefused: a `model_type` without input map, weights that do not fit the config, existing graphs, …
        OutputFailed: writing failed.
    """
    folder = local_path(model)
    checkpoint = open_checkpoint(folder)
    multi_modal, config, input_map = _family(checkpoint)
    prefixes = multi_modal.prefixes if multi_modal else ()
    roles = _roles(prefill, incremental, unified)
    embeddings = config.hidden_size if multi_modal else None
    wanted = forms(roles, cache_kind(shapes, cache), batch_size, max_seq_len, prompt_len, embeddings)
    wanted = {role: replace(form, target=target) for role, form in wanted.items()}
    files = {role: GRAPH_FILES[role] for role in [*roles, *(["embeddings"] if multi_modal else [])]}
    destination: Destination = InPlace(folder, dtype, overwrite or dry_run)
    if output is not None and output.resolve() != folder.resolve():
        destination = NewFolder(output, dtype, max_shard_size, overwrite, resume)
    destination.check(checkpoint, list(files))
    built = {form: build_graph(config, input_map, form) for form in dict.fromkeys(wanted.values())}
    graphs = {role: built[form][0] for role, form in wanted.items()}
    if multi_modal:
        graphs["embeddings"] = build_embeddings(config)
    used = {name for traced in graphs.values() for name in match_weights(traced, checkpoint, prefixes).values()}
    if multi_modal:
        require_language_model_used(checkpoint, used, prefixes)
    traced_layers = max(layers for _, layers in built.values())
    sizes = None
    if not dry_run:
        form = wanted[roles[0]].entry()
        kinds = (
            {} if form["cache"] == "growing" else {name: form.get(name) for name in ("cache", "batch_size", "slots")}
        )
        options = {"graphs": roles, "dtype": dtype, "layers_traced": traced_layers, **kinds}
        sizes = destination.write(graphs, checkpoint, step("export", Path(model), **options), prefixes)
    return Exported(destination.folder, files, sizes, checkpoint.nbytes, traced_layers, config.num_hidden_layers)


def _family(checkpoint: Checkpoint) -> tuple[MultiModal | None, Any, InputMap]:
    """The row of a multi-modal checkpoint, if it is one; the config of the language model; and its input map."""
    model_type = model_type_of(checkpoint)
    multi_modal = MULTI_MODAL.get(model_type)
    if multi_modal is None:
        input_map = find_input_map(model_type)
        return None, load_config(checkpoint.config), input_map
    if multi_modal.note:
        say(f"the language model alone: {multi_modal.note}")
    whole = load_config(checkpoint.config)
    config = whole.get_text_config(decoder=True)
    config.tie_word_embeddings = whole.tie_word_embeddings  # the head belongs to the whole
    return multi_modal, config, find_input_map(config.model_type)


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of `config.json`.

    Raises:
        MalformedInput: it has none.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedInput("`config.json` names no `model_type`", hint="copy the config of the original model again")
    return model_type


def _roles(prefill: bool, incremental: bool, unified: bool) -> list[str]:
    """The graphs asked for, in the order they are written."""
    if not (prefill or incremental or unified):
        prefill = incremental = True
    wanted = {"prefill": prefill, "decode": incremental, "unified": unified}
    return [role for role, given in wanted.items() if given]
