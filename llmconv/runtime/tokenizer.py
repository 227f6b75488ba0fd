"""The tokenizer of a model folder, opened without running its code, and the checks that a `tokenizer.json` must pass.

A template that adds so many special tokens to a text that these take all memory is refused. Source of the format:
`TemplateProcessing` of tokenizers: pieces of the template, and the ids of each special token.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.causal_lm import language_config
from llmconv.checkpoint import read_json, read_small
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem, first_line
from llmconv.files.paths import kind_of, refuse_git_lfs
from llmconv.files.sources import local_path
from llmconv.runtime.custom_code import TRUST_HINT, custom_code_errors, custom_tokenizer_class, tokenizer_reference
from llmconv.sample_texts import DEFAULT, calibration_text, is_default
from llmconv.tensors import Array

TOKENIZER = "tokenizer"  # the name of the tokenizer's own chat template

# maximum number of special tokens, and of places for a text, in one template; models have up to 5 and 2
MAX_SPECIAL, MAX_TEXTS = 1024, 8
FILE, MODEL, PIECES = "tokenizer.json", "tokenizer.model", "spiece.model"
MAX_PLACES = 8  # maximum number of post-processors in one file, which has one
TEMPLATE = re.compile(r'"post_processor"\s*:\s*')
HIDDEN = re.compile(r"\\u00[2-7][0-9a-fA-F]", re.IGNORECASE)  # a letter written as an escape, as no program writes one


def require_small_template(folder: Path) -> None:
    """Raises MalformedInput if templates in `tokenizer.json` add too many tokens; only these are parsed, first."""
    path = folder / FILE
    if not path.is_file():
        return
    found = list(_templates(path.read_bytes().decode("utf-8", "replace")))
    for name in ("single", "pair"):
        counts = [_counts(template, name) for template in found]
        special, texts = (sum(count[at] for count in counts) for at in (0, 1))
        if special > MAX_SPECIAL or texts > MAX_TEXTS:
            raise MalformedInput(
                f"the template of `{FILE}` adds {special:,} tokens to every text, and has {texts} places for it",
                hint=f"at most {MAX_SPECIAL} and {MAX_TEXTS}: copy the tokenizer of the original model",
            )


def _counts(template: dict[str, Any], name: str) -> tuple[int, int]:
    """Number of special tokens, and of places for a text, in one of the forms of a template."""
    ids, pieces = template.get("special_tokens"), template.get(name)
    sizes = {known: _size(one) for known, one in ids.items()} if isinstance(ids, dict) else {}
    pieces = pieces if isinstance(pieces, list) else []
    named = [(_piece(piece, "SpecialToken"), _piece(piece, "Sequence")) for piece in pieces]
    return sum(sizes.get(special, 1) for special, _ in named if special), sum(text is not None for _, text in named)


def _templates(text: str) -> Iterator[dict[str, Any]]:
    """Templates in a file's post-processors, none without valid JSON; MalformedInput for too many post-processors."""
    places = [found.end() for found in TEMPLATE.finditer(text)]
    if len(places) > MAX_PLACES:
        problem = f"`{FILE}` has {len(places)} fields `post_processor`"
        raise MalformedInput(problem, hint="copy the tokenizer of the original model")
    try:
        if HIDDEN.search(text):
            yield from _nested(json.loads(text))
        else:
            for place in places:
                yield from _nested(json.JSONDecoder().raw_decode(text, place)[0])
    except (ValueError, RecursionError):
        return


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a value, itself included, that are templates."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "single" in one or "pair" in one:
                yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _size(special: Any) -> int:
    """Number of ids of a special token."""
    ids = special.get("ids") if isinstance(special, dict) else None
    return len(ids) if isinstance(ids, list) else 1


def _piece(piece: Any, kind: str) -> str | None:
    """The id of a piece of a template; None for a piece of another kind."""
    found = piece.get(kind) if isinstance(piece, dict) else None
    return str(found.get("id")) if isinstance(found, dict) else None


TOKENIZER_FILES = (FILE, MODEL, "vocab.json", "tokenizer_config.json", PIECES)
HEAD = 64  # number of first bytes that identify a Git LFS pointer
# characters of the first beginning of a long text: a usual number per token of the maximum, and at least so many
CHARACTERS, LEAST_CHARACTERS = 4, 1 << 14
UNKNOWN = 1 << 20  # maximum number of tokens for a model that declares no context
# tokens that a beginning may have more than the same characters of the whole text: of the word in which it ends
SLACK = 256
# classes defined by tokenizer.json alone; opened directly, because `AutoTokenizer` imports torch
PLAIN = {"PreTrainedTokenizerFast", "TokenizersBackend"}
# parts of model types for which transformers prefers other files to tokenizer.json
OTHER_FILES_FIRST = ("mistral", "pixtral", "voxtral", "ministral")


def load_tokenizer(folder: Path, trust_remote_code: bool = False, *, way_out: str = "") -> Any:
    """The folder's tokenizer, with custom code only if trusted; MalformedInput if hostile.

    Raises InputRefused for none, with a hint that ends with a further `way_out`.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        hint = f"copy the tokenizer's files of the original model into it{way_out}"
        raise InputRefused(f"`{folder}` has no tokenizer", hint=hint)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                refuse_git_lfs(file.read(HEAD), name)
    require_small_template(folder)
    own = custom_tokenizer_class(folder, trust_remote_code)
    try:
        with custom_code_errors(folder if own else None):
            found = (own or _class_of(folder)).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not isinstance(found.model_max_length, int | float):
            raise ValueError("`model_max_length` is not a number")
        if own is None and (folder / FILE).is_file():
            if type(found).__name__ not in PLAIN:
                _follow_file(found, folder)
            _follow_flags(found, folder)
        elif own is None and (alone := next((one for one in (MODEL, PIECES) if (folder / one).is_file()), "")):
            _follow_model(found, folder / alone)
        _follow_bytes(found)
        _follow_added(found)
        return found
    except LlmconvError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputRefused(
            f"the tokenizer of `{folder}` cannot be read: {first_line(error)}",
            hint=TRUST_HINT if tokenizer_reference(folder) else _way_to_read(folder),
        ) from error


def _way_to_read(folder: Path) -> str:
    """What to do about a tokenizer that its class does not read: another class, where its file alone is read."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - of an error

    try:
        Tokenizer.from_file(str(folder / FILE))
    except Exception:  # the library raises plain Exception
        return "copy the tokenizer files of the original model into the folder"
    return f"`{FILE}` is of another kind: set `tokenizer_class` in `tokenizer_config.json` to `PreTrainedTokenizerFast`"


def find_tokenizer(given: Any, folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a caller, an object or a folder, None for that in `folder`; UsageProblem for others."""
    if given is None:
        return load_tokenizer(folder, trust_remote_code, way_out=", or give `--tokenizer FOLDER`")
    if isinstance(given, str | os.PathLike):
        return load_tokenizer(local_path(os.fspath(given)), trust_remote_code)
    if isinstance(given, type) or not callable(given) or not callable(getattr(given, "decode", None)):
        problem = f"`tokenizer` is {kind_of(given)}, not a tokenizer of transformers"
        raise UsageProblem(problem, hint="give `AutoTokenizer.from_pretrained(FOLDER)`, or FOLDER")
    return given


def _class_of(folder: Path) -> Any:
    """The class that `AutoTokenizer` would choose if that is known, else `AutoTokenizer`."""
    transformers = importlib.import_module("transformers")
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return transformers.AutoTokenizer
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    is_plain = tokenizer_config.get("tokenizer_class") in PLAIN and "auto_map" not in tokenizer_config
    if is_plain and not any(name in str(config.get("model_type")) for name in OTHER_FILES_FIRST):
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


# what decides of a text's tokens, besides vocabulary and merges, in a model of the type BPE
SWITCHES = (
    "byte_fallback",
    "fuse_unk",
    "ignore_merges",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
PREPENDS = re.compile(r'"add_prefix_space":\s*true|"prepend_scheme":\s*"(?:first|always)"|"type":\s*"Prepend"')


def _follow_file(found: Any, folder: Path) -> None:
    """Gives a tokenizer the model and the steps of its `tokenizer.json`, with which the model was trained.

    transformers 4 ran that file; transformers 5 builds tokenizers of classes such as Qwen2Tokenizer anew, from the
    vocabulary, with the kind of model and the steps that are usual for the class (`convert_to_native_format`). So
    DeepSeek-R1-Distill-Qwen, Qwen by `model_type`, lost the DeepSeek steps of its file, and a Unigram became the BPE of
    LlamaTokenizer. An `add_prefix_space` of `tokenizer_config.json` that contradicts the file is left to transformers,
    which has always let it win; so are the switches of a BertNormalizer.
    """
    backend: Any = getattr(found, "backend_tokenizer", None)
    content = read_json(folder / FILE)
    model = content.get("model")
    if backend is None or not isinstance(model, dict):
        return
    from tokenizers import Tokenizer  # noqa: PLC0415 - the module is read where no text becomes tokens

    kind, steps = type(backend.model).__name__, ("normalizer", "pre_tokenizer", "decoder")
    if is_bpe := kind == "BPE" and "merges" in model:  # the same vocabulary and merges, which take long to read
        empty = {**model, "type": "BPE", "vocab": {}, "merges": [], "unk_token": None}
        file = Tokenizer.from_str(json.dumps({**content, "model": empty, "added_tokens": [], "post_processor": None}))
    else:
        file = Tokenizer.from_file(str(folder / FILE))
    given = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    prefix, begun = (
        given.get("add_prefix_space"),
        PREPENDS.search(json.dumps([content.get(step) for step in steps[:2]])),
    )
    if isinstance(prefix, bool) and prefix != bool(begun) and kind == type(file.model).__name__:
        return
    if not is_bpe and not file.get_vocab().items() <= backend.get_vocab().items():
        return  # a class with ids of its own, such as those of languages
    _follow_model_of_file(backend, file, model if is_bpe else None)
    for step in steps:
        setattr(backend, step, getattr(file, step))


def _follow_model_of_file(backend: Any, file: Any, switches: Mapping[str, Any] | None) -> None:
    """Gives a tokenizer the file's model, or only its `switches`; keeps the switches of a BertNormalizer."""
    if switches is None:
        backend.model = file.model
    else:
        for switch in SWITCHES:
            value = switches.get(switch) or (None if switch in SWITCHES[3:] else False)
            if (getattr(backend.model, switch) or None) != (value or None):
                setattr(backend.model, switch, value)
    if type(file.normalizer).__name__ == type(backend.normalizer).__name__ == "BertNormalizer":
        normalizer = file.normalizer
        for switch in ("lowercase", "strip_accents", "handle_chinese_chars"):
            setattr(normalizer, switch, getattr(backend.normalizer, switch))
        file.normalizer = normalizer


PROBES = (
    "Hello world, how are you?",
    "thermal (12,345)  x",
    "a\tb\n  c \N{EM DASH} d",
    "\N{FULLWIDTH LATIN CAPITAL LETTER A}\u00e9\u6771 ",
)
UNIGRAM = 1  # `TrainerSpec.ModelType` of sentencepiece


def _follow_model(found: Any, path: Path) -> None:
    """Gives a tokenizer that transformers made of sentencepiece's file alone what it left out of that file.

    transformers 5 takes the pieces for a BPE without a normalizer: full-width letters, spaces side by side (OpenLLaMA)
    and the pieces of a unigram model became other tokens. Its T5Tokenizer, which rinna's models have, knows no bytes,
    no text without a first space and no other id of the unknown token than T5's. InputRefused if they still do.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # noqa: PLC0415 - few need it
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2  # noqa: PLC0415
    from tokenizers import Regex, models, normalizers, pre_tokenizers  # noqa: PLC0415

    backend: Any = getattr(found, "backend_tokenizer", None)
    data = path.read_bytes()
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        return  # tiktoken's
    is_plain = isinstance(getattr(backend, "pre_tokenizer", None), pre_tokenizers.Metaspace)
    if not proto.pieces or not (is_plain or type(found).__name__ == "T5Tokenizer"):
        return
    spec, unk = proto.normalizer_spec, proto.trainer_spec.unk_id
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        spaces = ("\\A +|[ \N{LOWER ONE EIGHTH BLOCK}]+\\z", ""), (" {2,}", " ")
        steps += [normalizers.Replace(Regex(pattern), content) for pattern, content in spaces]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    _divide_as_pieces(backend, path.parent, spec, proto.trainer_spec.byte_fallback or is_plain)
    if proto.trainer_spec.model_type == UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        more = sorted((at, text) for text, at in backend.get_vocab(False).items() if at >= len(pieces))
        backend.model = models.Unigram(
            [*pieces, *((text, 0.0) for _, text in more)], unk, proto.trainer_spec.byte_fallback
        )
    processor = SentencePieceProcessor(model_proto=data)
    if any(found.encode(text, add_special_tokens=False) != processor.encode(text) for text in PROBES):
        raise InputRefused(
            f"`{path.name}` gives other tokens in transformers than in sentencepiece",
            hint="copy the `tokenizer.json` of the original model into the folder",
        )


def _divide_as_pieces(backend: Any, folder: Path, spec: Any, has_bytes: bool) -> None:
    """Spaces of a text as sentencepiece's `NormalizerSpec` has them, on the way to pieces and back."""
    from tokenizers import decoders, pre_tokenizers  # noqa: PLC0415 - of few tokenizers

    is_plain = isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)
    given = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if not is_plain or (spec.remove_extra_whitespaces and given.get("legacy") is not False):
        # `first` would take a text whose first spaces were removed for a later one
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    if not spec.add_dummy_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    if has_bytes and not (is_plain and spec.add_dummy_prefix):
        plain = [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
        first = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
        backend.decoder = decoders.Sequence([*plain, *first])
    elif not spec.add_dummy_prefix:
        backend.decoder = decoders.Metaspace(prepend_scheme="never", split=False)


# classes whose tokenizer in transformers 4 begins and ends texts as the flags in `tokenizer_config.json` say, whatever
# tokenizer.json does, and the flags that are missing there (its `update_post_processor`)
FLAGS = {
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"), (True, False)),
    "GPTNeoXTokenizer": (False, False),
}


def stated_ends(settings: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Whether bos begins and eos ends a text by the flags of `tokenizer_config.json`; None where tokenizer.json says.

    transformers 5 writes no such flags, so a file that has them is one of transformers 4, whose tokenizers obey them.
    """
    flags = [settings.get(name) for name in ("add_bos_token", "add_eos_token")]
    usual = FLAGS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"))
    if usual is None or not any(isinstance(flag, bool) for flag in flags):
        return None
    bos, eos = (flag if isinstance(flag, bool) else default for flag, default in zip(flags, usual, strict=True))
    return bos, eos


def _follow_flags(found: Any, folder: Path) -> None:
    """Gives a tokenizer the tokens around a text that it had in transformers 4, with which the model was trained.

    e5-mistral appends eos by `add_eos_token` alone, and its embedding is the state of that token.
    """
    path = folder / "tokenizer_config.json"
    backend: Any = getattr(found, "backend_tokenizer", None)
    ends = stated_ends(read_json(path)) if backend is not None and path.is_file() else None
    if ends is None:
        return
    pairs = [(found.bos_token, found.bos_token_id), (found.eos_token, found.eos_token_id)]
    before, after = ([pair] if flag and None not in pair else [] for flag, pair in zip(ends, pairs, strict=True))
    if backend.encode("").ids == [number for _, number in (*before, *after)]:
        return
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415 - few tokenizers contradict their file

    def around(text: str, kind: int) -> list[str]:
        return [
            *(f"{token}:{kind}" for token, _ in before),
            f"{text}:{kind}",
            *(f"{token}:{kind}" for token, _ in after),
        ]

    single = around("$A", 0)
    backend.post_processor = TemplateProcessing(
        single=single, pair=[*single, *around("$B", 1)], special_tokens=[*before, *after]
    )


BYTES = b'"ByteLevel"'


def _follow_bytes(found: Any) -> None:
    """Gives a tokenizer whose tokens are bytes the decoder that reads them; some files have SentencePiece's.

    Mistral's tekken of Devstral 2 is one: its texts had `Ġ` in the place of spaces.
    """
    backend: Any = getattr(found, "backend_tokenizer", None)
    if backend is None or BYTES not in _state(backend.pre_tokenizer) or BYTES in _state(backend.decoder):
        return
    from tokenizers.decoders import ByteLevel  # noqa: PLC0415 - few tokenizers need another decoder than their file's

    backend.decoder = ByteLevel()


def _follow_added(found: Any) -> None:
    """Gives added tokens of a byte-level tokenizer their own texts.

    The decoder takes a token for bytes if all of its letters stand for bytes, also an added token, which is a text: the
    last letter of `café` stands for the byte 0xE9, and became U+FFFD. transformers 4 had this in its fast tokenizers.
    """
    backend: Any = getattr(found, "backend_tokenizer", None)
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return
    added = {number: one for number, one in backend.get_added_tokens_decoder().items() if not one.content.isascii()}
    odd = {at: one for at, one in added.items() if backend.decode([at], skip_special_tokens=False) != one.content}
    bytes_too = {one.content for one in odd.values()} & _made_of_bytes(backend) if odd else set()
    texts = {number: (one.content, one.special) for number, one in odd.items() if one.content not in bytes_too}
    if texts:
        found._decode = partial(_decode_around, found._decode, texts)


def _made_of_bytes(backend: Any) -> set[str]:
    """The tokens that the words of a text become: single letters, and what merges make of them."""
    model = json.loads(backend.to_str())["model"]
    merges = ("".join(one if isinstance(one, list) else one.split(" ")) for one in model.get("merges", ()))
    return {*merges, *(text for text in model.get("vocab", ()) if len(text) == 1)}


def _decode_around(
    decode: Callable[..., str],
    texts: Mapping[int, tuple[str, bool]],
    token_ids: Any,
    skip_special_tokens: bool = False,
    **options: Any,
) -> str:
    """As `decode`, but for the tokens in `texts`: text, and whether it is special, by id."""
    ids = [token_ids] if isinstance(token_ids, int) else token_ids
    shown = [one for one in ids if one not in texts or not (skip_special_tokens and texts[one][1])]
    return "".join(
        "".join(texts[one][0] for one in run)
        if is_added
        else decode(list(run), skip_special_tokens=skip_special_tokens, **options)
        for is_added, run in groupby(shown, texts.__contains__)
    )


def _state(step: Any) -> bytes:
    """A step of a tokenizer as JSON; empty for none."""
    return bytes(step.__getstate__()) if hasattr(step, "__getstate__") and step is not None else b""


class TooManyTokens(InputRefused):
    """A text has far more tokens than it may have; only its `beginning`, still too long, became tokens (`ids`)."""

    def __init__(self, most: int, beginning: str, ids: list[int]) -> None:
        super().__init__(
            f"the prompt has more than {2 * most} tokens, twice the {most} that are accepted",
            hint="shorten the prompt, or export with a larger --max-seq-len if the graphs set the limit",
        )
        self.beginning, self.ids = beginning, ids


def encode_prompt(
    tokenizer: Any, prompt: str, start: int | None = None, *, add_special_tokens: bool = True, most: int | None = None
) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds; the start token for an empty prompt.

    `start` is the start token if the tokenizer declares no `bos_token`. Raises InputRefused without any token, and as
    `token_ids`.
    """
    require_text(prompt)
    if ids := token_ids(tokenizer, prompt, most, add_special_tokens=add_special_tokens):
        return ids
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else start
    if first is None:
        raise InputRefused("the prompt has no tokens", hint="give a prompt that is not empty")
    return [int(first)]


def starts_twice(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether tokens begin with two start tokens: a text had one, and the tokenizer put its own before it.

    transformers, vLLM and llama.cpp run such a prompt as it is (llama.cpp says so), and so does llmconv.
    """
    bos = tokenizer.bos_token_id
    return bos is not None and list(ids[:2]) == [bos, bos]


def token_ids(tokenizer: Any, text: str, most: int | None = None, **options: Any) -> list[int]:
    """Token ids of a text, up to twice `most`, so that the caller can report their number.

    `options` are passed to the tokenizer. A text that is far too long is not tokenized as a whole, which takes a second
    and 200 MB per MB: beginnings of it are, each twice as long as the one before. A bound on its bytes would also
    refuse what a normalizer shortens. Raises InputRefused if the tokenizer fails, TooManyTokens for more than twice
    `most`.
    """
    size = len(text) if most is None else max(most * CHARACTERS, LEAST_CHARACTERS)
    while most is not None and size < len(text):
        ids = _token_ids(tokenizer, text[:size], options)
        if len(ids) > 2 * most + SLACK:
            raise TooManyTokens(most, text[:size], ids)
        size *= 2
    return _token_ids(tokenizer, text, options)


def _token_ids(tokenizer: Any, text: str, options: Mapping[str, Any]) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, **options)["input_ids"]
    except BaseException as error:  # tokenizers raise plain Exception, and a panic in Rust code is not one
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        problem = f"the tokenizer fails on this text: {first_line(error)}"
        raise InputRefused(
            problem, hint="is a pattern in tokenizer.json too costly, or its unknown token missing?"
        ) from error
    return ids


def first_ids(tokenizer: Any, text: str, most: int) -> list[int]:
    """The first `most` tokens of a text, of which only as much becomes tokens as is needed."""
    try:
        return token_ids(tokenizer, text, most, verbose=False)[:most]
    except TooManyTokens as error:
        return error.ids[:most]


def require_contents(messages: Sequence[Mapping[str, Any]], where: str = "the chat") -> None:
    """Raises InputRefused for contents that a template would render as `None` or `7`, or fail on.

    A content is a text, a list of parts (which some templates take), or None in a message of the assistant that has
    `tool_calls`, as in OpenAI's API. `where` is the name of the chat in the message.
    """
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        if isinstance(content, str | list | tuple):
            continue
        if content is None and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        kind = "null" if content is None else kind_of(content)
        hint = 'give a text, or ""; null is allowed only in a message of the assistant with `tool_calls`'
        raise InputRefused(f"the `content` of message {number} in {where} is {kind}, but must be a text", hint=hint)


def require_text(text: str) -> None:
    """Raises InputRefused for invalid Unicode: Python represents bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputRefused("the prompt is not UTF-8 text", hint="convert it, for example with `iconv`") from error


class TokenDecoder:
    """Decodes tokens to text without special tokens; spaces are kept, so that pieces of a text can be joined.

    The special tokens `shown` are in the text.
    """

    def __init__(self, tokenizer: Any, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        fast = _backend(tokenizer)
        self._decode = fast.decode if fast else partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def __call__(self, tokens: Sequence[int]) -> str:
        if self._shown:
            hidden = self.special_texts
            return str(self._decode([one for one in tokens if one not in hidden], skip_special_tokens=False))
        return str(self._decode(list(tokens), skip_special_tokens=True))

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of the tokens that are left out, by their ids."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = {int(at): str(token) for at, token in added.items() if getattr(token, "special", False)}
        ids, texts = (getattr(self._tokenizer, f"all_special_{name}", ()) for name in ("ids", "tokens"))
        known = {**dict(zip(map(int, ids), map(str, texts), strict=True)), **found}
        return {token: text for token, text in known.items() if token not in self._shown}


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers` object of a fast tokenizer that does not change decoding: it is faster per token."""
    if "transformers" not in sys.modules or "_decode" in vars(tokenizer):
        return None
    plain = sys.modules["transformers"].PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return None
    classes = type(tokenizer).__mro__
    decodes_otherwise = any("decode" in name for each in classes[: classes.index(plain)] for name in vars(each))
    return None if decodes_otherwise else tokenizer.backend_tokenizer


# tokens of the text that are used, per call, and at least. More than 4,096 tokens gain little
TOKENS, PIECE, LEAST = 4096, 512, 256
LONG, TEXT_BYTES = 1 << 20, 64 << 20  # tokens that are used where every token counts, and maximum size of a text file
HINT = "`--calibrate` takes a plain text file, or the word `default` for the text that ships with llmconv"


@dataclass(frozen=True)
class CalibrationText:
    """A plain text; `name` is that of its file, or `default`."""

    name: str
    content: str

    @classmethod
    def read(cls, path: str | Path) -> CalibrationText:
        """The text of a file, or llmconv's own for `default`; InputRefused if unreadable, UsageProblem if ambiguous."""
        if is_default(path):
            return cls.shipped()
        if Path(path).is_dir():
            raise InputRefused(f"`{path}` is a folder", hint=HINT)
        try:
            return cls(Path(path).name, read_small(Path(path), TEXT_BYTES).decode())
        except OSError as error:
            raise InputRefused(f"cannot read `{path}`: {error.strerror}", hint=HINT) from error
        except UnicodeDecodeError as error:
            raise InputRefused(f"`{path}` is not UTF-8 text", hint=HINT) from error

    @classmethod
    def shipped(cls) -> CalibrationText:
        return cls(DEFAULT, calibration_text())

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def tokens(
        self, folder: Path, context: int | None, *, trust_remote_code: bool = False, most: int = TOKENS
    ) -> list[Array]:
        """The first `most` ids, int64 [1, tokens] with at most `context` (None: unknown) each; raises InputRefused."""
        tokenizer = load_tokenizer(folder, trust_remote_code)
        if not self.content.strip():
            raise InputRefused(f"`{self.name}` is empty", hint=HINT)
        ids = np.array(first_ids(tokenizer, self.content, most), dtype=np.int64)
        if len(ids) < LEAST:
            problem = f"`{self.name}` is too short to measure anything: {len(ids)} tokens"
            raise InputRefused(problem, hint=f"give a text of some pages: {LEAST} tokens at least, {most:,} are used")
        vocabulary = language_config(folder).get("vocab_size")
        if isinstance(vocabulary, int) and ids.max() >= vocabulary:
            raise InputRefused(
                f"`{self.name}` has the token {ids.max()}, and the model has {vocabulary:,} tokens",
                hint="copy the tokenizer of the original model into the folder",
            )
        size = min(PIECE, context or PIECE)
        if size == 1:
            raise InputRefused("the model takes one token, and no text runs through it", hint="leave out `--calibrate`")
        pieces = [ids[None, start : start + size] for start in range(0, len(ids), size)]
        return [piece for piece in pieces if piece.shape[1] > 1]


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def random_prompts(tokens: Sequence[int], batch: int, length: int) -> list[list[int]]:
    """Random prompts [batch, length], chosen from `tokens` with a fixed seed."""
    found: list[list[int]] = np.random.default_rng([batch, length]).choice(tokens, (batch, length)).tolist()
    return found


def usable_tokens(folder: Path) -> list[int]:
    """All tokens of a model's vocabulary except special ones; raises InputRefused without a `vocab_size`."""
    config = language_config(folder)
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise InputRefused(f"`{folder}` has no config.json with a vocab_size", hint="copy the model's config.json")
    values = [config.get(name) for name in SPECIAL]
    special = {token for value in values for token in (value if isinstance(value, list) else [value])}
    return [token for token in range(size) if token not in special] or list(range(size))
