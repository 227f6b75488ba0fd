"""The tokenizer of a GGUF file as `tokenizer.json`, with the same ids.

Keys: ggml `docs/gguf.md`. `llama` is sentencepiece's BPE with scores, `gpt2` byte-level BPE with merges, whose
`tokenizer.ggml.pre` names how text is divided into words (llama.cpp `src/llama-vocab.cpp`). Types of tokens are
those of sentencepiece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from llmconv.causal_lm import GENERATION, SPECIAL_TOKENS
from llmconv.checkpoint import OWN_CODE, TEMPLATES, VOCABULARIES, Checkpoint
from llmconv.convert.tokenizers import (
    MODEL,
    PATTERN,
    TOKENIZER,
    SentencePieceModel,
    added_token,
    bos_template,
    is_tiktoken,
    merges_of,
    parse_sentencepiece,
    read_object,
    special_tokens,
    text_of,
    token_ids,
    tokenizer_bytes,
    tokenizer_json,
    tokens_of_other_files,
)
from llmconv.errors import MalformedInput, UnsupportedInput, first_line, listing, short
from llmconv.files.sources import model_name

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
PADDING = re.compile(r"\[PAD\d+\]")
"""Tokens that llama.cpp's converter adds where the embedding has more rows than the vocabulary."""

CHAT_TEMPLATE, NAME = "tokenizer.chat_template", re.compile(r"[A-Za-z0-9_]{1,64}")  # and names of further templates

GIVE = "give the model's own tokenizer with `--tokenizer FOLDER`"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

QWEN2 = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    rf"|\p{{N}}{{1,3}}{SIGNS}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}{SIGNS}"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DIGITS_AND_CHINESE = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")


@dataclass(frozen=True)
class Words:
    """How a byte-level tokenizer divides text into words."""

    pattern: str = ""  # of a word; empty: that of GPT-2
    first: tuple[str, ...] = ()  # of what is divided before, one after another
    digits: bool = False  # each digit is a word
    whole: bool = False  # a word that is a token is not split, whatever the merges say
    normalizes: bool = False  # text is in the normal form C
    bos: bool = False  # begins with bos unless the file says otherwise


WORDS: Mapping[str, Words] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2"), Words()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Words(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), Words(PATTERN, whole=True, bos=True)),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "lfm2"), Words(PATTERN, whole=True, bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words(PATTERN)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Words(QWEN2, normalizes=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), Words(GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Words(DEEPSEEK3, DIGITS_AND_CHINESE)),
    "tekken": Words(TEKKEN, whole=True, bos=True),
}
"""By the value of `tokenizer.ggml.pre`."""


def special_ids(metadata: Mapping[str, Any], source: str) -> dict[str, int | None]:
    """Fields of `config.json`: ids of the tokens that begin, end and pad a text; None for those that a file lacks.

    Raises MalformedInput for an id beyond the vocabulary.
    """
    return {
        f"{key}_token_id": _id(metadata, name, source)
        for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _id(metadata: Mapping[str, Any], key: str, source: str) -> int | None:
    number, tokens = metadata.get(f"tokenizer.ggml.{key}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if number is None or not isinstance(tokens, list):
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise MalformedInput(f"`{source}` has no token {short(number, 20)} (`{key}_token_id`)", hint=GIVE)
    return number


def tokenizer_files(metadata: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, bytes]:
    """The tokenizer, its chat template and the tokens that end a text, as files of a Hugging Face folder.

    Raises UnsupportedInput for a tokenizer that is not known exactly, MalformedInput for one that contradicts itself.
    """
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not tokens or kind == "no_vocab":
        warnings.append(f"`{source}` contains no tokenizer; give one with `--tokenizer`")
        return {}
    if not isinstance(tokens, list) or not all(isinstance(text, str) for text in tokens):
        raise MalformedInput(f"`{source}` has tokens that are not texts", hint=GIVE)
    types = _numbers(metadata, "token_type", len(tokens), source)
    if kind == "llama":
        content, begins = _sentencepiece(metadata, tokens, types, source), True
    elif kind == "gpt2":
        words = WORDS.get(str(metadata.get("tokenizer.ggml.pre")))
        if words is None:
            pre = str(metadata.get("tokenizer.ggml.pre", "default"))[:40]
            raise UnsupportedInput(f"`{source}` divides text into words in an unknown way (`{pre}`)", hint=GIVE)
        content, begins = _byte_level(metadata, tokens, types, words, source), words.bos
    else:
        raise UnsupportedInput(f"`{source}` has a tokenizer of the unsupported kind `{short(kind)}`", hint=GIVE)
    ids = {name: _id(metadata, key, source) for name, key in SPECIAL.items()}
    bos = ids["bos_token"]
    begins = _flag(metadata, "add_bos_token", default=begins) and bos is not None
    ends_in = ids["eos_token"] if (ending := metadata.get("tokenizer.ggml.add_eos_token", False)) is True else None
    if type(ending) is not bool or (ending and ends_in is None):
        raise MalformedInput(f"`{source}` has an invalid `add_eos_token`, or no token that it adds", hint=GIVE)
    content["post_processor"] = _template(tokens, bos if begins else None, ends_in)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": begins,
        **({"add_eos_token": True} if ends_in is not None else {}),
        **{name: tokens[number] for name, number in ids.items() if number is not None},
    }
    files = {"tokenizer.json": tokenizer_bytes(content)}
    if isinstance(template := metadata.get(CHAT_TEMPLATE), str):
        files["chat_template.jinja"] = template.encode()
        files |= {
            f"{TEMPLATES}/{name}.jinja": one.encode()
            for key, one in metadata.items()
            if isinstance(one, str) and (name := key.removeprefix(f"{CHAT_TEMPLATE}.")) != key and NAME.fullmatch(name)
        }
    files["tokenizer_config.json"] = tokenizer_bytes(settings)
    ends = [number for key in ("eos", "eot") if (number := _id(metadata, key, source)) is not None]
    if ends:
        generation = {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(ends)), "pad_token_id": ids["pad_token"]}
        files["generation_config.json"] = tokenizer_bytes({k: v for k, v in generation.items() if v is not None})
    return files


def _template(tokens: Sequence[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """The post-processor that begins each text with `bos` and ends it with `eos`; None for neither."""
    if bos is None and eos is None:
        return None
    if bos is not None and eos is None:
        return bos_template(tokens[bos], bos)

    def of(text: str, number: int) -> list[dict[str, Any]]:
        before, after = (
            [] if one is None else [{"SpecialToken": {"id": tokens[one], "type_id": number}}] for one in (bos, eos)
        )
        return [*before, {"Sequence": {"id": text, "type_id": number}}, *after]

    known = [one for one in (bos, eos) if one is not None]
    return {
        "type": "TemplateProcessing",
        "single": of("A", 0),
        "pair": [*of("A", 0), *of("B", 1)],
        "special_tokens": {tokens[one]: {"id": tokens[one], "ids": [one], "tokens": [tokens[one]]} for one in known},
    }


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    return metadata.get(f"tokenizer.ggml.{key}", default) not in (False, [])


def _numbers(metadata: Mapping[str, Any], key: str, count: int, source: str) -> Sequence[float]:
    """One number per token; MalformedInput for another count, zeros where the file has none."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return [0] * count
    kinds = float if key == "scores" else int
    if not isinstance(found, list) or not all(type(one) is kinds and isfinite(one) for one in found):
        raise MalformedInput(f"`{source}` has an invalid `{key}`", hint=GIVE)
    if len(found) != count:
        raise MalformedInput(f"`{source}` does not have one `{key}` per token", hint=GIVE)
    return found


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[float], source: str
) -> dict[str, Any]:
    scores = _numbers(metadata, "scores", len(tokens), source)
    unknown = _id(metadata, "unknown", source)
    if "tokenizer.ggml.scores" not in metadata or unknown is None:
        raise MalformedInput(f"`{source}` has no scores or unknown token, by which text is divided", hint=GIVE)
    pieces = [(text, score, int(kind)) for text, score, kind in zip(tokens, scores, types, strict=True)]
    if len({text for text, _, _ in pieces}) < len(pieces):
        raise MalformedInput(f"`{source}` has a token twice", hint=GIVE)
    model = SentencePieceModel(
        pieces=tuple(pieces),
        is_bpe=True,
        byte_fallback=BYTE in types,
        bos=_id(metadata, "bos", source) or 0,
        eos=_id(metadata, "eos", source) or 0,
        unk=unknown,
        charsmap=b"",
        add_dummy_prefix=_flag(metadata, "add_space_prefix", default=True),
        remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", default=False),
    )
    return tokenizer_json(model, found_first=True)


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[float], words: Words, source: str
) -> dict[str, Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = [str(merge).split(" ") for merge in merges] if isinstance(merges, list) else []
    vocabulary = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if not (kind == UNUSED and PADDING.fullmatch(text))
    }
    known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs)
    if not pairs or not known:
        raise MalformedInput(f"`{source}` has merges of tokens that it does not have, or none", hint=GIVE)
    if len({*tokens}) < len(tokens):
        raise MalformedInput(f"`{source}` has a token twice", hint=GIVE)
    added = [
        added_token(number, text, special=kind == CONTROL)
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    steps = _steps(words)
    return {
        **TOKENIZER,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if words.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**MODEL, "ignore_merges": words.whole, "vocab": vocabulary, "merges": pairs},
    }


def _steps(words: Words) -> list[dict[str, Any]]:
    """The steps of the pre-tokenizer."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not words.pattern}
    if words.pattern:
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in (*words.first, words.pattern)
        ]
        return [*splits, level]
    return [{"type": "Digits", "individual_digits": True}, level] if words.digits else [level]


# gguf-py `metadata.py`: field of `generation_config.json`, and the key after `general.sampling.`; llama.cpp takes them
# where its command line says nothing else (`common.cpp`, `common_init_sampler_from_model`)
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
SAMPLING |= {"repetition_penalty": "penalty_repeat"}
PREFIX, INT32 = "general.sampling.", 5


def sampling_fields(metadata: Mapping[str, Any], source: str, warnings: list[str]) -> dict[str, Any]:
    """The fields of `generation_config.json` by which llama.cpp samples from the file; a warning for other settings."""
    stated = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    found: dict[str, Any] = {}
    for name, key in SAMPLING.items():
        value = stated.pop(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 31:
            continue
        # a float32 in the fewest digits, as it was written
        found[name] = int(value) if name == "top_k" else float(str(np.float32(value)))
    if stated:
        warnings.append(
            f"transformers has no such settings, which are left out: {listing(sorted(stated))} (`{source}`)"
        )
    others = found.keys() - {"repetition_penalty"}  # which greedy search has, too
    if found.get("temperature", 1) <= 0:
        kept = {name: value for name, value in found.items() if name not in others}
        return {**kept, "do_sample": False}
    return {**found, "do_sample": True} if others else found


def sampling_keys(files: Mapping[str, bytes], warnings: list[str]) -> dict[str, Any]:
    """The keys of the sampling settings, of the types that llama.cpp's converter writes; warns of what has none."""
    given = read_object(files, "generation_config.json")
    stated = {*SAMPLING, *SPECIAL_TOKENS, "do_sample"}
    lost = [name for name in GENERATION if name not in stated and given.get(name) not in (None, GENERATION[name], [])]
    if lost:
        warnings.append(f"a GGUF file does not state {listing(sorted(lost))} of `generation_config.json`")
    drawn = [name for name in SAMPLING if name != "repetition_penalty" and given.get(name) is not None]
    if drawn and given.get("do_sample") is not True:
        warnings.append(
            f"`generation_config.json` has {listing(drawn)} without `do_sample`: the model picks the likeliest token, "
            "and programs that read the GGUF file sample"
        )
    keys: dict[str, Any] = {}
    for name, key in SAMPLING.items():
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= 1 << 31:
            continue
        keys[PREFIX + key] = struct.pack("<Ii", INT32, int(value)) if name == "top_k" else float(value)
    if given.get("do_sample") is True and not drawn:  # no other key tells that it samples
        keys[PREFIX + SAMPLING["temperature"]] = GENERATION["temperature"]
    return keys


# --- the way back -----------------------------------------------------------------------------------------------------

OWN = {
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "generation_config.json"),
}


def tokenizer_keys(checkpoint: Checkpoint, rows: int, warnings: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The metadata of the tokenizer for an embedding of `rows` rows, and the names of files that it does not cover.

    They are read back: what `to-hf` would make of them must divide text as the tokenizer does. Raises UnsupportedInput
    for a tokenizer that a file cannot state, MalformedInput for a damaged one, or one of more tokens than rows.
    """
    files, source = _with_json(checkpoint.side_files, checkpoint.path.name), checkpoint.path.name
    checkpoint = replace(checkpoint, side_files=files)
    left = [name for name in files if name not in OWN and not name.startswith(f"{TEMPLATES}/")]
    if "tokenizer.json" not in files:
        name = model_name(checkpoint.path)
        warnings.append(f"`{name}` has no tokenizer, so llama.cpp reads no text with the file; copy its files first")
        return {"tokenizer.ggml.model": "no_vocab"}, [*files]
    content = read_object(files, "tokenizer.json")
    try:
        content = _as_loaded(content, files, source)
        found = _metadata(checkpoint, content, rows, warnings)
        listed = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
        "".join(listed["tokenizer.ggml.tokens"]).encode()
        back = json.loads(tokenizer_files(listed, source, [])["tokenizer.json"])
        own, other = _meaning(content, {}), _meaning(back, content)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise MalformedInput(f"`tokenizer.json` of `{source}` is damaged: {first_line(error)}", hint=OTHER) from error
    if odd := [name for name in own if own[name] != other[name]]:
        raise UnsupportedInput(
            f"a GGUF file cannot state the tokenizer of `{source}`: its {odd[0]} would not read back the same",
            hint=OTHER,
        )
    return found, left


def _with_json(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """The files of a tokenizer with its `tokenizer.json`, made of sentencepiece's file if that is all there is.

    Raises UnsupportedInput for other vocabularies without one, as older releases of transformers saved them.
    """
    if "tokenizer.json" in files or not (found := sorted(VOCABULARIES & files.keys())):
        return dict(files)
    found = [name for name in found if name not in OWN_CODE] or found
    if found == ["tokenizer.model"] and not is_tiktoken(data := files["tokenizer.model"]):
        model = parse_sentencepiece(data)
        if model.is_converted:
            return {**files, "tokenizer.json": tokenizer_bytes(tokenizer_json(model))}
    raise UnsupportedInput(
        f"the tokenizer of `{source}` is `{found[0]}` alone, and what is written as GGUF is `tokenizer.json`",
        hint="copy the `tokenizer.json` of the same tokenizer into it, if one was published; llama.cpp's "
        f"`convert_hf_to_gguf.py` reads `{found[0]}`"
        if found[0] in OWN_CODE
        else f"write one with transformers: `AutoTokenizer.from_pretrained('{source}').save_pretrained('{source}')`",
    )


def _as_loaded(content: dict[str, Any], files: Mapping[str, bytes], source: str) -> dict[str, Any]:
    """`tokenizer.json` with what transformers takes from the files next to it: more tokens, and those around a text.

    Raises UnsupportedInput for a token whose id it would have in one release of transformers and not in another.
    """
    from llmconv.runtime.tokenizer import stated_ends  # noqa: PLC0415 - few commands write this format

    settings, known = read_object(files, "tokenizer_config.json"), token_ids(content)
    listed = list(content.get("added_tokens") or ())
    present, free = {token["content"] for token in listed}, max(known.values(), default=-1) + 1
    for entry, number in tokens_of_other_files(files):
        if (text := entry["content"]) in present:
            continue
        place = known.get(text, free)
        if number not in (None, place):
            raise UnsupportedInput(
                f"`{source}` adds the token {text!r} with the id {number}, which is not the next one, {place}",
                hint="save the tokenizer with transformers first, so that `tokenizer.json` has all tokens",
            )
        free += place == free
        listed.append({**entry, "id": place})
        present.add(text)
    result = {**content, "added_tokens": listed}
    if (ends := stated_ends(settings)) is None:
        return result
    ids, names = {**known, **token_ids(result)}, [text_of(settings.get(name)) for name in ("bos_token", "eos_token")]
    before, after = ([name] if flag and name in ids else [] for flag, name in zip(ends, names, strict=True))
    pieces = [*before, None, *after]
    return result | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": one}} if one else {"Sequence": {"id": "A"}} for one in pieces],
            "special_tokens": {one: {"ids": [ids[one]]} for one in pieces if one},
        }
    }


def _metadata(checkpoint: Checkpoint, content: Mapping[str, Any], rows: int, warnings: list[str]) -> dict[str, Any]:
    files, source = checkpoint.side_files, checkpoint.path.name
    settings = read_object(files, "tokenizer_config.json")
    model = content.get("model") or {}
    added = {token["content"]: token for token in content.get("added_tokens") or ()}
    ids = dict(model.get("vocab") or {}) if isinstance(model.get("vocab"), dict) else {}
    ids |= {text: token["id"] for text, token in added.items()}
    if model.get("type") != "BPE" or not ids:
        raise UnsupportedInput(
            f"the tokenizer of `{source}` is not BPE, the only kind that is written as GGUF", hint=OTHER
        )
    if max(ids.values()) >= rows:
        raise MalformedInput(
            f"the tokenizer of `{source}` has more tokens than the model ({rows})", hint="give its own"
        )
    texts = {number: text for text, number in ids.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [
        UNUSED if number not in texts
        else (CONTROL if added[text].get("special") else USER_DEFINED) if (text := texts[number]) in added
        else 1
        for number in range(rows)
    ]  # fmt: skip
    merges = [" ".join(pair) if isinstance(pair, list) else str(pair) for pair in model.get("merges") or ()]
    if model.get("byte_fallback"):
        keys = _piece_keys(content, tokens, kinds, merges, source)
    else:
        keys = {"model": "gpt2", "pre": _words_of(content, source), "merges": merges}
    keys |= {"tokens": tokens, "token_type": np.array(kinds, np.int32)}
    known = special_tokens(files)
    config = checkpoint.config
    for name, key in SPECIAL.items():
        number = known[name][1] if name in known else ids.get(settings.get(name) if name == "unk_token" else None)
        if number is None:
            number = config.get(f"{name}_id")
        if type(number) is int and 0 <= number < rows:
            keys[f"{key}_token_id"] = number
    keys |= _ends(keys.get("eos_token_id"), checkpoint, rows, warnings)
    before, after = _around(content.get("post_processor"))
    keys["add_bos_token"] = bool(before)
    if after:  # as llama.cpp's converter: eos is what ends a text, and eot what ends an answer
        keys["add_eos_token"] = True
        if after[-1] != keys.get("eos_token_id"):
            keys |= {"eot_token_id": keys.get("eos_token_id", after[-1]), "eos_token_id": after[-1]}
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return found | _templates(files, settings)


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the chat template, and of further ones by name, which llama.cpp uses as transformers does."""
    given = settings.get("chat_template")
    named = {one.get("name"): one.get("template") for one in given} if isinstance(given, list) else {"default": given}
    if "chat_template.jinja" in files:
        inner = [name for name in files if name.startswith(f"{TEMPLATES}/")]
        named = {PurePosixPath(name).stem: files[name].decode() for name in inner}
        named["default"] = files["chat_template.jinja"].decode()
    default = named.pop("default", None)
    texts = {re.sub(r"[^A-Za-z0-9]", "_", str(name)): text for name, text in named.items() if isinstance(text, str)}
    keys: dict[str, Any] = {f"{CHAT_TEMPLATE}.{name}": text for name, text in sorted(texts.items())}
    keys |= {"tokenizer.chat_templates": sorted(texts)} if texts else {}
    return keys | ({CHAT_TEMPLATE: default} if isinstance(default, str) and default else {})


def _ends(eos: int | None, checkpoint: Checkpoint, rows: int, warnings: list[str]) -> dict[str, int]:
    """The tokens that end a text: that of the tokenizer first, if generation ends with it, and another one."""
    given = read_object(checkpoint.side_files, "generation_config.json").get("eos_token_id")
    given = checkpoint.config.get("eos_token_id") if given is None else given
    ends = [one for one in (given if isinstance(given, list) else [given]) if type(one) is int and 0 <= one < rows]
    first = eos if eos in ends or not ends else ends[0]
    rest = [one for one in ends if one != first]
    if len(rest) > 1:
        warnings.append(
            f"a GGUF file has places for two tokens that end a text; left out: {', '.join(map(str, rest[1:]))}"
        )
    found = {"eos_token_id": first, "eot_token_id": rest[0] if rest else None}
    return {name: number for name, number in found.items() if number is not None}


SPACE = {"String": " "}  # the pattern of a step
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTES = {*map(chr, PRINTABLE), *(chr(256 + number) for number in range(256 - len(PRINTABLE)))}
"""The characters that stand for bytes in a byte-level vocabulary (`bytes_to_unicode` of GPT-2)."""


def _meaning(content: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about ids; tokens that only pad the embedding are not in it, unless `source` has them."""
    model, known = content["model"], {*(source.get("model") or {}).get("vocab", ())}
    normalizer = _flat(content.get("normalizer"), "normalizers")
    added = {
        token["id"]: (
            *(token["content"], bool(token.get("special"))),
            *(bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word")),
            bool(normalizer and token.get("normalized")),
        )
        for token in content.get("added_tokens") or ()
    }
    vocabulary = {**model["vocab"], **{text: number for number, (text, *_) in added.items()}}
    rest = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges", "unk_token"]
    steps = _flat(content.get("pre_tokenizer"), "pretokenizers")
    if (
        normalizer
        and json.loads(normalizer[-1]).get("pattern") == SPACE
        and " " not in json.loads(normalizer[-1])["content"]
    ):
        steps = [one for one in steps if json.loads(one).get("pattern") != SPACE]  # Gemma's: no text has a space then
    if any('"ByteLevel"' in one for one in steps) and vocabulary.keys() >= BYTES:
        rest.remove("unk_token")  # no text has an unknown part
    return {
        "normalizer": normalizer,
        "pre-tokenizer": steps,
        "tokens around a text": _around(content.get("post_processor")),
        "added tokens": added,
        "vocabulary": {
            text: number
            for text, number in vocabulary.items()
            if not PADDING.fullmatch(text) or text in known or not source
        },
        "merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges") or ()],
        **{f"`{name}`": model.get(name) or None for name in rest},
    }


def _flat(step: Any, name: str) -> list[str]:
    """The steps of a normalizer or pre-tokenizer, without fields that change no id."""
    if not isinstance(step, Mapping):
        return []
    if step["type"] == "Sequence":
        return [one for part in step[name] for one in _flat(part, name)]
    defaults = {"use_regex": True} if step["type"] == "ByteLevel" else {}
    fields = {key: value for key, value in {**defaults, **step}.items() if key != "trim_offsets"}
    return [json.dumps(fields, sort_keys=True)]


def _around(step: Any) -> tuple[list[int], list[int]]:
    """Ids of the tokens that a post-processor puts before and after a text; ValueError for another kind."""
    if not isinstance(step, Mapping) or step["type"] == "ByteLevel":
        return [], []
    if step["type"] == "Sequence":
        parts = [_around(part) for part in step["processors"]]
        return [one for before, _ in parts for one in before], [one for _, after in parts for one in after]
    if step["type"] in ("BertProcessing", "RobertaProcessing"):
        return [step["cls"][1]], [step["sep"][1]]
    if step["type"] != "TemplateProcessing":
        raise ValueError(f"a post-processor of the type {step['type']}")
    ids = [
        None if "Sequence" in part else step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
        for part in step["single"]
    ]
    text = ids.index(None)
    before, after = ids[:text], ids[text + 1 :]
    return [one for group in before for one in group or ()], [one for group in after for one in group or ()]


OTHER = "use llama.cpp's converter, or remove the tokenizer's files to write the model without one"


def _words_of(content: Mapping[str, Any], source: str) -> str:
    """The name of the division into words; UnsupportedInput for one that llama.cpp does not have, or we do not know."""
    normalizes = "NFC" in json.dumps(content.get("normalizer"))
    whole = bool(content["model"].get("ignore_merges"))
    steps = _flat(content.get("pre_tokenizer"), "pretokenizers")
    for name, words in WORDS.items():
        made = [one for step in _steps(words) for one in _flat(step, "")]
        if (steps, normalizes, whole) == (made, words.normalizes, words.whole):
            return name
    raise UnsupportedInput(f"the tokenizer of `{source}` divides text in a way that GGUF has no name for", hint=OTHER)


def _piece_keys(
    content: Mapping[str, Any], tokens: list[str], kinds: list[int], merges: list[str], source: str
) -> dict[str, Any]:
    """sentencepiece's BPE: the score of a piece is minus the rank of its first merge, which gives the same merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    scores = [-float(ranks.get(text, len(merges))) for text in tokens]
    for number, text in enumerate(tokens):
        if kinds[number] == 1 and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            kinds[number] = BYTE
    unknown = content["model"].get("unk_token")
    number = tokens.index(unknown) if unknown in tokens else 0
    kinds[number] = 2
    steps = json.dumps(content.get("normalizer")) + json.dumps(content.get("pre_tokenizer"))
    prefix = '"Prepend"' in steps or '"prepend_scheme": "first"' in steps or '"prepend_scheme": "always"' in steps
    model = SentencePieceModel(
        tuple(zip(tokens, scores, kinds, strict=True)), True, True, 0, 0, number, b"", prefix, False
    )
    if [" ".join(pair) for pair in merges_of(model)] != merges:
        raise UnsupportedInput(f"the merges of `{source}` have no scores that give them", hint=OTHER)
    return {
        "model": "llama",
        "pre": "default",
        "scores": np.array(scores, np.float32),
        "add_space_prefix": prefix,
        "unknown_token_id": number,
    }
