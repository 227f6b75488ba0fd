"""The Hugging Face family that computes the same as a LitGPT configuration, by a table of fields and values.

Source: litgpt `model.py` (`Block`, `CausalSelfAttention`, the MLP classes) against transformers' modeling files;
upstream's own table by model name is `scripts/convert_lit_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.formats.litgpt.read_config import LitConfig
from llmconv.errors import UnsupportedInput

SAME_FUNCTION = {
    "llama": ("llama", "mistral", "phi3"),
    "mistral": ("mistral", "phi3"),
}
"""Families that compute the same under other tensor names: a `config.json` next to the weights decides."""


GELU = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}

LAYER_NORM = {"mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm", "norm_qk": False, "is_olmo": False}
LAYER_NORM |= {"sliding_window_size": False}
RMS_NORM = {"norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False, "lm_head_bias": False}
RMS_NORM |= {"shared_attention_norm": False, "rotary_percentage": 1}
GEMMA = {**RMS_NORM, "mlp_class_name": "GemmaMLP", "is_gemma": True, "scale_embeddings": True, "norm_qk": False}
GEMMA |= {"attn_bias": False, "gelu_approximate": "tanh"}
LLAMA = {**RMS_NORM, "mlp_class_name": "LLaMAMLP", "is_gemma": False, "scale_embeddings": False, "norm_qk": False}
LLAMA |= {"attn_bias": False, "post_attention_norm": False, "post_mlp_norm": False, "sliding_window_size": False}
FALCON = {**LAYER_NORM, "lm_head_bias": False, "bias": False, "attn_bias": False, "parallel_residual": True}
FALCON |= {"rotary_percentage": 1, "gelu_approximate": "none", "heads_span_width": True}

FAMILIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "phi",
        {**LAYER_NORM, "lm_head_bias": True, "bias": True, "shared_attention_norm": True, "parallel_residual": True},
    ),
    (
        "gpt_neox",
        {**LAYER_NORM, "lm_head_bias": False, "bias": True, "shared_attention_norm": False, "has_key_per_head": True},
    ),
    ("falcon", {**FALCON, "shared_attention_norm": False}),
    ("falcon", {**FALCON, "shared_attention_norm": True, "has_key_per_head": True}),
    ("falcon", {**FALCON, "shared_attention_norm": True, "n_query_groups": 1}),
    ("gemma", {**GEMMA, "post_attention_norm": False, "post_mlp_norm": False, "sliding_window_size": False}),
    (
        "gemma2",
        {
            **GEMMA,
            "post_attention_norm": True,
            "post_mlp_norm": True,
            "sliding_window_size": True,
            "window_alternates": True,
        },
    ),
    (
        "mixtral",
        {
            **{name: value for name, value in LLAMA.items() if name != "sliding_window_size"},
            "mlp_class_name": "LLaMAMoE",
            "n_expert": True,
            "n_shared_expert": False,
            "n_expert_groups": False,
            "routed_scaling_factor": 1,
            "window_in_every_layer": True,
        },
    ),
    ("qwen3", {**LLAMA, "norm_qk": True, "norm_qk_type": "default"}),
    ("qwen2", {**LLAMA, "attn_bias": True}),
    ("mistral", {**LLAMA, "sliding_window_size": True, "window_in_every_layer": True}),
    ("llama", LLAMA),
)
"""Families with the fields of `LitConfig` that decide: True and False stand for set and not set (or zero)."""


def family_of(lit: LitConfig, source: str) -> str:
    """The `model_type` that computes the same.

    Raises:
        UnsupportedInput: llmconv does not know one.
    """
    found = next((family for family, fields in FAMILIES if _matches(lit, fields)), "")
    _require_plain(lit, source, found)
    if not found:
        raise refused(source, lit, f"a {lit.norm_class_name} model with {lit.mlp_class_name}")
    return found


def _matches(lit: LitConfig, fields: Mapping[str, Any]) -> bool:
    return all(
        bool(getattr(lit, name)) is value if isinstance(value, bool) else getattr(lit, name) == value
        for name, value in fields.items()
    )


def _require_plain(lit: LitConfig, source: str, family: str) -> None:
    """Refuses options that no family in the table has."""
    options = {
        "latent attention": lit.latent_attention,
        "interleaved rope": lit.rope_interleave,
        "two rope bases": lit.rope_local_base_freq,
        "no pre-norm": not (lit.norm_1 and lit.norm_2),
        "capped logits": family != "gemma2" and (lit.final_logit_softcapping or lit.attention_logit_softcapping),
        "its own attention scale": family != "gemma2" and lit.attention_scores_scalar not in (None, lit.head_size),
        f"the GELU `{str(lit.gelu_approximate)[:40]}`": lit.gelu_approximate not in GELU,
    }
    found = next((option for option, is_set in options.items() if is_set), None)
    if found:
        raise refused(source, lit, f"a model with {found}")


def refused(source: str, lit: LitConfig, description: str) -> UnsupportedInput:
    """The error for a model that transformers does not have.

    Args:
        source: name of the checkpoint.
        lit: its configuration.
        description: what transformers lacks.
    """
    return UnsupportedInput(
        f"`{source}` is {description} (`{lit.name[:60]}`), for which no equivalent model is known",
        hint="supported are llama, mistral, mixtral, phi-3, qwen2, qwen3, gemma 1 and 2, phi, pythia and falcon",
    )
