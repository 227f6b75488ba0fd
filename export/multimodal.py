"""Multi-modal checkpoints: the language model takes embeddings, and the embedding table is a graph of its own.

    embeddings.onnx   input_ids -> inputs_embeds
    decode.onnx, …    inputs_embeds, attention_mask, … -> logits, present…

Clients (ORT-GenAI, transformers.js) put the features of images or sound into the rows of their placeholder tokens in
between. What makes those features is not exported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MultiModal:
    """One kind of multi-modal checkpoint whose language model sees other media as embeddings alone.

    Attributes:
        prefixes: what stands before the language model's own tensor names, as transformers 5 and as 4 saved them.
        note: what the language model alone does not do.
    """

    prefixes: tuple[str, ...] = ("model.language_model.", "language_model.", "language_model.model.")
    note: str = ""


USUAL = MultiModal()
TEXT_MODEL = MultiModal(("model.text_model.",))

MULTI_MODAL: dict[str, MultiModal] = {
    "aya_vision": USUAL,
    "gemma3": MultiModal(
        note="tokens of an image see only those before them, where transformers lets them see each other"
    ),
    "got_ocr2": USUAL,
    "idefics3": TEXT_MODEL,
    "internvl": USUAL,
    "llava": USUAL,
    "llava_next": USUAL,
    "llava_onevision": USUAL,
    "mistral3": USUAL,
    "smolvlm": TEXT_MODEL,
    "vipllava": USUAL,
}
"""By `model_type`; the language model is a family of its own, with its own row among the input maps."""
