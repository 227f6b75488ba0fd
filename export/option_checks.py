"""The options of an export that exclude or need each other, checked before the model is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from llmconv.argument_checks import require_choice
from llmconv.errors import UsageProblem
from llmconv.export.clients import Client
from llmconv.export.export_options import CLASSIFY, DEFAULTS, EMBED, GENERATE, RERANK, SCORING, ExportOptions
from llmconv.export.graph_spec import FLOAT32, ShapeOptions
from llmconv.export.targets.presets import TARGETS
from llmconv.output.plan import DEFAULT_SIZE, require_shard_size
from llmconv.progress import warn
from llmconv.tensors import FLOATS, LazyTensor

TASKS = (GENERATE, EMBED, CLASSIFY, RERANK)  # values of the option `task`

FITTING = (
    "task",
    "no_cache",
    "opset",
    "strict_target",
    "dtype",
    "max_shard_size",
    "graphs_only",
    "overwrite",
    "resume",
    "dry_run",
    "logits_dtype",
    "trust_remote_code",
)
"""Options that graphs without a cache take; all others are about generating, or about weights that were changed."""


def require_fitting(given: ExportOptions) -> None:
    """Raises UsageProblem for an unknown task, one with `no_cache`, or an option that graphs without a cache lack."""
    task = given["task"]
    require_choice(task, TASKS, "task")
    if task == GENERATE and not given["no_cache"]:
        return
    if task != GENERATE and given["no_cache"]:
        raise UsageProblem(f"graphs of `--task {task}` keep no cache anyway", hint="leave out `--no-cache`")
    option = "--no-cache" if given["no_cache"] else f"--task {task}"
    for name, value in given.items():
        if name not in FITTING and value != DEFAULTS[name]:  # type: ignore[literal-required]
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


def require_possible(given: ExportOptions, *, writes: bool) -> None:
    """Raises UsageProblem for `graphs_only` without an output, or with an option that reads or writes weights."""
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


def check_target(given: ExportOptions) -> None:
    """Raises UsageProblem for invalid options before the model is opened, as far as the target does not decide them."""
    target = given["target"]
    require_choice(target or "ort-cpu", tuple(TARGETS), "target")
    if given["strict_target"] and not (target and TARGETS[target].compared):
        raise UsageProblem(
            "`--strict-target` compares graphs with the kernels of one provider",
            hint=f"add `--target`, one of: {', '.join(name for name, row in TARGETS.items() if row.compared)}",
        )
    if target is None:
        shape_options(given)


def warn_of_padding(given: ExportOptions, clients: Sequence[Client]) -> None:
    """Warns of logits of the last position for a client that pads batches after the prompts."""
    if given["last_logits"] and any(client.name == "genai" for client in clients):
        warn(
            "GenAI pads batches after the prompts: with `--last-logits` it needs prompts of equal length in a batch, "
            "or shorter ones get wrong tokens; `llmconv verify --client genai` shows that"
        )


def shape_options(given: ExportOptions) -> ShapeOptions:
    values: dict[str, Any] = {one.name: given[one.name] for one in fields(ShapeOptions)}  # type: ignore[literal-required]
    return ShapeOptions(**{name: value for name, value in values.items() if value is not None})


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
