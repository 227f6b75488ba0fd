"""Converts the tokenizer files of a PaddleNLP folder to files that transformers loads.

Files that transformers reads itself stay unchanged. PaddleNLP's own become a `tokenizer.json` with the same ids:
sentencepiece models (`LlamaTokenizer`, `ChatGLMv2Tokenizer`) and `qwen.tiktoken` (`QWenTokenizer`); the constants are
those of paddlenlp `transformers/{llama,chatglm_v2,qwen}/tokenizer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json, read_side_files
from llmconv.convert.tokenizers.sentencepiece_json import added_token, bos_template, parse_sentencepiece, tokenizer_json
from llmconv.convert.tokenizers.tiktoken_json import parse_tiktoken, tiktoken_json

SENTENCEPIECE = ("sentencepiece.bpe.model", "tokenizer.model")
TIKTOKEN = "qwen.tiktoken"
MODEL, JSON, CONFIG, CHAT, ADDED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "added_tokens.json",
)
PADDLE_CLASSES = {"GPTTokenizer": "GPT2Tokenizer", "BloomTokenizer": "PreTrainedTokenizerFast"}
"""Classes that transformers does not have, or has only without `tokenizer.json`."""

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
GLM_SPECIAL = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "sop",
    "eop",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
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
        return _converted(files, source, settings, model_type, warnings)
    if not files:
        warnings.append(f"`{folder.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    return {**files, CONFIG: _json(settings)} if settings else files


def _settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` with a class that transformers has."""
    settings = {name: value for name, value in stored.items() if name not in ("auto_map", "name_or_path")}
    kind = settings.get("tokenizer_class")
    return settings | ({"tokenizer_class": PADDLE_CLASSES[kind]} if kind in PADDLE_CLASSES else {})


def _converted(
    files: dict[str, bytes], source: Path, settings: dict[str, Any], model_type: str, warnings: list[str]
) -> dict[str, bytes]:
    """The files with a `tokenizer.json` made from PaddleNLP's own kind."""
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
