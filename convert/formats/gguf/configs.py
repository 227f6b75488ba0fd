"""The metadata of a GGUF file as the fields of `config.json`: a function per architecture.

Sources: llama.cpp `gguf-py/gguf/constants.py` (keys), `conversion/*.py` (what its converter writes of each family), and
`src/models/*.cpp` (what a file does not state, because llama.cpp computes it so).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Any

import numpy as np

from llmconv.convert.fields import LARGEST, SHORT, Fields
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array, LazyTensor

Tensors = Mapping[str, LazyTensor]
POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}  # values of `pooling_type` (`PoolingType` of the package `gguf`)
FREQUENCIES, LONG = "rope_freqs.weight", ("rope_factors_long.weight", "rope_factors_short.weight")
HINT = "the file was changed, or another program wrote it; download it again, or convert the original model"


@dataclass(frozen=True)
class Keys(Fields):
    """The metadata of a file, by keys without the name of its architecture."""

    architecture: str = ""
    read: set[str] = field(default_factory=set, compare=False)  # keys that were asked for

    def get(self, *names: str, default: Any = None) -> Any:
        self.read.update(names)
        return super().get(*names, default=default)

    def refuse_others(self) -> None:
        """UnsupportedInput for a key that nothing has asked for, unless it changes no result."""
        for name in sorted(self.values.keys() - self.read - HARMLESS):
            if self.values[name] not in NEUTRAL.get(name, (0, None)):
                raise self.unsupported(f"has `{name[:80]}` = {SHORT.repr(self.values[name])}, which is not supported")

    @classmethod
    def of(cls, metadata: Mapping[str, Any], source: str) -> Keys:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture.isprintable():
            raise MalformedInput(f"`{source}` names no architecture (`general.architecture`)", hint=HINT)
        start = f"{architecture[:80]}."
        own = {key.removeprefix(start): _plain(value) for key, value in metadata.items() if key.startswith(start)}
        return cls(own, source, "in the metadata of `{}`", HINT, architecture[:80])

    def unsupported(self, what: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"`{self.source}` ({self.architecture}) {what}",
            hint="give the Hugging Face folder that it was converted from",
        )


HARMLESS = {
    *("vocab_size", "context_length", "tensor_data_layout", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
}
"""Keys that change no result of an architecture that does not ask for them."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "pooling_type": (0, None, *POOLINGS.values()),  # of embeddings, for which `modules.json` is made
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Values that change no result, of keys for which it is not zero."""


def _plain(value: Any) -> Any:
    """A float32 as the shortest decimal that rounds to it, and an array per layer of one number as that number."""
    if isinstance(value, float):
        return float(str(np.float32(value))) if abs(value) < LARGEST else value
    if isinstance(value, list):
        return _plain(value[0]) if value and all(one == value[0] for one in value) else value
    return value


def decoder(keys: Keys, tensors: Tensors, **more: Any) -> dict[str, Any]:
    """Fields of Llama and its relatives."""
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", default=max(1, width // heads))
    if keys.count("attention.value_length", default=head_dim) != head_dim:
        raise keys.unsupported("has values of another size than keys")
    groups = keys.count("attention.head_count_kv", default=heads)
    if heads % groups:
        raise keys.invalid("attention.head_count_kv", groups, f"a divisor of {heads}")
    config = {
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "rope_scaling": scaling(keys, tensors, head_dim),
        **more,
    }
    return {name: value for name, value in config.items() if value is not None}


def scaling(keys: Keys, tensors: Tensors, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling`; None without it. Raises UnsupportedInput for a kind that no model of transformers has."""
    if (turned := keys.count("rope.dimension_count", default=head_dim)) != head_dim:
        raise keys.unsupported(f"turns {turned} of {head_dim} elements of a head")
    kind = keys.word("rope.scaling.type", "linear" if keys.get("rope.scaling.factor", "rope.scale_linear") else "none")
    if kind == "none":
        return _llama3(keys, tensors, head_dim) if FREQUENCIES in tensors else None
    if FREQUENCIES in tensors:
        raise keys.unsupported(f"scales rotary positions by `{kind[:20]}`, and by `{FREQUENCIES}`")
    if kind not in ("linear", "yarn"):
        raise keys.unsupported(f"scales rotary positions by `{kind[:20]}`")
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor", "rope.scale_linear")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
        ours = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        found |= {ours[name]: keys.number(f"rope.scaling.{name}") for name in ours if keys.get(f"rope.scaling.{name}")}
        usual = {"yarn_log_multiplier": 0.1, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0}
        if any(keys.number(f"rope.scaling.{name}", default=one, least=-2) != one for name, one in usual.items()):
            raise keys.unsupported("has YaRN with a scale of attention that its configuration does not state")
    return found


def _factors(keys: Keys, tensors: Tensors, name: str, turned: int) -> Array:
    """One factor of each frequency, float32 [turned / 2]."""
    found = tensors.get(name)
    values = found.read().astype(np.float32) if found and found.shape == (turned // 2,) else np.zeros(1, np.float32)
    if not all(0 < one < LARGEST for one in values.tolist()):
        raise MalformedInput(f"`{name}` of `{keys.source}` is not {turned // 2} positive numbers", hint=HINT)
    return values


def _llama3(keys: Keys, tensors: Tensors, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has the factors."""
    theta, factors = keys.number("rope.freq_base", default=10000.0), _factors(keys, tensors, FREQUENCIES, head_dim)
    factor = float(factors.max(initial=1.0))
    for context in (8192, keys.count("rope.scaling.original_context_length", default=8192)):
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        wanted = llama3_factors(rope, theta, head_dim)
        if wanted.shape == factors.shape and np.allclose(wanted, factors, rtol=1e-5, atol=0):
            return rope
    raise keys.unsupported("scales rotary frequencies otherwise than Llama 3 (`rope_freqs.weight`)")


def llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> Array:
    """How much slower each pair of a head turns, float32 [head_dim / 2] (llama.cpp `conversion/llama.py`)."""
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    context = rope["original_max_position_embeddings"]
    lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (context / lengths - low) / (high - low)
    with np.errstate(divide="ignore"):  # where it is not taken
        between = 1 / ((1 - smooth) / factor + smooth)
    found = np.where(lengths < context / high, 1.0, np.where(lengths > context / low, factor, between))
    return found.astype(np.float32)


def llama(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    biases = {
        name: f"blk.0.{tensor}.bias" in tensors
        for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up"))
    }
    if not keys.get("expert_count"):
        return decoder(keys, tensors, **biases)
    count = keys.count("expert_count")
    more = {"num_local_experts": count, "num_experts_per_tok": keys.count("expert_used_count", most=count + 1)}
    return decoder(keys, tensors, model_type="mixtral", **more)


def granite(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    ours = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return decoder(keys, tensors, **{name: keys.number(key) for name, key in ours.items()})


def qwen(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return decoder(keys, tensors, use_sliding_window=False)


def qwen_moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return decoder(
        keys,
        tensors,
        intermediate_size=keys.count("feed_forward_length", "expert_feed_forward_length"),
        moe_intermediate_size=keys.count("expert_feed_forward_length"),
        num_experts=keys.count("expert_count"),
        num_experts_per_tok=keys.count("expert_used_count", most=keys.count("expert_count") + 1),
        norm_topk_prob=True,  # as llama.cpp computes it
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def gemma(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return decoder(keys, tensors, hidden_activation="gelu_pytorch_tanh")


def gemma2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    found = gemma(keys, tensors)
    return found | {
        "query_pre_attn_scalar": _scale(keys, found, layers_of_27b=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=30.0),
        "sliding_window": keys.count("attention.sliding_window", default=4096),
    }


def gemma3(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    found = gemma(keys, tensors)
    return found | {
        "query_pre_attn_scalar": _scale(keys, found, layers_of_27b=62),
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", default=6),
        "rope_theta": keys.number("rope.freq_base", default=1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", default=10000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=0.0, least=-1) or None,
        "attn_logit_softcapping": None,
    }


def _scale(keys: Keys, config: Mapping[str, Any], layers_of_27b: int) -> int:
    """`query_pre_attn_scalar`, which llama.cpp knows by the number of layers: other than the head's size at 27 B."""
    if keys.count("block_count") == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def phi3(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    found = decoder(replace(keys, values={**keys.values, "rope.dimension_count": None}), tensors)
    size, context = found["head_dim"], found["max_position_embeddings"]
    turned = keys.count("rope.dimension_count", default=size, most=size + 1)
    original = keys.count("rope.scaling.original_context_length", default=context)
    found |= {
        "original_max_position_embeddings": original,
        "sliding_window": keys.count("attention.sliding_window") if keys.get("attention.sliding_window") else None,
        "partial_rotary_factor": turned / size,
    }
    if {*LONG} & tensors.keys():
        long, short = (_factors(keys, tensors, name, turned) for name in LONG)
        factors = {"long_factor": list(map(_plain, long.tolist())), "short_factor": list(map(_plain, short.tolist()))}
        found["rope_scaling"] = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
        scale = keys.number("rope.scaling.attn_factor", default=1.0)  # as llama.cpp, whatever the length of the context
        if abs(scale - longrope_attention(context, original)) > 1e-4:
            found["rope_scaling"]["attention_factor"] = scale
    return found


def longrope_attention(context: int, original: int) -> float:
    """The scale of attention of longrope that transformers computes where the configuration states none."""
    return sqrt(1 + log(context / original) / log(original)) if context > original > 1 else 1.0


def starcoder2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return _with_layer_norms(keys, tensors, "norm_epsilon") | {"use_bias": True, "sliding_window": None}


def gpt2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {
        "n_embd": keys.count("embedding_length"),
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_inner": keys.count("feed_forward_length"),
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def bloom(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if keys.count("attention.head_count_kv", default=heads) != heads:
        raise keys.unsupported("shares keys and values between heads, which transformers' BLOOM cannot")
    if keys.count("feed_forward_length", default=4 * width) != 4 * width:
        raise keys.unsupported("has a feed-forward part of another size than four times its width")
    return {
        "hidden_size": width,
        "n_layer": keys.count("block_count"),
        "n_head": heads,
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def falcon(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    heads, groups = keys.count("attention.head_count"), keys.count("attention.head_count_kv", default=1)
    width, two_norms = keys.count("embedding_length"), "blk.0.attn_norm_2.weight" in tensors
    if scaling(keys, tensors, max(1, width // heads)):
        raise keys.unsupported("scales rotary positions")
    return {
        "hidden_size": width,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_kv_heads": groups,
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "max_position_embeddings": keys.count("context_length"),
        "multi_query": groups == 1,
        "new_decoder_architecture": two_norms or groups > 1,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if two_norms or groups > 1 else None,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }


def mpt(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    width, bias = keys.count("embedding_length"), keys.number("attention.max_alibi_bias", default=0.0, least=-1)
    if not bias or bias != int(bias):
        raise keys.unsupported("has no ALiBi (`attention.max_alibi_bias`) as transformers' MPT has")
    if keys.count("attention.head_count_kv", default=keys.count("attention.head_count")) != keys.count(
        "attention.head_count"
    ):
        raise keys.unsupported("shares keys and values between heads, which transformers' MPT cannot")
    clip = keys.number("attention.clamp_kqv", default=0.0, least=-1)
    return {
        "d_model": width,
        "n_layers": keys.count("block_count"),
        "n_heads": keys.count("attention.head_count"),
        "expansion_ratio": keys.count("feed_forward_length") // width,
        "max_seq_len": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "attn_config": {"alibi": True, "alibi_bias_max": int(bias), "clip_qkv": clip or None},
        "no_bias": True,
    }


def cohere(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Command R; llama.cpp expects norms of queries and keys from 64 layers on."""
    if (normed := "blk.0.attn_q_norm.weight" in tensors) != (keys.count("block_count") >= COMMAND_R_PLUS):
        raise keys.unsupported(
            f"has {'norms' if normed else 'no norms'} of queries in {keys.count('block_count')} layers"
        )
    return _cohere(keys, tensors) | {"use_qk_norm": normed}


COMMAND_R_PLUS = 64


def cohere2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    _require_windows(keys, 4)
    found = _cohere(keys, tensors)
    if found.get("rope_scaling"):
        raise keys.unsupported("scales rotary positions, of which only layers with a sliding window have some")
    return found | {"sliding_window": keys.count("attention.sliding_window")}


def _cohere(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    found = _with_layer_norms(keys, tensors, "layer_norm_eps")
    return found | {"logit_scale": keys.number("logit_scale")}


def stablelm(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    keys.get("use_parallel_residual")  # llama.cpp goes by the norm
    return _partly_turned(keys, lambda keys: _with_layer_norms(keys, tensors, "layer_norm_eps")) | {
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    }


def glm4(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in tensors
    return _partly_turned(keys, lambda keys: decoder(keys, tensors, attention_bias=bias))


def exaone4(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """EXAONE 4; llama.cpp gives those of 64 layers a sliding window, in all but every fourth layer."""
    layers, windowed = _layers(keys), bool(keys.get("attention.sliding_window"))
    if windowed != (layers == EXAONE_32B):
        raise keys.unsupported(f"has {'a' if windowed else 'no'} sliding window in {layers} layers")
    found = decoder(keys, tensors)
    if not windowed:
        return found | {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    _require_windows(keys, 4)
    if keys.number("rope.freq_base_swa", default=found["rope_theta"]) != found["rope_theta"]:
        raise keys.unsupported("turns positions by another base in layers with a sliding window")
    types = ["full_attention" if number % 4 == 3 else "sliding_attention" for number in range(layers)]
    window = keys.count("attention.sliding_window")
    return found | {"sliding_window": window, "sliding_window_pattern": 4, "layer_types": types}


EXAONE_32B = 64


def lfm2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """LFM 2: layers without heads of keys have a short convolution in place of attention."""
    layers, given = _layers(keys), keys.get("attention.head_count_kv")
    each = given if isinstance(given, list) else [given] * layers
    if len(each) != layers or not all(type(one) is int for one in each) or len({*each} - {0}) != 1:
        raise keys.invalid("attention.head_count_kv", given, f"one number for some of {layers} layers, 0 for others")
    found = decoder(replace(keys, values={**keys.values, "attention.head_count_kv": max(each)}), tensors)
    return {name: one for name, one in found.items() if name != "rms_norm_eps"} | {
        "norm_eps": found["rms_norm_eps"],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if one else "conv" for one in each],
    }


def _layers(keys: Keys) -> int:
    return keys.count("block_count", most=MANY_LAYERS + 1)


def _partly_turned(keys: Keys, config: Callable[[Keys], dict[str, Any]]) -> dict[str, Any]:
    """`config` of a model that turns a part of each head; UnsupportedInput if it scales positions as well."""
    found = config(replace(keys, values={**keys.values, "rope.dimension_count": None}))
    size = found.get("head_dim", found["hidden_size"] // found["num_attention_heads"])
    turned = keys.count("rope.dimension_count", default=size, most=size + 1)
    if found.get("rope_scaling"):
        raise keys.unsupported(f"scales rotary positions, of {turned} of {size} elements of a head")
    return found | {"partial_rotary_factor": turned / size}


def _with_layer_norms(keys: Keys, tensors: Tensors, name: str) -> dict[str, Any]:
    """As `decoder`, with layer norms, whose epsilon is the field `name`, and heads that divide the width."""
    epsilon = keys.number("attention.layer_norm_epsilon")
    found = decoder(replace(keys, values={**keys.values, "attention.layer_norm_rms_epsilon": epsilon}), tensors)
    if found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]:
        raise keys.unsupported("has heads that do not divide its width")
    del found["rms_norm_eps"], found["head_dim"]
    return found | {name: epsilon}


def _require_windows(keys: Keys, every: int) -> None:
    """UnsupportedInput unless all layers but every second, fourth, … one have a sliding window."""
    layers = range(1, _layers(keys) + 1)
    if keys.get("attention.sliding_window_pattern", default=every) not in (every, [bool(n % every) for n in layers]):
        raise keys.unsupported(f"has a sliding window in other layers than all but one in {every}")


MANY_LAYERS = 1 << 10


def gpt_oss(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    count = keys.count("expert_count")
    found = decoder(
        keys,
        tensors,
        intermediate_size=keys.count("expert_feed_forward_length", "feed_forward_length"),
        num_local_experts=count,
        num_experts_per_tok=keys.count("expert_used_count", most=count + 1),
        sliding_window=keys.count("attention.sliding_window"),
    )
    _require_windows(keys, 2)
    if keys.number("rope.freq_base_swa", default=found["rope_theta"]) != found["rope_theta"]:
        raise keys.unsupported("turns positions by another base in layers with a sliding window")
    # without it, transformers would scale positions; OpenAI's models do not round the range of YaRN, as no file states
    rope = found.get("rope_scaling", {"rope_type": "default"})
    return found | {"rope_scaling": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {})}


GROUPED = {160: "DeepSeek-V2", 256: "DeepSeek-V3"}
"""Numbers of experts of models with groups of them, which files before llama.cpp read these do not state."""


def deepseek(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """DeepSeek V2 if the router is a softmax, else V3, whose experts have biases for their choice."""
    turned, rank = keys.count("rope.dimension_count"), keys.count("attention.kv_lora_rank")
    heads, end = keys.count("attention.head_count"), "_mla" if keys.get("attention.key_length_mla") else ""
    key, value = (keys.count(f"attention.{name}_length{end}") for name in ("key", "value"))
    # a newer file has the sizes of the latents that llama.cpp keeps in its cache; an older one those of the heads
    sizes = (rank + turned, rank, 1) if end else (key, value, heads)
    names = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
    if any(keys.count(name, default=size) != size for name, size in zip(names, sizes, strict=True)):
        raise keys.unsupported("has keys or values of other sizes than its latents give")
    if key <= turned:
        raise keys.invalid(f"attention.key_length{end}", key, f"more than the {turned} elements that turn")
    plain = {**keys.values, "rope.scaling.yarn_log_multiplier": None, "attention.head_count_kv": heads}
    plain |= {"attention.key_length": turned, "attention.value_length": turned}
    found = decoder(replace(keys, values=plain), tensors)
    del found["head_dim"]
    return found | {
        "rope_scaling": _deepseek_scaling(keys, found.get("rope_scaling")),
        "q_lora_rank": _optional(keys, "attention.q_lora_rank", 1 << 31) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        **_deepseek_experts(keys, tensors),
    }


def _deepseek_scaling(keys: Keys, rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """`rope_scaling` with the scale of attention, for which llama.cpp takes `mscale` and `mscale_all_dim` as equal."""
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if rope is None:
        return None
    if rope["rope_type"] != "yarn":
        raise keys.unsupported(f"scales rotary positions by `{rope['rope_type']}`")
    if not multiplier:
        raise keys.unsupported("has YaRN without the scale of its attention (`rope.scaling.yarn_log_multiplier`)")
    scale = _plain(10 * keys.number("rope.scaling.yarn_log_multiplier"))
    return rope | {"mscale": scale, "mscale_all_dim": scale}


def _deepseek_experts(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Fields of the experts; UnsupportedInput for a choice of them that transformers does not compute."""
    layers, count = keys.count("block_count"), _optional(keys, "expert_count", 1 << 31)
    if not count:
        raise keys.unsupported("has no experts")
    in_use = keys.count("expert_used_count", most=count + 1)
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    if (keys.get("expert_gating_func", default=1), biased) not in ((1, False), (2, True)):
        raise keys.unsupported("chooses experts in another way than DeepSeek V2 and V3 (`expert_gating_func`)")
    groups, normalized = _optional(keys, "expert_group_count", count + 1), keys.flag("expert_weights_norm")
    used = keys.count("expert_group_used_count", most=groups + 1) if groups else 0
    if not groups and count in GROUPED:
        raise keys.unsupported(f"does not state the groups of the {count} experts of {GROUPED[count]}")
    found = {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_routed_experts": count,
        "num_experts_per_tok": in_use,
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": _optional(keys, "leading_dense_block_count", layers + 1),
        "routed_scaling_factor": keys.number("expert_weights_scale") if keys.get("expert_weights_scale") else 1.0,
        "norm_topk_prob": normalized,
        "moe_layer_freq": 1,
    }
    if biased:
        size = count // max(1, groups)
        if count % max(1, groups) or size < 2 or in_use > max(1, used) * size:
            raise keys.invalid("expert_group_count", groups, f"groups of the {count} experts that give those in use")
        kind = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return found | kind | {"n_group": max(1, groups), "topk_group": max(1, used), "num_nextn_predict_layers": 0}
    if normalized or groups > 1:
        what = "normalizes the weights of its experts" if normalized else "has groups of experts"
        raise keys.unsupported(f"{what}, which transformers' DeepSeek-V2 computes otherwise")
    kind = {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"}
    return found | kind | {"n_group": groups or None, "topk_group": used or None}


def _optional(keys: Keys, name: str, most: int) -> int:
    """A positive integer below `most`; 0 where it is not given."""
    return keys.count(name, most=most) if keys.get(name) else 0
