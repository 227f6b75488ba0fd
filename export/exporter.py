"""Exports a Hugging Face folder as ONNX graphs that map its weights: the checks that need no torch, then the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Protocol, Unpack, get_type_hints, runtime_checkable

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_task
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, write_small
from llmconv.convert.tokenizers import beyond_rows
from llmconv.errors import InputRefused, LlmconvError, word
from llmconv.export.clients import DEFAULT, Client, find_clients, roles_for
from llmconv.export.export_options import (
    DEFAULTS,
    Exported,
    ExportOptions,
    check_options,
    graph_names,
    home_of,
    option_that_computes,
    roles_of_task,
)
from llmconv.export.families import find_input_map, is_multi_modal
from llmconv.export.graph_spec import graph_specs
from llmconv.export.quantization.settings import QuantizationSettings, with_kv_cache
from llmconv.files.gguf_file import holds_gguf
from llmconv.files.paths import Placed, output_place
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder
from llmconv.files.sources import fetches, is_remote, local_path, require_own_folder
from llmconv.files.weight_ranges import require_mapped
from llmconv.model_code import model_class
from llmconv.not_a_model_folder import is_quantized_export, refused_export
from llmconv.output.manifest import MTP_ROLE, existing_files, read_manifest
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import destination_of
from llmconv.progress import step, warn, warn_all


@runtime_checkable
class Module(Protocol):
    """A model in memory: a `torch.nn.Module`, which is not named here, so that a refusal does not import torch."""

    def named_parameters(self) -> Any:
        """As torch's."""

    def state_dict(self) -> Any:
        """As torch's."""


@fetches
@checked
def export(model: str | Path | Module, output: Placed | None = None, **options: Unpack[ExportOptions]) -> Exported:
    """Exports decoder graphs: `prefill.onnx`, `decode.onnx` and, on demand, `model.onnx` for both.

    Without `output` the graphs map the weights in the model folder; otherwise the weights are streamed into `output`
    once, cast to `dtype`, and mapped there. The graphs compute in `precision`; weights of another dtype are cast when a
    runtime opens them.

    Args:
        model: Hugging Face folder or hub id; a GGUF file, whose quantized weights keep their codes; or a causal
            language model of transformers in memory, whose weights are written into `output` once.
        output: new folder; by default the graphs are added to the folder of the model or of the GGUF file.
        **options: see `ExportOptions`.

    Raises:
        UsageProblem: invalid options, or options that contradict each other.
        InputRefused: a `model_type` without input map, weights that do not match the config, existing graphs, …
        OutputFailed: writing failed.
    """
    given = with_kv_cache({**DEFAULTS, **options})
    clients = find_clients([layout] if isinstance(layout := given["layout"], str) else layout)
    asked = {"prefill": given["prefill"], "decode": given["incremental"], "unified": given["unified"]}
    roles = roles_for(clients, [role for role, wanted in asked.items() if wanted])
    check_options(given, writes=output is not None)
    QuantizationSettings.parse(given)  # refuses before anything is opened
    if not isinstance(model, str | Path):
        with step("loading torch"):
            from llmconv.export.checkpoint_export import export_checkpoint  # noqa: PLC0415 - torch
            from llmconv.export.model_in_memory import opened_in_memory  # noqa: PLC0415 - torch

        with opened_in_memory(model, output, graphs_only=given["graphs_only"]) as checkpoint:
            return export_checkpoint(checkpoint, Path(type(model).__name__), output, given, clients, roles)
    if not is_remote(model) and Path(model).is_dir() and is_quantized_export(Path(model)):
        raise refused_export(Path(model), " ".join(f"--layout {one.name}" for one in clients if one.name != DEFAULT))
    if output is None:
        require_own_folder(model)  # the graphs are added to it
    with _opened(model, in_parts=option_that_computes(given) is None) as (checkpoint, source):
        require_task(checkpoint.config, model, given["task"])
        _refuse_early(checkpoint, source, output, given, clients, roles)
        warn_all(beyond_rows(checkpoint.side_files, checkpoint.config))
        with step("loading torch"):
            from llmconv.export.checkpoint_export import export_checkpoint  # noqa: PLC0415 - torch; refusals are quick

        return export_checkpoint(checkpoint, source, output, given, clients, roles)


@contextmanager
def _opened(model: str | Path, *, in_parts: bool) -> Iterator[tuple[Checkpoint, Path]]:
    """The model of a Hugging Face folder or a GGUF file, and the path that the manifest records."""
    file = local_path(model) if is_remote(model) and str(model).lower().endswith(".gguf") else Path(model)
    if holds_gguf(file):
        with _opened_gguf(file) as checkpoint:
            yield checkpoint, file
        return
    checkpoint = open_checkpoint(local_path(model, in_parts=in_parts))
    warn_all(checkpoint.warnings)
    if (checkpoint.path / ADAPTER_CONFIG).is_file():
        warn(f"`{model}` also contains an adapter; the graphs are those of the weights without it")
    yield checkpoint, checkpoint.path if is_remote(model) else Path(model)


@contextmanager
def _opened_gguf(path: Path) -> Iterator[Checkpoint]:
    """The model in a GGUF file with the codes that the file has; its small files are in a temporary folder."""
    from llmconv.convert.opening import open_training  # noqa: PLC0415 - most models are Hugging Face folders

    folder = make_temporary_folder()
    instead = f"with `llmconv to-hf {word(path)} -o MODEL --tokenizer FOLDER`, and export MODEL"

    def of_export(text: str) -> str:
        return re.sub("with `--tokenizer( FOLDER)?`", lambda _: instead, text).replace(str(folder), str(path))

    try:
        opened = open_training(path, "gguf", options={"quant": "graphs"})
        warn_all([of_export(text) for text in opened.warnings])
        write_small(folder, plan_checkpoint(opened).small_files)
        yield replace(opened, path=folder)
    except LlmconvError as error:
        error.message, error.hint = of_export(error.message), of_export(error.hint or "")
        error.args = (error.message,)
        raise
    finally:
        remove_temporary_folder(folder)


def _refuse_early(
    checkpoint: Checkpoint,
    source: Path,
    output: Placed | None,
    given: ExportOptions,
    clients: Sequence[Client],
    roles: Sequence[str],
) -> None:
    """Refuses what file names and `config.json` alone show; the export itself checks all of it again."""
    is_foreign = model_class(checkpoint.config) and not given["trust_remote_code"]  # refused for its code, if at all
    if not is_foreign and not is_multi_modal(checkpoint.config, embeds=given["embeds"]):
        find_input_map(str(checkpoint.config.get("model_type")))
    layouts = [client.name for client in clients if client.name != DEFAULT]
    roles = roles_of_task(given) or [*roles, *[MTP_ROLE] * given["mtp"]]
    graph_names(given["graph_name"], roles, layouts)
    if given["target"] is None and not roles_of_task(given):
        graph_specs(roles, given)
    home = home_of(checkpoint, source)
    place = output_place(output) if output is not None else home
    if not isinstance(place, Path):
        return
    if (place.resolve() == home.resolve() or given["graphs_only"]) and checkpoint.format == "gguf":
        require_mapped(checkpoint)
    if place.resolve() != home.resolve():
        inputs = [source] if checkpoint.format == "gguf" else [home]  # a new folder may be next to a file
        destination_of(place).require_free(given["overwrite"], inputs, resume=given["resume"])
        return
    existing = existing_files(place, read_manifest(place).graphs, roles)
    if existing and not (given["overwrite"] or given["resume"] or given["dry_run"]):
        raise InputRefused(f"`{place / existing[0]}` already exists", hint="give `--overwrite` to replace it")


def _signature() -> Signature:
    """The signature of `export` with every option, for `help` and for completion."""
    found = signature(export)
    first = list(found.parameters.values())[:2]
    kinds = get_type_hints(ExportOptions)
    options = [Parameter(n, Parameter.KEYWORD_ONLY, default=v, annotation=kinds[n]) for n, v in DEFAULTS.items()]
    return found.replace(parameters=[*first, *options])


export.__signature__ = _signature()  # type: ignore[attr-defined]
