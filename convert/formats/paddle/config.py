"""PaddleNLP's `config.json` as the `config.json` of the Hugging Face model that computes the same.

Also `generation_config.json` in both directions, for the fields that both have (paddlenlp
`generation/configuration_utils.py`); PaddleNLP's `max_length` counts new tokens, transformers' all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.fields import Fields
from llmconv.errors import MalformedInput, UnsupportedInput, short
from llmconv.output.plan import json_bytes

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = (*TOKENS, "initializer_range", "tie_word_embeddings")

WITHOUT_EQUAL = {  # families that cannot be converted exactly, with the reason
    "chatglm": "ChatGLM-6B v1 has two rotary positions per token, which no model of transformers has",
    "glm": "PaddleNLP's GLM fills blanks with two positions per token, which transformers' `glm` does not have",
    "ernie": "transformers has ERNIE only as an encoder, not as a causal language model",
}

HINT = "give the run's own `config.json` with `--config`"
ALIBI = "a Llama with ALiBi (such as Baichuan-13B)", "transformers has no such model"
TWO_POSITIONS = "a ChatGLM-6B", WITHOUT_EQUAL["chatglm"]


def to_config(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The Hugging Face config of a PaddleNLP one; `warnings` receives a line for each difference beyond some length.

    Raises UnsupportedInput for an unknown `model_type` or an option that the Hugging Face model does not have,
    MalformedInput for a field that is missing or not a positive number.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in WITHOUT_EQUAL:
        raise UnsupportedInput(f"`{source}` is a `{kind}`: {WITHOUT_EQUAL[kind]}", hint="only its own code computes it")
    if config.get("alibi"):
        raise UnsupportedInput(f"`{source}` is {ALIBI[0]}: {ALIBI[1]}", hint="only its own code computes it")
    if not isinstance(kind, str) or kind not in CONVERTERS:
        raise UnsupportedInput(
            f"`{source}` is a PaddleNLP model of the unsupported type `{short(kind, 80)}`",
            hint=f"supported are {', '.join(CONVERTERS)}; give the `config.json` with `--config` if it is one of them",
        )
    fields = Fields(config, source, hint=HINT)
    _refuse(fields, {"use_long_sequence_strategies": False})
    return {**{name: config[name] for name in KEPT if name in config}, **CONVERTERS[kind](fields, warnings)}


def own_kind(config: Mapping[str, Any]) -> str:
    """The type of the published code that alone computes a model: `baichuan` or `chatglm`; empty for other models."""
    if config.get("alibi") and config.get("model_type") in ("llama", "baichuan"):
        return "baichuan"
    return "chatglm" if config.get("model_type") == "chatglm" else ""


def to_own_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of a model of its own code; UnsupportedInput for an option, MalformedInput for an invalid field."""
    fields = Fields(config, source, hint=HINT)
    if own_kind(config) == "chatglm":
        # source: paddlenlp `transformers/chatglm/{configuration,modeling}.py`; the fields of THUDM's own code
        fixed = {"position_encoding_2d": True, "pre_seq_len": None, "attention_scale": True, "activation": "gelu"}
        _refuse(fields, {**fixed, "quantization_bit": 0})
        hidden, heads = fields.count("hidden_size", default=4096), fields.count("num_attention_heads", default=32)
        _divides(source, 4 * heads, hidden, "hidden sizes for four times the heads")
        sizes = {
            "vocab_size": fields.count("vocab_size", default=130528),
            "hidden_size": hidden,
            "num_layers": fields.count("num_hidden_layers", "num_layers", default=28),
            "num_attention_heads": heads,
            "inner_hidden_size": fields.count("inner_hidden_size", default=16384),
            "max_sequence_length": fields.count("max_sequence_length", default=2048),
            "layernorm_epsilon": fields.number("layernorm_epsilon", default=1e-5),
        }
        tokens = (*TOKENS, "mask_token_id", "gmask_token_id")
        return {**{name: config[name] for name in tokens if name in config}, **sizes, "position_encoding_2d": True}
    return _llama(fields, [])


def _divides(source: str, small: int, large: int, what: str) -> int:
    """`large / small`, which must be an integer."""
    if large % small:
        raise MalformedInput(
            f"the configuration of `{source}` has {large} {what} {small}",
            hint="the first number must be a multiple of the second",
        )
    return large // small


def _refuse(fields: Fields, needed: Mapping[str, Any]) -> None:
    """Refuses a config that sets an option of `needed` to another value."""
    for name, value in needed.items():
        if name in fields.values and fields.values[name] != value:
            raise UnsupportedInput(
                f"`{fields.source}` has `{name}` {fields.values[name]!r:.150}, which transformers' model of this kind "
                "cannot express",
                hint="only its own code computes it; it can be converted when that option is not used",
            )


def _decoder(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """The config of Llama-like models."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    length = fields.count("max_position_embeddings", "seq_length", default=2048)
    _divides(fields.source, kv_heads, heads, "query heads for key/value heads")
    given, what = fields.values.get("head_dim"), "hidden sizes for heads"
    head_dim = fields.count("head_dim") if given else _divides(fields.source, heads, hidden, what)
    return {
        "model_type": str(fields.get("model_type")),
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.count("intermediate_size"),
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **({"head_dim": head_dim} if given else {}),
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        **_rope(fields, head_dim),
    }


def _rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The rotary options of PaddleNLP's `llama/modeling.py` (`_init_rope`) in transformers' fields."""
    theta, factor = fields.number("rope_theta", default=10000.0), fields.number("rope_scaling_factor", default=1.0)
    if isinstance(fields.values.get("rope_scaling"), Mapping):
        return {"rope_theta": theta, "rope_scaling": dict(fields.values["rope_scaling"])}
    if isinstance(given := fields.values.get("rope_parameters"), Mapping):  # the user's, as transformers 5 has them
        return {"rope_parameters": {"rope_theta": theta, **given}}
    match fields.values.get("rope_scaling_type"):
        case None:
            return {"rope_theta": theta}
        case "linear":
            return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
        case "ntk":
            return {"rope_theta": theta * factor ** (head_dim / max(1, head_dim - 2))}
        case "dynamic_ntk":
            return {"rope_theta": theta, "rope_scaling": {"rope_type": "dynamic", "factor": factor}}
        case other:
            raise UnsupportedInput(
                f"`{fields.source}` has the unsupported `rope_scaling_type` `{other}`",
                hint="linear, ntk and dynamic_ntk are supported",
            )


def _llama(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    return {**_decoder(fields, warnings), "model_type": "llama"}


def _qwen2(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    windows = ("use_sliding_window", "sliding_window", "max_window_layers")
    kept = {name: fields.values[name] for name in windows if name in fields.values}
    if fields.values.get("use_sliding_window") and _ignores_window(fields, warnings):
        kept["use_sliding_window"] = False
    return {**_decoder(fields, warnings), **kept}


def _ignores_window(fields: Fields, warnings: list[str]) -> bool:
    """Whether PaddleNLP wrote it (a key `paddlenlp_version`): its Mistral and Qwen 2 (2.6 to 3.0) ignore the window."""
    window = fields.values.get("sliding_window")
    if "paddlenlp_version" not in fields.values or window is None:
        return False
    warnings.append(
        f"PaddleNLP ignores `sliding_window` {window!r:.40}: its model attends to all tokens, and so does the "
        f"converted model of `{fields.source}`"
    )
    return True


def _qwen(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """Qwen 1 is Qwen 2 without grouped queries; its options for long inputs do nothing up to `seq_length`."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    length = fields.count("seq_length", default=2048)
    head_dim = _divides(fields.source, heads, hidden, "hidden sizes for heads")
    _refuse(fields, {"rotary_pct": 1.0, "no_bias": True, "kv_channels": head_dim})
    if long_input_options := [name for name in ("use_dynamic_ntk", "use_logn_attn") if fields.values.get(name, True)]:
        warnings.append(f"Qwen 2 has no {' and '.join(long_input_options)}: beyond {length} tokens the results differ")
    return {
        "model_type": "qwen2",
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.count("intermediate_size") // 2,
        "num_hidden_layers": fields.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-6),
        "rope_theta": fields.number("rotary_emb_base", default=10000.0),
        "use_sliding_window": False,
    }


def _bloom(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "n_layer": fields.count("n_layer", "num_hidden_layers"),
        "n_head": fields.count("n_head", "num_attention_heads"),
        "layer_norm_epsilon": fields.number("layer_norm_epsilon", default=1e-5),
        "apply_residual_connection_post_layernorm": fields.get(
            "apply_residual_connection_post_layernorm", default=False
        ),
        "tie_word_embeddings": True,
    }


ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "gelu_new": "gelu_new"}
"""PaddleNLP's GPT computes `gelu` by its tanh formula (`gpt/modeling.py`, `approximate=True`)."""


def _gpt(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    _refuse(fields, {"normalize_before": True, "scale_qk_coeff": 1.0})
    activation = str(fields.values.get("hidden_activation", fields.values.get("hidden_act", "gelu")))
    if activation not in ACTIVATIONS:
        _refuse(fields, {"hidden_activation": "gelu"})
    hidden = fields.count("hidden_size")
    return {
        "model_type": "gpt2",
        "vocab_size": fields.count("vocab_size"),
        "n_embd": hidden,
        "n_layer": fields.count("num_hidden_layers"),
        "n_head": fields.count("num_attention_heads"),
        "n_inner": fields.count("intermediate_size", default=4 * hidden),
        "n_positions": fields.count("max_position_embeddings", default=1024),
        "activation_function": ACTIVATIONS[activation],
        "layer_norm_epsilon": fields.number("layer_norm_eps", default=1e-5),
        "tie_word_embeddings": True,
    }


GLM_FIXED: dict[str, Any] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
}


def _chatglm(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """ChatGLM 2 and 3 are transformers' `glm`: rotary pairs in the first half of each head, gate and up fused."""
    _refuse(fields, GLM_FIXED)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return {
        "model_type": "glm",
        "vocab_size": fields.count("padded_vocab_size", "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.count("ffn_hidden_size"),
        "num_hidden_layers": fields.count("num_hidden_layers", "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("multi_query_group_num", default=heads),
        "head_dim": fields.count("kv_channels", default=hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields.count("max_sequence_length", "seq_length", default=2048),
        "rms_norm_eps": fields.number("layernorm_epsilon", default=1e-5),
        "rope_theta": 10000.0 * fields.number("rope_ratio", default=1.0),
        "partial_rotary_factor": 0.5,
        "attention_bias": bool(fields.values.get("add_qkv_bias", True)),
        "tie_word_embeddings": False,
        "bos_token_id": fields.values.get("bos_token_id"),
        "eos_token_id": fields.values.get("eos_token_id", 2),
        "pad_token_id": fields.values.get("pad_token_id", 0),
    }


CONVERTERS: dict[Any, Callable[[Fields, list[str]], dict[str, Any]]] = {
    "llama": _llama,
    "baichuan": _llama,
    "qwen2": _qwen2,
    "mistral": lambda fields, warnings: {
        **_decoder(fields, warnings),
        "sliding_window": None if _ignores_window(fields, warnings) else fields.get("sliding_window"),
    },
    "qwen": _qwen,
    "bloom": _bloom,
    "gpt": _gpt,
    "chatglm_v2": _chatglm,
}


FILE = "generation_config.json"
SHARED_FIELDS = (*TOKENS, "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
STRATEGY, SAMPLING, GREEDY = "decode_strategy", "sampling", "greedy_search"


def read_generation_config(folder: Path) -> dict[str, bytes]:
    """transformers' `generation_config.json` from Paddle's, by file name; empty if there is none."""
    if not (folder / FILE).is_file():
        return {}
    stored = read_json(folder / FILE)
    kept = {name: stored[name] for name in SHARED_FIELDS if stored.get(name) is not None}
    kept |= {"do_sample": True} if stored.get(STRATEGY) == SAMPLING else {}
    return {FILE: json_bytes(kept)} if kept else {}
