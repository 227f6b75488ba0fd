"""Whose names a state dict has: one table, so that one format and no other claims a file.

Sources of the signs: litgpt `model.py`, torchtune `modules/transformer.py`, nanoGPT `train.py`, Lightning
`trainer/connectors/checkpoint_connector.py`; the keys of other trainers from DeepSpeed `engine.py`, Megatron
`checkpointing.py`, Composer `core/state.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmconv.convert.torch_state.files import StateFile, peek_state

TORCHTUNE = re.compile(r"^(?:_orig_mod\.|module\.)*layers\.\d+\.(?:attn\.output_proj|sa_norm|mlp_norm)\.")
LITGPT = re.compile(
    r"^(?:_orig_mod\.|module\.|_forward_module\.)*transformer\.h\.\d+\.(?:attn\.(?:attn|qkv)|norm_[12])\."
)
NANOGPT = re.compile(r"^(?:_orig_mod\.|module\.)*transformer\.h\.\d+\.attn\.c_attn\.weight$")
EMBEDDING = re.compile(r"(?<!embedding\.)\b(?:embed_tokens|wte|embed_in|word_embeddings|embeddings?)\.weight$")
"""Hugging Face's input embeddings; Megatron's lies in a module `embedding`."""

LIGHTNING_KEYS = ("pytorch-lightning_version",)
OTHER_TRAINERS = {"state", "ds_version", "ds_config", "param_shapes", "checkpoint_version"}
"""Keys of Composer, DeepSpeed and Megatron, whose formats have files of their own."""

ADAPTER = re.compile(r"lora_|\.modules_to_save\.|prompt_embeddings")


def dialect_of(path: Path) -> str | None:
    """`lightning`, `nanogpt`, `torchtune`, `litgpt`, `torch` (Hugging Face's names), or None; content decides."""
    found = peek_state(path) if path.is_file() else None
    return dialect(found) if found else None


def dialect(found: StateFile) -> str | None:
    """As `dialect_of`, of a state dict that is open."""
    if OTHER_TRAINERS & {str(key) for key in found.around}:
        return None
    if any(key in found.around for key in LIGHTNING_KEYS):
        return "lightning"
    if "model_args" in found.around:
        return "nanogpt" if _has(found, NANOGPT) else None
    if _has(found, TORCHTUNE):
        return "torchtune"
    if _has(found, LITGPT):
        return "litgpt"
    if found.path.name.startswith("adapter_model.") or all(ADAPTER.search(name) for name in found.state):
        return None
    return "torch" if _has(found, EMBEDDING) else None


def _has(found: StateFile, sign: re.Pattern[str]) -> bool:
    return any(sign.search(name) for name in found.state)
