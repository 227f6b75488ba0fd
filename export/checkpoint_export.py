"""The export of an open checkpoint: everything that needs torch. What can be refused without is in `exporter.py`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmconv.causal_lm import context_length
from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem, first_line
from llmconv.export.calibration import cache_scales, calibration_of, measure_ranges, require_one_input, text_of
from llmconv.export.clients import DEFAULT, Client, ClientFiles, ClientModel
from llmconv.export.clients.image_parts import Edits, ImageModel, edited
from llmconv.export.export_options import (
    EMBED,
    GENERATE,
    RERANK,
    SCORING,
    ExportOptions,
    check_shapes,
    check_weight_options,
    require_exact,
)
from llmconv.export.exported import Exported, ExportSizes
from llmconv.export.folders import GraphsOnly, InPlace, NewFolder, OutputFolder, file_tensors, main_dtype
from llmconv.export.graph_files import GraphOptions, GraphPlan
from llmconv.export.graph_names import graph_names
from llmconv.export.graph_spec import FLOAT32, NO_CACHE, GraphSpec, graph_specs, refuse_option, with_fixed_inputs
from llmconv.export.input_map import decoder_config
from llmconv.export.language_model import LanguageModel, open_language_model
from llmconv.export.quantization.activation_aware import measure_activation_aware
from llmconv.export.quantization.block_rounding import ColumnFormat
from llmconv.export.quantization.calibration import TextRun, column_importance
from llmconv.export.quantization.products import grouped
from llmconv.export.quantization.quantized_tensor import Scratch
from llmconv.export.quantization.selection import QuantizedSizes, QuantizedWeight, StoredFormats, select
from llmconv.export.quantization.sequential_rounding import round_sequentially
from llmconv.export.quantization.settings import QuantizationSettings, require_kv_cache, require_used
from llmconv.export.quantization.smoothing import Graphs, Smoothing, coded, measure_smoothing
from llmconv.export.rewrite.grouped_query import fits_grouped_query
from llmconv.export.rewrite.lora_inputs import lora_targets
from llmconv.export.rewrite.passes import TokenChoice, require_grouped_query
from llmconv.export.rewrite.pipeline_stages import first_layers, graph_parts, require_stages, stage_parts
from llmconv.export.sentence_modules import MODULES, SentenceHead, SentenceModules, TokenScore, read_sentence_modules
from llmconv.export.targets.presets import Preset, find_preset
from llmconv.export.tracing.fake_model import depth
from llmconv.export.weights import match_weights, require_one_copy
from llmconv.files.paths import Placed, local_only, output_place
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder
from llmconv.files.sources import local_path
from llmconv.model_code import code_of
from llmconv.output.manifest import step
from llmconv.progress import say, warn
from llmconv.progress import step as progress_step
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.runtime.custom_code import uses_custom_code
from llmconv.runtime.eager.torch_runner import require_causal_model
from llmconv.runtime.prefix import open_prefix
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor


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
    code = checkpoint.path if uses_custom_code(checkpoint.config, given["trust_remote_code"]) else None
    if code:  # it is copied with the side files
        files = code_of(code, checkpoint.config, checkpoint.side_files)
        checkpoint = replace(checkpoint, side_files={**checkpoint.side_files, **files})
    language_model = open_language_model(checkpoint, code, embeds=given["embeds"])
    checkpoint, single = with_task(checkpoint, language_model, given)
    given = _for_target(given, clients, language_model, checkpoint)
    check_weight_options(given, writes=output is not None)
    if given["last_logits"] and any(client.name == "genai" for client in clients):
        warn(
            "GenAI pads batches after the prompts: with `--last-logits` it needs prompts of equal length in a batch, "
            "or shorter ones get wrong tokens; `llmconv verify --client genai` shows that"
        )
    if given["kv_cache"]:
        past = language_model.input_map.past(language_model.config)
        require_kv_cache(given, checkpoint.config.get("model_type"), fits=fits_grouped_query(past))
    check_shapes(given)
    text = text_of(given) if given["kv_cache"] else None
    rest = given["strict_target"], quantization, text.sha256 if text else "", lora_targets(given["lora_inputs"])
    layouts = [client.name for client in clients if client.name != DEFAULT]
    names = graph_names(given["graph_name"], list(single or roles), layouts)
    changes = GraphOptions(given["last_logits"], choice, given["stages"], prefix, given["opset"], *rest, names)
    extras = language_model.extra_inputs
    for option in (name for name in ("prefix", "kv_cache") if given[name]):
        refuse_option(extras, f"--{option.replace('_', '-')}")
    specs = single or graph_specs(roles, given, language_model.embeddings, quantized=quantization is not None)
    specs = with_fixed_inputs(specs, extras, clients)
    check_context(language_model.config, context_length(checkpoint.path), given["max_seq_len"])
    plan = GraphPlan(specs, _client_files(clients, language_model, checkpoint, specs, given["quant"]), changes)
    if quantization:
        require_exact(given, checkpoint)
    folder = _output_folder(language_model, checkpoint, output, given, plan.clients.edits())
    folder.check(plan)
    return _make(language_model, checkpoint, plan, folder, source, given)


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
    calibration = calibration_of(language_model, checkpoint, graphs, given)
    quantized: dict[str, QuantizedWeight] = {}
    if formats := plan.options.quantization:
        quantized, folder = _quantized(pairs, formats, calibration, folder, given)
        folder.check(plan)
        weights = folder.weights()
    scales = cache_scales(calibration) if calibration and given["kv_cache"] else None
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
    require_stages(stages, layers)
    if isinstance(folder, NewFolder) and stages > 1:
        return replace(folder, parts=stage_parts(graphs, first_layers(stages, layers)))
    if isinstance(folder, NewFolder) and plan.clients.divide_weights:
        return replace(folder, parts=graph_parts([matched for _, matched in graphs]))
    return folder


def _quantized(
    pairs: Graphs,
    formats: QuantizationSettings | StoredFormats,
    calibration: TextRun | None,
    folder: OutputFolder,
    given: ExportOptions,
) -> tuple[dict[str, QuantizedWeight], OutputFolder]:
    quantized = grouped(pairs, select(pairs, formats))
    if calibration is None or not isinstance(formats, QuantizationSettings) or not formats.text:
        return quantized, folder.quantized(quantized, {}, Smoothing())
    if given["static_activations"]:
        require_one_input(calibration, coded(quantized, ColumnFormat))
    importance = column_importance(calibration) if any(one.is_searched for one in quantized.values()) else {}
    if given["method"] == "awq":
        smoothing = measure_activation_aware(pairs, quantized, importance, calibration)
    else:
        smoothing = measure_smoothing(pairs, quantized, calibration)
    if given["static_activations"]:
        ranges = measure_ranges(calibration, coded(quantized, ColumnFormat), smoothing)
        quantized = {name: replace(weight, activation=ranges.get(name)) for name, weight in quantized.items()}
    if given["method"] == "gptq" and not given["dry_run"]:
        home = local_only(folder.place) or Path(gettempdir(), folder.place.name)
        with Scratch.beside(home) as scratch:  # the codes stay mapped after the file is closed
            codes = round_sequentially(calibration, quantized, scratch)
        quantized = {name: replace(weight, rounded=codes.get(name)) for name, weight in quantized.items()}
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


def with_task(
    checkpoint: Checkpoint, model: LanguageModel, given: ExportOptions
) -> tuple[Checkpoint, dict[str, GraphSpec]]:
    """The checkpoint with the modules after the model, and the spec of the graph by its role; none to generate.

    Raises UnsupportedInput: a model or a module that graphs without a cache do not compute; InputRefused: the folder
    does not declare what the task needs.
    """
    task = given["task"]
    bidirectional = getattr(model.config, "use_bidirectional_attention", None) in (True, "all")
    if task == GENERATE and not given["no_cache"]:
        if bidirectional or getattr(model.config, "is_causal", True) is False:
            raise UnsupportedInput(
                "tokens of this model attend to later tokens, so it cannot generate with a cache",
                hint="`--task embed` exports it as an embedding model",
            )
        return checkpoint, {}
    if model.naming:
        raise UnsupportedInput(
            "graphs without a cache take tokens, and those of a multi-modal model take embeddings",
            hint="leave out `--task` and `--no-cache`",
        )
    if task != GENERATE and getattr(model.config, "is_decoder", True) is False:
        raise UnsupportedInput(
            f"a {model.config.model_type} without `is_decoder` is an encoder, and `--task {task}` exports decoders",
            hint="`optimum-cli export onnx` exports encoders",
        )
    if extras := model.input_map.extra_inputs(model.config):
        raise UnsupportedInput(
            f"graphs without a cache take tokens alone, and this family has the input `{next(iter(extras))}`",
            hint="leave out `--task` and `--no-cache`",
        )
    spec = GraphSpec(NO_CACHE, logits=given["logits_dtype"])
    if task == GENERATE:
        return checkpoint, {SCORING: spec}
    if modules := read_sentence_modules(checkpoint.path):
        places = {name: tensor.location for name, tensor in modules.tensors.items()}
        checkpoint = replace(
            checkpoint,
            tensors={**checkpoint.tensors, **modules.tensors},
            side_files={**checkpoint.side_files, **modules.side_files},
            files={**checkpoint.files, **places},
        )
    return checkpoint, {task: replace(spec, task=task, head=_head(task, modules))}


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


@contextmanager
def opened_in_memory(model: Any, output: Placed | None, *, graphs_only: bool) -> Iterator[Checkpoint]:
    """The checkpoint that `save_pretrained` would write for a causal language model on any device.

    Its configuration is in a temporary folder, no weight is. Raises InputRefused: transformers does not save its
    configuration; UsageProblem: not a torch module, no output for its weights, or `graphs_only`; or its weights are not
    plain tensors in memory, or have an adapter around them.
    """
    if not isinstance(model, nn.Module):
        raise UsageProblem(
            f"`model` must be a path or a `Module`, and is a `{type(model).__name__}`",
            hint="give a folder, or a causal language model of transformers",
        )
    if output is None:
        raise UsageProblem(
            "a model in memory needs `output`, a new folder for its weights", hint="`export(model, OUT)`"
        )
    if graphs_only:
        raise UsageProblem(
            "`graphs_only` needs a model folder, not one in memory", hint="leave it out, or save the model first"
        )
    model = _require_plain(model)
    folder = make_temporary_folder()
    try:
        try:
            config = copy.deepcopy(model.config)
            config.architectures, config.dtype = [type(model).__name__], model.dtype
            config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        except (ValueError, TypeError, OSError) as error:
            raise InputRefused(
                f"transformers cannot save the configuration: {first_line(error)}", hint="fix `generation_config`"
            ) from error
        # those that `save_pretrained` stores, by their names there; of tied ones the first alone
        whole = remove_tied_weights_from_state_dict(model.state_dict(), model)
        tensors = {name: _lazy(name, tensor) for name, tensor in revert_weight_conversion(model, whole).items()}
        yield Checkpoint(folder, "hf", tensors, read_json(folder / "config.json"), read_side_files(folder))
    finally:
        remove_temporary_folder(folder)


def _require_plain(model: Any) -> PreTrainedModel:
    """The model, if its weights are in memory, and are all of it."""
    if type(model).__module__.partition(".")[0] == "peft" or getattr(model, "_hf_peft_config_loaded", False):
        raise UsageProblem(
            "the model has an adapter that is not merged",
            hint="give `model.merge_and_unload()`, or save both and run `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    if getattr(getattr(model, "config", None), "auto_map", None):
        raise UsageProblem(
            "the model has code of its own, which is not in memory",
            hint="save it: `model.save_pretrained(FOLDER)`; then `export(FOLDER, OUT, trust_remote_code=True)`",
        )
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        raise UsageProblem(
            f"`model` is {type(model).__name__} around a {type(inner).__name__}", hint="give `model.module`"
        )
    model = require_causal_model(model)
    _require_known_class(model)
    _require_tied_head(model)
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise UsageProblem(
            "the weights of the model are quantized",
            hint="save it: `model.save_pretrained(FOLDER)`; then export FOLDER",
        )
    if odd := next((name for name, tensor in model.named_parameters() if type(tensor.data) is not torch.Tensor), None):
        raise UsageProblem(
            f"`{odd}` is divided between processes or has a layout of its own",
            hint="save it: `trainer.save_model(FOLDER)`; then export FOLDER",
        )
    return model


def _require_known_class(model: PreTrainedModel) -> None:
    """Refuses a class of the user's own, which may compute something else than the one that its config names."""
    kind, known = type(model), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    if kind.__module__.partition(".")[0] != "transformers" and kind not in (
        known if isinstance(known, tuple) else (known,)
    ):
        raise UsageProblem(
            f"the model's class `{kind.__name__}` is not of transformers, and its code is not in `config.json`",
            hint="register it: `AutoModelForCausalLM.register(ConfigClass, ModelClass)`; see docs/adding-a-family.md",
        )


def _require_tied_head(model: PreTrainedModel) -> None:
    """Refuses a head of its own where the config ties it to the embedding: graphs would read the embedding."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own, shared = getattr(head, "weight", None), getattr(table, "weight", None)
    if own is None or shared is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    if own is not shared and (own.shape != shared.shape or not torch.equal(own, shared.to(own))):
        raise UsageProblem(
            "`config.tie_word_embeddings` is true, and the output head differs from the embedding",
            hint="set `model.config.tie_word_embeddings = False`, or call `model.tie_weights()`",
        )


def _lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    """A torch tensor of which only the rows that are asked for are copied; UsageProblem for an unsupported dtype."""
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise UsageProblem(f"`{name}` has the dtype {tensor.dtype}", hint="convert the model: `model.float()`")
    return LazyTensor(dtype, tuple(tensor.shape), partial(_rows, tensor.detach(), dtype))


def _rows(tensor: torch.Tensor, dtype: DType, start: int, stop: int) -> Array:
    rows = (tensor if tensor.ndim else tensor.reshape(1))[start:stop].cpu().contiguous()
    return rows.view(torch.uint8).numpy().view(dtype.numpy).reshape(rows.shape)
