"""Every tensor of the common model types by name, so that a gap is found which transformers would fill at random.

Source: transformers `models/{llama,mistral,qwen2,qwen3,gemma,gemma2,phi3,gpt2,gpt_neox}/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmconv.convert.mapping import listing, require
from llmconv.convert.state_dict import HEADS, LAYER_COUNTS
from llmconv.convert.torch_state.model_names import ModelNames
from llmconv.errors import MalformedInput

FINAL_NORM = ("norm", "ln_f")
HAVE_FINAL_NORM = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmo2", "cohere", "cohere2", "starcoder2"),
    *("stablelm", "granite", "smollm3", "phi", "bloom", "falcon", "gptj", "gpt_neo", "gpt_bigcode", "codegen"),
)
"""Other types that end with a norm; some models (OPT 350M, OLMo) have none, or one without weights."""


def _weights(modules: str, kind: str = "weight") -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules.split())


def _both(modules: str) -> tuple[str, ...]:
    return _weights(modules) + _weights(modules, "bias")


QKV, FEED = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj mlp.down_proj"
NORMS = "input_layernorm post_attention_layernorm"
LLAMA = _weights(f"{QKV} self_attn.o_proj {FEED} {NORMS}")
HEAD_NORMS = _weights("self_attn.q_norm self_attn.k_norm")
LLAMA_ENDS = _weights("model.embed_tokens model.norm")

LAYERS: dict[str, tuple[str, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA + _weights(QKV, "bias"),
    "qwen3": LLAMA + HEAD_NORMS,
    "gemma": LLAMA,
    "gemma2": LLAMA + _weights("pre_feedforward_layernorm post_feedforward_layernorm"),
    "phi3": _weights(f"self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj {NORMS}"),
    "gpt2": _both("ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    "gpt_neox": _both(f"{NORMS} mlp.dense_h_to_4h mlp.dense_4h_to_h")
    + _weights("attention.query_key_value attention.dense"),
}
ENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt2": ("transformer.h", (*_weights("transformer.wte transformer.wpe"), *_both("transformer.ln_f"))),
    "gpt_neox": ("gpt_neox.layers", ("gpt_neox.embed_in.weight", *_both("gpt_neox.final_layer_norm"))),
}
"""Where the layers lie and what is around them; `model.layers` and Llama's where nothing else is said."""

OPTIONAL: dict[str, dict[str, tuple[bool, tuple[str, ...]]]] = {
    "llama": {
        "attention_bias": (False, _weights(f"{QKV} self_attn.o_proj", "bias")),
        "mlp_bias": (False, _weights(FEED, "bias")),
    },
    "qwen3": {"attention_bias": (False, _weights(f"{QKV} self_attn.o_proj", "bias"))},
    "gemma": {"attention_bias": (False, _weights(f"{QKV} self_attn.o_proj", "bias"))},
    "gemma2": {"attention_bias": (False, _weights(f"{QKV} self_attn.o_proj", "bias"))},
    "gpt_neox": {"attention_bias": (True, _weights("attention.query_key_value attention.dense", "bias"))},
}
"""Configuration field to its default, and the tensors that it adds to a layer."""


def check_parts(names: Iterable[str], config: Mapping[str, Any], model: ModelNames, source: str) -> None:
    """The names are those of the whole model: exactly, where the type is in the table, else the ends.

    Raises:
        MalformedInput: lists what is missing, or what is there and has no place.
    """
    found, expected = dict.fromkeys(names), _expected(config)
    if expected is None:
        require([model.embedding] if model.embedding else [], found, source)
        has_norm = any(end in name for name in found for end in FINAL_NORM if not _in_layer(name))
        if config.get("model_type") in HAVE_FINAL_NORM and not has_norm:
            raise MalformedInput(f"`{source}` has no norm after its last layer", hint="the checkpoint is partial")
        return
    require(expected, found, source)
    extra = [name for name in found if name not in expected and name not in HEADS]
    if extra:
        raise MalformedInput(
            f"`{source}` holds {len(extra)} tensors that a {config['model_type']} of its configuration does not have: "
            f"{listing(extra)}",
            hint="the configuration is of another model; give the right one with `--config`",
        )


def _in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _expected(config: Mapping[str, Any]) -> dict[str, None] | None:
    kind = str(config.get("model_type"))
    count = next((config[field] for field in LAYER_COUNTS if field in config), None)
    if kind not in LAYERS or type(count) is not int:
        return None
    layers, ends = ENDS.get(kind, ("model.layers", LLAMA_ENDS))
    options = OPTIONAL.get(kind, {}).items()
    added = [name for field, (usual, more) in options if config.get(field, usual) for name in more]
    parts = [*LAYERS[kind], *added]
    return dict.fromkeys([*ends, *(f"{layers}.{number}.{part}" for number in range(count) for part in parts)])
