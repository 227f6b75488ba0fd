"""ExportOptions: the keyword arguments of `export`, their defaults, and which of them exclude or need each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast, get_type_hints

from llmconv.argument_checks import require_choice, require_least
from llmconv.errors import UsageProblem
from llmconv.export.targets.presets import FLOAT32, TARGETS
from llmconv.output.plan import DEFAULT_SIZE, require_shard_size
from llmconv.tensors import FLOATS, LazyTensor

GENERATE, EMBED, CLASSIFY, RERANK = "generate", "embed", "classify", "rerank"
SCORING = "scoring"  # values of the option `task`, and the role of the graph of `no_cache`


class ExportOptions(TypedDict, total=False):
    """The keyword arguments of `export`, with the names of the command's options.

    Attributes:
        prefill: write `prefill.onnx`.
        incremental: write `decode.onnx`.
        unified: write `model.onnx`, one graph for prompts and steps. By default the first two are written, or the
            graphs that `layout` needs.
        graph_name: `ROLE=FILE` each: names of `prefill`, `decode`, `unified`, `scoring`, … other than the usual ones.
        layout: names of the clients that will open the folder, one file each in `export/clients/`.
        embeds: graphs take `inputs_embeds` instead of `input_ids`, and `embeddings.onnx` is the embedding table; always
            so for multimodal models.
        mtp: write `mtp.onnx`, the layer that predicts one further token (MTP), too; the other graphs return the hidden
            state that it reads.
        last_logits: return the logits of the last position only.
        postprocess: `argmax` or `topk:K`: choose tokens in the graph.
        stages: number of graphs that the layers are divided into.
        lora_inputs: linear layers whose graphs take LoRA factors as optional inputs: `all-linear`, or names of modules.
        prefix: PEFT adapter of prefix or prompt tuning, or `pre_caches.npy`: virtual tokens before every prompt.
        opset: version of the standard operators: 21, 23 or 24.
        shapes: `dynamic`, or `static`: every axis is a number, and the cache is a buffer that is filled in place.
        batch_size: static: sequences per call (default: 1).
        max_seq_len: static: number of tokens that the cache holds.
        prompt_len: static: new tokens per call of `prefill.onnx` (default: the largest divisor of `max_seq_len` up to
            128, so that every prompt that fits can be cut into calls of this length).
        cache: dynamic: `growing`, or `shared-buffer`: past and present are one buffer that is filled in place, as
            required by ORT-GenAI's `past_present_share_buffer` (default: that of the target, otherwise `growing`).
        target: `ort-cpu`, `ort-cuda`, `ort-webgpu` or `ort-dml`: the provider of onnxruntime that runs the graphs. It
            decides `precision`, `cache` and `opset` where they are not given, see `targets/presets.py`.
        strict_target: refuse graphs with nodes that the target's provider would leave to the CPU.
        task: `generate`, or one graph without a cache: `embed`, `classify` or `rerank`, see docs/embeddings.md.
        no_cache: one graph that returns the logits of a whole text and keeps no cache, `scoring.onnx`.
        precision: `float32`, `float16` or `bfloat16`: dtype that the graphs compute in, and of their cache (default:
            that of the target, otherwise `float32`).
        logits_dtype: dtype of the logits: `float32`, or the precision.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the stored weights; by default, with a new
            folder and a `precision` of less than float32, that precision.
        quant: `int8`, `int4`, `int4-mixed`, `int4-small` or `a8w8`: store the matrices as integer codes, in `output`.
        quant_block: number of neighboring weights that share a scale: 16, 32, 64, 128 or 256 (default: 32, for
            `int4` 64, for `int4-small` 128).
        symmetric: store no zero points.
        quant_exclude: regular expressions; weights with such names are not quantized.
        quant_bits: `PATTERN=8` or `PATTERN=4`: bits of the weights with such names.
        kv_cache: `int8`: keep keys and values as integer codes, with scales measured on the text `calibrate` (default:
            that of llmconv).
        calibrate: text file, or `default` for the text that ships with llmconv; columns of a weight count as much as
            what they are multiplied with on this text. For `a8w8`, norms are divided by factors from the ranges on it.
        static_activations: with `a8w8` and `calibrate`: round activations in the ranges measured on the text, with
            `QuantizeLinear` and `DequantizeLinear`, as toolchains for NPUs read them.
        method: `search` for the scales with the least squared error, `rtn` for those of onnxruntime; of 4 bits also
            `awq-columns` (norms and columns scaled by the mean squares of 256 tokens, or of `calibrate`; the default),
            and with `calibrate` `awq` (scaled by all products) and `gptq` (error feedback).
        max_shard_size: largest safetensors file, such as `5GB`, if weights are written.
        graphs_only: write graphs, configuration and tokenizer into `output`, but no weights: those of the model are to
            be put next to the graphs, by the names of its files; only their headers are read.
        overwrite: replace existing graphs, or an existing `output`.
        resume: continue an interrupted export.
        dry_run: make and check all graphs, but write nothing.
        trust_remote_code: run the model's own code, which `auto_map` of its `config.json` declares.
    """

    prefill: bool
    incremental: bool
    unified: bool
    graph_name: str | Sequence[str]
    layout: str | Sequence[str]
    embeds: bool
    mtp: bool
    last_logits: bool
    postprocess: str | None
    stages: int
    prefix: str | Path | None
    lora_inputs: str | Sequence[str]
    opset: int | None
    shapes: str
    batch_size: int | None
    max_seq_len: int | None
    prompt_len: int | None
    cache: str | None
    target: str | None
    strict_target: bool
    task: str
    no_cache: bool
    precision: str | None
    logits_dtype: str
    dtype: str
    quant: str | None
    quant_block: int | None
    symmetric: bool
    quant_exclude: Sequence[str]
    quant_bits: Sequence[str]
    kv_cache: str | None
    calibrate: str | Path | None
    static_activations: bool
    method: str | None
    max_shard_size: str | int
    graphs_only: bool
    overwrite: bool
    resume: bool
    dry_run: bool
    trust_remote_code: bool


NOT_NONE = {"graph_name": (), "layout": (), "stages": 1, "lora_inputs": "", "shapes": "dynamic", "task": GENERATE}
NOT_NONE |= {
    "logits_dtype": FLOAT32,
    "dtype": "keep",
    "quant_exclude": (),
    "quant_bits": (),
    "max_shard_size": DEFAULT_SIZE,
}
DEFAULTS = cast(  # the options that a call leaves out: a flag is off, and others are None, or in this table
    ExportOptions,
    {name: NOT_NONE.get(name, False if kind is bool else None) for name, kind in get_type_hints(ExportOptions).items()},
)

TASKS = (GENERATE, EMBED, CLASSIFY, RERANK)  # values of the option `task`
PRECISIONS = (FLOAT32, "float16", "bfloat16")  # values of the option `precision`: the dtype that a graph computes in
WITHOUT_CACHE = {
    *("task", "no_cache", "opset", "strict_target", "dtype", "max_shard_size", "graphs_only", "overwrite", "resume"),
    *("dry_run", "logits_dtype", "trust_remote_code"),
    *("quant", "method", "quant_block", "quant_bits", "quant_exclude"),
}
"""Options that graphs without a cache take; all others are about generating."""


def check_options(given: ExportOptions, *, writes: bool) -> None:
    """Refuses invalid options, and those that exclude or need each other, before the model is opened.

    `writes`: there is an output. What the target decides is checked again when that is known. Raises UsageProblem.
    """
    target = given["target"]
    require_choice(given["task"], TASKS, "task")
    if roles_of_task(given):
        _require_fitting(given, given["task"])
    require_choice(target or "ort-cpu", tuple(TARGETS), "target")
    if given["strict_target"] and not (target and TARGETS[target].compared):
        raise UsageProblem(
            "`--strict-target` compares graphs with the kernels of one provider",
            hint=f"add `--target`, one of: {', '.join(name for name, row in TARGETS.items() if row.compared)}",
        )
    _require_plain_graphs(given)
    if target is None:
        check_shapes(given)
    check_weight_options(given, writes=writes)
    if not given["graphs_only"]:
        return
    if not writes:
        raise UsageProblem(
            "`--graphs-only` has no effect: without `-o` no weights are written", hint="add `-o OUT`, or leave it out"
        )
    if name := option_that_computes(given):
        raise UsageProblem(
            f"`--{name}` reads the weights, and `--graphs-only` only their headers", hint="leave one of the two out"
        )
    if given["max_shard_size"] != DEFAULT_SIZE:
        raise UsageProblem(
            "`--max-shard-size` has no effect: `--graphs-only` writes no weights", hint="leave one of the two out"
        )


WITH_MTP = {
    *("mtp", "prefill", "incremental", "unified", "graph_name", "dtype", "max_shard_size", "graphs_only"),
    *("overwrite", "resume", "dry_run"),
}
"""Options that graphs with an MTP head take: those are in float32 and have a growing cache."""


def _require_plain_graphs(given: ExportOptions) -> None:
    """Raises UsageProblem for an option that graphs with an MTP head do not have."""
    for name, value in given.items():
        if given["mtp"] and name not in WITH_MTP and value != DEFAULTS[name]:  # type: ignore[literal-required]
            raise UsageProblem(
                f"`--{name.replace('_', '-')}` is not supported with `--mtp`", hint="leave one of the two out"
            )


def _require_fitting(given: ExportOptions, task: str) -> None:
    if task != GENERATE and given["no_cache"]:
        raise UsageProblem(f"graphs of `--task {task}` keep no cache anyway", hint="leave out `--no-cache`")
    option = "--no-cache" if given["no_cache"] else f"--task {task}"
    for name, value in given.items():
        if name not in WITHOUT_CACHE and value != DEFAULTS[name]:  # type: ignore[literal-required]
            raise UsageProblem(
                f"`--{name.replace('_', '-')}` is not supported with `{option}`", hint="leave one of the two out"
            )
    if given["trust_remote_code"] and task != GENERATE:
        raise UsageProblem(
            f"`--task {task}` exports models of transformers only", hint="leave out `--trust-remote-code`"
        )


def roles_of_task(given: ExportOptions) -> list[str]:
    """The graph without a cache that is asked for, by its role; none for graphs that generate."""
    if given["task"] != GENERATE:
        return [given["task"]]
    return [SCORING] if given["no_cache"] else []


def option_that_computes(given: ExportOptions) -> str | None:
    """The name of an option for which all of the model is read and run, None if there is none."""
    computed = {"quant": given["quant"], "kv-cache": given["kv_cache"], "calibrate": given["calibrate"]}
    return next((name for name, value in computed.items() if value), None)


def check_shapes(given: ExportOptions) -> None:
    """Raises UsageProblem for invalid values of the options for the axes of the graphs, the cache and their dtypes."""
    for name in ("batch_size", "max_seq_len", "prompt_len"):
        if (size := given[name]) is not None:
            require_least(size, 1, name)
    precision, logits = given["precision"] or FLOAT32, given["logits_dtype"]
    require_choice(given["shapes"], ("dynamic", "static"), "shapes")
    require_choice(given["cache"] or "growing", ("growing", "shared-buffer"), "cache")
    require_choice(given["target"] or "ort-cpu", tuple(TARGETS), "target")
    require_choice(precision, PRECISIONS, "precision")
    require_choice(logits, PRECISIONS, "logits_dtype")
    require_choice(given["kv_cache"] or "int8", ("int8",), "kv_cache")
    if logits not in (FLOAT32, precision):
        raise UsageProblem(
            f"`--logits-dtype {logits}` needs graphs that compute in {logits}",
            hint=f"add `--precision {logits}`, or leave it out: logits are float32",
        )


def check_weight_options(given: ExportOptions, *, writes: bool) -> None:
    """Refuses invalid values, a dtype that the graphs cannot map, and a shard size if no weights are written."""
    dtype, precision = given["dtype"], given["precision"] or FLOAT32
    require_choice(dtype, ("keep", *FLOATS), "dtype")
    if dtype not in ("keep", precision) and precision != FLOAT32:
        raise UsageProblem(
            f"graphs of `--precision {precision}` map weights of that dtype, and `--dtype {dtype}` stores others",
            hint="leave out `--dtype`",
        )
    if given["quant"] == "a8w8" and precision != FLOAT32:
        raise UsageProblem(
            f"`--quant a8w8` computes in float32, and not in {precision}",
            hint="leave out `--precision`, or give `--quant int8`",
        )
    require_shard_size(given["max_shard_size"])
    if given["quant"] and not writes:
        raise UsageProblem("`--quant` writes new weights", hint="give `-o OUT`, a new folder for them")
    if given["max_shard_size"] != DEFAULT_SIZE and not writes:
        raise UsageProblem(
            "`--max-shard-size` has no effect: without `-o` no weights are written",
            hint="add `-o OUT`, or leave it out",
        )


def require_exact(given: ExportOptions, weights: Mapping[str, LazyTensor]) -> None:
    """Refuses a `--dtype` that would round weights but not the codes that are computed from them."""
    dtype, rounds = given["dtype"], given["dtype"] in ("float16", "bfloat16") and given["precision"] in (None, FLOAT32)
    stored = {tensor.dtype.name for tensor in weights.values()}.intersection(FLOATS)
    if rounds and stored != {dtype}:
        raise UsageProblem(
            f"`--dtype {dtype}` would round the weights that `--quant` leaves as they are, and no others",
            hint=f"convert it first: `llmconv to-hf MODEL -o NEW --dtype {dtype}`, or give `--precision {dtype}`",
        )
