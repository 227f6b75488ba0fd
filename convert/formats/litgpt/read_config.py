"""Reads LitGPT's `model_config.yaml` (before 2024 `lit_config.json`): the fields that define the model.

Source: Lightning-AI/litgpt `config.py`, with its defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.convert.models.config_file import read_config_file
from llmconv.errors import InputRefused, MalformedInput

FILES = ("model_config.yaml", "lit_config.json")
OLD_NAMES = {"_norm_class": "norm_class_name", "_mlp_class": "mlp_class_name", "condense_ratio": "rope_condense_ratio"}
DERIVED = ("head_size", "padded_vocab_size", "n_query_groups", "intermediate_size")
SIZE_LIMIT = 1 << 31
LAYER_LIMIT = 10_000
STRIDES: dict[str | int, int] = {"all": 1, "interleaved": 2, 1: 1, 2: 2}


@dataclass(frozen=True)
class LitConfig:
    """The fields under LitGPT's names, including the sizes that upstream derives."""

    n_layer: int
    n_embd: int
    n_head: int
    head_size: int
    n_query_groups: int
    padded_vocab_size: int
    intermediate_size: int
    block_size: int = 4096
    name: str = ""
    norm_class_name: str = "LayerNorm"
    norm_eps: float = 1e-5
    norm_qk: bool = False
    norm_qk_type: str = "default"
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    parallel_residual: bool = True
    shared_attention_norm: bool = False
    attn_bias: bool = False
    attention_scores_scalar: int | None = None
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None
    attention_logit_softcapping: float | None = None
    rope_base: float = 10000
    rotary_percentage: float = 0.25
    rope_condense_ratio: float = 1
    rope_adjustments: dict[str, Any] | None = None
    rope_interleave: bool = False
    bias: bool = True
    mlp_class_name: str = "GptNeoxMLP"
    gelu_approximate: str = "none"
    n_expert: int = 0
    n_expert_per_token: int = 0
    n_shared_expert: int | None = None
    n_expert_groups: int | None = None
    moe_intermediate_size: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    scale_embeddings: bool = False
    lm_head_bias: bool = False
    final_logit_softcapping: float | None = None
    norm_1: bool = True
    norm_2: bool = True
    latent_attention: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused matrix."""
        return (self.n_head + 2 * self.n_query_groups) * self.head_size

    @property
    def is_gemma(self) -> bool:
        """Whether norms add one to the weight, which upstream detects by the name (`Config.norm_class`)."""
        return "Gemma" in self.name

    @property
    def is_olmo(self) -> bool:
        """Whether norms have no weights, which upstream detects by the name."""
        return "OLMo" in self.name

    @property
    def has_key_per_head(self) -> bool:
        """Whether each query head has its own key and value."""
        return self.n_query_groups == self.n_head

    @property
    def heads_span_width(self) -> bool:
        """Whether the heads together are as wide as the hidden state."""
        return self.n_embd == self.n_head * self.head_size

    @property
    def window_in_every_layer(self) -> bool:
        """Whether no layer is without a window, if there is one."""
        return all(self.sliding_window_indices or [1])

    @property
    def window_alternates(self) -> bool:
        """Whether every other layer has a window, the first one included."""
        return (self.sliding_window_indices or [])[: self.n_layer] == [1 - i % 2 for i in range(self.n_layer)]


TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list[int]": (list,),
    "dict[str, Any]": (dict,),
}


def read_settings(folder: Path, source: str) -> LitConfig:
    """The configuration in `folder`.

    Raises:
        InputRefused: there is none.
        MalformedInput: a field is invalid.
    """
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise InputRefused(
            f"`{source}` has no `{FILES[0]}` next to it, which is needed to split its fused matrices",
            hint="copy the file next to the weights; `litgpt download` and `litgpt finetune` write it",
        )
    return settings_of(read_config_file(file), file.name)


def settings_of(content: Mapping[str, Any], source: str) -> LitConfig:
    """The fields of `content`; unknown ones do not change what the model computes.

    Raises:
        MalformedInput: a field is invalid.
    """
    values = {OLD_NAMES.get(name, name): value for name, value in content.items()}
    values = {name: value for name, value in values.items() if value is not None}
    for name in ("n_layer", "n_embd", "n_head"):
        _size(values, name, source)
    values.setdefault("head_size", values["n_embd"] // values["n_head"])
    values.setdefault("n_query_groups", values["n_head"])
    if "padded_vocab_size" not in values:
        multiple = values.setdefault("padding_multiple", 512)
        vocabulary, multiple = _size(values, "vocab_size", source), _size(values, "padding_multiple", source)
        values["padded_vocab_size"] = -(-vocabulary // multiple) * multiple
    if values.get("mlp_class_name", "GptNeoxMLP") == "GptNeoxMLP":
        values.setdefault("intermediate_size", 4 * values["n_embd"])
    for name in DERIVED:
        _size(values, name, source)
    if values["n_head"] % values["n_query_groups"]:
        raise _invalid("n_query_groups", values["n_query_groups"], source)
    if values["n_layer"] > LAYER_LIMIT:
        raise _invalid("n_layer", values["n_layer"], source)
    if "sliding_window_size" in values and "sliding_window_indices" not in values:
        values["sliding_window_indices"] = _windows(values, source)
    return LitConfig(**{one.name: _checked(one, values, source) for one in fields(LitConfig) if one.name in values})


def _windows(values: Mapping[str, Any], source: str) -> list[int]:
    """1 for each layer with a window, else 0, from the fields before April 2025: a placement, a stride, an offset."""
    placement = values.get("sliding_window_layer_placing", "all")
    usual = STRIDES.get(placement) if isinstance(placement, str | int) else None
    stride = values.get("sliding_window_layer_stride", usual)
    offset = values.get("sliding_window_offset", 0)
    if type(stride) is not int or stride <= 0 or type(offset) is not int:
        raise _invalid("sliding_window_layer_placing", placement, source)
    return [int((number + offset) % stride == 0) for number in range(values["n_layer"])]


def _size(values: Mapping[str, Any], name: str, source: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 < value < SIZE_LIMIT:
        raise _invalid(name, value, source)
    return value


def _checked(field: Any, values: Mapping[str, Any], source: str) -> Any:
    value, kind = values[field.name], str(field.type).removesuffix(" | None")
    is_right = isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
    is_right = is_right and (not isinstance(value, int | float) or abs(value) <= sys.float_info.max)
    if not is_right or (field.default is MISSING and value <= 0):
        raise _invalid(field.name, value, source)
    return value


def _invalid(name: str, value: Any, source: str) -> MalformedInput:
    return MalformedInput(f"`{name}` in `{source}` is invalid: {str(value)[:40]!r}", hint="repair or replace the file")
