"""Multi-modal checkpoints: the language model takes embeddings, and the embedding table is a separate graph.

    embeddings.onnx   input_ids -> inputs_embeds
    decode.onnx, …    inputs_embeds, attention_mask, … -> logits, present…

Between the two, clients (ORT-GenAI, transformers.js) replace the rows of placeholder tokens by the features of images
or sound. The encoders of these features are not exported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from llmconv.errors import UnsupportedInput
from llmconv.export.traced_graph import TracedGraph

WITHOUT: Mapping[str, Mapping[str, float]] = defaultdict(dict, {"aya_vision": {"logit_scale": 1.0}})
"""`model_type` to fields of the language model that the whole model does not apply: its head is a matrix alone."""


@dataclass(frozen=True)
class TensorNaming:
    """The prefixes of the language model's tensors in a multi-modal checkpoint, instead of `model.` and `lm_head.`.

    `seen` is the prefix of a tensor by which a checkpoint with these names is known; default: `body`.
    """

    body: str
    head: str = "lm_head."
    seen: str = ""

    def name(self, own: str) -> str:
        """The name in the checkpoint of the tensor `own` of the language model."""
        if own.startswith("lm_head."):
            return self.head + own.removeprefix("lm_head.")
        return self.body + own.removeprefix("model.")

    def rename_decoder(self, traced: TracedGraph) -> TracedGraph:
        """A decoder's graph with the checkpoint's names of its weights."""
        return self._renamed(traced, (self.body, self.head))

    def rename_embeddings(self, traced: TracedGraph) -> TracedGraph:
        """The graph of the embedding table likewise; it needs none of the other tensors."""
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


NAMINGS = (
    TensorNaming("model.language_model."),
    TensorNaming("language_model.model.", "language_model.lm_head."),
    TensorNaming("model.text_model."),
    TensorNaming("model.", seen="model.layers."),
)
"""Names that transformers 5 writes, that transformers 4 wrote, those of idefics3 and others, and those of Qwen2-VL."""


def alone(table: TracedGraph) -> TracedGraph:
    """The graph of a language model's embedding table, which needs none of the other tensors."""
    return replace(table, ignored=("",))


def find_naming(names: Iterable[str]) -> TensorNaming:
    """The naming of the language model's tensors among a checkpoint's names; UnsupportedInput if it is unknown."""
    names = list(names)
    for naming in NAMINGS:
        if any(name.startswith(naming.seen or naming.body) for name in names):
            return naming
    raise UnsupportedInput(
        "unknown tensor names: no tensor of this multi-modal checkpoint has the prefix of a language model",
        hint=f"known prefixes are {', '.join(f'`{naming.body}`' for naming in NAMINGS)}",
    )
