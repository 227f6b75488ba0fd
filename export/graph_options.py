"""Options of `llmconv export` that change what a graph computes, takes or returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.export.prefix.adapter import Prefix, open_prefix
from llmconv.export.rewrite.passes.opset import IR_VERSIONS
from llmconv.export.rewrite.passes.postprocess import TokenChoice


@dataclass(frozen=True)
class GraphOptions:
    """Options that change what a graph computes, takes or returns.

    Attributes:
        last_logits: compute the head for the last position only: `logits` are `[batch_size, 1, vocab]`.
        choice: return `tokens` and `scores` instead of `logits`, see `passes.postprocess`; None for logits.
        stages: number of graphs that the layers are divided into, see `rewrite.pipeline_stages`.
        prefix: virtual tokens before every prompt; None for none.
        opset: version of the standard operators, 21, 23 or 24; None for that of the graph spec, 23 or 24.
    """

    last_logits: bool = False
    choice: TokenChoice | None = None
    stages: int = 1
    prefix: Prefix | None = None
    opset: int | None = None

    @classmethod
    def parse(
        cls, last_logits: bool, postprocess: str | None, stages: int, prefix: Path | None, opset: int | None
    ) -> GraphOptions:
        """Options from the values of the command line.

        Args:
            last_logits: see the class.
            postprocess: `argmax` or `topk:K`; None for logits.
            stages: see the class.
            prefix: folder or file of a prefix; None for none.
            opset: see the class.

        Raises:
            UsageProblem: an invalid `postprocess` or `opset`.
            InputRefused: `prefix` does not contain a prefix.
        """
        if opset is not None and opset not in IR_VERSIONS:
            raise UsageProblem(f"`opset` is {opset}", hint=f"one of: {', '.join(map(str, IR_VERSIONS))}")
        choice = TokenChoice.parse(postprocess) if postprocess else None
        return cls(last_logits, choice, stages, open_prefix(prefix) if prefix else None, opset)

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of a graph's manifest entry, defaults left out; those of a prefix are in `PrefixFile`."""
        fields = {"last_logits": self.last_logits, "postprocess": self.choice.text if self.choice else ""}
        return {name: value for name, value in fields.items() if value}

    def own_runner_option(self) -> str:
        """The first given option that only llmconv's own runner supports; empty if there is none."""
        given = {"--postprocess": self.choice, "--stages": self.stages > 1, "--prefix": self.prefix}
        return next((name for name, value in given.items() if value), "")
