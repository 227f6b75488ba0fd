"""The export of an open checkpoint: everything that needs torch. What can be refused without is in `exporter.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import transformers
from torch import nn

from llmconv.causal_lm import context_length
from llmconv.checkpoint import INDEX, Checkpoint, own_file, read_json, read_small
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export.calibration import Calibration, text_of
from llmconv.export.clients import DEFAULT, Client, ClientFiles, ClientModel
from llmconv.export.clients.image_parts import Edits, ImageModel, edited
from llmconv.export.export_options import EMBED, GENERATE, RERANK, SCORING, ExportOptions
from llmconv.export.exported import Exported, ExportSizes
from llmconv.export.folders import (
    InPlace,
    NewFolder,
    OutputFolder,
    checkpoint_in_memory,
    file_tensors,
    main_dtype,
    require_output,
    write_new,
)
from llmconv.export.graph_files import GraphFiles, GraphOptions, GraphPlan
from llmconv.export.graph_names import graph_names
from llmconv.export.graph_spec import FLOAT32, NO_CACHE, GraphSpec, graph_specs, refuse_option, with_fixed_inputs
from llmconv.export.input_map import decoder_config
from llmconv.export.language_model import LanguageModel, open_language_model
from llmconv.export.option_checks import check_weight_options, require_exact, shape_options, warn_of_padding
from llmconv.export.quantization.products import grouped
from llmconv.export.quantization.selection import QuantizedSizes, QuantizedWeight, StoredFormats, select
from llmconv.export.quantization.settings import QuantizationSettings, require_kv_cache, require_used
from llmconv.export.quantization.smoothing import Graphs, Smoothing
from llmconv.export.rewrite.grouped_query import fits_grouped_query
from llmconv.export.rewrite.lora_inputs import lora_targets
from llmconv.export.rewrite.passes import TokenChoice, require_grouped_query
from llmconv.export.rewrite.pipeline_stages import first_layers, graph_parts, require_stages, stage_parts
from llmconv.export.sentence_modules import MODULES, SentenceHead, SentenceModules, TokenScore, read_sentence_modules
from llmconv.export.targets.presets import Preset, find_preset
from llmconv.export.tracing.fake_model import depth
from llmconv.export.weights import match_weights, require_one_copy
from llmconv.files.paths import Placed, local_only, output_place
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.sources import local_path
from llmconv.model_code import code_of
from llmconv.output.manifest import step
from llmconv.output.plan import Plan, plan_checkpoint
from llmconv.output.writer import Place, destination_of
from llmconv.progress import say, warn
from llmconv.progress import step as progress_step
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.runtime.custom_code import uses_custom_code
from llmconv.runtime.prefix import open_prefix
from llmconv.tensors import Array


def export_checkpoint(
    checkpoint: Checkpoint,
    source: Path,
    output: Placed | None,
    given: ExportOptions,
    clients: Sequence[Client],
    roles: Sequence[str],
) -> Exported:
    """Exports an open checkpoint; raises as `export` does.

    The manifest records the folder `source`; without `output` the graphs go into the folder of the model.
    """
    settings = QuantizationSettings.parse(given)
    checkpoint, quantization = _with_plain_weights(checkpoint, settings)
    if settings:
        require_used(settings.patterns, checkpoint)
    choice = TokenChoice.parse(given["postprocess"]) if given["postprocess"] else None
    prefix = open_prefix(local_path(given["prefix"])) if given["prefix"] else None
    language_model, checkpoint = _open_language_model(checkpoint, given)
    checkpoint, single = with_task(checkpoint, language_model, given)
    given = _for_target(given, clients, language_model, checkpoint)
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


@contextmanager
def opened_in_memory(model: Any, output: Placed | None, *, graphs_only: bool) -> Iterator[Checkpoint]:
    """The checkpoint of a transformers causal language model in memory, whose weights are written to `output`.

    Raises UsageProblem: not a torch module, no output, or `graphs_only`.
    """
    if not isinstance(model, nn.Module):
        raise UsageProblem(
            f"`model` must be a path or a `Module`, and is a `{type(model).__name__}`",
            hint="give a folder, or a causal language model of transformers",
        )
    require_output(output, graphs_only=graphs_only)
    with checkpoint_in_memory(model) as checkpoint:
        yield checkpoint


def _make(
    language_model: LanguageModel,
    checkpoint: Checkpoint,
    plan: GraphPlan,
    folder: OutputFolder,
    source: Path,
    given: ExportOptions,
) -> Exported:
    language_model.require_fit(checkpoint, next(iter(plan.specs.values())).task)
    with progress_step(f"tracing layers of {depth(language_model.config)}"):
        graphs, traced_layers = language_model.trace(plan.specs)
    weights = folder.weights()
    distinct = {id(traced): traced for traced in graphs.values()}
    matches = {key: match_weights(traced, {**checkpoint, **weights}) for key, traced in distinct.items()}
    for traced in distinct.values():
        require_one_copy(traced, checkpoint)
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
        origin = {"transformers": transformers.__version__, "layers_traced": traced_layers, "parameters": count}
        done = step("export", source, **kept, **origin, **plan.manifest_options())
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


def _for_target(
    given: ExportOptions, clients: Sequence[Client], model: LanguageModel, checkpoint: Checkpoint
) -> ExportOptions:
    """The options, with those that the target decides by the layouts' caches, the key/value heads and the dtype.

    Raises UsageProblem: an option that the target does not have.
    """
    if given["target"] is None:
        return given
    dynamic = given["shapes"] == "dynamic"
    fits = (
        dynamic
        and not model.input_map.both_ways(model.config)
        and not given["prefix"]
        and given["stages"] == 1
        and (given["opset"] or 24) >= 24
    )
    fits = fits and all("shared-buffer" in client.caches for client in clients if client.name != DEFAULT)
    preset = find_preset(
        given["target"],
        Preset(given["precision"] or "", given["cache"] or "", given["opset"]),
        main_dtype(checkpoint),
        buffers=fits and fits_grouped_query(model.input_map.past(model.config)),
        growing=dynamic,
    )
    return {**given, "precision": preset.precision, "cache": preset.cache, "opset": preset.opset}


def check_context(config: Any, context: int | None, slots: int | None) -> None:
    """Checks that a static cache of `slots` tokens (None: a growing cache) is not longer than the declared context.

    A table of positions, learned or computed, ends at the context length. Rotary positions continue, but the model was
    not trained on them, which only warns. A `context` of None is not checked. Raises InputRefused: the cache is longer
    than the model's table of positions.
    """
    config = decoder_config(config)
    if slots is None or context is None or slots <= context or getattr(config, "alibi", False):
        return
    problem = f"a cache of {slots:,} tokens is longer than the model's context of {context:,}"
    # Rotation angles have no limit; GPT-J and CodeGen look them up in a table.
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        raise InputRefused(
            f"{problem}, and its table of positions ends there", hint=f"give `--max-seq-len {context}` or less"
        )
    warn(f"{problem} (`max_position_embeddings`): the model was not trained on positions beyond it")


@contextmanager
def _without_weights() -> Iterator[None]:
    """Changes the hint of errors about weights that graphs cannot map as they are."""
    try:
        yield
    except InputRefused as error:
        hint = "leave out `--graphs-only`: the weights are converted into OUT once"
        raise InputRefused(error.message, hint=hint) from error


@dataclass(frozen=True)
class GraphsOnly:
    """An `OutputFolder` for graphs that map the model's own files, which the user puts next to them.

    Only headers of the model's files are read. `resume` accepts a complete folder that is equal.
    """

    place: Place
    model: InPlace
    overwrite: bool
    resume: bool

    def check(self, plan: GraphPlan) -> None:
        """Refuses an existing folder without `overwrite`, and weights that the graphs could not map."""
        with _without_weights():
            self.model.require_mappable(plan)
        destination_of(self.place).require_free(self.overwrite, [self.model.place], resume=self.resume)

    def weights(self) -> Mapping[str, FileTensor]:
        """The tensors in the model's own files, as if those were in the new folder."""
        home = local_only(self.place) or Path(self.place.name)  # of an address only the names of files are used
        return {
            name: FileTensor(
                home / tensor.location, tensor.offset, tensor.dtype, tensor.shape, location=tensor.location
            )
            for name, tensor in self.model.weights().items()
        }

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> GraphsOnly:
        """See `OutputFolder`; only codes that the model's files contain as graphs read them can be mapped."""
        with _without_weights():
            return replace(self, model=self.model.quantized(weights, importance, smoothing))

    def divided(self, parts: Mapping[str, int]) -> GraphsOnly:
        return self

    def planned(self) -> dict[str, int]:
        return {name: len(content) for name, content in self._small_files().items()}

    def missing(self) -> dict[str, int]:
        paths = {tensor.location: tensor.path for tensor in self.model.weights().values()}
        return {name: path.stat().st_size for name, path in sorted(paths.items())}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        source = self.model.checkpoint
        plan = Plan(source, (), self._small_files())
        made = {**step, "options": {**step["options"], "weights": self.missing()}}
        write_new(source, plan, self.place, files, made, overwrite=self.overwrite, resume=self.resume)
        return 0

    def _small_files(self) -> dict[str, bytes]:
        """The files of a model except its weights; the index is the model's own, which names its own files."""
        checkpoint = self.model.checkpoint
        planned = {name: text for name, text in plan_checkpoint(checkpoint).small_files.items() if name != INDEX}
        has_index = (checkpoint.path / INDEX).is_file()
        return planned | ({INDEX: read_small(own_file(checkpoint.path, INDEX))} if has_index else {})


def with_task(
    checkpoint: Checkpoint, model: LanguageModel, given: ExportOptions
) -> tuple[Checkpoint, dict[str, GraphSpec]]:
    """The checkpoint with the modules after the model, and the spec of the graph by its role; none to generate.

    Raises UnsupportedInput: a model or a module that graphs without a cache do not compute; InputRefused: the folder
    does not declare what the task needs.
    """
    task = given["task"]
    if task == GENERATE and not given["no_cache"]:
        _require_causal_attention(model)
        return checkpoint, {}
    if model.naming:
        raise UnsupportedInput(
            "graphs without a cache take tokens, and those of a multi-modal model take embeddings",
            hint="leave out `--task` and `--no-cache`",
        )
    if task != GENERATE:
        _require_decoder(model, task)
    if extras := model.input_map.extra_inputs(model.config):
        raise UnsupportedInput(
            f"graphs without a cache take tokens alone, and this family has the input `{next(iter(extras))}`",
            hint="leave out `--task` and `--no-cache`",
        )
    spec = GraphSpec(NO_CACHE, logits=given["logits_dtype"])
    if task == GENERATE:
        return checkpoint, {SCORING: spec}
    modules = read_sentence_modules(checkpoint.path)
    return _with_modules(checkpoint, modules), {task: replace(spec, task=task, head=_head(task, modules))}


def _head(task: str, modules: SentenceModules | None) -> SentenceHead | TokenScore | None:
    if task == RERANK:
        if modules is None or modules.score is None:
            raise InputRefused(
                f"`--task rerank` needs a `{MODULES}` with a LogitScore module, which names the tokens of yes and no",
                hint="docs/embeddings.md has an example for Qwen3-Reranker; a classifier has `--task classify`",
            )
        return modules.score
    if task == EMBED and (modules is None or modules.head is None):
        say(f"no pooling module in `{MODULES}`: the graph returns `last_hidden_state` alone")
    return modules.head if modules and task == EMBED else None


def _with_modules(checkpoint: Checkpoint, modules: SentenceModules | None) -> Checkpoint:
    if modules is None:
        return checkpoint
    places = {name: tensor.location for name, tensor in modules.tensors.items()}
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **modules.tensors},
        side_files={**checkpoint.side_files, **modules.side_files},
        files={**checkpoint.files, **places},
    )


def _require_causal_attention(model: LanguageModel) -> None:
    config = model.config
    if (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", True) is False
    ):
        raise UnsupportedInput(
            "tokens of this model attend to later tokens, so it cannot generate with a cache",
            hint="`--task embed` exports it as an embedding model",
        )


def _require_decoder(model: LanguageModel, task: str) -> None:
    if getattr(model.config, "is_decoder", True) is False:
        raise UnsupportedInput(
            f"a {model.config.model_type} without `is_decoder` is an encoder, and `--task {task}` exports decoders",
            hint="`optimum-cli export onnx` exports encoders",
        )
