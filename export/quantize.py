"""The quantization of an export: weights of floats become codes, and codes that a model has stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export.calibration import measure_ranges, require_one_input
from llmconv.export.export_options import ExportOptions
from llmconv.export.folders import OutputFolder
from llmconv.export.quantization.activation_aware import groups_with_factors, measure_activation_aware
from llmconv.export.quantization.block_rounding import ColumnFormat
from llmconv.export.quantization.calibration import TextRun, column_importance, column_sums
from llmconv.export.quantization.products import grouped
from llmconv.export.quantization.quantized_tensor import Scratch
from llmconv.export.quantization.selection import QuantizedWeight, StoredFormats, select
from llmconv.export.quantization.sequential_rounding import round_sequentially
from llmconv.export.quantization.settings import COLUMNS, QuantizationSettings
from llmconv.export.quantization.smoothing import Graphs, Smoothing, coded, measure_smoothing
from llmconv.files.paths import local_only
from llmconv.progress import say, warn
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.tensors import Array


def with_plain_weights(
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


def chosen_codes(
    pairs: Graphs,
    formats: QuantizationSettings | StoredFormats,
    runs: tuple[TextRun | None, Callable[[], TextRun]],
    folder: OutputFolder,
    given: ExportOptions,
) -> tuple[dict[str, QuantizedWeight], OutputFolder, QuantizationSettings | StoredFormats]:
    """As `quantize`, and the formats, which are by weights alone where the model cannot run llmconv's own text.

    `runs` are the text that was asked for, and what makes the run of llmconv's own.
    """
    asked, own = runs
    if isinstance(formats, QuantizationSettings) and formats.brief:
        try:
            run = own()  # a dry run, too, has to know whether the model can run it, which decides of the formats
            if given["dry_run"]:
                say("sizes are with factors of all columns that may have some: a run measures them, and finds fewer")
                return *_of_largest_size(pairs, formats, run, folder), formats
            return *quantize(pairs, formats, run, folder, given), formats
        except InputRefused as error:
            say(f"codes are chosen by the weights alone (`--method search`): {error}")
            formats = formats.by_weights_alone()
    return *quantize(pairs, formats, asked, folder, given), formats


def _of_largest_size(
    pairs: Graphs, formats: QuantizationSettings, run: TextRun, folder: OutputFolder
) -> tuple[dict[str, QuantizedWeight], OutputFolder]:
    """As `quantize`, with everything that a text may tell, whose values nobody reads: for the sizes of a dry run."""
    quantized = grouped(pairs, select(pairs, formats))
    importance: dict[str, Array] = {}
    for name in (name for name, weight in quantized.items() if weight.is_searched):
        shape = run.tensors[name].shape
        columns = shape[-2] if quantized[name].transposed else shape[-1]
        importance[name] = np.ones((*shape[:-2], columns), np.float32)
    groups = groups_with_factors(pairs, quantized, brief=True)
    sizes = {
        group: importance[one.name].shape[-1] for group in groups for one in group.matrices if one.name in importance
    }
    smoothing = Smoothing.of((group, np.full(size, 2, np.float32)) for group, size in sizes.items())
    return quantized, folder.quantized(quantized, importance, smoothing)


def quantize(
    pairs: Graphs,
    formats: QuantizationSettings | StoredFormats,
    calibration: TextRun | None,
    folder: OutputFolder,
    given: ExportOptions,
) -> tuple[dict[str, QuantizedWeight], OutputFolder]:
    """The weights that become codes, by name, and the folder with codes in their place.

    `calibration` is a text that ran through the graphs; None without one. Raises UnsupportedInput: a matrix whose
    activations have no single range; InputRefused: activations are not finite, or codes that graphs cannot map.
    """
    quantized = grouped(pairs, select(pairs, formats))
    if calibration is None or not isinstance(formats, QuantizationSettings) or not formats.text:
        return quantized, folder.quantized(quantized, {}, Smoothing())
    if given["static_activations"]:
        require_one_input(calibration, coded(quantized, ColumnFormat))
    columns = column_sums(calibration) if any(one.is_searched for one in quantized.values()) else {}
    importance = column_importance(calibration, columns)
    if formats.method in ("awq", COLUMNS):
        known = columns if formats.method == COLUMNS else None
        smoothing = measure_activation_aware(pairs, quantized, importance, calibration, known)
    else:
        smoothing = measure_smoothing(pairs, quantized, calibration)
    if given["static_activations"]:
        ranges = measure_ranges(calibration, coded(quantized, ColumnFormat), smoothing)
        quantized = {name: replace(weight, activation=ranges.get(name)) for name, weight in quantized.items()}
    if formats.method == "gptq" and not given["dry_run"]:
        home = local_only(folder.place) or Path(gettempdir(), folder.place.name)
        with Scratch.next_to(home) as scratch:  # the codes stay mapped after the file is closed
            codes = round_sequentially(calibration, quantized, scratch)
        quantized = {name: replace(weight, rounded=codes.get(name)) for name, weight in quantized.items()}
    return quantized, folder.quantized(quantized, importance, smoothing)
