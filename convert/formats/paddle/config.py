"""PaddleNLP's `config.json` as the `config.json` of the Hugging Face model that computes the same.

Also `generation_config.json` in both directions, for the fields that both have (paddlenlp
`generation/configuration_utils.py`); PaddleNLP's `max_length` counts new tokens, transformers' all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.models.config_file import json_object
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.output.plan import json_bytes

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = (*TOKENS, "initializer_range", "tie_word_embeddings")

WITHOUT_EQUAL = {  # families that cannot be converted exactly, with the reason
    "chatglm": "ChatGLM-6B v1 has two rotary positions per token, which no model of transformers has",
    "glm": "PaddleNLP's GLM fills blanks with two positions per token, which transformers' `glm` does not have",
    "ernie": "transformers has ERNIE only as an encoder, not as a causal language model",
}

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
            f"`{source}` is a PaddleNLP model of the unsupported type `{str(kind)[:80]}`",
            hint=f"supported are {', '.join(CONVERTERS)}; give the `config.json` with `--config` if it is one of them",
        )
    _refuse(source, config, {"use_long_sequence_strategies": False})
    return {**{name: config[name] for name in KEPT if name in config}, **CONVERTERS[kind](config, source, warnings)}


def own_kind(config: Mapping[str, Any]) -> str:
    """The type of the published code that alone computes a model: `baichuan` or `chatglm`; empty for other models."""
    if config.get("alibi") and config.get("model_type") in ("llama", "baichuan"):
        return "baichuan"
    return "chatglm" if config.get("model_type") == "chatglm" else ""


def to_own_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of a model of its own code; UnsupportedInput for an option, MalformedInput for an invalid field."""
    if own_kind(config) == "chatglm":
        # source: paddlenlp `transformers/chatglm/{configuration,modeling}.py`; the fields of THUDM's own code
        fixed = {"position_encoding_2d": True, "pre_seq_len": None, "attention_scale": True, "activation": "gelu"}
        _refuse(source, config, {**fixed, "quantization_bit": 0})
        hidden, heads = number(config, "hidden_size", source, 4096), number(config, "num_attention_heads", source, 32)
        _divides(source, 4 * heads, hidden, "hidden sizes for four times the heads")
        sizes = {
            "vocab_size": number(config, "vocab_size", source, 130528),
            "hidden_size": hidden,
            "num_layers": number(config, "num_hidden_layers", source, config.get("num_layers", 28)),
            "num_attention_heads": heads,
            "inner_hidden_size": number(config, "inner_hidden_size", source, 16384),
            "max_sequence_length": number(config, "max_sequence_length", source, 2048),
            "layernorm_epsilon": real(config, "layernorm_epsilon", source, 1e-5),
        }
        tokens = (*TOKENS, "mask_token_id", "gmask_token_id")
        return {**{name: config[name] for name in tokens if name in config}, **sizes, "position_encoding_2d": True}
    return _decoder({**config, "model_type": "llama"}, source, [])


def number(config: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    """A field that is a positive integer (else MalformedInput); with `default` None the field is required."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 40:
        raise _invalid(name, value, source)
    return value


def real(config: Mapping[str, Any], name: str, source: str, default: float) -> float:
    """A field that is a positive number (else MalformedInput), or `default` if it is missing."""
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise _invalid(name, value, source)
    return float(value)


def _invalid(name: str, value: Any, source: str) -> MalformedInput:
    return MalformedInput(
        f"`{name}` in the configuration of `{source}` is invalid: {value!r}"[:200],
        hint="give the run's own `config.json` with `--config`",
    )


def _divides(source: str, small: int, large: int, what: str) -> int:
    """`large / small`, which must be an integer."""
    if large % small:
        raise MalformedInput(
            f"the configuration of `{source}` has {large} {what} {small}",
            hint="the first number must be a multiple of the second",
        )
    return large // small


def _refuse(source: str, config: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Refuses a config that sets an option of `needed` to another value."""
    for name, value in needed.items():
        if name in config and config[name] != value:
            raise UnsupportedInput(
                f"`{source}` has `{name}` {config[name]!r}, which transformers' model of this kind cannot express"[
                    :300
                ],
                hint="only its own code computes it; it can be converted when that option is not used",
            )


def _decoder(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The config of Llama-like models."""
    hidden, heads = number(config, "hidden_size", source), number(config, "num_attention_heads", source)
    kv_heads = number(config, "num_key_value_heads", source, heads)
    length = number(config, "max_position_embeddings", source, number(config, "seq_length", source, 2048))
    _divides(source, kv_heads, heads, "query heads for key/value heads")
    given, what = config.get("head_dim"), "hidden sizes for heads"
    head_dim = number(config, "head_dim", source) if given else _divides(source, heads, hidden, what)
    return {
        "model_type": config["model_type"],
        "vocab_size": number(config, "vocab_size", source),
        "hidden_size": hidden,
        "intermediate_size": number(config, "intermediate_size", source),
        "num_hidden_layers": number(config, "num_hidden_layers", source),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **({"head_dim": head_dim} if given else {}),
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": real(config, "rms_norm_eps", source, 1e-6),
        **_rope(config, source, head_dim),
    }


def _rope(config: Mapping[str, Any], source: str, head_dim: int) -> dict[str, Any]:
    """The rotary options of PaddleNLP's `llama/modeling.py` (`_init_rope`) in transformers' fields."""
    theta, factor = real(config, "rope_theta", source, 10000.0), real(config, "rope_scaling_factor", source, 1.0)
    if isinstance(config.get("rope_scaling"), Mapping):
        return {"rope_theta": theta, "rope_scaling": dict(config["rope_scaling"])}
    match config.get("rope_scaling_type"):
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
                f"`{source}` has the unsupported `rope_scaling_type` `{other}`",
                hint="linear, ntk and dynamic_ntk are supported",
            )


def _llama(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    return {**_decoder(config, source, warnings), "model_type": "llama"}


def _qwen2(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    fields = ("use_sliding_window", "sliding_window", "max_window_layers")
    kept = {name: config[name] for name in fields if name in config}
    if config.get("use_sliding_window") and _ignores_window(config, source, warnings):
        kept["use_sliding_window"] = False
    return {**_decoder(config, source, warnings), **kept}


def _mistral(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    window = None if _ignores_window(config, source, warnings) else config.get("sliding_window")
    return {**_decoder(config, source, warnings), "sliding_window": window}


def _ignores_window(config: Mapping[str, Any], source: str, warnings: list[str]) -> bool:
    """Whether PaddleNLP wrote it (a key `paddlenlp_version`): its Mistral and Qwen 2 (2.6 to 3.0) ignore the window."""
    window = config.get("sliding_window")
    if "paddlenlp_version" not in config or window is None:
        return False
    warnings.append(
        f"PaddleNLP ignores `sliding_window` {window!r:.40}: its model attends to all tokens, and so does the "
        f"converted model of `{source}`"
    )
    return True


def _qwen(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """Qwen 1 is Qwen 2 without grouped queries; its options for long inputs do nothing up to `seq_length`."""
    hidden, heads = number(config, "hidden_size", source), number(config, "num_attention_heads", source)
    length = number(config, "seq_length", source, 2048)
    head_dim = _divides(source, heads, hidden, "hidden sizes for heads")
    _refuse(source, config, {"rotary_pct": 1.0, "no_bias": True, "kv_channels": head_dim})
    if long_input_options := [name for name in ("use_dynamic_ntk", "use_logn_attn") if config.get(name, True)]:
        warnings.append(f"Qwen 2 has no {' and '.join(long_input_options)}: beyond {length} tokens the results differ")
    return {
        "model_type": "qwen2",
        "vocab_size": number(config, "vocab_size", source),
        "hidden_size": hidden,
        "intermediate_size": number(config, "intermediate_size", source) // 2,
        "num_hidden_layers": number(config, "num_hidden_layers", source),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": real(config, "layer_norm_epsilon", source, 1e-6),
        "rope_theta": real(config, "rotary_emb_base", source, 10000.0),
        "use_sliding_window": False,
    }


def _bloom(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    layers = config.get("num_hidden_layers")
    return {
        "model_type": "bloom",
        "vocab_size": number(config, "vocab_size", source),
        "hidden_size": number(config, "hidden_size", source),
        "n_layer": number(config, "n_layer", source, layers),
        "n_head": number(config, "n_head", source, config.get("num_attention_heads")),
        "layer_norm_epsilon": real(config, "layer_norm_epsilon", source, 1e-5),
        "apply_residual_connection_post_layernorm": config.get("apply_residual_connection_post_layernorm", False),
        "tie_word_embeddings": True,
    }


ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "gelu_new": "gelu_new"}
"""PaddleNLP's GPT computes `gelu` by its tanh formula (`gpt/modeling.py`, `approximate=True`)."""


def _gpt(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    _refuse(source, config, {"normalize_before": True, "scale_qk_coeff": 1.0})
    activation = str(config.get("hidden_activation", config.get("hidden_act", "gelu")))
    if activation not in ACTIVATIONS:
        _refuse(source, config, {"hidden_activation": "gelu"})
    hidden = number(config, "hidden_size", source)
    return {
        "model_type": "gpt2",
        "vocab_size": number(config, "vocab_size", source),
        "n_embd": hidden,
        "n_layer": number(config, "num_hidden_layers", source),
        "n_head": number(config, "num_attention_heads", source),
        "n_inner": number(config, "intermediate_size", source, 4 * hidden),
        "n_positions": number(config, "max_position_embeddings", source, 1024),
        "activation_function": ACTIVATIONS[activation],
        "layer_norm_epsilon": real(config, "layer_norm_eps", source, 1e-5),
        "tie_word_embeddings": True,
    }


GLM_FIXED: dict[str, Any] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
}


def _chatglm(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """ChatGLM 2 and 3 are transformers' `glm`: rotary pairs in the first half of each head, gate and up fused."""
    _refuse(source, config, GLM_FIXED)
    hidden, heads = number(config, "hidden_size", source), number(config, "num_attention_heads", source)
    return {
        "model_type": "glm",
        "vocab_size": number(config, "padded_vocab_size", source, config.get("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": number(config, "ffn_hidden_size", source),
        "num_hidden_layers": number(config, "num_hidden_layers", source, config.get("num_layers")),
        "num_attention_heads": heads,
        "num_key_value_heads": number(config, "multi_query_group_num", source, heads),
        "head_dim": number(config, "kv_channels", source, hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": number(config, "max_sequence_length", source, config.get("seq_length", 2048)),
        "rms_norm_eps": real(config, "layernorm_epsilon", source, 1e-5),
        "rope_theta": 10000.0 * real(config, "rope_ratio", source, 1.0),
        "partial_rotary_factor": 0.5,
        "attention_bias": bool(config.get("add_qkv_bias", True)),
        "tie_word_embeddings": False,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id", 2),
        "pad_token_id": config.get("pad_token_id", 0),
    }


CONVERTERS: dict[Any, Callable[[Mapping[str, Any], str, list[str]], dict[str, Any]]] = {
    "llama": _llama,
    "baichuan": _llama,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "qwen": _qwen,
    "bloom": _bloom,
    "gpt": _gpt,
    "chatglm_v2": _chatglm,
}


FILE = "generation_config.json"
SHARED_FIELDS = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty"),
)
STRATEGY, SAMPLING, GREEDY = "decode_strategy", "sampling", "greedy_search"


def read_generation_config(folder: Path) -> dict[str, bytes]:
    """transformers' `generation_config.json` from Paddle's, by file name; empty if there is none."""
    if not (folder / FILE).is_file():
        return {}
    stored = read_json(folder / FILE)
    kept = _shared_fields(stored) | ({"do_sample": True} if stored.get(STRATEGY) == SAMPLING else {})
    return {FILE: json_bytes(kept)} if kept else {}


def paddle_generation_config(content: bytes) -> bytes:
    """PaddleNLP's `generation_config.json` from transformers'; without fields if that is not a JSON object."""
    fields = json_object(content)
    return json_bytes(_shared_fields(fields) | {STRATEGY: SAMPLING if fields.get("do_sample") else GREEDY})


def _shared_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in SHARED_FIELDS if fields.get(name) is not None}
