"""What a text adds to integers of 4 bits: columns that matter, factors of norms (AWQ), error feedback (GPTQ).

The text runs through the model's float32 graph in pieces, as for `export --quant`, and the codes are the same
(`llmconv.export.quantization`): the weights of one piece are in memory at a time, and codes with error feedback wait in
an unnamed file beside the output.

The factors of AWQ are powers of two. Columns of all matrices behind a norm are multiplied with them, and its weight is
divided by them, which is exact: the folder has no tensor more than without, and engines compute the same function.
Experts share the factors of their norm, with which the router is multiplied, too. A norm is left as it is if anything
else reads it, or if it adds 1 to its weight (Gemma). In a gated unit, `down(f(gate(x)) * up(x))`, rows of `up` take the
place of the norm, of each expert by itself: its codes are the same, with scales divided.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np

from llmconv.checkpoint import Checkpoint, is_model_folder, open_checkpoint
from llmconv.compressed.rounding import Measured
from llmconv.compressed.schemes import Scheme
from llmconv.compressed.selection import OfStack, Selected
from llmconv.convert.models.head_and_dtype import lacks_head
from llmconv.errors import UnsupportedInput
from llmconv.export.calibration import text_run
from llmconv.export.language_model import open_language_model
from llmconv.export.quantization.activation_aware import measure_activation_aware
from llmconv.export.quantization.block_rounding import NONE, BlockFormat
from llmconv.export.quantization.calibration import TextRun, column_importance
from llmconv.export.quantization.quantized_tensor import RoundedCodes, Scratch
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.sequential_rounding import round_sequentially
from llmconv.export.quantization.smoothing import Smoothing, coded, measured_digest, smoothing_groups
from llmconv.export.weights import ONNX_TYPES
from llmconv.files.paths import local_only
from llmconv.files.weight_ranges import Mapped
from llmconv.output.writer import Place
from llmconv.runtime.tokenizer import LONG, TOKENS, CalibrationText
from llmconv.tensors import Array, LazyTensor


def require_plain_files(source: Checkpoint, selected: Selected, dtype: str) -> None:
    """Raises UnsupportedInput: the text cannot run through the weights, which a graph maps as they are stored."""
    if not is_model_folder(source.path) or not all(isinstance(one, Mapped) for one in source.values()):
        changed = f" in {dtype}" if dtype != "keep" else ""
        if is_model_folder(source.path) and not {*source} <= {*open_checkpoint(source.path)}:
            raise UnsupportedInput(
                "`--calibrate` runs a text through weights as they are stored, here experts in stacks",
                hint="write the model with one tensor per expert, as transformers' `save_pretrained` does for most",
            )
        raise UnsupportedInput(
            f"`--calibrate` runs a text through weights as they are stored, and this model is not stored{changed} yet",
            hint="write it first, with `llmconv to-hf` or `llmconv merge-lora`, and quantize that folder",
        )
    if lacks_head(source, source.config):
        raise UnsupportedInput(
            f"`{source.path.name}` has no output head, and `--calibrate` runs a text through the whole language model",
            hint="leave out `--calibrate`, or give the model as `AutoModelForCausalLM` saves it",
        )


def with_text(
    source: Checkpoint, selected: Selected, scheme: Scheme, method: str | None, text: CalibrationText, output: Place
) -> Selected:
    """The same weights with what the text tells of them, and norms divided by factors.

    Raises UnsupportedInput: no norm takes factors (`awq`), or the model has no graph that takes tokens; InputRefused:
    the text is too short, or activations are not finite.
    """
    assert scheme.integers
    run = text_run(open_language_model(source), source, {}, text, LONG if method == "gptq" else TOKENS)
    kinds: dict[str, QuantizedWeight] = {}
    for name, one in selected.weights.items():
        place = selected.stacks.get(name)
        stored, turned = (place.name, place.turned) if place else (name, False)
        kinds[stored] = QuantizedWeight(scheme.integers, turned, ONNX_TYPES[one.tensor.dtype.name])
    rounded, smoothing = {}, Smoothing()
    if method == "gptq":
        home = local_only(output) or Path(gettempdir(), output.name)
        with Scratch.next_to(home) as scratch:  # the codes stay mapped after the file is closed
            rounded = round_sequentially(run, kinds, scratch)
    importance = column_importance(run) if kinds.keys() - rounded.keys() else {}
    _require_measured(selected, {*importance, *rounded})
    if method == "awq":
        smoothing = _smoothing(run, kinds, importance)
    weights = {
        name: replace(one, measured=_measured(selected.stacks.get(name), name, importance, smoothing, rounded))
        for name, one in selected.weights.items()
    }
    kept = {
        name: _scaled(tensor, divisor if divisor is not None else 1 / smoothing.matrices[name])
        for name, tensor in selected.tensors.items()
        if (divisor := smoothing.norms.get(name)) is not None or name in smoothing.matrices and name not in weights
    }
    digest = measured_digest(importance, smoothing, rounded)
    return replace(selected, weights=weights, tensors={**selected.tensors, **kept}, measured=digest)


def _require_measured(selected: Selected, measured: Container[str]) -> None:
    """Raises UnsupportedInput: experts of a stack run in a way in which their activations are not seen."""
    if missing := next((name for name, place in selected.stacks.items() if place.name not in measured), None):
        raise UnsupportedInput(
            f"`--calibrate` cannot measure `{missing}`, which is stored in one tensor with all experts",
            hint="leave out `--calibrate`",
        )


def _measured(
    place: OfStack | None,
    name: str,
    importance: Mapping[str, Array],
    smoothing: Smoothing,
    rounded: Mapping[str, RoundedCodes],
) -> Measured:
    """What a text tells of a weight, or of its part of a stack."""
    stored = place.name if place else name
    columns, rows, codes = (
        smoothing.matrices.get(stored, NONE),
        smoothing.outputs.get(stored, NONE),
        rounded.get(stored),
    )
    found = importance.get(stored, NONE)
    if not place:
        return Measured(found, columns, rows, codes)
    number, part = place.expert, slice(place.first, place.first + place.count)
    return Measured(
        found[number] if found.size else NONE,
        columns[number].ravel() if columns.size else NONE,
        rows[number].ravel()[part, None] if rows.size else NONE,
        replace(codes, parts={end: one[number, part] for end, one in codes.parts.items()}) if codes else None,
    )


def _smoothing(run: TextRun, kinds: Mapping[str, QuantizedWeight], importance: Mapping[str, Array]) -> Smoothing:
    pairs = [(run.traced, run.matches)]
    if not smoothing_groups(pairs, coded(kinds, BlockFormat), aware=True):
        raise UnsupportedInput(
            "`--method awq` does not fit this model: no norm and no gated matrix can be divided by factors",
            hint="norms that add 1 to their weight cannot; `--method gptq` fits all",
        )
    return measure_activation_aware(pairs, kinds, importance, run)


def _scaled(tensor: LazyTensor, divisors: Array) -> LazyTensor:
    """A vector or matrix [N, K] divided by powers of two [K] with which the quotient is exact, in its own dtype."""

    def rows(start: int, stop: int) -> Array:
        mine = divisors[start:stop] if len(tensor.shape) == 1 else divisors
        quotient: Array = tensor.rows(start, stop).astype(np.float32) / mine
        return quotient.astype(tensor.dtype.numpy)

    return LazyTensor(tensor.dtype, tensor.shape, rows)
