"""`config.json` from LitGPT's `model_config.yaml` (before 2024 `lit_config.json`), and the comparison with a given one.

Sources: fields and defaults from Lightning-AI/litgpt `config.py`; formulas from `model.py` (`build_rope_cache`,
`Block`, `CausalSelfAttention`, the MLP classes) against transformers' modeling files. A table of fields and values
finds the Hugging Face family; upstream's own table by model name is `scripts/convert_lit_checkpoint.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.convert.fields import Fields
from llmconv.convert.models.config_file import read_config_file
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, short

LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
COMPARED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("intermediate_size", "head_dim", "rope_theta", "rope_local_base_freq", "num_local_experts", "sliding_window"),
)
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def to_config(lit: LitConfig, family: str, source: str) -> dict[str, Any]:
    """The content of `config.json`, without token ids; UnsupportedInput if transformers lacks the rotary formula."""
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": lit.padded_vocab_size,
        "hidden_size": lit.n_embd,
        "num_hidden_layers": lit.n_layer,
        "num_attention_heads": lit.n_head,
        "max_position_embeddings": lit.block_size,
        "rope_theta": float(lit.rope_base),
        **({"rope_scaling": scaling} if (scaling := _rope_scaling(lit, source)) else {}),
    }
    if family == "falcon":
        return config | {
            "layer_norm_epsilon": lit.norm_eps,
            "ffn_hidden_size": lit.intermediate_size,
            "num_kv_heads": lit.n_query_groups,
            "new_decoder_architecture": not lit.shared_attention_norm,
            "multi_query": lit.n_query_groups == 1,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "activation": "gelu",
        }
    config["intermediate_size"] = lit.intermediate_size
    if family in ("gpt_neox", "phi"):
        return config | _neox_or_phi(lit, family)
    config |= {"num_key_value_heads": lit.n_query_groups, "head_dim": lit.head_size}
    if family in ("olmo", "stablelm"):
        return config | _with_layer_norms(lit, family)
    window = {"sliding_window": lit.sliding_window_size}
    config |= {
        "rms_norm_eps": lit.norm_eps,
        **(window if family in ("mistral", "mixtral", "gemma2", "gemma3_text", "phi3") else {}),
    }
    if family == "mixtral":
        inner = lit.moe_intermediate_size or lit.intermediate_size
        experts = {"num_local_experts": lit.n_expert, "num_experts_per_tok": lit.n_expert_per_token}
        return config | experts | {"intermediate_size": inner, "hidden_act": "silu"}
    if family == "qwen3_moe":  # LitGPT's router always divides by the sum of the chosen experts
        experts = {"num_experts": lit.n_expert, "num_experts_per_tok": lit.n_expert_per_token, "norm_topk_prob": True}
        inner = lit.moe_intermediate_size or lit.intermediate_size
        sparse = {"moe_intermediate_size": inner, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return config | experts | sparse | {"attention_bias": False, "hidden_act": "silu"}
    if family.startswith("gemma"):
        config |= {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
        gemma2 = {
            "query_pre_attn_scalar": lit.attention_scores_scalar or lit.head_size,
            "attn_logit_softcapping": lit.attention_logit_softcapping,
            "final_logit_softcapping": lit.final_logit_softcapping,
        }
        kinds = ["sliding_attention" if window else "full_attention" for window in lit.windows]
        gemma3 = {"layer_types": kinds, "rope_local_base_freq": lit.rope_local_base_freq}
        return config | (gemma2 if family != "gemma" else {}) | (gemma3 if family == "gemma3_text" else {})
    if family == "phi3":  # its default token for padding is beyond a small vocabulary
        config |= {"partial_rotary_factor": lit.rotary_percentage, "pad_token_id": None}
    biases = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    return config | biases | {"hidden_act": "silu"}


def _with_layer_norms(lit: LitConfig, family: str) -> dict[str, Any]:
    if family == "olmo":  # whose norms have no weights, and one epsilon
        return {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None}
    return {
        "layer_norm_eps": lit.norm_eps,
        "hidden_act": "silu",
        "partial_rotary_factor": lit.rotary_percentage,
        "use_qkv_bias": lit.attn_bias,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    }


def _neox_or_phi(lit: LitConfig, family: str) -> dict[str, Any]:
    shared = {"layer_norm_eps": lit.norm_eps, "hidden_act": GELU[lit.gelu_approximate]}
    if family == "gpt_neox":
        rotary = {"rotary_pct": lit.rotary_percentage, "rotary_emb_base": float(lit.rope_base)}
        return {**shared, **rotary, "use_parallel_residual": lit.parallel_residual, "attention_bias": True}
    if lit.gelu_approximate == "tanh":
        shared["hidden_act"] = "gelu_new"
    return {
        **shared,
        "num_key_value_heads": lit.n_query_groups,
        "partial_rotary_factor": lit.rotary_percentage,
        "qk_layernorm": False,
    }


def _rope_scaling(lit: LitConfig, source: str) -> dict[str, Any] | None:
    """transformers' `rope_scaling`: Llama 3.1's formula, or positions divided by a number."""
    if (adjust := lit.rope_adjustments) is None:
        ratio = lit.rope_condense_ratio
        return None if ratio == 1 else {"rope_type": "linear", "factor": float(ratio)}
    numbers = {name: adjust.get(name) for name in LLAMA_3}
    is_llama_3 = set(adjust) == set(LLAMA_3) and all(map(_is_number, numbers.values()))
    is_linear = set(adjust) == {"factor"} and _is_number(adjust["factor"])
    if lit.rope_condense_ratio != 1 or not (is_llama_3 or is_linear):
        raise refused(source, lit, f"a model with `rope_adjustments` {short(adjust, 80)}")
    if not is_llama_3:
        return {"rope_type": "linear", "factor": float(adjust["factor"])}
    positions = {"original_max_position_embeddings": adjust["original_max_seq_len"]}
    return {"rope_type": "llama3", **{name: float(adjust[name]) for name in LLAMA_3[:3]}, **positions}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def reconcile(stored: Mapping[str, Any], computed: dict[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The `config.json` next to the weights with LitGPT's vocabulary, or `computed`; MalformedInput if they differ.

    Where LitGPT computes with another epsilon or without the scaling of positions (as Gemma and Phi-3), a warning.
    """
    if not stored:
        return computed
    kind, given = stored.get("model_type"), computed["vocab_size"]
    rope = stored.get("rope_parameters")
    flat = {**stored, **(rope if isinstance(rope, dict) else {})}
    eps = {
        name: computed[name] for name in EPSILONS if name in computed and flat.get(name) not in (None, computed[name])
    }
    for name, value in eps.items():
        warnings.append(f"`{name}` is LitGPT's {value}, which it computes with; `config.json` declares {flat[name]}")
    scaling = flat.get("rope_scaling") or {}
    scaled = str(
        flat.get("rope_type") or (scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else "")
    )
    if scaled in ("longrope", "su", "yarn", "dynamic") and "rope_scaling" not in computed:
        warnings.append(
            f"LitGPT computes without the `{scaled}` scaling of positions that `config.json` declares, which is kept"
        )
    known = SAME_FUNCTION.get(computed["model_type"], (computed["model_type"],))
    different = [name for name in COMPARED if name in computed and flat.get(name) not in (None, computed[name])]
    if kind is not None and kind not in known:
        different.insert(0, "model_type")
    if different:
        name = different[0]
        raise MalformedInput(
            f"`config.json` next to `{source}` declares `{name}` {short(flat.get(name))}, but `model_config.yaml` "
            f"{computed.get(name)}",
            hint="one of the two belongs to another model; remove the wrong one",
        )
    return {**computed, **stored, **eps, "vocab_size": given}


def text_part(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a multimodal Gemma 3's `config.json` that LitGPT has: the language model; others as they are."""
    text = stored.get("text_config")
    if stored.get("model_type") != "gemma3" or not isinstance(text, dict):
        return dict(stored)
    ids = {name: stored[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in stored}
    return {**ids, **text, "model_type": "gemma3_text"}


FILES = ("model_config.yaml", "lit_config.json")
OLD_NAMES = {"_norm_class": "norm_class_name", "_mlp_class": "mlp_class_name", "condense_ratio": "rope_condense_ratio"}
DERIVED = ("head_size", "padded_vocab_size", "n_query_groups", "intermediate_size")
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
    rope_indices: list[int] | None = None

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
        return self.n_query_groups == self.n_head

    @property
    def heads_span_width(self) -> bool:
        return self.n_embd == self.n_head * self.head_size

    @property
    def windows(self) -> list[int]:
        """1 for each layer with a window, else 0."""
        return (self.sliding_window_indices or [1] * self.n_layer)[: self.n_layer]

    @property
    def windows_have_the_local_base(self) -> bool:
        """Whether the layers with windows, and no others, have the rotary base `rope_local_base_freq`."""
        local = (self.rope_indices or [1] * self.n_layer)[: self.n_layer]
        return len(local) == self.n_layer and list(map(bool, local)) == list(map(bool, self.windows))

    @property
    def window_in_every_layer(self) -> bool:
        return all(self.sliding_window_indices or [1])

    @property
    def window_alternates(self) -> bool:
        """Whether every other layer has a window, the first one included."""
        return self.windows == [1 - i % 2 for i in range(self.n_layer)]


TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list[int]": (list,),
    "dict[str, Any]": (dict,),
}


def read_settings(folder: Path, source: str) -> LitConfig:
    """The configuration in `folder`; InputRefused if there is none, MalformedInput if a field is invalid."""
    if (file := next((folder / name for name in FILES if (folder / name).is_file()), None)) is None:
        raise InputRefused(
            f"`{source}` has no `{FILES[0]}` next to it, which is needed to split its fused matrices",
            hint="copy the file next to the weights; `litgpt download` and `litgpt finetune` write it",
        )
    return settings_of(read_config_file(file), file.name)


def settings_of(content: Mapping[str, Any], source: str) -> LitConfig:
    """The fields of `content` that change what the model computes; MalformedInput if one is invalid."""
    values = {OLD_NAMES.get(name, name): value for name, value in content.items() if value is not None}
    given = Fields(values, source, "in `{}`", "repair or replace the file")
    layers, width, heads = (given.count(name) for name in ("n_layer", "n_embd", "n_head"))
    values.setdefault("head_size", width // heads)
    values.setdefault("n_query_groups", heads)
    if "padded_vocab_size" not in values:
        multiple = given.count("padding_multiple", default=512)
        values["padded_vocab_size"] = -(-given.count("vocab_size") // multiple) * multiple
    if values.get("mlp_class_name", "GptNeoxMLP") == "GptNeoxMLP":
        values.setdefault("intermediate_size", 4 * width)
    for name in DERIVED:
        given.count(name)
    if heads % values["n_query_groups"]:
        raise given.invalid("n_query_groups", values["n_query_groups"])
    if layers > LAYER_LIMIT:
        raise given.invalid("n_layer", layers)
    if "sliding_window_size" in values and "sliding_window_indices" not in values:
        values["sliding_window_indices"] = _windows(given, layers)
    return LitConfig(**{one.name: _checked(one, given) for one in fields(LitConfig) if one.name in values})


def _windows(given: Fields, layers: int) -> list[int]:
    """1 for each layer with a window, else 0, from the fields before April 2025: a placement, a stride, an offset."""
    placement = given.get("sliding_window_layer_placing", default="all")
    usual = STRIDES.get(placement) if isinstance(placement, str | int) else None
    stride = given.get("sliding_window_layer_stride", default=usual)
    offset = given.get("sliding_window_offset", default=0)
    if type(stride) is not int or stride <= 0 or type(offset) is not int:
        raise given.invalid("sliding_window_layer_placing", placement)
    return [int((number + offset) % stride == 0) for number in range(layers)]


def _checked(field: Any, given: Fields) -> Any:
    value, kind = given.values[field.name], str(field.type).removesuffix(" | None")
    is_right = isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
    is_right = is_right and (not isinstance(value, int | float) or abs(value) <= sys.float_info.max)
    if not is_right or (field.default is MISSING and value <= 0):
        raise given.invalid(field.name, value)
    return value


# Families that compute the same under other tensor names: a `config.json` next to the weights decides
SAME_FUNCTION = {"llama": ("llama", "mistral", "phi3"), "mistral": ("mistral", "phi3")}
GELU = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}

LAYER_NORM = {"mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm", "norm_qk": False, "is_olmo": False}
LAYER_NORM |= {"sliding_window_size": False}
RMS_NORM = {"norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False, "lm_head_bias": False}
RMS_NORM |= {"shared_attention_norm": False, "rotary_percentage": 1}
GEMMA = {**RMS_NORM, "mlp_class_name": "GemmaMLP", "is_gemma": True, "scale_embeddings": True, "norm_qk": False}
GEMMA |= {"attn_bias": False, "gelu_approximate": "tanh"}
LLAMA = {**RMS_NORM, "mlp_class_name": "LLaMAMLP", "is_gemma": False, "scale_embeddings": False, "norm_qk": False}
LLAMA |= {"attn_bias": False, "post_attention_norm": False, "post_mlp_norm": False, "sliding_window_size": False}
OLMO = {"norm_class_name": "LayerNorm", "is_olmo": True, "mlp_class_name": "LLaMAMLP", "parallel_residual": False}
OLMO |= {"bias": False, "lm_head_bias": False, "attn_bias": False, "norm_qk": False, "post_attention_norm": False}
OLMO |= {"post_mlp_norm": False, "sliding_window_size": False, "scale_embeddings": False, "heads_span_width": True}
STABLELM = {name: value for name, value in OLMO.items() if name != "attn_bias"} | {"is_olmo": False}
OLMO |= {"rotary_percentage": 1, "norm_eps": 1e-5}
OLMO2 = {**LLAMA, "post_attention_norm": True, "post_mlp_norm": True, "norm_1": False, "norm_2": False}
OLMO2 |= {"norm_qk": True, "norm_qk_type": "olmo2"}
GEMMA3 = {**GEMMA, "post_attention_norm": True, "post_mlp_norm": True, "norm_qk": True, "norm_qk_type": "default"}
GEMMA3 |= {"sliding_window_size": True, "rope_local_base_freq": True, "windows_have_the_local_base": True}
PHI3 = {name: value for name, value in LLAMA.items() if name not in ("rotary_percentage", "sliding_window_size")}
MIXTURE = {**LLAMA, "mlp_class_name": "LLaMAMoE", "n_expert": True, "n_shared_expert": False, "n_expert_groups": False}
MIXTURE |= {"routed_scaling_factor": 1}
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
            **{name: value for name, value in MIXTURE.items() if name != "sliding_window_size"},
            "window_in_every_layer": True,
        },
    ),
    ("qwen3_moe", {**MIXTURE, "norm_qk": True, "norm_qk_type": "default"}),
    ("qwen3", {**LLAMA, "norm_qk": True, "norm_qk_type": "default"}),
    ("qwen2", {**LLAMA, "attn_bias": True}),
    ("mistral", {**LLAMA, "sliding_window_size": True, "window_in_every_layer": True}),
    ("llama", LLAMA),
    ("olmo2", OLMO2),
    ("olmo", OLMO),
    ("stablelm", STABLELM),
    ("gemma3_text", GEMMA3),
    ("phi3", {**PHI3, "window_in_every_layer": True}),
)
"""Families with the fields of `LitConfig` that decide: True and False stand for set and not set (or zero)."""


def family_of(lit: LitConfig, source: str) -> str:
    """The `model_type` that computes the same; UnsupportedInput if llmconv does not know one."""
    found = ""
    for family, wanted in FAMILIES:
        own = {name: getattr(lit, name) for name in wanted}
        if all((bool(own[name]) if isinstance(value, bool) else own[name]) == value for name, value in wanted.items()):
            found = family
            break
    options = {  # that no family in the table has
        "latent attention": lit.latent_attention,
        "interleaved rope": lit.rope_interleave,
        "two rope bases": found != "gemma3_text" and lit.rope_local_base_freq,
        "no pre-norm": found != "olmo2" and not (lit.norm_1 and lit.norm_2),
        "capped logits": found != "gemma2" and (lit.final_logit_softcapping or lit.attention_logit_softcapping),
        "its own attention scale": found not in ("gemma2", "gemma3_text")
        and lit.attention_scores_scalar not in (None, lit.head_size),
        f"the GELU `{short(lit.gelu_approximate)}`": lit.gelu_approximate not in GELU,
    }
    if option := next((option for option, is_set in options.items() if is_set), None):
        raise refused(source, lit, f"a model with {option}")
    if not found:
        raise refused(source, lit, f"a {lit.norm_class_name} model with {lit.mlp_class_name}")
    return found


def refused(source: str, lit: LitConfig, description: str) -> UnsupportedInput:
    """The error for a model that transformers does not have; `description` says what it lacks."""
    return UnsupportedInput(
        f"`{source}` is {description} (`{lit.name[:60]}`), for which no equivalent model is known",
        hint="supported are llama, mistral, mixtral, phi, phi-3 and 4, qwen2, qwen3 and its MoE, gemma 1 to 3, pythia, "
        "falcon, olmo 1 and 2, stablelm",
    )
