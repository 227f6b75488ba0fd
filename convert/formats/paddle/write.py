"""Writes PaddleNLP's folder: `model_state.pdparams`, or one file per rank, and `config.json`.

The config is the reverse of `config.py`, and checked against it. Source: `configuration.py` and `modeling.py`
(`_init_rope`) in paddlenlp `transformers/<family>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra.operations import concat, interleave_rows, require, split
from llmconv.convert.formats.paddle.config import (
    ACTIVATIONS,
    FILE,
    GLM_FIXED,
    KEPT,
    paddle_generation_config,
    to_config,
)
from llmconv.convert.formats.paddle.join_ranks import unrolled
from llmconv.convert.formats.paddle.names import FAMILIES, TensorRule
from llmconv.convert.formats.paddle.pdparams import pdparams_pieces
from llmconv.convert.formats.paddle.read import WHOLE
from llmconv.convert.formats.paddle.tokenizer import MODEL, SENTENCEPIECE
from llmconv.convert.models.model_config import (
    ModelSettings,
    refuse,
    refuse_other_settings,
    refuse_settings,
    refuse_shards,
    settings_of,
    tied,
)
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed

HEAD = "lm_head.weight"


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a PaddleNLP checkpoint; see `Format.save`."""
    checkpoint = tied(checkpoint)
    config, settings = config_of(checkpoint)
    family, source = FAMILIES[config["model_type"]], checkpoint.path.name
    _refuse_shards(config, settings, shards, source)
    tensors = dict(checkpoint.tensors)
    if config["model_type"] == "gpt":  # PaddleNLP's GPT always saves its head, which equals the embedding
        tensors[HEAD] = tensors.get(HEAD, tensors[family.embedding])
    # Llama-like models have Hugging Face's names after the prefix; an untied head is a Linear
    shapes = {name.replace("model.", family.prefix, 1): tensor.shape for name, tensor in tensors.items()}
    if HEAD in tensors and not settings["tie_word_embeddings"]:
        shapes[HEAD] = tensors[HEAD].shape[::-1]
    ranks = split_among_ranks(family.rules(settings, shapes), tensors, settings[family.layers], shards, source)
    names = [WHOLE] if shards == 1 else [f"model_state.tp{rank:02}.pdparams" for rank in range(shards)]
    files = tuple(Shard(name, rank, pdparams_pieces) for name, rank in zip(names, ranks, strict=True))
    parallel = {"tensor_parallel_degree": shards} if shards > 1 else {}
    small = {**_side_files(checkpoint), "config.json": json_bytes({**config, **parallel})}
    return Plan(checkpoint, files, small, _ignored(config))


def _ignored(config: dict[str, Any]) -> tuple[str, ...]:
    """A warning about a window that PaddleNLP ignores, if prompts can be longer than it."""
    window = config.get("sliding_window")
    if type(window) is not int or window >= config["max_position_embeddings"]:
        return ()
    return (f"PaddleNLP ignores `sliding_window` {window}: its results differ for longer inputs",)


def _refuse_shards(config: dict[str, Any], settings: dict[str, Any], shards: int, source: str) -> None:
    """Ranks need whole heads, equal parts of the feed-forward, and in some models equal parts of the vocabulary."""
    family = FAMILIES[config["model_type"]]
    if shards > 1 and not family.tensor_parallel:
        raise UnsupportedInput(
            f"`{source}` would be a {config['model_type']}, which cannot be split among ranks",
            hint="leave out `--shards`",
        )
    absolute = ("n_head", "n_embd", "n_inner", "hidden_size", "vocab_size")
    names = absolute if "n_head" in settings else ("num_attention_heads", "intermediate_size")
    refuse_shards(source, shards, {name: settings[name] for name in names if name in settings})


def _side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The side files; a sentencepiece model also under PaddleNLP's name."""
    files = dict(checkpoint.side_files)
    if FILE in files:
        files[FILE] = paddle_generation_config(files[FILE])
    return files | ({SENTENCEPIECE[0]: files[MODEL]} if MODEL in files else {})


PADDLE = "PaddleNLP"
SCALING = {"linear": "linear", "dynamic": "dynamic_ntk"}
"""transformers' `rope_type` to `rope_scaling_type`."""

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The fields of Llama 3.1's `rope_scaling` that PaddleNLP 3 reads."""

SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
DECODER = (*SAME, "intermediate_size", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Paddle's `config.json`, and the Hugging Face config that `to-hf` makes of it.

    Raises UnsupportedInput, which lists the fields, if PaddleNLP cannot express the model, MalformedInput for a size.
    """
    settings, source = settings_of(checkpoint), checkpoint.path.name
    if settings["model_type"] not in WRITERS:
        raise UnsupportedInput(
            f"`{source}` is a `{settings['model_type']}`, which cannot be written in PaddleNLP's format",
            hint=f"models of these types can be written: {', '.join(WRITERS)}",
        )
    kind, architecture, write = WRITERS[settings["model_type"]]
    kept = {name: checkpoint.config[name] for name in KEPT if name in checkpoint.config}
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype")),
        **kept,
        "tie_word_embeddings": settings["tie_word_embeddings"],
        **write(settings, source),
    }
    back = to_config(config, source, [])
    refuse_other_settings(checkpoint, back, PADDLE)
    return config, back


def _decoder(settings: ModelSettings, source: str) -> dict[str, Any]:
    if settings["head_dim"] * settings["num_attention_heads"] != settings["hidden_size"]:
        refuse(source, {"head_dim": settings["head_dim"]}, PADDLE)
    refuse_settings(source, settings, {"hidden_act": "silu"}, PADDLE)
    return {
        **{name: settings[name] for name in DECODER},
        "seq_length": settings["max_position_embeddings"],
        "rope_scaling_type": None,
        "rope_scaling_factor": 1.0,
    }


def _llama(settings: ModelSettings, source: str) -> dict[str, Any]:
    scaling = settings["rope_scaling"] or {}
    scaled: dict[str, Any] = {}
    if scaling.get("rope_type") == "llama3" and set(scaling) == {"rope_type", *LLAMA3_SCALING}:
        scaled = {"rope_scaling": dict(scaling)}
    elif scaling.get("rope_type") in SCALING and set(scaling) == {"rope_type", "factor"}:
        kind = SCALING[scaling["rope_type"]]
        scaled = {"rope_scaling_type": kind, "rope_scaling_factor": scaling["factor"]}
    return _decoder(settings, source) | scaled


def _mistral(settings: ModelSettings, source: str) -> dict[str, Any]:
    window = settings["sliding_window"]
    return _decoder(settings, source) | {"sliding_window": window[0] if window else None}


def _qwen2(settings: ModelSettings, source: str) -> dict[str, Any]:
    return _decoder(settings, source) | {"use_sliding_window": False}


def _bloom(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **{name: settings[name] for name in ("vocab_size", "hidden_size", "layer_norm_epsilon")},
        "n_layer": settings["num_hidden_layers"],
        "n_head": settings["num_attention_heads"],
        "apply_residual_connection_post_layernorm": settings["apply_residual_connection_post_layernorm"],
    }


def _gpt(settings: ModelSettings, source: str) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in reversed(ACTIVATIONS.items())}
    return {
        **{name: settings[name] for name in (*SAME, "intermediate_size", "max_position_embeddings")},
        "hidden_activation": ours.get(settings["activation_function"], "gelu"),
        "layer_norm_eps": settings["layer_norm_epsilon"],
    }


def _chatglm(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **GLM_FIXED,
        **{name: settings[name] for name in SAME},
        "padded_vocab_size": settings["vocab_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "multi_query_group_num": settings["num_key_value_heads"],
        "kv_channels": settings["head_dim"],
        "max_sequence_length": settings["max_position_embeddings"],
        "layernorm_epsilon": settings["rms_norm_eps"],
        "rope_ratio": settings["rope_theta"] / 10000.0,
        "add_qkv_bias": settings["attention_bias"],
    }


WRITERS: Mapping[str, tuple[str, str, Callable[[ModelSettings, str], dict[str, Any]]]] = {
    "llama": ("llama", "LlamaForCausalLM", _llama),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _qwen2),
    "mistral": ("mistral", "MistralForCausalLM", _mistral),
    "bloom": ("bloom", "BloomForCausalLM", _bloom),
    "gpt2": ("gpt", "GPTForCausalLM", _gpt),
    "glm": ("chatglm_v2", "ChatGLMv2ForCausalLM", _chatglm),
}
"""Transformers' `model_type` to Paddle's, with its class."""


def split_among_ranks(
    rules: Sequence[TensorRule], tensors: Mapping[str, LazyTensor], layers: int, count: int, source: str
) -> list[dict[str, LazyTensor]]:
    """Paddle's name to tensor of each rank, the reverse of `apply_rules`; MalformedInput for wrong keys or shapes."""
    all_rules = unrolled(rules, layers)
    targets = [name for rule in all_rules for name in rule.targets]
    require(targets, tensors, source)
    if unknown := sorted(tensors.keys() - targets):
        raise MalformedInput(
            f"`{source}` has {len(unknown)} unexpected keys: {listing(unknown)}",
            hint="the model has parts that its `config.json` does not declare",
        )
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    for rule in all_rules:
        wholes = _sources(rule, [tensors[name] for name in rule.targets], source)
        for name, whole in zip(rule.sources, wholes, strict=True):
            for rank, part in zip(ranks, _parts(rule, whole, count), strict=True):
                rank[name] = transposed(part) if rule.linear else part
    return ranks


def _sources(rule: TensorRule, targets: Sequence[LazyTensor], source: str) -> list[LazyTensor]:
    """The whole sources of a rule, still [out, in] if it is linear."""
    outputs = 0 if rule.linear else len(rule.shape) - 1
    try:
        if len(targets) > 1:
            found = [concat(targets, outputs) if rule.groups == 1 else interleave_rows(targets, rule.pieces)]
        else:
            found = split(targets[0], outputs, len(rule.sources))
    except ValueError as error:
        raise _mismatch(rule, source, str(error)) from error
    expected = rule.shape[::-1] if rule.linear else rule.shape
    wrong = next((tensor.shape for tensor in found if tensor.shape != expected), None)
    if wrong is not None:
        raise _mismatch(rule, source, f"expected {list(expected)}, got {list(wrong)}")
    return found


def _mismatch(rule: TensorRule, source: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"shape mismatch for `{rule.targets[0]}` of `{source}`: {problem}",
        hint="the config belongs to another model; copy the folder again",
    )


def _parts(rule: TensorRule, whole: LazyTensor, count: int) -> Sequence[LazyTensor]:
    """The part of a source for each rank; split before it is transposed, so that nothing is read twice."""
    if rule.split is None or rule.units % count:
        return [whole] * count
    return split(whole, 1 - rule.split if rule.linear else rule.split, count)
