"""Exports a Hugging Face folder as ONNX graphs that map its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, signature
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Unpack, get_type_hints

import torch

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_task
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint, read_json
from llmconv.errors import UsageProblem
from llmconv.export.calibration import Calibration, text_of
from llmconv.export.clients import DEFAULT, Client, ClientFiles, ClientModel, find_clients, roles_for
from llmconv.export.clients.image_model import Edits, ImageModel, edited
from llmconv.export.context_limit import check_context
from llmconv.export.export_options import DEFAULTS, ExportOptions
from llmconv.export.exported import Exported, ExportSizes
from llmconv.export.fixed_inputs import refuse_option, with_fixed_inputs
from llmconv.export.folders.graphs_only import GraphsOnly, option_that_computes, require_possible
from llmconv.export.folders.in_place import InPlace
from llmconv.export.folders.model_in_memory import checkpoint_in_memory, require_output
from llmconv.export.folders.new_folder import NewFolder, OutputFolder, file_tensors
from llmconv.export.graph_files import GraphPlan
from llmconv.export.graph_names import graph_names
from llmconv.export.graph_options import GraphOptions
from llmconv.export.graph_spec import FLOAT32, GraphSpec, graph_specs
from llmconv.export.input_map import decoder_config
from llmconv.export.language_model import LanguageModel, open_language_model
from llmconv.export.option_checks import (
    check_target,
    check_weight_options,
    for_target,
    require_exact,
    shape_options,
    warn_of_padding,
)
from llmconv.export.quantization.cache_options import require_kv_cache, with_kv_cache
from llmconv.export.quantization.name_patterns import require_used
from llmconv.export.quantization.product_groups import grouped
from llmconv.export.quantization.quantized_sizes import QuantizedSizes
from llmconv.export.quantization.selection import QuantizedWeight, select
from llmconv.export.quantization.settings import QuantizationSettings
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.export.quantization.smoothing_groups import Graphs
from llmconv.export.quantization.stored_formats import StoredFormats
from llmconv.export.rewrite.grouped_query import fits_grouped_query
from llmconv.export.rewrite.lora_inputs import lora_targets
from llmconv.export.rewrite.passes.postprocess import TokenChoice
from llmconv.export.rewrite.passes.quantized_cache import require_grouped_query
from llmconv.export.rewrite.pipeline_stages import first_layers, require_stages
from llmconv.export.tasks import require_fitting, with_task
from llmconv.export.tracing.fake_model import depth
from llmconv.export.weights.bind import match_weights
from llmconv.export.weights.stage_parts import graph_parts, stage_parts
from llmconv.files.paths import Placed, local_only, output_place
from llmconv.files.sources import fetches, is_remote, local_path, require_own_folder
from llmconv.model_code import code_of
from llmconv.output.manifest import step
from llmconv.progress import warn
from llmconv.quantized_export import is_quantized_export, refused_export
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.runtime.context_length import context_length
from llmconv.runtime.custom_code import uses_custom_code
from llmconv.runtime.prefix.trained import open_prefix


@fetches
@checked
def export(
    model: str | Path | torch.nn.Module, output: Placed | None = None, **options: Unpack[ExportOptions]
) -> Exported:
    """Exports decoder graphs: `prefill.onnx`, `decode.onnx` and, on demand, `model.onnx` for both.

    Without `output` the graphs map the weights in the model folder; otherwise the weights are streamed into `output`
    once, cast to `dtype`, and mapped there. The graphs compute in `precision`; weights of another dtype are cast when a
    runtime opens them.

    Args:
        model: Hugging Face folder or hub id; or a causal language model of transformers in memory, whose weights are
            written into `output` once.
        output: new folder; by default the graphs are added to the model folder.
        **options: see `ExportOptions`.

    Raises:
        UsageProblem: invalid options, or options that contradict each other.
        InputRefused: a `model_type` without input map, weights that do not match the config, existing graphs, …
        OutputFailed: writing failed.
    """
    given = with_kv_cache({**DEFAULTS, **options})
    clients, roles = _clients_and_roles(given)
    require_fitting(given)
    check_target(given)
    check_weight_options(given, writes=output is not None)
    require_possible(given, writes=output is not None)
    QuantizationSettings.parse(given)  # refuses before anything is opened
    if isinstance(model, torch.nn.Module):
        require_output(output, graphs_only=given["graphs_only"])
        with checkpoint_in_memory(model) as checkpoint:
            return _of_checkpoint(checkpoint, Path(type(model).__name__), output, given, clients, roles)
    _refuse_graphs(model, clients)
    checkpoint = _open(model, output, given)
    source = checkpoint.path if is_remote(model) else Path(model)
    return _of_checkpoint(checkpoint, source, output, given, clients, roles)


def _of_checkpoint(
    checkpoint: Checkpoint,
    source: Path,
    output: Placed | None,
    given: ExportOptions,
    clients: Sequence[Client],
    roles: Sequence[str],
) -> Exported:
    """Exports an open checkpoint."""
    settings = QuantizationSettings.parse(given)
    checkpoint, quantization = _with_plain_weights(checkpoint, settings)
    if settings:
        require_used(settings.patterns, checkpoint)
    choice = TokenChoice.parse(given["postprocess"]) if given["postprocess"] else None
    prefix = open_prefix(local_path(given["prefix"])) if given["prefix"] else None
    language_model, checkpoint = _open_language_model(checkpoint, given)
    checkpoint, single = with_task(checkpoint, language_model, given)
    given = for_target(given, clients, language_model, checkpoint)
    check_weight_options(given, writes=output is not None)
    warn_of_padding(given, clients)
    if given["kv_cache"]:
        past = language_model.input_map.past(language_model.config)
        require_kv_cache(given, checkpoint.config.get("model_type"), fits=fits_grouped_query(past))
    shapes = shape_options(given)
    text = text_of(given) if given["kv_cache"] else None
    rest = given["strict_target"], quantization, text.sha256 if text else "", lora_targets(given["lora_inputs"])
    layouts = [client.name for client in clients if client.name != DEFAULT]
    names = graph_names(given["graph_name"], list(single or roles), layouts)
    changes = GraphOptions(given["last_logits"], choice, given["stages"], prefix, given["opset"], *rest, names)
    extras = language_model.extra_inputs
    for option in (name for name in ("prefix", "kv_cache") if given[name]):
        refuse_option(extras, f"--{option.replace('_', '-')}")
    specs = single or graph_specs(roles, shapes, language_model.embeddings, quantized=quantization is not None)
    specs = with_fixed_inputs(specs, extras, clients)
    check_context(language_model.config, context_length(checkpoint.path), shapes.max_seq_len)
    plan = GraphPlan(specs, _client_files(clients, language_model, checkpoint, specs, given["quant"]), changes)
    if quantization:
        require_exact(given, checkpoint)
    folder = _output_folder(language_model, checkpoint, output, given, plan.clients.edits())
    folder.check(plan)
    return _make(language_model, checkpoint, plan, folder, source, given)


def _signature() -> Signature:
    """The signature of `export` with every option, for `help` and for completion."""
    found = signature(export)
    first = list(found.parameters.values())[:2]
    kinds = get_type_hints(ExportOptions)
    options = [Parameter(n, Parameter.KEYWORD_ONLY, default=v, annotation=kinds[n]) for n, v in DEFAULTS.items()]
    return found.replace(parameters=[*first, *options])


export.__signature__ = _signature()  # type: ignore[attr-defined]


def _make(
    language_model: LanguageModel,
    checkpoint: Checkpoint,
    plan: GraphPlan,
    folder: OutputFolder,
    source: Path,
    given: ExportOptions,
) -> Exported:
    """Traces the graphs, makes all files, and writes them unless this is a dry run."""
    graphs, traced_layers = language_model.trace(plan.specs)
    weights = folder.weights()
    distinct = {id(traced): traced for traced in graphs.values()}
    matches = {key: match_weights(traced, {**checkpoint, **weights}) for key, traced in distinct.items()}
    for traced in (graph for graph in distinct.values() if graph.spec.kv_cache):  # before anything is measured
        require_grouped_query(traced.model, checkpoint.config.get("model_type"))
    pairs = [(distinct[key], matched) for key, matched in matches.items()]
    folder = _divided(folder, pairs, plan)
    weights = folder.weights()
    calibration = Calibration.of(language_model, checkpoint, graphs, given)
    quantized: dict[str, QuantizedWeight] = {}
    if formats := plan.options.quantization:
        quantized, folder = _quantized(pairs, formats, calibration, folder, given)
        folder.check(plan)
        weights = folder.weights()
    scales = calibration.cache_scales() if calibration and given["kv_cache"] else None
    files = plan.make(graphs, weights, file_tensors(checkpoint), quantized, matches, scales)
    sizes = None
    if not given["dry_run"]:
        count = sum(prod(tensor.shape) for tensor in checkpoint.values()) if formats else None
        kept = {name: given[name] for name in ("dtype", "graphs_only", "embeds")}
        done = step("export", source, **kept, layers_traced=traced_layers, parameters=count, **plan.manifest_options())
        sizes = ExportSizes(files.nbytes, files.mapped, folder.write(files, done))
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    made = {name: len(content) if isinstance(content, bytes) else 0 for name, content in files.files.items()}
    return Exported(
        folder.place,
        {role: plan.file_names(role) for role in graphs},
        sizes,
        weight_bytes,
        weight_bytes if isinstance(folder, NewFolder) else 0,
        traced_layers,
        depth(language_model.config),
        plan.clients.names,
        {**folder.planned(), **made},
        QuantizedSizes.of(quantized, checkpoint, weights) if given["quant"] else None,
        folder.missing() if isinstance(folder, GraphsOnly) else {},
    )


def _divided(folder: OutputFolder, graphs: Graphs, plan: GraphPlan) -> OutputFolder:
    """The output folder, in which each stage, or each graph for some clients, has weight files of its own."""
    stages, layers = plan.options.stages, graphs[0][0].num_layers
    if stages > 1:
        require_stages(stages, layers)
        return folder.divided(stage_parts(graphs, first_layers(stages, layers)))
    return folder.divided(graph_parts([matched for _, matched in graphs])) if plan.clients.divide_weights else folder


def _quantized(
    pairs: Graphs,
    formats: QuantizationSettings | StoredFormats,
    calibration: Calibration | None,
    folder: OutputFolder,
    given: ExportOptions,
) -> tuple[dict[str, QuantizedWeight], OutputFolder]:
    """The weights that are stored as codes, and the output folder with these."""
    quantized = grouped(pairs, select(pairs, formats))
    text = calibration if isinstance(formats, QuantizationSettings) and formats.text else None
    if text and given["static_activations"]:
        text.require_ranges(quantized)
    importance = text.importance() if text and any(weight.is_searched for weight in quantized.values()) else {}
    smoothing = Smoothing()
    if text and given["method"] == "awq":
        smoothing = text.activation_aware(pairs, quantized, importance)
    elif text:
        smoothing = text.smoothing(pairs, quantized)
    if text and given["static_activations"]:
        quantized = text.with_ranges(quantized, smoothing)
    if text and given["method"] == "gptq" and not given["dry_run"]:
        quantized = text.with_feedback(quantized, local_only(folder.place) or Path(gettempdir(), folder.place.name))
    return quantized, folder.quantized(quantized, importance, smoothing)


def _clients_and_roles(given: ExportOptions) -> tuple[list[Client], list[str]]:
    """The chosen clients, and the graphs to write."""
    layout = given["layout"]
    clients = find_clients([layout] if isinstance(layout, str) else layout)
    asked = {"prefill": given["prefill"], "decode": given["incremental"], "unified": given["unified"]}
    return clients, roles_for(clients, [role for role, wanted in asked.items() if wanted])


def _client_files(
    clients: Sequence[Client],
    model: LanguageModel,
    checkpoint: Checkpoint,
    specs: Mapping[str, GraphSpec],
    quant: str | None,
) -> ClientFiles:
    path = checkpoint.path / "generation_config.json"
    generation = read_json(path) if path.is_file() else None
    spec = next(iter(specs.values()))
    kinds = spec.cache, spec.precision, spec.target, quant
    fed = replace(model.input_map, extras=()) if spec.fixed_inputs else model.input_map
    images = ImageModel.of(model.whole, checkpoint) if model.whole else None
    described = ClientModel(decoder_config(model.config), fed, generation, *kinds, images, tuple(specs))
    return ClientFiles(clients, described)


def _refuse_graphs(model: str | Path, clients: Sequence[Client]) -> None:
    """Refuses a folder of quantized graphs, with the command that makes those that were asked for."""
    if not is_remote(model) and Path(model).is_dir() and is_quantized_export(Path(model)):
        layouts = [f"--layout {client.name}" for client in clients if client.name != DEFAULT]
        raise refused_export(Path(model), " ".join(layouts))


def _open(model: str | Path, output: str | Path | None, given: ExportOptions) -> Checkpoint:
    """The checkpoint of a causal language model; must be a local folder if the graphs are added to it."""
    if output is None:
        require_own_folder(model)
    checkpoint = open_checkpoint(local_path(model, in_parts=option_that_computes(given) is None))
    require_task(checkpoint.config, model, given["task"])
    if (checkpoint.path / ADAPTER_CONFIG).is_file():
        warn(f"`{model}` also contains an adapter; the graphs are those of the weights without it")
    return checkpoint


def _with_plain_weights(
    checkpoint: Checkpoint, settings: QuantizationSettings | None
) -> tuple[Checkpoint, QuantizationSettings | StoredFormats | None]:
    """A quantized checkpoint with plain weights, and the formats of its codes; any other as it is."""
    if (found := quantized_checkpoint(checkpoint)) is None:
        return checkpoint, settings
    formats = StoredFormats.of(found)
    if settings and len(formats.without_operator) < len(formats.weights):
        raise UsageProblem(
            f"the weights are quantized already ({formats.method})",
            hint="leave out `--quant`: the graphs read the codes that the model has",
        )
    if again := formats.without_operator:
        bits = f"as `--quant {settings.preset}` says" if settings else "to 8 bits, in blocks of 32"
        warn(
            f"onnxruntime has no operator for the codes of {len(again)} weights ({formats.method}): they are quantized "
            f"again, {bits}; `llmconv verify` measures what that costs"
        )
    return found.plain, settings or formats


def _open_language_model(checkpoint: Checkpoint, given: ExportOptions) -> tuple[LanguageModel, Checkpoint]:
    """The language model, and the checkpoint with the model's own code as side files if that is run."""
    code = checkpoint.path if uses_custom_code(checkpoint.config, given["trust_remote_code"]) else None
    if code:
        files = code_of(code, checkpoint.config, checkpoint.side_files)
        checkpoint = replace(checkpoint, side_files={**checkpoint.side_files, **files})
    return open_language_model(checkpoint, code, embeds=given["embeds"]), checkpoint


def _output_folder(
    model: LanguageModel, checkpoint: Checkpoint, output: str | Path | None, given: ExportOptions, edits: Edits
) -> OutputFolder:
    overwrite, resume = given["overwrite"], given["resume"]
    place = output_place(output) if output is not None else checkpoint.path
    is_new = not isinstance(place, Path) or place.resolve() != checkpoint.path.resolve()
    if given["quant"] and not is_new:
        raise UsageProblem("`--quant` writes new weights", hint="give `-o OUT`, a new folder for them")
    if is_new:
        checkpoint = edited(checkpoint, edits)
    elif edits:
        warn(
            f"`{', '.join(edits)}` of the model folder stays as it is, and the layout needs other fields in it: give "
            "`-o OUT`, or see docs/clients.md"
        )
    if is_new and given["graphs_only"]:
        return GraphsOnly(place, InPlace(checkpoint, given["dtype"]), overwrite, resume)
    if is_new:
        precision = given["precision"] or FLOAT32
        dtype = given["dtype"] if precision == FLOAT32 else precision
        rest = given["max_shard_size"], overwrite, resume
        return NewFolder(place, checkpoint, dtype, *rest, model.kept_in_float32(dtype))
    return InPlace(checkpoint, given["dtype"], overwrite or given["dry_run"], resume)
