"""A Hugging Face model as a GGUF file, with the names, keys and changes of llama.cpp's own converter.

Source: llama.cpp `conversion/base.py` (vectors, positions and routers stay float32); `recipes.py` has types of blocks.
What the file says is read back and compared with the configuration, so that nothing is left out silently.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor, isclose, log, pi, prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.causal_lm import mtp_tensors
from llmconv.checkpoint import SENTENCE_MODULES, Checkpoint, listed_modules, own_file, read_json, transposed
from llmconv.convert.algebra import (
    concat,
    deal_rows,
    fitting,
    inverse_order,
    inverted,
    permute_rows,
    rename,
    reshaped,
    rope_order,
)
from llmconv.convert.formats.gguf.configs import (
    FREQUENCIES,
    LONG,
    POOLINGS,
    Keys,
    llama3_factors,
    longrope_attention,
)
from llmconv.convert.formats.gguf.names import (
    ARCHITECTURES,
    FALCON_TWO_NORMS,
    HEAD_ORDERED,
    ONE_LESS,
    TURNED,
    in_hugging_face_names,
)
from llmconv.convert.formats.gguf.tokenizer import sampling_keys, tokenizer_keys
from llmconv.convert.models.model_config import rope_settings
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem, first_line, listing, short
from llmconv.files.gguf_file import ALIGNMENT, ARRAY, BLOCKS, MAGIC, NUMBERS, PLAIN, TEXT
from llmconv.files.sources import model_name
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast, in_memory

FILE = "model.gguf"
VERSION = 3
TYPES = {name: number for number, (name, _) in PLAIN.items()} | {block.name: number for number, block in BLOCKS.items()}
OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FLOATS = {"F32": 0, "F16": 1, "BF16": 32}
MIXTURES = {
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
}
"""llama.cpp's names of what a file can have, and `general.file_type`, of floats by the type of most matrices."""
KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", **{kind: kind.lower() for kind in MIXTURES}}
"""Values of `--dtype`, by these names."""
KEPT = re.compile(
    r"\.ffn_gate_inp\.|\.shortconv\.conv\.|^position_embd\.|_norm\.weight$|(?<!\.weight)$"
)  # matrices that stay float32

UINT32, FLOAT32, BOOL = 4, 6, 7


def save(checkpoint: Checkpoint, shards: int, imatrix: Path | None = None, *, kind: str = "") -> Plan:
    """The file of a model; see `Format.save`.

    `kind` is the type of its matrices or their mixture, a key of `KINDS`; `imatrix` an importance matrix for a mixture.
    """
    source = checkpoint.path.name
    if shards != 1:
        raise UsageProblem("GGUF files are not split into ranks", hint="leave out `--shards`")
    if imatrix and (kind not in MIXTURES or kind == "Q8_0"):
        raise UsageProblem(
            f"`{KINDS[kind]}` does not use an importance matrix",
            hint="leave out `--imatrix`, or give another type, such as q4_k_m",
        )
    architecture = _architecture(checkpoint)
    keys = _keys(checkpoint.config)
    tensors = _tensors(checkpoint, architecture)
    matrices = {name: one.shape[-1] for name, one in tensors.items() if len(one.shape) > 1 and not KEPT.search(name)}
    kinds, weights, about, warnings = dict.fromkeys(matrices, kind), dict[str, Array](), {}, list[str]()
    if kind in MIXTURES:
        from llmconv.convert.formats.gguf.recipes import types_of  # noqa: PLC0415 - few files have mixtures

        tied, weighted = "output.weight" not in tensors, imatrix is not None
        kinds = types_of(matrices, kind, architecture, keys, tied=tied, weighted=weighted)
    if imatrix:
        from llmconv.convert.formats.gguf.importance import read_importance, without_weights  # noqa: PLC0415 - as above

        shapes = {name: one.shape for name, one in tensors.items() if len(one.shape) > 1}
        importance = read_importance(imatrix, shapes, source)
        weights, about = importance.weights, importance.metadata
        warnings += without_weights(weights, kinds, imatrix.name)
    stored = {
        name: _stored(name, tensor, kinds.get(name, "F32"), weights.get(name)) for name, tensor in tensors.items()
    }
    _require_same(checkpoint, architecture, keys, tensors)
    types = [stored[name].type for name in matrices if stored[name].type != "F32"]
    warnings += _approximations(_full(checkpoint.config).to_dict())
    vocabulary, left = tokenizer_keys(checkpoint, tensors["token_embd.weight"].num_rows, warnings)
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": model_name(checkpoint.path),
        "general.quantization_version": 2,
        "general.file_type": (FLOATS | MIXTURES)[
            kind if kind in MIXTURES else max(types, key=types.count, default="F32")
        ],
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **{f"{architecture}.{key}": value for key, value in _pooling(checkpoint.path, warnings).items()},
        **vocabulary,
        **sampling_keys(checkpoint.side_files, warnings),
        **about,
    }
    container = partial(gguf_pieces, metadata=metadata, stored=stored)
    shard = Shard(FILE, {name: one.data for name, one in stored.items()}, container)
    return Plan(
        replace(checkpoint, side_files={name: checkpoint.side_files[name] for name in left}),
        (shard,),
        warnings=tuple(warnings),
    )


def _architecture(checkpoint: Checkpoint) -> str:
    kind = str(checkpoint.config.get("model_type"))
    if kind in ("mistral", "mixtral"):
        if getattr(_full(checkpoint.config), "sliding_window", None):
            raise UnsupportedInput(
                f"`{checkpoint.path.name}` has a sliding window, which llama.cpp's `llama` does not have",
                hint="set `sliding_window` to null in its `config.json` if the contexts are shorter",
            )
        return "llama"
    known = {family.model_type: name for name, family in ARCHITECTURES.items()} | {"deepseek_v2": "deepseek2"}
    if kind not in known:
        raise UnsupportedInput(
            f"a model of the type `{kind[:80]}` is not written as GGUF",
            hint=f"supported are {', '.join([*known, 'mistral', 'mixtral'])}; for others use llama.cpp's converter",
        )
    if kind in (UNTIED if "lm_head.weight" not in checkpoint.tensors else TIED):
        raise UnsupportedInput(
            f"`{checkpoint.path.name}` has {'a tied' if kind in UNTIED else 'its own'} head, which llama.cpp's "
            f"`{known[kind]}` does not have",
            hint="use another program than llama.cpp, or another format",
        )
    if heads := mtp_tensors(checkpoint.tensors, checkpoint.config):
        raise UnsupportedInput(
            f"`{checkpoint.path.name}` has an MTP head, which is not written as GGUF: {listing(heads)}",
            hint="use llama.cpp's converter",
        )
    return known[kind]


UNTIED, TIED = ("gpt_oss", "olmo2", "stablelm"), ("cohere", "cohere2", "gemma", "gemma2")
"""Types whose head llama.cpp requires in the file, or does not look for."""


def _full(config: Mapping[str, Any]) -> Any:
    """transformers' configuration, with the defaults of fields that the file lacks."""
    from transformers import AutoConfig  # noqa: PLC0415 - of no other format

    try:
        return AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    except Exception as error:  # its checks of fields raise several classes
        reason = first_line(error.__cause__ or error)
        problem = f"transformers cannot read the configuration: {reason.removeprefix('ValueError: ')}"
        raise MalformedInput(problem, hint="correct `config.json`, or copy that of the original model") from error


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:  # noqa: C901, PLR0915 - a line per key
    """The metadata of the model, by keys without the architecture; those of its fields that the file can state."""
    full = _full(config).to_dict()
    rope = full.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {}

    def put(key: str, *names: str, of: Mapping[str, Any] = full, kind: Callable[[Any], Any] = int) -> None:
        value = next((of[name] for name in names if of.get(name) is not None), None)
        if value is not None and value is not False:
            found[key] = kind(value)

    put("context_length", "max_position_embeddings", "n_positions", "max_seq_len")
    put("embedding_length", "hidden_size", "n_embd", "d_model")
    put("block_count", "num_hidden_layers", "n_layer", "n_layers")
    put("feed_forward_length", "intermediate_size", "n_inner", "ffn_hidden_size")
    found.setdefault("context_length", 2048)  # as llama.cpp's converter for models without a limit
    found.setdefault("feed_forward_length", int(full.get("expansion_ratio", 4)) * found["embedding_length"])
    put("attention.head_count", "num_attention_heads", "n_head", "n_heads")
    put("attention.head_count_kv", "num_key_value_heads", "num_kv_heads")
    if full.get("multi_query") and not full.get("new_decoder_architecture"):
        found["attention.head_count_kv"] = 1
    put("attention.layer_norm_rms_epsilon", "rms_norm_eps", "norm_eps", kind=float)
    put("attention.layer_norm_epsilon", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", kind=float)
    put("vocab_size", "vocab_size")
    heads, width = found["attention.head_count"], found["embedding_length"]
    head_dim = full.get("head_dim") or width // heads
    if "rms_norm_eps" in full or "head_dim" in full:
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope:
        found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head_dim)
        put("rope.freq_base", "rope_theta", of=rope, kind=float)
        kind = rope.get("rope_type", "default")
        if kind in ("linear", "yarn"):
            found["rope.scaling.type"] = kind
            put("rope.scaling.factor", "factor", of=rope, kind=float)
            put("rope.scaling.original_context_length", "original_max_position_embeddings", of=rope)
            put("rope.scaling.yarn_beta_fast", "beta_fast", of=rope, kind=float)
            put("rope.scaling.yarn_beta_slow", "beta_slow", of=rope, kind=float)
    local = (full.get("rope_parameters") or {}).get("sliding_attention") or {}
    put("rope.freq_base_swa", "rope_theta", of=local, kind=float)
    put("expert_count", "num_local_experts", "num_experts", "n_routed_experts")
    if "expert_count" in found:
        put("expert_used_count", "num_experts_per_tok")
        put("expert_feed_forward_length", "moe_intermediate_size")
    if config["model_type"] == "gpt_oss":
        put("expert_feed_forward_length", "intermediate_size")
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2", "exaone4"):
        put("attention.sliding_window", "sliding_window")
    put("attn_logit_softcapping", "attn_logit_softcapping", kind=float)
    put("final_logit_softcapping", "final_logit_softcapping", kind=float)
    put("embedding_scale", "embedding_multiplier", kind=float)
    put("residual_scale", "residual_multiplier", kind=float)
    put("attention.scale", "attention_multiplier", kind=float)
    put("logit_scale", "logits_scaling", "logit_scale", kind=float)
    if config["model_type"] == "phi3":
        put("rope.scaling.original_context_length", "original_max_position_embeddings")
        if rope.get("rope_type") == "longrope":  # llama.cpp derives no scale of attention
            usual = longrope_attention(found["context_length"], found["rope.scaling.original_context_length"])
            found["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
    if attention := full.get("attn_config"):
        put("attention.max_alibi_bias", "alibi_bias_max", of=attention, kind=float)
        put("attention.clamp_kqv", "clip_qkv", of=attention, kind=float)
    if config["model_type"] == "lfm2":
        put("shortconv.l_cache", "conv_L_cache")
        groups = [0 if kind == "conv" else full["num_key_value_heads"] for kind in full["layer_types"]]
        found |= {
            "attention.head_count_kv": np.array(groups, np.int32),
            "feed_forward_length": _effective(full)["intermediate_size"],
        }
    return found | (_latent_keys(full, rope) if "kv_lora_rank" in full else {})


def _latent_keys(full: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of DeepSeek: llama.cpp's cache has a latent and the part of a key that turns, as one head."""
    rank, turned = full["kv_lora_rank"], full["qk_rope_head_dim"]
    names = {
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
    }
    found = {key: full[name] for key, name in names.items() if full[name] is not None}
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": full["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": full["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": full["q_lora_rank"] or 0,  # llama.cpp asks for it, but for models of 26 or 27 layers
        "leading_dense_block_count": full["first_k_dense_replace"] or 0,
        "expert_gating_func": 2 if full["model_type"] == "deepseek_v3" else 1,
    }


MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "lasttoken",
    **{name: name for name in ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")},
}
"""Pooling modes by what their fields before version 6 of sentence-transformers are called."""


def _pooling(folder: Path, warnings: list[str]) -> dict[str, int]:
    """The key of what follows the model in sentence-transformers; a warning for modules that no key states."""
    modules = listed_modules(folder) if (folder / SENTENCE_MODULES).is_file() else []
    others = [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize", "Dropout")]
    homes = [home for kind, home in modules if kind == "Pooling"]
    modes: list[Any] = []
    for home in homes:
        config = read_json(own_file(folder, f"{home}/config.json")) if (folder / home / "config.json").is_file() else {}
        given = config.get("pooling_mode")
        if given is None:
            given = [mode for field, mode in MODES.items() if config.get(f"pooling_mode_{field}")] or ["mean"]
        modes += given if isinstance(given, list) else [given]
        others += ["Pooling"] if config.get("include_prompt") is False else []
    number = POOLINGS.get(modes[0]) if len(modes) == 1 and isinstance(modes[0], str) else None
    others += ["Pooling"] if homes and number is None else []
    if others:
        listed = ", ".join(dict.fromkeys(others))
        warnings.append(
            f"a GGUF file does not state the modules {listed} of `{SENTENCE_MODULES}`: its embeddings are those "
            "before them"
        )
    return {} if number is None else {"pooling_type": number}


# --- tensors ----------------------------------------------------------------------------------------------------------


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """The tensors in llama.cpp's names and orders; UnsupportedInput for a model that llama.cpp does not have."""
    return _tensors(checkpoint, _architecture(checkpoint))


def _tensors(checkpoint: Checkpoint, architecture: str) -> dict[str, LazyTensor]:
    """The tensors in llama.cpp's names and orders, in the element types of the checkpoint."""
    config, family = checkpoint.config, ARCHITECTURES[architecture]
    names = FALCON_TWO_NORMS if "transformer.h.0.ln_attn.weight" in checkpoint.tensors else family.names
    stored, divided = dict(checkpoint.tensors), dict[str, LazyTensor]()
    with fitting(f"the tensors of `{checkpoint.path.name}` do not match its configuration"):
        for parts in family.parts:
            divided |= parts.write(stored, _full(config).to_dict())
    found = {
        name: _changed(target, stored[target], config)
        for name, target in rename(stored, inverted(names), checkpoint.path.name).items()
    }
    rope = rope_settings(config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3":
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found[FREQUENCIES] = in_memory(llama3_factors(rope, theta, head_dim), BY_NAME["float32"])
    if kind == "longrope":
        for name, length in zip(LONG, ("long", "short"), strict=True):
            found[name] = in_memory(np.array(rope[f"{length}_factor"], np.float32), BY_NAME["float32"])
    return found | divided


def _changed(name: str, tensor: LazyTensor, config: Mapping[str, Any]) -> LazyTensor:
    """What llama.cpp's converter does to a tensor of a family, by Hugging Face's name."""
    kind = config["model_type"]
    if kind in HEAD_ORDERED and re.search(r"\.[qk]_proj\.", name):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return permute_rows(tensor, inverse_order(rope_order(head_dim)))
    if kind in ONE_LESS and name.endswith("norm.weight"):
        whole = cast(tensor, BY_NAME["float32"])
        return LazyTensor(whole.dtype, whole.shape, lambda start, stop: whole.rows(start, stop) + np.float32(1))
    if kind == "lfm2" and name.endswith("conv.conv.weight"):
        return reshaped(tensor, (tensor.shape[0], tensor.shape[-1]))
    if kind == "gpt2" and TURNED.search(name):
        return transposed(tensor)
    if "query_key_value" in name:
        heads = int(config.get("num_attention_heads") or config["n_head"])
        groups = heads if kind == "bloom" else config.get("num_kv_heads") or 1
        if config.get("multi_query") and not config.get("new_decoder_architecture"):
            groups = 1
        width = config["hidden_size"] // heads
        return concat(deal_rows(tensor, [heads // groups * width, width, width]), 0)
    return tensor


# --- what the file says -----------------------------------------------------------------------------------------------

IGNORED = re.compile(
    r"_token_id$|dropout|^(?:dtype|torch_dtype|architectures|transformers_version|_name_or_path|use_cache|model_type|"
    r"initializer_range|pretraining_tp|output_.*|return_dict|problem_type|id2label|label2id|chunk_size_feed_forward|"
    r"router_.*|tie_word_embeddings|vocab_size|cache_implementation|summary_.*|resid_pdrop|embd_pdrop|attn_pdrop|"
    r"reorder_and_upcast_attn|init_.*|verbose|max_window_layers|task_specific_params|num_mtp_layers|"
    r"num_nextn_predict_layers)$"
)
"""Fields that change no logit, or that are compared by the tensors."""

UNDECLARED = ("head_dim", "is_causal")  # fields that models read, and some of their configurations do not declare
MPT_ATTENTION = ("alibi", "alibi_bias_max", "clip_qkv", "softmax_scale", "qk_ln", "prefix_lm", "attn_type")


def _require_same(
    checkpoint: Checkpoint, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> None:
    """Refuses a model of which the file would say something else than its configuration (UnsupportedInput)."""
    source = checkpoint.path.name
    listed = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in keys.items()}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": one for key, one in listed.items()}}
    try:
        back, found = in_hugging_face_names(Keys.of(metadata, source), tensors)
    except MalformedInput as error:  # a field that the file requires, and the configuration leaves out
        raise UnsupportedInput(
            f"a GGUF file of `{architecture}` cannot state the model `{source}`: {error.message}",
            hint="use llama.cpp's own converter",
        ) from error
    fields = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    kind = back.pop("model_type")
    own, other = (
        _effective(_full({**given, "model_type": kind, "pad_token_id": None}).to_dict())  # of any vocabulary
        for given in (fields, back)
    )
    known = {*_full({"model_type": kind}).to_dict(), *UNDECLARED}  # others change nothing in transformers' class
    odd = [
        name for name in own if name in known and not IGNORED.search(name) and not _alike(own[name], other.get(name))
    ]
    if odd:
        shown = ", ".join(f"`{name}` {short(own[name], 60)}" for name in odd[:3])
        raise UnsupportedInput(
            f"`{source}` has settings that a GGUF file of `{architecture}` does not state: {shown}",
            hint="llama.cpp has no such model, or another architecture for it; use its own converter",
        )
    missing = checkpoint.tensors.keys() - found.keys()
    if missing or {name: checkpoint.tensors[name].shape for name in found} != {n: t.shape for n, t in found.items()}:
        raise UnsupportedInput(f"`{source}` has tensors that GGUF has no name for", hint="use llama.cpp's converter")


def _approximations(full: Mapping[str, Any]) -> list[str]:
    """Warnings about models that llama.cpp computes slightly differently from transformers."""
    rope = full.get("rope_parameters") or {}
    if "kv_lora_rank" in full and full["rms_norm_eps"] != LATENT_EPSILON:
        return [
            f"llama.cpp takes `rms_norm_eps` {full['rms_norm_eps']} for the norms of latents too, transformers "
            f"{LATENT_EPSILON}: logits differ slightly"
        ]
    if rope.get("rope_type") == "longrope" and full["max_position_embeddings"] > (
        original := rope["original_max_position_embeddings"]
    ):
        return [
            f"llama.cpp turns positions of any text by `long_factor` if its context is larger than {original} tokens, "
            f"and the model those of longer texts alone: run it with `-c {original}` where that is enough"
        ]
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        size, context, base = full["head_dim"], rope["original_max_position_embeddings"], rope["rope_theta"]
        low, high = (size * log(context / (turn * 2 * pi)) / (2 * log(base)) for turn in turns)
        if (max(low, 0), min(high, size - 1)) != (max(floor(low), 0), min(ceil(high), size - 1)):
            return ["llama.cpp rounds the range of YaRN, and the model does not (`truncate`): logits differ slightly"]
    return []


LATENT_EPSILON = 1e-6  # of transformers' `q_a_layernorm` and `kv_a_layernorm`


def _effective(config: dict[str, Any]) -> dict[str, Any]:
    """The fields with values for those that follow from others, and without those that have no effect then."""
    found = {"is_causal": True, **config}
    if "head_dim" in config:
        found["head_dim"] = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if "n_inner" in config:
        found["n_inner"] = config["n_inner"] or 4 * config["n_embd"]
    if "new_decoder_architecture" in config:
        if not config["new_decoder_architecture"]:
            found["num_kv_heads"] = 1 if config["multi_query"] else config["num_attention_heads"]
        del found["multi_query"]
        found["ffn_hidden_size"] = config["ffn_hidden_size"] or 4 * config["hidden_size"]
    if isinstance(rope := config.get("rope_parameters"), Mapping):
        found["rope_parameters"] = {name: value for name, value in rope.items() if name != "type"}  # as `rope_type`
    if config.get("layer_types"):  # which follow from the others, where they are not given
        found |= {name: None for name in ("sliding_window_pattern", "full_attn_idxs") if name in config}
    if "block_auto_adjust_ff_dim" in config:
        size = config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:  # as `Lfm2MLP`
            factor, multiple = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
            size = int(2 * size / 3) if factor is None else int(factor * int(2 * size / 3))
            size = -(-size // multiple) * multiple
        found = {name: one for name, one in found.items() if not name.startswith("block_")}
        found["intermediate_size"] = size
    if "attn_config" in config:
        found["attn_config"] = {name: config["attn_config"].get(name) for name in MPT_ATTENTION}
    return found


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    return bool(one == other) or (not one and not other)


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in the file."""

    type: str
    shape: tuple[int, ...]  # of its elements
    data: LazyTensor  # the elements, or the bytes of their blocks


F32 = "write it in another type: `llmconv to-gguf MODEL --type f32 -o FILE.gguf`, or `from-hf` with `--dtype float32`"


def _stored(name: str, tensor: LazyTensor, kind: str, weights: Array | None) -> Stored:
    """A tensor in a type of `FLOATS` or `QUANTIZERS`; "" as it is."""
    if kind in BY_TYPE:
        return _in_blocks(name, tensor, kind, weights)
    dtype = BY_NAME[KINDS[kind]] if kind else tensor.dtype
    if dtype.name not in OF_DTYPE:
        raise UnsupportedInput(f"`{name}` is {dtype.name}, which llama.cpp cannot run", hint=F32)
    return Stored(OF_DTYPE[dtype.name], tensor.shape, cast(tensor, dtype, name))


def _in_blocks(name: str, tensor: LazyTensor, kind: str, weights: Array | None) -> Stored:
    """A matrix as blocks.

    `weights` are the importance of columns, float32 [experts, columns], if known.
    """
    from llmconv.convert.formats.gguf.quantizers import QUANTIZERS  # noqa: PLC0415 - few files have blocks

    block, quantizer, columns = BY_TYPE[kind], QUANTIZERS[kind], tensor.shape[-1]
    shape = (*tensor.shape[:-1], columns // block.elements * block.width)
    inner = prod(tensor.shape[1:-1])  # rows of a row of dim 0
    step, count = max(1, ROWS // (inner * columns)), max(1, VALUES // columns)
    rows = tensor.shape[-2]  # that have the same weights

    def blocks(values: Array, first: int) -> Array:
        single = values.astype(np.float32)
        largest = np.abs(single).max(initial=0)
        if not largest <= quantizer.limit:
            raise InputRefused(
                f"`{name}` contains {float(largest):.6g}, too large for the float16 scale of a {kind} block",
                hint="give a type without blocks, such as bf16, and correct the weights if they are not numbers",
            )
        if weights is None or quantizer.weighted is None:
            return quantizer.blocks(single.reshape(-1, block.elements))
        made = quantizer.weighted(single, weights[(first + np.arange(len(single))) // rows])
        if not np.isfinite(block.values(made)).all():
            raise InputRefused(f"the importance of `{name}` is too large for float32", hint="leave out `--imatrix`")
        return made

    def load(start: int, stop: int) -> Array:
        found = np.empty((stop - start, *shape[1:]), np.uint8)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values = tensor.rows(first, last).reshape(-1, columns)
            made = found[first - start : last - start].reshape(len(values), -1)
            for at in range(0, len(values), count):
                data = blocks(values[at : at + count], first * inner + at)
                made[at : at + count] = data.reshape(-1, made.shape[1])
        return found

    return Stored(kind, tensor.shape, LazyTensor(BY_NAME["uint8"], shape, load))


VALUES = 1 << 16  # that are quantized at once, with several temporary copies in float32
ROWS = 1 << 20  # values that are read at once
BY_TYPE = {block.name: block for block in BLOCKS.values()}


def gguf_pieces(
    tensors: Mapping[str, LazyTensor], *, metadata: Mapping[str, Any], stored: Mapping[str, Stored]
) -> Iterator[bytes | LazyTensor]:
    """Yields a GGUF file: the header, then each tensor at a multiple of the alignment."""
    header = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    header += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        shape = stored[name].shape[::-1]
        header.append(
            _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[stored[name].type], offset)
        )
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    head = b"".join(header)
    yield head + bytes(-len(head) % ALIGNMENT)
    for tensor in tensors.values():
        yield tensor
        if padding := -tensor.nbytes % ALIGNMENT:
            yield bytes(padding)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type before it, as bytes are already; lists are of texts, arrays of float32 or int32."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    kind = TEXT if isinstance(value, list) else next(k for k, name in NUMBERS.items() if np.dtype(name) == value.dtype)
    items = b"".join(map(_text, value)) if isinstance(value, list) else value.tobytes()
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + items
