"""Calibration: a text runs through the model's float32 graph, and ranges are measured on it.

Scales of an int8 cache, per channel: 1.1 * the largest magnitude on the text / 127. A rotary embedding rotates pairs
of channels of keys by angles that grow with the position; on a long context each reaches the larger maximum of both,
so they share a scale (`KeyRotation`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from llmconv.causal_lm import context_length
from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.export_options import ExportOptions
from llmconv.export.folders import file_tensors
from llmconv.export.graph_spec import GROWING, all_fixed
from llmconv.export.language_model import LanguageModel
from llmconv.export.quantization.activation_aware import measure_activation_aware
from llmconv.export.quantization.block_rounding import BlockFormat, ColumnFormat, WeightFormat
from llmconv.export.quantization.calibration import TextRun, column_importance, largest_of
from llmconv.export.quantization.quantized_tensor import Scratch
from llmconv.export.quantization.selection import ActivationRange, QuantizedWeight
from llmconv.export.quantization.sequential_rounding import round_sequentially
from llmconv.export.quantization.smoothing import Graphs, Smoothing, measure_smoothing, smoothing_groups
from llmconv.export.rewrite.fused_operators import fuse_rotary
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, producer
from llmconv.export.weights import DOMAIN, GROUPED, leaves
from llmconv.files.safetensors_file import FileTensor
from llmconv.progress import say, warn
from llmconv.runtime.extra_inputs import is_present, past_of
from llmconv.runtime.tokenizer import LONG, TOKENS, CalibrationText
from llmconv.tensors import Array


@dataclass(frozen=True)
class Calibration(TextRun):
    """What an export measures on its text."""

    @classmethod
    def of(
        cls,
        language_model: LanguageModel,
        checkpoint: Checkpoint,
        graphs: Mapping[str, TracedGraph],
        given: ExportOptions,
    ) -> Calibration | None:
        """The text of the option `calibrate`, for a cache of integers by default llmconv's own; None without one.

        Raises UnsupportedInput: the weights are quantized, and a calibration needs those of floats.
        """
        if (text := text_of(given)) is None:
            return None
        if any(not isinstance(tensor, FileTensor) for tensor in checkpoint.values()):
            raise UnsupportedInput(
                "a text runs through weights of floats, and those of this model are quantized",
                hint="leave out `--calibrate` and `--kv-cache`",
            )
        limit, trusted = context_length(checkpoint.path), given["trust_remote_code"]
        most = LONG if given["method"] == "gptq" else TOKENS
        texts = text.tokens(checkpoint.path, limit, trust_remote_code=trusted, most=most)
        fixed = all_fixed(language_model.extra_inputs, "a calibration", "--calibrate")
        plain = replace(GROWING, fixed_inputs=fixed)
        traced = next((graph for graph in graphs.values() if graph.spec == plain), None)
        if traced is None:
            traced = language_model.trace({"unified": plain})[0]["unified"]
        say(f"measuring activations on {sum(text.size for text in texts):,} tokens")
        return cls(traced, texts, file_tensors(checkpoint))

    def importance(self) -> dict[str, Array]:
        return column_importance(self)

    def smoothing(self, graphs: Graphs, quantized: Mapping[str, QuantizedWeight]) -> Smoothing:
        """Factors of weights whose activations are rounded with one scale, and of the norms before them."""
        if not (coded := _names(quantized, ColumnFormat)):
            return Smoothing()
        if not (groups := smoothing_groups(graphs, coded)):
            warn("SmoothQuant does not fit this model (no norm can be divided): `--calibrate` has no effect on `a8w8`")
            return Smoothing()
        return measure_smoothing(groups, self)

    def activation_aware(
        self, graphs: Graphs, quantized: Mapping[str, QuantizedWeight], importance: Mapping[str, Array]
    ) -> Smoothing:
        """Factors of weights with which blocks of 4 bits lose less, and of the norms before them."""
        every = smoothing_groups(graphs, _names(quantized, BlockFormat))
        groups = [group for group in every if any(quantized[name].is_searched for name, _ in group.matrices)]
        if not groups:
            warn("AWQ does not fit this model (no norm can be divided): its codes are those of `--calibrate` alone")
            return Smoothing()
        return measure_activation_aware(groups, quantized, importance, self)

    def with_feedback(self, quantized: Mapping[str, QuantizedWeight], output: Path) -> dict[str, QuantizedWeight]:
        """Weights with the codes of GPTQ where they have 4 bits, and all others as they are; kept beside `output`."""
        with Scratch.beside(output) as scratch:  # the codes stay mapped after the file is closed
            found = round_sequentially(self, quantized, scratch)
        return {name: replace(weight, rounded=found.get(name)) for name, weight in quantized.items()}

    def require_ranges(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Raises UnsupportedInput for weights of routed experts or shared by layers, which have no single range."""
        require_one_input(self, _names(quantized, ColumnFormat))

    def with_ranges(self, quantized: Mapping[str, QuantizedWeight], smoothing: Smoothing) -> dict[str, QuantizedWeight]:
        """Weights in columns with the ranges of what they are multiplied with, and all others as they are."""
        found = measure_ranges(self, _names(quantized, ColumnFormat), smoothing)
        return {name: replace(weight, activation=found.get(name)) for name, weight in quantized.items()}

    def cache_scales(self) -> dict[str, Array]:
        """Scales of an int8 cache by input, float32 [1, kv_heads, 1, head_dim]; InputRefused if not finite."""
        rotations, observed = key_rotations(self.traced), self.bound("--kv-cache int8")
        maxima = largest_of(self.outputs(_observing(observed)))
        return {
            name: _scale(name, found, rotations.get(name, KeyRotation.NONE))
            for name, found in ((output.removeprefix(MAXIMA), found) for output, found in maxima.items())
        }


def _names(quantized: Mapping[str, QuantizedWeight], form: type[WeightFormat]) -> set[str]:
    return {name for name, weight in quantized.items() if isinstance(weight.form, form) and weight.kept is None}


def text_of(given: ExportOptions) -> CalibrationText | None:
    if given["calibrate"] is not None:
        return CalibrationText.read(given["calibrate"])
    return CalibrationText.shipped() if given["kv_cache"] else None


HINT = "leave out `--static-activations`"


def measure_ranges(run: TextRun, names: Collection[str], smoothing: Smoothing) -> dict[str, ActivationRange]:
    """The range of the activations that each stored matrix is multiplied with, after smoothing, by name.

    Raises UnsupportedInput: a matrix is one of several experts, or has several inputs or none that can be measured;
    InputRefused: activations are not finite.
    """
    require_one_input(run, names)
    found: dict[str, list[Array]] = defaultdict(list)
    for name, extremes in run.reduced(_extremes, names):
        factors = smoothing.matrices.get(name)
        found[name].append(extremes.reshape(2, -1) / (1 if factors is None else factors.ravel()))
    if missing := sorted(set(names) - found.keys()):
        raise UnsupportedInput(f"what `{missing[0]}` is multiplied with cannot be measured", hint=HINT)
    return {name: _range(name, np.stack(extremes)) for name, extremes in found.items()}


def _extremes(editor: NodeEditor, values: ir.Value) -> ir.Value:
    """The smallest numbers of all columns, then the largest: [2 * K]."""
    axis = integers(editor.graph, 0)
    both = [editor.one(name, [values, axis], {"keepdims": 0}) for name in ("ReduceMin", "ReduceMax")]
    return editor.one("Concat", both, {"axis": 0})


def _range(name: str, extremes: Array) -> ActivationRange:
    if not np.isfinite(extremes).all():
        raise InputRefused(
            f"`{name}` is multiplied with values that are not finite on the text", hint=f"check the model, or {HINT}"
        )
    return ActivationRange.of(float(extremes[:, 0].min()), float(extremes[:, 1].max()))


def require_one_input(run: TextRun, names: Collection[str]) -> None:
    """Raises UnsupportedInput for matrices of routed experts or shared by layers, which have no single range."""
    inputs: dict[str, set[ir.Value | None]] = defaultdict(set)
    for parameter, match in run.matches.items():
        for name in {leaf.name for leaf in leaves(match)} & set(names):
            for node, _ in run.traced.weights[parameter].uses():
                inputs[name].add(node.inputs[0])
                if (node.domain, node.op_type) == (DOMAIN, GROUPED):
                    raise UnsupportedInput(
                        f"`{name}` is of routed experts, for which no fixed range of activations is known", hint=HINT
                    )
    if shared := next((name for name, values in inputs.items() if len(values) > 1), ""):
        raise UnsupportedInput(f"several layers share `{shared}`, each with a range of its own", hint=HINT)


HEADROOM = 1.1  # other texts exceed the range: measured, a tenth more than the range on the text costs least
LARGEST = 127  # the largest code; -128 is left out, so that codes are symmetric
MAXIMA = "largest:"  # prefix of the outputs with maxima; the rest is the name of the cache input


def _observing(traced: TracedGraph) -> onnx.ModelProto:
    """The graph with the largest magnitude per channel of keys and values as its only outputs."""
    graph = traced.model.graph
    outputs: list[ir.Value] = []
    for value in [value for value in graph.outputs if is_present(value.name or "")]:
        name = past_of(value.name or "")
        editor = NodeEditor(graph, None, f"largest/{name}")
        found = editor.one("ReduceMax", [editor.one("Abs", [value]), integers(graph, 0, 2)], {"keepdims": 1})
        found.name, found.type, found.shape = MAXIMA + name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None] * 4)
        outputs.append(found)
    graph.outputs[:] = outputs
    return ir.to_proto(traced.model)


def _scale(name: str, maxima: Array, rotation: KeyRotation) -> Array:
    if not np.isfinite(maxima).all():
        raise InputRefused(
            f"`{name}` has values that are not finite on the text", hint="check the model, or leave out `--kv-cache`"
        )
    shared = rotation.shared(maxima)
    return (np.where(shared > 0, shared, 1) * HEADROOM / LARGEST).astype(np.float32)


MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Split", "Slice", "Identity")
"""Operators that move channels and do not compute with them."""


def key_rotations(traced: TracedGraph) -> dict[str, KeyRotation]:
    """The rotation of every layer's keys by the name of their cache input, in a graph with a growing cache."""
    fused = traced.copy()
    fuse_rotary(fused)
    outputs = [value for value in fused.model.graph.outputs if (value.name or "").endswith(".key")]
    return {past_of(value.name or ""): _rotation(value) for value in outputs}


def _rotation(present: ir.Value) -> KeyRotation:
    """The rotation of `Concat(past, new)`; unknown where the graph shows neither one whole rotation nor none."""
    joined = producer(present, "Concat")
    new = joined.inputs[-1] if joined else None
    rotary = producer(new, "RotaryEmbedding")
    if rotary is not None:
        if rotary.attributes.get_int("rotary_embedding_dim", 0):
            return KeyRotation.UNKNOWN
        return KeyRotation.NEIGHBORS if rotary.attributes.get_int("interleaved", 0) else KeyRotation.HALVES
    return KeyRotation.NONE if joined and _is_projected(new) else KeyRotation.UNKNOWN


def _is_projected(value: ir.Value | None) -> bool:
    """Whether a value is the result of a linear layer, moved only."""
    while node := producer(value):
        if node.op_type in ("Gemm", "MatMul"):
            return True
        if node.op_type == "Add":
            computed = [given for given in node.inputs if given is not None and given.producer() is not None]
            value = computed[0] if len(computed) == 1 else None
        else:
            value = node.inputs[0] if node.op_type in MOVING else None
    return False


class KeyRotation(Enum):
    """Which channels of a head are mixed: none, i with i + half of the head, 2i with 2i + 1, or possibly any."""

    NONE = "none"
    HALVES = "halves"
    NEIGHBORS = "neighbors"
    UNKNOWN = "unknown"

    def shared(self, maxima: Array) -> Array:
        """Maxima [..., head_dim] of channels as the maxima of all channels that each is mixed with; the same shape."""
        if self is KeyRotation.NONE:
            return maxima
        size = maxima.shape[-1]
        groups = {KeyRotation.HALVES: (2, size // 2), KeyRotation.NEIGHBORS: (size // 2, 2)}.get(self, (1, size))
        axis = -2 if self is KeyRotation.HALVES else -1
        grouped = maxima.reshape(*maxima.shape[:-1], *groups)
        return np.broadcast_to(grouped.max(axis=axis, keepdims=True), grouped.shape).reshape(maxima.shape)
