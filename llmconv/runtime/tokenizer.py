"""The tokenizer of a folder, and what it makes of prompts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, LlmconvError, first_line
from llmconv.files.pointer_files import refuse_git_lfs
from llmconv.runtime.custom_code import TRUST_HINT, custom_code_errors, custom_tokenizer_class, tokenizer_reference

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")

HEAD = 64
"""Bytes by which a pointer of Git LFS is told."""

PLAIN = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""Classes that are tokenizer.json and nothing else. `AutoTokenizer`, which would choose them, imports torch."""

OTHERS_FIRST = ("mistral", "pixtral", "voxtral", "ministral")
"""In the names of model types for which transformers looks for other files before tokenizer.json."""


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer; its own code runs only if it is trusted.

    Raises:
        InputRefused: there is none, or transformers cannot read it.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputRefused(
            f"`{folder}` has no tokenizer",
            hint="convert with `llmconv to-hf … --tokenizer PATH`, or copy tokenizer.json",
        )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                refuse_git_lfs(file.read(HEAD), name)
    own = custom_tokenizer_class(folder, trust_remote_code)
    try:
        with custom_code_errors(folder if own else None):
            found = (own or _class_of(folder)).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not isinstance(found.model_max_length, int | float):
            raise ValueError("`model_max_length` is not a number")
        return found
    except LlmconvError:
        raise
    except Exception as error:  # those of the tokenizers library are of no class of their own
        raise InputRefused(
            f"the tokenizer of `{folder}` cannot be read: {first_line(error)}",
            hint=TRUST_HINT
            if tokenizer_reference(folder)
            else "copy the tokenizer files of the original model into the folder",
        ) from error


def _class_of(folder: Path) -> Any:
    """What `AutoTokenizer` would choose, or it itself."""
    transformers = importlib.import_module("transformers")
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return transformers.AutoTokenizer
    said = read_json(folder / "tokenizer_config.json")
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    is_plain = said.get("tokenizer_class") in PLAIN and "auto_map" not in said
    if is_plain and not any(name in str(config.get("model_type")) for name in OTHERS_FIRST):
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def encode_prompt(tokenizer: Any, prompt: str, start: int | None = None) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds; an empty one becomes the start token.

    Args:
        tokenizer: of transformers.
        prompt: a text.
        start: the start token where the tokenizer names none.

    Raises:
        InputRefused: no token at all, or no text.
    """
    require_text(prompt)
    ids = token_ids(tokenizer, prompt)
    if ids:
        return ids
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else start
    if first is None:
        raise InputRefused("the prompt has no tokens", hint="give a prompt that is not empty")
    return [int(first)]


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """What a tokenizer makes of a text.

    Raises:
        InputRefused: it fails.
    """
    try:
        ids: list[int] = tokenizer(text, **options)["input_ids"]
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        raise InputRefused(
            f"the tokenizer fails on this text: {first_line(error)}", hint="is a pattern in tokenizer.json too costly?"
        ) from error
    return ids


def require_text(text: str) -> None:
    """Refuses what arrived as bytes that are no UTF-8: Python keeps those as lone surrogates.

    Raises:
        InputRefused: there are some.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputRefused("the prompt is no text in UTF-8", hint="convert it, for example with `iconv`") from error


class TokenDecoder:
    """Tokens to text without special tokens, as the pieces of a text need it: spaces stay as they are."""

    def __init__(self, tokenizer: Any) -> None:
        fast = _backend(tokenizer)
        self._decode = fast.decode if fast else partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def __call__(self, tokens: Sequence[int]) -> str:
        text: str = self._decode(list(tokens), skip_special_tokens=True)
        return text


def _backend(tokenizer: Any) -> Any:
    """What a fast tokenizer asks in the end, where its class adds nothing to that: once per token the way counts."""
    if "transformers" not in sys.modules:
        return None
    plain = sys.modules["transformers"].PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return None
    own = type(tokenizer)
    return tokenizer.backend_tokenizer if (own.decode, own._decode) == (plain.decode, plain._decode) else None
