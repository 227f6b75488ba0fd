"""PaddleNLP: `config.json` next to `model_state*.pdparams` or Paddle's own safetensors, whole, sharded or one per rank.

Layout: `read.py` (the pickle, the folder), `names.py` (the names). Linear weights are [in, out]. Its safetensors files
have the names of Hugging Face's, but Paddle's tensor names and layout. What is written, `model_state.pdparams` or one
file per rank, has a config that is the reverse of `config.py`, and checked against it. Source: `configuration.py` and
`modeling.py` (`_init_rope`) in paddlenlp `transformers/<family>`.

Tokenizer files that transformers reads itself stay unchanged. PaddleNLP's own become a `tokenizer.json` with the same
ids: sentencepiece models (`LlamaTokenizer`, `ChatGLMv2Tokenizer`) and `qwen.tiktoken` (`QWenTokenizer`); the constants
are those of paddlenlp `transformers/{llama,chatglm_v2,qwen}/tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, json_object, read_json, read_side_files, transposed
from llmconv.convert import tokenizers
from llmconv.convert.algebra import concat, interleave_rows, require, split
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format
from llmconv.convert.formats.paddle import config as configs
from llmconv.convert.formats.paddle import read
from llmconv.convert.formats.paddle.names import FAMILIES, TensorRule, apply_rules, unrolled
from llmconv.convert.models.code_model import baichuan, chatglm, needs_code
from llmconv.convert.models.config_file import OPTION, plain_fields, trusted_code, updated, with_architecture
from llmconv.convert.models.model_config import (
    ModelSettings,
    refuse,
    refuse_other_settings,
    refuse_settings,
    refuse_shards,
    settings_of,
    tied,
)
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.not_a_model_folder import training_files_in
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor

HEAD = "lm_head.weight"


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a PaddleNLP checkpoint; see `Format.save`."""
    checkpoint = tied(checkpoint, WRITERS)
    config, settings = config_of(checkpoint)
    family, source = FAMILIES[config["model_type"]], checkpoint.path.name
    if shards > 1 and not family.tensor_parallel:
        raise UnsupportedInput(
            f"`{source}` would be a {config['model_type']}, which cannot be split among ranks",
            hint="leave out `--shards`",
        )
    # ranks need whole heads, equal parts of the feed-forward, and in some models equal parts of the vocabulary
    absolute = ("n_head", "n_embd", "n_inner", "hidden_size", "vocab_size")
    sizes = absolute if "n_head" in settings else ("num_attention_heads", "intermediate_size")
    refuse_shards(source, shards, {name: settings[name] for name in sizes if name in settings})
    tensors = dict(checkpoint.tensors)
    if config["model_type"] == "gpt":  # PaddleNLP's GPT always saves its head, which equals the embedding
        tensors[HEAD] = tensors.get(HEAD, tensors[family.embedding])
    # Llama-like models have Hugging Face's names after the prefix; an untied head is a Linear
    shapes = {name.replace("model.", family.prefix, 1): tensor.shape for name, tensor in tensors.items()}
    if HEAD in tensors and not settings["tie_word_embeddings"]:
        shapes[HEAD] = tensors[HEAD].shape[::-1]
    ranks = split_among_ranks(family.rules(settings, shapes), tensors, settings[family.layers], shards, source)
    names = [read.WHOLE] if shards == 1 else [f"model_state.tp{rank:02}.pdparams" for rank in range(shards)]
    files = tuple(Shard(name, rank, read.pdparams_pieces) for name, rank in zip(names, ranks, strict=True))
    parallel = {"tensor_parallel_degree": shards} if shards > 1 else {}
    small = {**checkpoint.side_files, "config.json": json_bytes({**config, **parallel})}
    if configs.FILE in small:
        fields = json_object(small[configs.FILE])
        kept = {name: fields[name] for name in configs.SHARED_FIELDS if fields.get(name) is not None}
        strategy = configs.SAMPLING if fields.get("do_sample") else configs.GREEDY
        small[configs.FILE] = json_bytes({**kept, configs.STRATEGY: strategy})
    if MODEL in small:  # PaddleNLP has another name for a sentencepiece model
        small[SENTENCEPIECE[0]] = small[MODEL]
    window, warnings = config.get("sliding_window"), tuple[str, ...]()
    if type(window) is int and window < config["max_position_embeddings"]:
        warnings = (f"PaddleNLP ignores `sliding_window` {window}: its results differ for longer inputs",)
    return Plan(checkpoint, files, small, warnings)


PADDLE = "PaddleNLP"
SCALING = {"linear": "linear", "dynamic": "dynamic_ntk"}  # transformers' `rope_type` to `rope_scaling_type`
# The fields of Llama 3.1's `rope_scaling` that PaddleNLP 3 reads
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
DECODER = (*SAME, "intermediate_size", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Paddle's `config.json`, and what `to-hf` makes of it; UnsupportedInput, listing fields; MalformedInput."""
    settings, source = settings_of(checkpoint, WRITERS), checkpoint.path.name
    kind, architecture, write = WRITERS[settings["model_type"]]
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype")),
        **{name: checkpoint.config[name] for name in configs.KEPT if name in checkpoint.config},
        "tie_word_embeddings": settings["tie_word_embeddings"],
        **write(settings, source),
    }
    back = configs.to_config(config, source, [])
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
        scaled = {"rope_scaling_type": SCALING[scaling["rope_type"]], "rope_scaling_factor": scaling["factor"]}
    return _decoder(settings, source) | scaled


def _bloom(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **{name: settings[name] for name in ("vocab_size", "hidden_size", "layer_norm_epsilon")},
        "n_layer": settings["num_hidden_layers"],
        "n_head": settings["num_attention_heads"],
        "apply_residual_connection_post_layernorm": settings["apply_residual_connection_post_layernorm"],
    }


def _gpt(settings: ModelSettings, source: str) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in reversed(configs.ACTIVATIONS.items())}
    return {
        **{name: settings[name] for name in (*SAME, "intermediate_size", "max_position_embeddings")},
        "hidden_activation": ours.get(settings["activation_function"], "gelu"),
        "layer_norm_eps": settings["layer_norm_epsilon"],
    }


def _chatglm(settings: ModelSettings, source: str) -> dict[str, Any]:
    return {
        **configs.GLM_FIXED,
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
    "qwen2": ("qwen2", "Qwen2ForCausalLM", lambda *model: _decoder(*model) | {"use_sliding_window": False}),
    "mistral": (
        "mistral",
        "MistralForCausalLM",
        lambda *model: _decoder(*model) | {"sliding_window": (model[0]["sliding_window"] or [None])[0]},
    ),
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
        # the whole sources of the rule, still [out, in] if it is linear
        parts_of, outputs = [tensors[name] for name in rule.targets], 0 if rule.linear else len(rule.shape) - 1
        try:
            if len(parts_of) > 1:
                wholes = [concat(parts_of, outputs) if rule.groups == 1 else interleave_rows(parts_of, rule.pieces)]
            else:
                wholes = split(parts_of[0], outputs, len(rule.sources))
        except ValueError as error:
            raise _mismatch(rule, source, str(error)) from error
        expected = rule.shape[::-1] if rule.linear else rule.shape
        if (wrong := next((tensor.shape for tensor in wholes if tensor.shape != expected), None)) is not None:
            raise _mismatch(rule, source, f"expected {list(expected)}, got {list(wrong)}")
        for name, whole in zip(rule.sources, wholes, strict=True):
            if rule.split is None or rule.units % count:
                parts = [whole] * count
            else:  # split before it is transposed, so that nothing is read twice
                parts = split(whole, 1 - rule.split if rule.linear else rule.split, count)
            for rank, part in zip(ranks, parts, strict=True):
                rank[name] = transposed(part) if rule.linear else part
    return ranks


def _mismatch(rule: TensorRule, source: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"shape mismatch for `{rule.targets[0]}` of `{source}`: {problem}",
        hint="the config belongs to another model; copy the folder again",
    )


SENTENCEPIECE = ("sentencepiece.bpe.model", "tokenizer.model")
TIKTOKEN = "qwen.tiktoken"
MODEL, JSON, CONFIG, CHAT, ADDED = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.json", "added_tokens.json"),
)
# Classes that transformers does not have, or has only without `tokenizer.json`
PADDLE_CLASSES = {"GPTTokenizer": "GPT2Tokenizer", "BloomTokenizer": "PreTrainedTokenizerFast"}
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
    for name in files.keys() & {JSON, CONFIG, CHAT, ADDED}:
        read_json(folder / name)
    if CHAT in files and "chat_template" not in read_json(folder / CHAT):
        del files[CHAT]
        warnings.append(f"left out `{CHAT}`: transformers does not read PaddleNLP's templates")
    stored = read_json(folder / CONFIG) if CONFIG in files else {}
    settings = {name: value for name, value in stored.items() if name not in ("auto_map", "name_or_path")}
    if (kind := settings.get("tokenizer_class")) in PADDLE_CLASSES:  # a class that transformers has
        settings["tokenizer_class"] = PADDLE_CLASSES[kind]
    source = next((folder / name for name in (*SENTENCEPIECE, TIKTOKEN) if (folder / name).is_file()), None)
    if JSON not in files and source is not None:
        # the files with a `tokenizer.json` made from PaddleNLP's own kind
        own = json_object(files.get(ADDED, b"{}"))
        added = {str(text): number for text, number in own.items() if type(number) is int}
        if source.name == TIKTOKEN:
            content, names = _qwen(source.read_bytes())
        else:
            files = {**files, MODEL: source.read_bytes()}
            model = tokenizers.parse_sentencepiece(files[MODEL])
            if not model.is_converted:
                warnings.append(f"`{source.name}` is {tokenizers.NOT_CONVERTED}; it is written as it is")
                return {**files, **({CONFIG: json_bytes(settings)} if settings else {})}
            content = tokenizers.tokenizer_json(model)
            names = {"bos_token": model.pieces[model.bos][0], "eos_token": model.pieces[model.eos][0]}
            names["unk_token"] = model.pieces[model.unk][0]
            if settings.get("add_bos_token") is False:
                content["post_processor"] = None
            if model_type == "chatglm_v2":
                added |= {text: len(model.pieces) + number for number, text in enumerate(GLM_SPECIAL)}
                content["post_processor"] = _prefix(added)
        known = {entry["id"] for entry in content["added_tokens"]}
        more = sorted((number, text) for text, number in added.items() if number not in known)
        content["added_tokens"] += [tokenizers.added_token(number, text, special=True) for number, text in more]
        merged = {**names, **settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        merged.setdefault("clean_up_tokenization_spaces", False)
        files.pop(ADDED, None)
        return {**files, JSON: tokenizers.tokenizer_bytes(content), CONFIG: json_bytes(merged)}
    if not files:
        warnings.append(f"`{folder.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    return {**files, CONFIG: json_bytes(settings)} if settings else files


def _qwen(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of `tokenizer.json`, and the names of special tokens."""
    ranks = tokenizers.parse_tiktoken(data)
    content = tokenizers.tiktoken_json(ranks, since_3_1=False)
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN_PATTERN
    specials = enumerate(QWEN_SPECIAL, len(ranks))
    content["added_tokens"] = [tokenizers.added_token(number, text, special=True) for number, text in specials]
    content |= {"normalizer": {"type": "NFC"}, "post_processor": None}
    return content, {"eos_token": QWEN_SPECIAL[0], "pad_token": QWEN_SPECIAL[0]}


def _prefix(ids: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that adds ChatGLM's `[gMASK]sop` before each text."""
    marks = [{"SpecialToken": {"id": name, "type_id": 0}} for name in GLM_PREFIX]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*marks, text],
        "pair": [*marks, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in GLM_PREFIX},
    }


QUANTIZED = (".quant_weight", ".quant_scale", ".weight_scale", ".activation_quanter")


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    if found := next((match for name in names if (match := read.ADAPTER_FILES.fullmatch(name))), None):
        kind = "a LoRA adapter"
        hint = "convert its base with `to-hf`, then `llmconv merge-lora BASE ADAPTER_FILES -o OUT`"
        if found[1] == "prefix":
            kind, hint = "a prefix", "convert the model that it was trained on"
        raise UnsupportedInput(f"`{path.name}` is {kind} (`{found[0]}`), not a model", hint=hint)
    folder = path if path.is_dir() else path.parent
    stored = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    fields = {name: value for name, value in config.items() if name != OPTION}
    warnings: list[str] = []
    if not (paddle := plain_fields(updated(stored, fields), warnings)):
        raise InputRefused(f"`{path.name}` has no `config.json` next to it", hint="give the run's with `--config`")
    own, code = configs.own_kind(paddle), trusted_code(config)
    if own:
        code = needs_code(code, path.name, *(configs.ALIBI if own == "baichuan" else configs.TWO_POSITIONS))
    settings = configs.to_own_config(paddle, path.name) if own else configs.to_config(paddle, path.name, warnings)
    family = FAMILIES[paddle["model_type"]]
    ranks = read.open_ranks(path, paddle)
    if len(ranks) > 1 and not family.tensor_parallel:
        raise UnsupportedInput(
            f"`{path.name}` is a {paddle['model_type']} split over {len(ranks)} tensor-parallel ranks",
            hint="join it with PaddleNLP's `merge_tp_and_pp_params.py` first",
        )
    if packed := [name for name in ranks[0] if name.endswith(QUANTIZED)]:
        raise UnsupportedInput(
            f"`{path.name}` is quantized: it holds {listing(packed)}",
            hint="give the weights from before quantization; Paddle's packed ones are ordered for its GPU kernels",
        )
    shapes = {name: tensor.shape for name, tensor in ranks[0].items()}
    tensors = apply_rules(
        family.rules(settings, shapes), ranks, Fields(settings, path.name).count(family.layers), path.name
    )
    if own and code:
        build = baichuan if own == "baichuan" else chatglm
        tensors, settings = build(tensors, settings, code, path.name)
    else:
        # PaddleNLP leaves out its default, true: with a head, the values decide then
        tied = settings.get("tie_word_embeddings", None if HEAD in tensors else True)
        settings = with_architecture({**settings, "tie_word_embeddings": tied})
    place = folder if tokenizer is None else tokenizer
    files = read_paddle_tokenizer(place, paddle["model_type"], warnings) if place.is_dir() else {}
    files = files if files or tokenizer is None else tokenizers.read_tokenizer(tokenizer)
    side_files = {**files, **configs.read_generation_config(folder)}
    release = stored.get("paddlenlp_version")
    more = {
        "shards": len(read.weight_files(path)),
        "dropped": training_files_in(path),
        "source_type": paddle["model_type"],
    }
    more |= {"version": f"paddlenlp {release}"} if isinstance(release, str) else {}
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), **more)


FORMAT = Format(
    name="paddle",
    title="PaddleNLP: a folder of `config.json` and `model_state*.pdparams`, or its safetensors",
    covers="llama (and Baichuan-7B), mistral, qwen, qwen2, bloom, gpt, chatglm2/3; with their own code "
    "(`--code`) Baichuan-13B and ChatGLM-6B; whole, sharded, or one file per "
    "tensor- and pipeline-parallel rank",
    detect=lambda path: (
        (read.has_pdparams(path) or read.names_paddle(path))
        if path.is_dir()
        else path.is_file() and (read.is_pdparams(path) or (path.suffix == ".safetensors" and read.names_paddle(path)))
    ),
    open=_open,
    peek=read.peek,
    options=(OPTION,),
    save=save,
)
