"""What `export` takes and returns: ExportOptions, their defaults, which exclude or need each other, and Exported.

Also what `--target` means, one row per target, and the names of graph files: the usual ones by role, and those of
`--graph-name ROLE=FILE`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from llmconv.argument_checks import require_choice, require_least
from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UsageProblem
from llmconv.not_a_model_folder import described
from llmconv.output.manifest import (
    EMBEDDINGS,
    EMBEDDINGS_ROLE,
    GRAPH_FILES,
    MTP,
    MTP_ROLE,
    SINGLE_PASS_FILES,
    VISION,
    VISION_ROLE,
)
from llmconv.output.plan import DEFAULT_SIZE, require_shard_size
from llmconv.output.writer import Place
from llmconv.tensors import FLOATS, LazyTensor

FLOAT32, FLOAT16, BFLOAT16 = "float32", "float16", "bfloat16"
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
            decides `precision`, `cache` and `opset` where they are not given, see `TARGETS`.
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


@dataclass(frozen=True)
class Target:
    """One provider of onnxruntime."""

    precisions: tuple[str, ...] = (FLOAT32, FLOAT16, BFLOAT16)  # dtypes that its kernels compute in
    # precision for weights that are stored in half precision: `stored` for the dtype of the weights
    half: str = "stored"
    whole: str = FLOAT32  # precision for weights that are stored in float32
    # precisions in which its `GroupQueryAttention` runs our graphs, which give it the mask as a bias
    grouped_query: tuple[str, ...] = ()
    opset: int | None = None  # version of the standard operators for a growing cache; None for the usual one
    compared: bool = True  # whether `export` compares the graphs with the kernels of the provider
    no_buffer: str = ""  # the fault of its `GroupQueryAttention` for which a shared buffer is refused; empty for none


TARGETS = {
    "ort-cpu": Target(half=FLOAT32, compared=False),
    "ort-cuda": Target(grouped_query=(FLOAT16, BFLOAT16)),
    # neither has opset 23's Attention, which opset 21 writes as products and a softmax
    "ort-webgpu": Target(
        (FLOAT32, FLOAT16),
        FLOAT16,
        FLOAT16,
        opset=21,
        # onnxruntime 1.27, 8 lanes: 4 tokens after 5 are off by 0.06 in a lone node, 0.4 in logits
        no_buffer="computes wrong numbers for several new tokens on adapters with small subgroups",
    ),
    "ort-dml": Target(
        (FLOAT32, FLOAT16),
        FLOAT16,
        FLOAT16,
        opset=21,
        no_buffer="does not read the mask that graphs with a shared buffer give it",
    ),
}


@dataclass(frozen=True)
class Preset:
    """The options of an export that a target decides, each as given or else as the target's row has it."""

    precision: str
    cache: str
    opset: int | None


def find_preset(target: str, given: Preset, stored: str, *, buffers: bool, growing: bool) -> Preset:
    """The options of an export for a target; those that are `given` win (the others are empty, or None).

    `stored` is the dtype of the weights; `buffers`: the model and the other options allow `--cache shared-buffer`;
    `growing`: a growing cache keeps its axes dynamic. Raises UsageProblem: an option that the provider cannot run.
    """
    row = TARGETS[target]
    half = stored if row.half == "stored" else row.half
    precision = given.precision or (half if stored in (FLOAT16, BFLOAT16) else row.whole)
    if precision not in row.precisions:
        raise UsageProblem(
            f"`--target {target}` has no kernels for `--precision {precision}`", hint="`--precision float16 -o OUT`"
        )
    if given.cache == "shared-buffer" and row.no_buffer:
        raise UsageProblem(
            f"`GroupQueryAttention` of `{target}` {row.no_buffer}", hint="leave out `--cache shared-buffer`"
        )
    shared = buffers and precision in row.grouped_query
    cache = given.cache or ("shared-buffer" if shared else "growing")
    opset = given.opset or (row.opset if cache == "growing" and growing else None)
    return Preset(precision, cache, opset)


FILES: Mapping[str, str] = {  # the usual names by role
    **GRAPH_FILES,
    **SINGLE_PASS_FILES,
    EMBEDDINGS_ROLE: EMBEDDINGS,
    VISION_ROLE: VISION,
    MTP_ROLE: MTP,
}

OPTION, SUFFIX = "--graph-name", ".onnx"
LONGEST = 200  # maximum number of bytes of a name: file systems take 255, and the number of a stage is added


def graph_names(given: Sequence[str], roles: Collection[str], layouts: Collection[str]) -> dict[str, str]:
    """File names by role, given `ROLE=FILE` each.

    `layouts` are clients with files of their own; names of the graphs of embeddings and images are fixed. Raises
    UsageProblem: there is such a client, no such role, a role or a name twice, or a name that no graph in a folder can
    have.
    """
    if given and layouts:
        raise UsageProblem(
            f"the layout `{next(iter(layouts))}` has names of its own", hint=f"leave out `{OPTION}`, or `--layout`"
        )
    found: dict[str, str] = {}
    for one in [given] if isinstance(given, str) else given:
        role, equals, name = one.partition("=")
        if not equals:
            raise UsageProblem(f"`{OPTION} {one}` is not ROLE=FILE", hint=f"for example `{OPTION} decode=step{SUFFIX}`")
        if role in (EMBEDDINGS_ROLE, VISION_ROLE):
            raise UsageProblem(
                f"`{OPTION} {one}`: the name `{FILES[role]}` is fixed", hint=f"one of: {', '.join(roles)}"
            )
        if role not in roles:
            raise UsageProblem(f"`{OPTION} {one}`: no graph `{role}` is exported", hint=f"one of: {', '.join(roles)}")
        if role in found:
            raise UsageProblem(f"`{OPTION}` is given twice for `{role}`", hint="leave out one of them")
        if problem := _problem(name):
            raise UsageProblem(f"`{OPTION} {one}`: {problem}", hint=f"for example `{OPTION} {role}=my-{role}{SUFFIX}`")
        found[role] = name
    names = [found.get(role, FILES[role]) for role in roles]
    alike = [name.casefold() for name in names]  # one file on macOS and Windows
    if double := next((name for name in names if alike.count(name.casefold()) > 1), None):
        raise UsageProblem(f"two graphs would have the name `{double}`", hint="give each a name of its own")
    return found


def _problem(name: str) -> str:
    if Path(name).name != name or "\\" in name or not name.isprintable():
        return "a name without a folder is needed"
    if not name.endswith(SUFFIX) or name == SUFFIX or name.startswith("."):
        return f"the name must end in `{SUFFIX}`"
    if len(name.encode()) > LONGEST:
        return f"a name of at most {LONGEST} bytes is needed"
    return f"`{name}` is the name of another graph" if name.casefold() in (EMBEDDINGS, VISION) else ""


def home_of(checkpoint: Checkpoint, source: Path) -> Path:
    """The folder of the model, or of its GGUF file `source`, into which graphs go without an output."""
    if checkpoint.format != "gguf":
        return checkpoint.path
    return source.parent if source.is_file() else source


@dataclass(frozen=True)
class ExportSizes:
    """Bytes of all graphs, of the weights that they map (each counted once), and of the weights that were written."""

    graphs: int
    mapped: int
    copied: int


@dataclass(frozen=True)
class QuantizedSizes:
    """Numbers of weights and bytes of a quantized export."""

    # number of quantized tensors by bits and size of a block, which is 0 for one scale per column
    matrices: Mapping[tuple[int, int], int]
    before: int  # bytes of these tensors in the model
    after: int  # bytes of their codes, scales and zero points
    plain: int  # number of tensors that are stored as they are
    factors: int  # bytes of factors of columns, which no graph reads: `verify` does

    @property
    def line(self) -> str:
        sizes = f"{described(self.matrices)}, {self.after:,} bytes instead of {self.before:,}"
        plain = f"{self.plain:,} tensor{'s' * (self.plain != 1)} as {'they are' if self.plain != 1 else 'it is'}"
        factors = f"; {self.factors:,} bytes of factors, which only `verify` reads" if self.factors else ""
        return f"quantized: {sizes}; {plain}{factors}"

    def fields(self) -> dict[str, Any]:
        kinds = [{"bits": bits, "block": size, "count": count} for (bits, size), count in self.matrices.items()]
        sizes = {"bytes_before": self.before, "bytes": self.after, "factor_bytes": self.factors}
        return {"matrices": kinds, **sizes, "plain": self.plain}


@dataclass(frozen=True)
class Exported:
    """The result of an export or of its dry run.

    Attributes:
        place: the folder of the graphs, on this machine or in an object store.
        graphs: role (`prefill`, `decode`, `unified`, `embeddings`, `scoring`, `embed`, …) to file names, one per stage.
        sizes: bytes of graphs, of mapped weights and of written weights; None for a dry run.
        weight_bytes: bytes of the weights in the folder.
        weight_bytes_written: bytes of weights that the export writes: 0 if the graphs are added to the model folder.
        traced_layers: number of layers that were traced; the others were replicated.
        num_layers: number of layers of the model.
        client_files: paths of the clients' own files in the folder.
        files: bytes of the files that the export writes, by name, without the manifest; 0 for links.
        quantized: what `quant` made of the weights; None without it.
        missing: with `graphs_only`, bytes of the model's files that have to be put next to the graphs, by name.
    """

    place: Place
    graphs: dict[str, list[str]]
    sizes: ExportSizes | None
    weight_bytes: int
    weight_bytes_written: int
    traced_layers: int
    num_layers: int
    client_files: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    quantized: QuantizedSizes | None = None
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the graphs. Raises InputRefused: it is in an object store."""
        if isinstance(self.place, Path):
            return self.place
        raise InputRefused(f"`{self.place}` is not a folder of this machine", hint="use `place`, or copy it here first")

    @property
    def weight_bytes_mapped(self) -> int:
        """Bytes of weights that the graphs map, each counted once; for a dry run, all weights of the folder."""
        return self.sizes.mapped if self.sizes else self.weight_bytes

    def __repr__(self) -> str:
        files = ", ".join(name for names in self.graphs.values() for name in names)
        state = "a dry run" if self.sizes is None else f"{self.sizes.graphs:,} bytes"
        return f"<Exported {self.place}: {files}; {state}, {self.weight_bytes_mapped:,} bytes of weights mapped>"
