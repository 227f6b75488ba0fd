"""What the graphs can be: the options that change a graph, and how a manifest records them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmconv.export.passes.choice import Choice
from llmconv.export.prefixes import Prefix
from llmconv.export.trace import OPSET


@dataclass(frozen=True)
class GraphOptions:
    """Options of `llmconv export` that change what a graph computes, takes or gives.

    Attributes:
        last_logits: the head runs on the last position only.
        choice: tokens and scores instead of logits; None for logits.
        stages: how many graphs share the layers.
        prefix: what the graphs of a prompt begin with; None for nothing.
        opset: version of the standard operators.
    """

    last_logits: bool = False
    choice: Choice | None = None
    stages: int = 1
    prefix: Prefix | None = None
    opset: int = OPSET

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
