"""What the graphs can be: the options that change a graph, and how a manifest records them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.export.prefix.adapter import Prefix, open_prefix
from llmconv.export.rewrite.passes.opset import IR_VERSIONS
from llmconv.export.rewrite.passes.postprocess import Choice


@dataclass(frozen=True)
class GraphOptions:
    """Options of `llmconv export` that change what a graph computes, takes or gives.

    Attributes:
        last_logits: the head runs on the last position only: `logits` are `[batch_size, 1, vocab]`.
        choice: `tokens` and `scores` instead of `logits`, see `passes.choice`; None for logits.
        stages: how many graphs share the layers, see `llmconv.export.rewrite.pipeline_stages`.
        prefix: what the graphs of a prompt begin with; None for nothing.
        opset: version of the standard operators, 21, 23 or 24; None for that of the form, 23 or 24.
    """

    last_logits: bool = False
    choice: Choice | None = None
    stages: int = 1
    prefix: Prefix | None = None
    opset: int | None = None

    @classmethod
    def read(
        cls, last_logits: bool, postprocess: str | None, stages: int, prefix: Path | None, opset: int | None
    ) -> GraphOptions:
        """The options as the command gives them: `argmax` or `topk:K`, and the folder of a prefix.

        Raises:
            UsageProblem: a choice or an opset that there is not.
            InputRefused: the folder holds no prefix.
        """
        if opset is not None and opset not in IR_VERSIONS:
            raise UsageProblem(f"`opset` is {opset}", hint=f"one of: {', '.join(map(str, IR_VERSIONS))}")
        choice = Choice.parse(postprocess) if postprocess else None
        return cls(last_logits, choice, stages, open_prefix(prefix) if prefix else None, opset)

    def recorded(self) -> dict[str, Any]:
        """What the manifest says of every graph, options that were left out omitted; see `PrefixFile` for a prefix."""
        entry = {
            "last_logits": self.last_logits,
            "postprocess": self.choice.text if self.choice else "",
        }
        return {name: value for name, value in entry.items() if value}

    def for_own_runner(self) -> str:
        """The first option that only llmconv's own runner understands; empty where there is none."""
        given = {"--postprocess": self.choice, "--stages": self.stages > 1, "--prefix": self.prefix}
        return next((name for name, value in given.items() if value), "")
