"""Signs: keys and names that distinguish the state dicts of a training system from others and from transformers'."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmconv.convert.state_dicts.files import StateFile

EMBEDDING = re.compile(r"(?<!embedding\.)\b(?:embed_tokens|wte|embed_in|word_embeddings|embeddings?)\.weight$")
"""Names of Hugging Face's input embeddings; Megatron's is in a module `embedding`."""

ADAPTER_NAMES = re.compile(r"lora_|\.modules_to_save\.|prompt_embeddings")
MEGATRON_KEY = "checkpoint_version"
"""A key of Megatron's checkpoints (its `checkpointing.py`), which are unsupported."""


@dataclass(frozen=True)
class Sign:
    """Content that only the state dicts of one system have.

    Attributes:
        keys: keys next to the state dict; any of them identifies the system, whatever the names of the tensors.
        names: a pattern that matches the name of some tensor; None if the keys are enough.
    """

    keys: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None

    def has_key(self, found: StateFile) -> bool:
        """Whether one of the keys is in the file."""
        return bool(set(self.keys) & {str(key) for key in found.around})

    def has_names(self, found: StateFile) -> bool:
        """Whether the tensors have names of this system."""
        return self.names is None or any(self.names.search(name) for name in found.state)


def has_hugging_face_names(found: StateFile) -> bool:
    """Whether the tensors have the names of a transformers model; False for an adapter."""
    if MEGATRON_KEY in found.around or found.path.name.startswith("adapter_model."):
        return False
    if all(ADAPTER_NAMES.search(name) for name in found.state):
        return False
    return any(EMBEDDING.search(name) for name in found.state)
