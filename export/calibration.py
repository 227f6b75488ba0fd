"""Calibration: a text that runs through the model's float32 graph, and what is measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput
from llmconv.export.export_options import ExportOptions
from llmconv.export.fixed_inputs import all_fixed
from llmconv.export.folders.new_folder import file_tensors
from llmconv.export.graph_spec import GROWING
from llmconv.export.language_model import LanguageModel
from llmconv.export.quantization.activation_aware import measure_activation_aware
from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.cache_scales import measure_cache_scales
from llmconv.export.quantization.calibration import column_importance
from llmconv.export.quantization.column_format import ColumnFormat, WeightFormat
from llmconv.export.quantization.measured_ranges import measure_ranges, require_one_input
from llmconv.export.quantization.rounded_codes import Scratch
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.sequential_rounding import round_sequentially
from llmconv.export.quantization.smoothing import Smoothing, measure_smoothing
from llmconv.export.quantization.smoothing_groups import Graphs, smoothing_groups
from llmconv.export.rewrite.key_rotation import key_rotations
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.bind import match_weights
from llmconv.files.safetensors_file import FileTensor
from llmconv.progress import say, warn
from llmconv.runtime.calibration_text import LONG, TOKENS, CalibrationText
from llmconv.runtime.context_length import context_length
from llmconv.tensors import Array


@dataclass(frozen=True)
class Calibration:
    """A text and the model's float32 graph, which runs on it.

    Attributes:
        traced: the graph, its weights still inputs.
        texts: token ids int64 [1, tokens].
        tensors: the checkpoint's tensors in their files.
    """

    traced: TracedGraph
    texts: list[Array]
    tensors: dict[str, FileTensor]

    @classmethod
    def of(
        cls,
        language_model: LanguageModel,
        checkpoint: Checkpoint,
        graphs: Mapping[str, TracedGraph],
        given: ExportOptions,
    ) -> Calibration | None:
        """The text of the option `calibrate`, for a cache of integers by default llmconv's own; None without one.

        Raises:
            UnsupportedInput: the weights are quantized, and a calibration needs those of floats.
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
        """The importance of the columns of weights, by name."""
        return column_importance(self.traced, match_weights(self.traced, self.tensors), self.tensors, self.texts)

    def smoothing(self, graphs: Graphs, quantized: Mapping[str, QuantizedWeight]) -> Smoothing:
        """Factors of weights whose activations are rounded with one scale, and of the norms before them."""
        if not (coded := _names(quantized, ColumnFormat)):
            return Smoothing()
        if not (groups := smoothing_groups(graphs, coded)):
            warn("SmoothQuant does not fit this model (no norm can be divided): `--calibrate` has no effect on `a8w8`")
            return Smoothing()
        matches = match_weights(self.traced, self.tensors)
        return measure_smoothing(groups, self.traced, matches, self.tensors, self.texts)

    def activation_aware(
        self, graphs: Graphs, quantized: Mapping[str, QuantizedWeight], importance: Mapping[str, Array]
    ) -> Smoothing:
        """Factors of weights with which blocks of 4 bits lose less, and of the norms before them."""
        every = smoothing_groups(graphs, _names(quantized, BlockFormat))
        groups = [group for group in every if any(quantized[name].is_searched for name, _ in group.matrices)]
        if not groups:
            warn("AWQ does not fit this model (no norm can be divided): its codes are those of `--calibrate` alone")
            return Smoothing()
        given = self.traced, match_weights(self.traced, self.tensors), self.tensors, self.texts
        return measure_activation_aware(groups, quantized, importance, *given)

    def with_feedback(self, quantized: Mapping[str, QuantizedWeight], output: Path) -> dict[str, QuantizedWeight]:
        """Weights with the codes of GPTQ where they have 4 bits, and all others as they are; kept beside `output`."""
        matches = match_weights(self.traced, self.tensors)
        with Scratch.beside(output) as scratch:  # the codes stay mapped after the file is closed
            found = round_sequentially(self.traced, matches, self.tensors, self.texts, quantized, scratch)
        return {name: replace(weight, rounded=found.get(name)) for name, weight in quantized.items()}

    def require_ranges(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Refuses weights in columns that have no range of their own.

        Raises:
            UnsupportedInput: routed experts, or matrices that several layers share.
        """
        require_one_input(self.traced, match_weights(self.traced, self.tensors), _names(quantized, ColumnFormat))

    def with_ranges(self, quantized: Mapping[str, QuantizedWeight], smoothing: Smoothing) -> dict[str, QuantizedWeight]:
        """Weights in columns with the ranges of what they are multiplied with, and all others as they are."""
        names = _names(quantized, ColumnFormat)
        matches = match_weights(self.traced, self.tensors)
        found = measure_ranges(self.traced, matches, self.tensors, self.texts, names, smoothing)
        return {name: replace(weight, activation=found.get(name)) for name, weight in quantized.items()}

    def cache_scales(self) -> dict[str, Array]:
        """Scales of an int8 cache, by name of the cache input."""
        matches, rotations = match_weights(self.traced, self.tensors), key_rotations(self.traced)
        return measure_cache_scales(self.traced, matches, self.tensors, self.texts, rotations)


def _names(quantized: Mapping[str, QuantizedWeight], form: type[WeightFormat]) -> set[str]:
    """The weights that are rounded now to a format."""
    return {name for name, weight in quantized.items() if isinstance(weight.form, form) and weight.kept is None}


def text_of(given: ExportOptions) -> CalibrationText | None:
    """The text that runs through the model; None for none."""
    if given["calibrate"] is not None:
        return CalibrationText.read(given["calibrate"])
    return CalibrationText.shipped() if given["kv_cache"] else None
