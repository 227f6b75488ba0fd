"""Options of `llmconv export` that change what a graph computes, takes or returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.export.quantization.settings import QuantizationSettings
from llmconv.export.quantization.stored_formats import StoredFormats
from llmconv.export.rewrite.passes.opset import IR_VERSIONS
from llmconv.export.rewrite.passes.postprocess import TokenChoice
from llmconv.runtime.prefix.trained import Prefix


@dataclass(frozen=True)
class GraphOptions:
    """Options that change what a graph computes, takes or returns.

    Attributes:
        last_logits: compute the head for the last position only: `logits` are `[batch_size, 1, vocab]`.
        choice: return `tokens` and `scores` instead of `logits`; None for logits.
        stages: number of graphs that the layers are divided into.
        prefix: virtual tokens before every prompt; None for none.
        opset: version of the standard operators, 21, 23 or 24; None for that of the graph spec, 23 or 24.
        strict_target: refuse nodes for which the target's provider has no kernel; otherwise they are listed.
        quantization: which weights become integer codes, or are stored as such; None for none.
        lora: linear layers with optional inputs for LoRA factors.
        names: file names of roles that do not have their usual one.
        cache_text: sha256 of the text on which the ranges of an int8 cache are measured; empty for a cache of floats.

    Raises:
        UsageProblem: another `opset`.
    """

    last_logits: bool = False
    choice: TokenChoice | None = None
    stages: int = 1
    prefix: Prefix | None = None
    opset: int | None = None
    strict_target: bool = False
    quantization: QuantizationSettings | StoredFormats | None = None
    cache_text: str = ""
    lora: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.opset is not None and self.opset not in IR_VERSIONS:
            raise UsageProblem(f"`opset` is {self.opset}", hint=f"one of: {', '.join(map(str, IR_VERSIONS))}")

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of a graph's manifest entry, defaults left out; those of a prefix are in `PrefixFile`."""
        fields = {
            "last_logits": self.last_logits,
            "postprocess": self.choice.text if self.choice else "",
            "calibrate": self.cache_text,
            "lora_inputs": list(self.lora),
        }
        quantized = self.quantization.manifest_fields() if self.quantization else {}
        return {**{name: value for name, value in fields.items() if value}, **quantized}

    def own_runner_option(self) -> str:
        """The first given option that only llmconv's own runner supports; empty if there is none."""
        given = {
            "--postprocess": bool(self.choice),
            "--stages": self.stages > 1,
            "--prefix": bool(self.prefix),
            "--lora-inputs": bool(self.lora),
        }
        return next((name for name, value in given.items() if value), "")
