"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's form.

Source: vLLM's page on its OpenAI-compatible server, "Tokenizer API".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmconv.runtime.tokenizer import TooManyTokens
from llmconv.serve.fields import ApiError, Fields, checked_text
from llmconv.serve.openai_schema import MAX_TOKENS, chat_request
from llmconv.serve.served_model import ServedModel

OF_CHAT = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def tokens_of(named: Callable[[str | None], ServedModel], content: Any) -> dict[str, Any]:
    """The answer of `/tokenize` to a `prompt`, or to the `messages` of a chat; ApiError for invalid fields.

    `named` gives the model of a name.
    """
    fields = Fields(content)
    served = _served(named, fields)
    special, texts = fields.take("add_special_tokens", bool), fields.flag("return_token_strs")
    prompt = fields.take("prompt", str)
    chat = {name: value for name in OF_CHAT if (value := fields.take(name, object)) is not None}
    if (prompt is None) == ("messages" not in chat):
        raise ApiError("give `prompt`, or `messages`", parameter="prompt")
    model = served.model
    try:
        if prompt is None:
            ids = served.prompt_of(chat_request(chat)).ids
        elif special is False and not prompt:
            ids = []
        else:
            text = checked_text(prompt, "prompt")
            ids = model.encode(text, add_special_tokens=special is not False, most=model.longest_prompt)
    except TooManyTokens as error:
        raise ApiError(error.message, parameter="prompt", code="context_length_exceeded") from None
    names = model.tokenizer.convert_ids_to_tokens(list(ids)) if texts else None
    return {"count": len(ids), "max_model_len": model.context_length, "tokens": list(ids), "token_strs": names}


def text_of(named: Callable[[str | None], ServedModel], content: Any) -> dict[str, Any]:
    """The answer of `/detokenize`: the text of `tokens`, special ones included; ApiError for invalid fields."""
    fields = Fields(content)
    served, ids = _served(named, fields), fields.take("tokens", list)
    most = len(served.model.tokenizer)
    is_valid = ids is not None and len(ids) <= MAX_TOKENS
    if not is_valid or not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < most for one in ids):
        raise ApiError(f"`tokens` must be a list of token ids below {most}", parameter="tokens")
    return {"prompt": served.shown(ids)}


def info_of(served: ServedModel) -> dict[str, Any]:
    """The answer of `/tokenizer_info`: special tokens by their texts, and the chat template."""
    tokenizer = served.model.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: None if (text := getattr(tokenizer, name, None)) is None else str(text) for name in names}
    length = {"model_max_length": served.model.longest_prompt, "chat_template": tokenizer.chat_template}
    return {"tokenizer_class": type(tokenizer).__name__, **special, **length}


def _served(named: Callable[[str | None], ServedModel], fields: Fields) -> ServedModel:
    name = fields.take("model", str)
    return named(name)
