"""The options of an export that depend on each other: checked, and completed by the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from llmconv.argument_checks import require_choice
from llmconv.checkpoint import Checkpoint
from llmconv.errors import UsageProblem
from llmconv.export.clients import DEFAULT, Client
from llmconv.export.export_options import ExportOptions
from llmconv.export.folders.new_folder import main_dtype
from llmconv.export.graph_spec import FLOAT32, ShapeOptions
from llmconv.export.language_model import LanguageModel
from llmconv.export.rewrite.grouped_query import fits_grouped_query
from llmconv.export.targets.presets import TARGETS, Preset, find_preset
from llmconv.output.plan import DEFAULT_SIZE, require_shard_size
from llmconv.progress import warn
from llmconv.tensors import FLOATS, LazyTensor


def check_target(given: ExportOptions) -> None:
    """Refuses invalid options before the model is opened, as far as the target does not decide them.

    Raises:
        UsageProblem: names the option.
    """
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
    """The options that decide axes, cache and precision."""
    values: dict[str, Any] = {one.name: given[one.name] for one in fields(ShapeOptions)}  # type: ignore[literal-required]
    return ShapeOptions(**{name: value for name, value in values.items() if value is not None})


def for_target(
    given: ExportOptions, clients: Sequence[Client], model: LanguageModel, checkpoint: Checkpoint
) -> ExportOptions:
    """The options, with those that the target decides.

    Args:
        given: the options of the call.
        clients: the chosen layouts, which may not read caches in shared buffers.
        model: its key/value heads decide whether the fused operator of the target fits.
        checkpoint: its dtype is the precision that some targets prefer.

    Raises:
        UsageProblem: an option that the target does not have.
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
