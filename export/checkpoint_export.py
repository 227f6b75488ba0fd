"""The export of an open checkpoint: everything that needs torch. What can be refused without is in `exporter.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from llmconv.causal_lm import context_length
from llmconv.checkpoint import VOCABULARIES, Checkpoint, read_json
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export.clients import DEFAULT, Client, ClientFiles, ClientModel
from llmconv.export.export_options import (
    EMBED,
    GENERATE,
    RERANK,
    SCORING,
    Exported,
    ExportOptions,
    ExportSizes,
    Preset,
    check_shapes,
    check_weight_options,
    find_preset,
    graph_names,
    home_of,
    require_exact,
)
from llmconv.export.folders import GraphsOnly, InPlace, NewFolder, OutputFolder, file_tensors, main_dtype
from llmconv.export.graph_files import GraphOptions, GraphPlan
from llmconv.export.graph_spec import FLOAT32, NO_CACHE, GraphSpec, graph_specs, refuse_option, with_fixed_inputs
from llmconv.export.input_map import decoder_config
from llmconv.export.language_model import LanguageModel, open_language_model
from llmconv.export.quantization.settings import QuantizationSettings, require_kv_cache, require_used
from llmconv.export.rewrite.fused_operators import fits_grouped_query
from llmconv.export.rewrite.lora_inputs import lora_targets
from llmconv.export.rewrite.passes import TokenChoice, require_grouped_query
from llmconv.export.rewrite.pipeline_stages import first_layers, graph_parts, require_stages, stage_parts
from llmconv.export.tracing.fake_model import depth
from llmconv.export.weights import match_weights, require_one_copy
from llmconv.files.paths import Placed, output_place
from llmconv.files.sources import local_path
from llmconv.model_code import code_of
from llmconv.not_a_model_folder import refuse_unexplained_codes
from llmconv.output.manifest import MTP_ROLE, step
from llmconv.progress import say, warn
from llmconv.progress import step as progress_step
from llmconv.runtime.custom_code import uses_custom_code

if TYPE_CHECKING:
    from llmconv.export.clients.image_parts import Edits
    from llmconv.export.quantization.selection import QuantizedWeight, StoredFormats
    from llmconv.export.quantization.smoothing import Graphs
    from llmconv.export.sentence_modules import SentenceHead, SentenceModules, TokenScore


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
    quantization: QuantizationSettings | StoredFormats | None = settings
    if checkpoint.config.get("quantization_config"):
        from llmconv.export.quantize import with_plain_weights  # noqa: PLC0415 - most models are plain

        checkpoint, quantization = with_plain_weights(checkpoint, settings)
    else:
        refuse_unexplained_codes(checkpoint, checkpoint.config)
    if settings:
        require_used(settings.patterns, checkpoint)
    choice = TokenChoice.parse(given["postprocess"]) if given["postprocess"] else None
    prefix = None
    if given["prefix"]:
        from llmconv.runtime.prefix import open_prefix  # noqa: PLC0415 - most exports have none

        prefix = open_prefix(local_path(given["prefix"]))
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
    text = ""  # the sha256 of the text that scales of the cache are measured on
    if given["kv_cache"]:
        from llmconv.export.calibration import text_of  # noqa: PLC0415 - as above

        text = found.sha256 if (found := text_of(given)) else ""
    rest = given["strict_target"], quantization, text, lora_targets(given["lora_inputs"])
    layouts = [client.name for client in clients if client.name != DEFAULT]
    names = graph_names(given["graph_name"], [*(single or roles), *[MTP_ROLE] * given["mtp"]], layouts)
    changes = GraphOptions(given["last_logits"], choice, given["stages"], prefix, given["opset"], *rest, names)
    extras = language_model.extra_inputs
    for option in (name for name in ("prefix", "kv_cache") if given[name]):
        refuse_option(extras, f"--{option.replace('_', '-')}")
    specs = single or graph_specs(roles, given, language_model.embeddings, quantized=quantization is not None)
    specs = with_fixed_inputs(specs, extras, clients)
    language_model, specs = _with_mtp(language_model, specs, checkpoint) if given["mtp"] else (language_model, specs)
    check_context(language_model.config, context_length(checkpoint.path), given["max_seq_len"])
    plan = GraphPlan(specs, _client_files(clients, language_model, checkpoint, specs, given["quant"]), changes)
    if quantization:
        require_exact(given, checkpoint)
    folder = _output_folder(language_model, checkpoint, source, output, given, plan.clients.edits())
    folder.check(plan)
    return _make(language_model, checkpoint, plan, folder, source, given)


def _with_mtp(
    model: LanguageModel, specs: Mapping[str, GraphSpec], checkpoint: Checkpoint
) -> tuple[LanguageModel, dict[str, GraphSpec]]:
    """The model and the specs of its graphs, with the graph of its MTP head.

    Raises as `head_of`, and UnsupportedInput for a multi-modal model.
    """
    from llmconv.export.tracing.mtp import head_of  # noqa: PLC0415 - few models have one

    if model.embeddings:
        raise UnsupportedInput(
            "`--mtp`: graphs that take embeddings have no graph of an MTP head", hint="export without `--mtp`"
        )
    size = int(model.config.hidden_size)
    with_hidden = {role: replace(spec, hidden=size) for role, spec in specs.items()}
    mtp = replace(model, mtp=head_of(model.config, checkpoint))
    return mtp, {**with_hidden, MTP_ROLE: GraphSpec(task=MTP_ROLE, hidden=size)}


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
    calibration, scales = None, None
    if given["calibrate"] is not None or given["kv_cache"]:
        from llmconv.export.calibration import cache_scales, calibration_of  # noqa: PLC0415 - most exports run no text

        calibration = calibration_of(language_model, checkpoint, graphs, given)
        scales = cache_scales(calibration) if calibration and given["kv_cache"] else None
    quantized: dict[str, QuantizedWeight] = {}
    if formats := plan.options.quantization:
        from llmconv.export.calibration import brief_run  # noqa: PLC0415 - most exports are of floats
        from llmconv.export.quantize import chosen_codes  # noqa: PLC0415 - as above

        runs = calibration, partial(brief_run, language_model, checkpoint, graphs, given)
        quantized, folder, formats = chosen_codes(pairs, formats, runs, folder, given)
        plan = replace(plan, options=replace(plan.options, quantization=formats))
        folder.check(plan)
        weights = folder.weights()
    files = plan.make(graphs, weights, file_tensors(checkpoint), quantized, matches, scales)
    sizes = None
    if not given["dry_run"]:
        count = sum(prod(tensor.shape) for tensor in checkpoint.values()) if formats else None
        kept = {name: given[name] for name in ("dtype", "graphs_only", "embeds")}
        origin = {"transformers": transformers.__version__, "layers_traced": traced_layers, "parameters": count}
        done = step("export", source, **kept, **origin, **plan.manifest_options())
        sizes = ExportSizes(files.nbytes, files.mapped, folder.write(files, done))
    kept_sizes = None
    if given["quant"]:
        from llmconv.export.quantization.selection import quantized_sizes  # noqa: PLC0415 - as above

        kept_sizes = quantized_sizes(quantized, checkpoint, weights)
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
        kept_sizes,
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
    images = None
    if model.whole:
        from llmconv.export.clients.image_parts import ImageModel  # noqa: PLC0415 - most models take no images

        images = ImageModel.of(model.whole, checkpoint)
    readers = ", ".join(client.name for client in clients if client.reads_tokenizer_json)
    if readers and "tokenizer.json" not in checkpoint.side_files and VOCABULARIES & checkpoint.side_files.keys():
        home = checkpoint.path
        way = f"transformers writes it, `AutoTokenizer.from_pretrained('{home}').save_pretrained('{home}')`"
        warn(f"{readers}: the tokenizer is read from `tokenizer.json`, which `{home}` does not have: {way}")
    config = decoder_config(model.config)
    described = ClientModel(config, fed, generation, *kinds, images, tuple(specs), checkpoint.config)
    return ClientFiles(clients, described)


def _output_folder(
    model: LanguageModel,
    checkpoint: Checkpoint,
    source: Path,
    output: str | Path | None,
    given: ExportOptions,
    edits: Edits,
) -> OutputFolder:
    overwrite, resume = given["overwrite"], given["resume"]
    home = home_of(checkpoint, source)
    place = output_place(output) if output is not None else home
    is_new = not isinstance(place, Path) or place.resolve() != home.resolve()
    file_home = home if home != checkpoint.path else None  # the folder of a GGUF file
    if given["quant"] and not is_new:
        raise UsageProblem("`--quant` writes new weights", hint="give `-o OUT`, a new folder for them")
    if is_new and edits:
        from llmconv.export.clients.image_parts import edited  # noqa: PLC0415 - few layouts edit files of the model

        checkpoint = edited(checkpoint, edits)
    if edits and not is_new:
        warn(
            f"`{', '.join(edits)}` of the model folder stays as it is, and the layout needs other fields in it: give "
            "`-o OUT`, or see docs/clients.md"
        )
    if is_new and given["graphs_only"]:
        return GraphsOnly(place, InPlace(checkpoint, given["dtype"], home=file_home), overwrite, resume)
    if is_new:
        precision = given["precision"] or FLOAT32
        dtype = given["dtype"] if precision == FLOAT32 else precision
        rest = given["max_shard_size"], overwrite, resume
        return NewFolder(place, checkpoint, dtype, *rest, model.kept_in_float32(dtype))
    return InPlace(checkpoint, given["dtype"], overwrite or given["dry_run"], resume, home=file_home)


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
    from llmconv.export.sentence_modules import read_sentence_modules  # noqa: PLC0415 - models that generate have none

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
                "`--task rerank` needs a `modules.json` with a LogitScore module, which names the tokens of yes and no",
                hint="docs/embeddings.md has an example for Qwen3-Reranker; a classifier has `--task classify`",
            )
        return modules.score
    if task == EMBED and (modules is None or modules.head is None):
        say("no pooling module in `modules.json`: the graph returns `last_hidden_state` alone")
    return modules.head if modules and task == EMBED else None
