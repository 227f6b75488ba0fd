"""Multi-modal checkpoints: the language model takes embeddings, and the embedding table is a graph of its own.

    embeddings.onnx   input_ids -> inputs_embeds
    decode.onnx, …    inputs_embeds, attention_mask, … -> logits, present…

Clients (ORT-GenAI, transformers.js) put the features of images or sound into the rows of their placeholder tokens in
between. What makes those features is not exported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from llmconv.errors import UnsupportedInput
from llmconv.export.traced_graph import TracedGraph

T = TypeVar("T")

MULTI_MODAL: dict[str, str] = {
    "aya_vision": "",
    "gemma3": "tokens of an image see only those before them, where transformers lets them see each other",
    "got_ocr2": "",
    "idefics3": "",
    "internvl": "",
    "llava": "",
    "llava_next": "",
    "llava_onevision": "",
    "mistral3": "",
    "smolvlm": "",
    "vipllava": "",
}
"""By `model_type`, what the language model alone does not do; it is a family of its own, with its own input map."""


@dataclass(frozen=True)
class Part:
    """How a multi-modal checkpoint calls the tensors of its language model.

    Attributes:
        body: stands in the place of `model.`.
        head: stands in the place of `lm_head.`.
    """

    body: str
    head: str = "lm_head."

    def name(self, own: str) -> str:
        """The checkpoint's name of what the language model alone calls `own`."""
        if own.startswith("lm_head."):
            return self.head + own.removeprefix("lm_head.")
        return self.body + own.removeprefix("model.")

    def decoder(self, traced: TracedGraph) -> TracedGraph:
        """A decoder's graph, its weights called as in the checkpoint."""
        return self._renamed(traced, (self.body, self.head))

    def table(self, traced: TracedGraph) -> TracedGraph:
        """The embedding table's graph likewise; every other tensor belongs to other graphs."""
        return self._renamed(traced, tuple(self.name(name) for name in traced.weights))

    def _renamed(self, traced: TracedGraph, own: tuple[str, ...]) -> TracedGraph:
        return replace(
            traced,
            weights={self.name(name): value for name, value in traced.weights.items()},
            tied={self.name(name): self.name(tied) for name, tied in traced.tied.items()},
            unused={self.name(name): shape for name, shape in traced.unused.items()},
            base_prefix=self.body.removesuffix("."),
            own=own,
        )


PARTS = (
    Part("model.language_model."),
    Part("language_model.model.", "language_model.lm_head."),
    Part("model.text_model."),
)
"""As transformers 5 saves them, as 4 did, and idefics3's kin."""


def part_of(names: Iterable[str]) -> Part:
    """How the language model's tensors are called among the names of a checkpoint.

    Raises:
        UnsupportedInput: in no known way.
    """
    names = list(names)
    for part in PARTS:
        if any(name.startswith(part.body) for name in names):
            return part
    raise UnsupportedInput(
        "no tensor of this multi-modal checkpoint begins as a language model's",
        hint=f"known beginnings are {', '.join(f'`{part.body}`' for part in PARTS)}",
    )
