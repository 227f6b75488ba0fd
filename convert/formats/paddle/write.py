"""Writes PaddleNLP's folder: `model_state.pdparams`, or one file per rank, and `config.json`.

The config is the reverse of `config.py`, and checked against it. Source: `configuration.py` and `modeling.py`
(`_init_rope`) in paddlenlp `transformers/<family>`.

Converts the tokenizer files of a PaddleNLP folder to files that transformers loads.

Files that transformers reads itself stay unchanged. PaddleNLP's own become a `tokenizer.json` with the same ids:
sentencepiece models (`LlamaTokenizer`, `ChatGLMv2Tokenizer`) and `qwen.tiktoken` (`QWenTokenizer`); the constants are
those of paddlenlp `transformers/{llama,chatglm_v2,qwen}/tokenizer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.algebra.operations import concat, interleave_rows, require, split
from llmconv.convert.formats.paddle.config import (
    ACTIVATIONS,
    FILE,
    GLM_FIXED,
    KEPT,
    paddle_generation_config,
    to_config,
)
from llmconv.convert.formats.paddle.names import FAMILIES, TensorRule, unrolled
from llmconv.convert.formats.paddle.read import WHOLE, pdparams_pieces
from llmconv.convert.models.model_config import (
    ModelSettings,
    refuse,
    refuse_other_settings,
    refuse_settings,
    refuse_shards,
    settings_of,
    tied,
)
from llmconv.convert.tokenizers import (
    added_token,
    bos_template,
    parse_sentencepiece,
    parse_tiktoken,
    tiktoken_json,
    tokenizer_json,
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
SCALING = {"linear": "linear", "dynamic": "dynamic_ntk"}  # transformers' `rope_type` to `rope_scaling_type`
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The fields of Llama 3.1's `rope_scaling` that PaddleNLP 3 reads."""

SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
DECODER = (*SAME, "intermediate_size", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Paddle's `config.json`, and what `to-hf` makes of it; UnsupportedInput, listing fields; MalformedInput."""
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
    if (wrong := next((tensor.shape for tensor in found if tensor.shape != expected), None)) is not None:
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


SENTENCEPIECE = ("sentencepiece.bpe.model", "tokenizer.model")
TIKTOKEN = "qwen.tiktoken"
MODEL, JSON, CONFIG, CHAT, ADDED = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.json", "added_tokens.json"),
)
PADDLE_CLASSES = {"GPTTokenizer": "GPT2Tokenizer", "BloomTokenizer": "PreTrainedTokenizerFast"}
"""Classes that transformers does not have, or has only without `tokenizer.json`."""

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
GLM_SPECIAL = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
GLM_PREFIX = ("[gMASK]", "sop")


def read_paddle_tokenizer(folder: Path, model_type: str, warnings: list[str]) -> dict[str, bytes]:
    """Tokenizer files by plain name; empty, with a warning, if there are none.

    ChatGLM's special tokens, which its files lack, follow from `model_type`. `warnings` receives a line for each file
    that is missing or cannot be converted. Raises MalformedInput if the content of a file does not match its name.
    """
    files = {name: content for name, content in read_side_files(folder).items() if name != "generation_config.json"}
    for name in (JSON, CONFIG, CHAT, ADDED):
        if name in files:
            read_json(folder / name)
    if CHAT in files and "chat_template" not in read_json(folder / CHAT):
        del files[CHAT]
        warnings.append(f"left out `{CHAT}`: transformers does not read PaddleNLP's templates")
    settings = _settings(read_json(folder / CONFIG) if CONFIG in files else {})
    source = next((folder / name for name in (*SENTENCEPIECE, TIKTOKEN) if (folder / name).is_file()), None)
    if JSON not in files and source is not None:
        # the files with a `tokenizer.json` made from PaddleNLP's own kind
        added = {str(text): number for text, number in _added(source.parent).items() if type(number) is int}
        if source.name == TIKTOKEN:
            content, names = _qwen(source.read_bytes())
        else:
            files = {**files, MODEL: source.read_bytes()}
            model = parse_sentencepiece(files[MODEL])
            if not model.is_bpe or min(model.bos, model.eos, model.unk) < 0:
                warnings.append(f"`{source.name}` is not a BPE with bos, eos and unk; it is written as it is")
                return {**files, **({CONFIG: _json(settings)} if settings else {})}
            content = tokenizer_json(model)
            names = {"bos_token": model.pieces[model.bos][0], "eos_token": model.pieces[model.eos][0]}
            names["unk_token"] = model.pieces[model.unk][0]
            if settings.get("add_bos_token") is False:
                content["post_processor"] = None
            if model_type == "chatglm_v2":
                added |= {text: len(model.pieces) + number for number, text in enumerate(GLM_SPECIAL)}
                content["post_processor"] = _prefix(added)
        known = {entry["id"] for entry in content["added_tokens"]}
        more = sorted((number, text) for text, number in added.items() if number not in known)
        content["added_tokens"] += [added_token(number, text, special=True) for number, text in more]
        merged = {**names, **settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        merged.setdefault("clean_up_tokenization_spaces", False)
        files.pop(ADDED, None)
        return {**files, JSON: _json(content, indent=None), CONFIG: _json(merged)}
    if not files:
        warnings.append(f"`{folder.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    return {**files, CONFIG: _json(settings)} if settings else files


def _settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` with a class that transformers has."""
    settings = {name: value for name, value in stored.items() if name not in ("auto_map", "name_or_path")}
    kind = settings.get("tokenizer_class")
    return settings | ({"tokenizer_class": PADDLE_CLASSES[kind]} if kind in PADDLE_CLASSES else {})


def _added(folder: Path) -> dict[str, Any]:
    return read_json(folder / ADDED) if (folder / ADDED).is_file() else {}


def _qwen(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of `tokenizer.json`, and the names of special tokens."""
    ranks = parse_tiktoken(data)
    content = tiktoken_json(ranks, since_3_1=False)
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN_PATTERN
    specials = enumerate(QWEN_SPECIAL, len(ranks))
    content["added_tokens"] = [added_token(number, text, special=True) for number, text in specials]
    content |= {"normalizer": {"type": "NFC"}, "post_processor": None}
    return content, {"eos_token": QWEN_SPECIAL[0], "pad_token": QWEN_SPECIAL[0]}


def _prefix(ids: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that adds ChatGLM's `[gMASK]sop` before each text."""
    template = bos_template(GLM_PREFIX[0], ids[GLM_PREFIX[0]])
    marks = [{"SpecialToken": {"id": name, "type_id": 0}} for name in GLM_PREFIX]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        **template,
        "single": [*marks, text],
        "pair": [*marks, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in GLM_PREFIX},
    }


def _json(content: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=indent) + "\n").encode()
