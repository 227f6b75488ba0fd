"""Converting the configuration of LLM Foundry's MPT to transformers' MPT, or refusing options that it cannot express.

Foundry's formula: mosaicml/llm-foundry `models/mpt/`, `models/layers/{attention,blocks,ffn,norm}.py`. transformers'
class (`models/mpt/modeling_mpt.py`) has ALiBi of at most 8, as many key heads as query heads, no biases, an MLP four
times as wide with an exact GELU, and reads only some fields of its configuration; the others it ignores silently. Fewer
key heads are repeated and a narrower MLP is filled with zeros (`enlarged`), which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.algebra import concat, fitting, fuse, slice_rows, zeros
from llmconv.convert.fields import LARGEST, Fields
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

FOUNDRY_ONLY = frozenset(  # fields of Foundry's configuration that transformers' has not
    ("norm_eps", "ffn_config", "fc_type", "init_config", "attention_bias", "block_overrides", "final_logit_softcapping")
    + ("head_dim", "use_pad_tok_in_ffn", "fuse_norm_attn_norm", "loss_fn", "name", "moe_world_size")
)

OLD_ATTENTION = {"attn_qk_ln": "qk_ln", "attn_clip_qkv": "clip_qkv"} | {
    name: name
    for name in ("attn_pdrop", "attn_impl", "softmax_scale", "prefix_lm", "attn_uses_sequence_id", "alibi")
    + ("alibi_bias_max",)
}
OLD_INIT = ("param_init_fn", "init_div_is_residual", "init_std", "emb_init_std", "emb_init_uniform_lim", "init_gain")
OLD_FIELDS = {*OLD_ATTENTION, *OLD_INIT, "fan_mode", "init_nonlinearity", "mlp_ratio", "low_precision_layernorm"}
# Options of `attn_config`: what Foundry takes where they are left out, and the values that transformers' MPT has
ATTENTION: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "alibi": (False, (True,)),
    "alibi_bias_max": (8, (8,)),
    "rope": (False, (False, None)),
    "sliding_window_size": (-1, (-1,)),
    "qk_ln": (False, (False, None)),
    "qk_gn": (False, (False, None)),
    "nope": (False, (False, None)),
    "prefix_lm": (False, (False, None)),
    "attn_logit_softcapping": (None, (None,)),
}
MODEL: Mapping[str, tuple[Any, tuple[Any, ...]]] = {  # options of the model, as in `ATTENTION`
    "no_bias": (False, (True,)),
    "norm_type": ("low_precision_layernorm", ("low_precision_layernorm", "layernorm")),
    "logit_scale": (None, (None, 1)),
    "final_logit_softcapping": (None, (None,)),
    "block_overrides": (None, (None,)),
}

# Fields of `attn_config` that are looked at elsewhere, or that change nothing here (`attn_uses_sequence_id` acts only
# on packed sequences, which are given in training)
HARMLESS = frozenset(
    ("attn_type", "kv_n_heads", "kv_dim", "attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "fused_qkv")
    + ("attn_uses_sequence_id", "attn_temperature_tuning", "rope_theta", "rope_impl", "rope_dail_config")
    + ("rope_hf_config", "seq_parallel_world_size")
)
# Sizes, and what both libraries take where they are left out
SIZES = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "vocab_size": 50368}
HINT = (
    "transformers' MPT would compute something else, without an error; give the folder of its code with "
    "`--code FOLDER --trust-remote-code`, if you trust it"
)


def native_config(config: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The config of transformers' MPT that computes what Foundry computes with `config`.

    One that transformers itself wrote (it has `layer_norm_epsilon` and nothing of Foundry's) is returned as it is. The
    model type is `mpt` or `mosaic_gpt` (its name before LLM Foundry). What matters only in training is left out, with a
    warning. Raises UnsupportedInput, with every such option and its value, if transformers' MPT computes something
    else, MalformedInput for a value of the wrong kind.
    """
    if _is_of_transformers(config):
        return dict(config)
    old = config["model_type"] == "mosaic_gpt"
    config = _modern(config) if old else config
    sizes = read_sizes(config, source)
    attention, ffn = _fields(config, source).table("attn_config"), _fields(config, source).table("ffn_config")
    found = _of_attention(attention, sizes) | _of_model(config, attention, sizes) | _of_mlp(config, ffn, sizes)
    if old and sizes["n_heads"] & (sizes["n_heads"] - 1):
        found["n_heads"] = f"{sizes['n_heads']} (not a power of two: its ALiBi was different before April 2023)"
    if found:
        options = ", ".join(f"`{name}` {value}" for name, value in found.items())
        raise UnsupportedInput(
            f"`{source}` is an MPT of LLM Foundry that transformers' MPT cannot express: {options}", hint=HINT
        )
    # lines about what transformers' class has no smaller form of
    width = _width(config, ffn, sizes)
    heads = _key_heads(attention, sizes)
    if heads != sizes["n_heads"]:
        warnings.append(
            f"keys and values of {heads} heads are repeated for {sizes['n_heads']}, since transformers' MPT has as "
            "many as queries: weights and caches are larger, and results the same"
        )
    if width != 4 * sizes["d_model"]:
        warnings.append(
            f"the MLP of width {int(width)} is filled up with zeros to {4 * sizes['d_model']}, the only width of "
            "transformers' MPT: weights are larger, and results the same"
        )
    if attention.get("attn_pdrop"):
        warnings.append(f"left out `attn_pdrop` {attention['attn_pdrop']}, which matters only in training")
    kept = {name: value for name, value in config.items() if name not in FOUNDRY_ONLY}
    epsilon = config.get("norm_eps", config.get("layer_norm_epsilon", 1e-5))
    given = _fields(attention, source)  # in the types that transformers insists on
    fixed = {"attn_type": "multihead_attention", "attn_impl": "torch", "attn_pdrop": 0, "prefix_lm": False}
    names = [name for name in ("clip_qkv", "softmax_scale") if given.get(name) is not None]
    numbers = {"clip_qkv": None, "softmax_scale": None} | {name: given.number(name, least=-LARGEST) for name in names}
    fixed |= {"qk_ln": False, "attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8}
    native: dict[str, Any] = {
        "layer_norm_epsilon": _fields({"norm_eps": epsilon}, source).number("norm_eps", least=-LARGEST),
        "embedding_fraction": _fields(config, source).number("embedding_fraction", default=1, least=-LARGEST),
        "attn_config": fixed | numbers,
    }
    native |= {"expansion_ratio": 4, "learned_pos_emb": False, "no_bias": True, "logit_scale": None}
    return kept | sizes | native | {"model_type": "mpt", "init_device": "cpu"}


def _is_of_transformers(config: Mapping[str, Any]) -> bool:
    return config["model_type"] == "mpt" and "layer_norm_epsilon" in config and not FOUNDRY_ONLY & config.keys()


def is_native(config: Mapping[str, Any], source: str) -> bool:
    """Whether transformers' MPT computes what Foundry computes with a config; see `native_config`."""
    try:
        native_config(config, source, [])
    except UnsupportedInput:
        return False
    return True


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Foundry config for any machine, as its `convert_composer_to_hf.py` leaves it: torch's attention, on the CPU."""
    attention = config.get("attn_config")
    own = {"attn_config": {**attention, "attn_impl": "torch"}} if isinstance(attention, Mapping) else {}
    return {**config, **own, "init_device": "cpu"}


def _of_attention(attention: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, str]:
    """What of `attn_config` stands in the way: option to value."""
    found = _other_than(ATTENTION, attention, "attn_config.")
    kind = attention.get("attn_type", "multihead_attention")
    if kind not in ("multihead_attention", "multiquery_attention", "grouped_query_attention"):
        found["attn_config.attn_type"] = repr(kind)
    elif not isinstance(heads := _key_heads(attention, sizes), int) or heads < 1 or sizes["n_heads"] % heads:
        found["attn_config.kv_n_heads"] = repr(heads)
    if attention.get("kv_dim") not in (None, sizes["d_model"]):
        found["attn_config.kv_dim"] = repr(attention["kv_dim"])
    tuning = attention.get("attn_temperature_tuning")
    if tuning and not (isinstance(tuning, Mapping) and not tuning.get("attn_scale")):
        found["attn_config.attn_temperature_tuning"] = repr(tuning)
    for name, value in attention.items():
        if name not in ATTENTION and name not in HARMLESS and value not in (None, False):
            found[f"attn_config.{name}"] = repr(value)
    return found


def _of_model(config: Mapping[str, Any], attention: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, str]:
    """What of the model's own options stands in the way."""
    norm = config.get("norm_type", "low_precision_layernorm")
    found = _other_than(MODEL, {**config, "norm_type": norm.lower() if isinstance(norm, str) else norm})
    # Foundry switches learned positions off where there is ALiBi or rope (`MPTConfig.__init__`).
    if not attention.get("alibi") and not attention.get("rope") and config.get("learned_pos_emb", True):
        found["learned_pos_emb"] = "True"
    if config.get("no_bias") is True and config.get("attention_bias"):
        found["attention_bias"] = "True"
    if config.get("norm_eps", same := config.get("layer_norm_epsilon")) != same and same is not None:
        found["norm_eps"] = f"{config['norm_eps']!r} next to `layer_norm_epsilon` {same!r}"
    kind = config.get("fc_type", "torch")
    if (kind.get("name", "torch") if isinstance(kind, Mapping) else kind) not in ("torch", "te"):
        found["fc_type"] = repr(kind)
    width = config.get("head_dim")
    if width is not None and width != sizes["d_model"] / sizes["n_heads"]:
        found["head_dim"] = repr(width)
    return found


def _of_mlp(config: Mapping[str, Any], ffn: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, str]:
    """What of the MLP stands in the way."""
    found: dict[str, str] = {}
    if (kind := ffn.get("ffn_type", "mptmlp")) != "mptmlp":
        found["ffn_config.ffn_type"] = repr(kind)
    activation = ffn.get("ffn_act_fn") or {"name": "gelu"}
    if activation not in ({"name": "gelu"}, {"name": "gelu", "approximate": "none"}):
        found["ffn_config.ffn_act_fn"] = repr(activation)
    width, most = _width(config, ffn, sizes), 4 * sizes["d_model"]
    if isinstance(width, bool) or not isinstance(width, int | float) or not 1 <= width <= most or width % 1:
        named = "expansion_ratio" if ffn.get("ffn_hidden_size") is None else "ffn_config.ffn_hidden_size"
        found[named] = repr(config.get("expansion_ratio") if named == "expansion_ratio" else width)
    return found


def _width(config: Mapping[str, Any], ffn: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The width of the MLP inside, whatever its type."""
    hidden, ratio = ffn.get("ffn_hidden_size"), config.get("expansion_ratio", 4)
    if hidden is not None:
        return hidden
    return int(sizes["d_model"] * ratio) if isinstance(ratio, int | float) and 0 < ratio < LARGEST else ratio


def _key_heads(attention: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The number of heads of keys and values, whatever its type."""
    kind = attention.get("attn_type", "multihead_attention")
    known = {"multihead_attention": sizes["n_heads"], "multiquery_attention": 1}
    return known.get(kind, attention.get("kv_n_heads"))


def _other_than(
    table: Mapping[str, tuple[Any, tuple[Any, ...]]], given: Mapping[str, Any], prefix: str = ""
) -> dict[str, str]:
    values = {name: (given.get(name, default), allowed) for name, (default, allowed) in table.items()}
    return {prefix + name: repr(value) for name, (value, allowed) in values.items() if value not in allowed}


def _modern(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `mosaic_gpt` configuration with the names of today."""
    attention = {new: config[old] for old, new in OLD_ATTENTION.items() if old in config}
    if config.get("multiquery_attention"):
        attention["attn_type"] = "multiquery_attention"
    modern = {name: value for name, value in config.items() if name not in {*OLD_FIELDS, "multiquery_attention"}}
    own = config.get("attn_config")
    merged = attention | own if isinstance(own, dict) else own or attention
    ratio = config.get("mlp_ratio", config.get("expansion_ratio", 4))
    return modern | {"attn_config": merged, "expansion_ratio": ratio}


def _fields(config: Mapping[str, Any], source: str) -> Fields:
    whole = {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in config.items()}
    return Fields(whole, source, hint="give the configuration it was trained with, with `--config`")


def read_sizes(config: Mapping[str, Any], source: str) -> dict[str, int]:
    """The fields of `SIZES`; MalformedInput if one is not a positive integer."""
    return {name: _fields(config, source).count(name, default=default) for name, default in SIZES.items()}


OLD_NAMES = ((".ln_", ".norm_"), (".mlp_up.", ".up_proj."), (".mlp_down.", ".down_proj."), (".mlp.", ".ffn."))
"""Names from before LLM Foundry (its `scripts/misc/convert_examples_ckpt.py`)."""


def native_tensors(tensors: Mapping[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """The tensors in transformers' names, queries, keys, values in one; MalformedInput: duplicates, or no match."""
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = name.replace(".norm_attn_norm.", ".")
        for old, modern in OLD_NAMES:
            new = new.replace(old, modern)
        if new in renamed:
            raise MalformedInput(f"`{source}` holds `{new}` twice, under different names", hint="save the model alone")
        renamed[new] = tensor
    with fitting(f"`{source}` holds queries, keys and values that do not fit together", "the checkpoint is damaged"):
        return fuse(renamed, [f"attn.W{part}" for part in "qkv"], "attn.Wqkv")


def enlarged(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> dict[str, LazyTensor]:
    """The tensors with a key/value head for each query head, and an MLP four times as wide as the model.

    Foundry gives each key head to as many neighboring query heads (`repeat_kv_for_gqa`); hidden units without weights
    add nothing. Tensors of another shape than the config declares stay as they are, for the check of completeness to
    refuse.
    """
    if _is_of_transformers(config):
        return dict(tensors)
    config = _modern(config) if config["model_type"] == "mosaic_gpt" else config
    sizes = read_sizes(config, source)
    heads = int(_key_heads(_fields(config, source).table("attn_config"), sizes))
    inner = int(_width(config, _fields(config, source).table("ffn_config"), sizes))
    return {name: _enlarged(name, tensor, sizes, heads, inner) for name, tensor in tensors.items()}


def _enlarged(name: str, tensor: LazyTensor, sizes: Mapping[str, int], heads: int, inner: int) -> LazyTensor:
    width, all_heads = sizes["d_model"], sizes["n_heads"]
    size, missing = width // all_heads, 4 * width - inner
    if name.endswith(".attn.Wqkv.weight") and tensor.shape == (width + 2 * size * heads, width) and heads < all_heads:
        parts = [slice_rows(tensor, start, start + size) for start in range(width, tensor.shape[0], size)]
        repeated = [part for part in parts for _ in range(all_heads // heads)]
        return concat([slice_rows(tensor, 0, width), *repeated], 0)
    if missing and name.endswith(".ffn.up_proj.weight") and tensor.shape == (inner, width):
        return concat([tensor, zeros(tensor.dtype, (missing, width))], 0)
    if missing and name.endswith(".ffn.down_proj.weight") and tensor.shape == (width, inner):
        return concat([tensor, zeros(tensor.dtype, (width, missing))], 1)
    return tensor
