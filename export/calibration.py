"""Calibration: a text runs through the model's float32 graph, and ranges are measured on it.

Scales of an int8 cache, per channel: 1.1 * the largest magnitude on the text / 127. A rotary embedding rotates pairs
of channels of keys by angles that grow with the position; on a long context each reaches the larger maximum of both,
so they share a scale (`KeyRotation`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum

import numpy as np
import onnx_ir as ir

from llmconv.causal_lm import context_length
from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.export_options import ExportOptions
from llmconv.export.folders import file_tensors
from llmconv.export.graph_spec import GROWING, all_fixed
from llmconv.export.language_model import LanguageModel
from llmconv.export.quantization.calibration import TextRun, largest_of
from llmconv.export.quantization.selection import ActivationRange
from llmconv.export.quantization.settings import BRIEF
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.export.rewrite.fused_operators import fuse_rotary
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, producer
from llmconv.export.weights import DOMAIN, GROUPED, leaves
from llmconv.files.weight_ranges import Mapped
from llmconv.progress import say
from llmconv.runtime.extra_inputs import is_present, past_of
from llmconv.runtime.tokenizer import LONG, TOKENS, CalibrationText
from llmconv.tensors import Array


def calibration_of(
    language_model: LanguageModel, checkpoint: Checkpoint, graphs: Mapping[str, TracedGraph], given: ExportOptions
) -> TextRun | None:
    """The text of the option `calibrate`, for a cache of integers by default llmconv's own; None without one.

    Raises UnsupportedInput: the weights are quantized, and a calibration needs those of floats.
    """
    if (text := text_of(given)) is None:
        return None
    if any(not isinstance(tensor, Mapped) for tensor in checkpoint.values()):
        raise UnsupportedInput(
            "a text runs through weights of floats, and those of this model are quantized",
            hint="leave out `--calibrate` and `--kv-cache`",
        )
    most = LONG if given["method"] == "gptq" else TOKENS
    return text_run(language_model, checkpoint, graphs, text, most, trust_remote_code=given["trust_remote_code"])


SEARCH = "give `--method search`"


def brief_run(
    language_model: LanguageModel, checkpoint: Checkpoint, graphs: Mapping[str, TracedGraph], given: ExportOptions
) -> TextRun:
    """The first tokens of llmconv's own text; raises InputRefused or UnsupportedInput if the model cannot run them."""
    if any(graph.spec.task for graph in graphs.values()) or language_model.embeddings:
        raise UnsupportedInput("its graphs do not continue a text", hint=SEARCH)
    if any(not isinstance(tensor, Mapped) for tensor in checkpoint.values()):
        raise UnsupportedInput("its weights are not all in files", hint=SEARCH)
    trusted = given["trust_remote_code"]
    text, quiet = CalibrationText.shipped(), given["dry_run"]
    return text_run(language_model, checkpoint, graphs, text, BRIEF, trust_remote_code=trusted, quiet=quiet)


def text_run(
    language_model: LanguageModel,
    checkpoint: Checkpoint,
    graphs: Mapping[str, TracedGraph],
    text: CalibrationText,
    most: int,
    *,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> TextRun:
    """`most` tokens of a text, in the float32 graph with a growing cache; traced unless in `graphs`."""
    limit = context_length(checkpoint.path)
    texts = text.tokens(checkpoint.path, limit, trust_remote_code=trust_remote_code, most=most)
    fixed = all_fixed(language_model.extra_inputs, "a calibration", "--calibrate")
    plain = replace(GROWING, fixed_inputs=fixed)
    traced = next((graph for graph in graphs.values() if graph.spec == plain), None)
    if traced is None:
        traced = language_model.trace({"unified": plain})[0]["unified"]
    if not quiet:
        say(f"measuring activations on {sum(text.size for text in texts):,} tokens")
    return TextRun(traced, texts, file_tensors(checkpoint))


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
    ranges: dict[str, ActivationRange] = {}
    for name, extremes in ((name, np.stack(extremes)) for name, extremes in found.items()):
        if not np.isfinite(extremes).all():
            raise InputRefused(
                f"`{name}` is multiplied with values that are not finite on the text",
                hint=f"check the model, or {HINT}",
            )
        ranges[name] = ActivationRange.of(float(extremes[:, 0].min()), float(extremes[:, 1].max()))
    return ranges


def _extremes(editor: NodeEditor, values: ir.Value) -> ir.Value:
    """The smallest numbers of all columns, then the largest: [2 * K]."""
    axis = integers(editor.graph, 0)
    both = [editor.one(name, [values, axis], {"keepdims": 0}) for name in ("ReduceMin", "ReduceMax")]
    return editor.one("Concat", both, {"axis": 0})


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


def cache_scales(run: TextRun) -> dict[str, Array]:
    """Scales of an int8 cache by input, float32 [1, kv_heads, 1, head_dim]; InputRefused if not finite."""
    rotations, observed = key_rotations(run.traced), run.bound("--kv-cache int8").model
    graph = observed.graph
    outputs: list[ir.Value] = []  # the largest magnitudes per channel of keys and values
    for value in [value for value in graph.outputs if is_present(value.name or "")]:
        name = past_of(value.name or "")
        editor = NodeEditor(graph, None, f"largest/{name}")
        found = editor.one("ReduceMax", [editor.one("Abs", [value]), integers(graph, 0, 2)], {"keepdims": 1})
        found.name, found.type, found.shape = MAXIMA + name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None] * 4)
        outputs.append(found)
    graph.outputs[:] = outputs
    scales: dict[str, Array] = {}
    for output, maxima in largest_of(run.outputs(ir.to_proto(observed))).items():
        name = output.removeprefix(MAXIMA)
        if not np.isfinite(maxima).all():
            raise InputRefused(
                f"`{name}` has values that are not finite on the text",
                hint="check the model, or leave out `--kv-cache`",
            )
        shared = rotations.get(name, KeyRotation.NONE).shared(maxima)
        scales[name] = (np.where(shared > 0, shared, 1) * HEADROOM / LARGEST).astype(np.float32)
    return scales


MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Split", "Slice", "Identity")
"""Operators that move channels and do not compute with them."""


def key_rotations(traced: TracedGraph) -> dict[str, KeyRotation]:
    """The rotation of every layer's keys by the name of their cache input, in a graph with a growing cache."""
    fused = traced.copy()
    fuse_rotary(fused.model)
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
