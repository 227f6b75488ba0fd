"""Chat: a conversation whose turns share one cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.generation.loop import Conversation
from llmconv.generation.model import TextModel
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.chat_templates import find_template, require_template
from llmconv.runtime.tokenizer import TOKENIZER

ANSWER_TOKENS = 2048  # maximum number of tokens in an answer, unless a setting or the context gives a smaller one
MAX_SHIFT = 16  # maximum difference in tokens between an answer and its text when that is tokenized again


class Chat:
    """A conversation with a model; each turn runs only the new tokens.

    `settings` (default: `model.defaults`, with `model.chat_ends`) are of the answers, see `answer_settings`; `template`
    is as for `TextModel.encode_chat` (InputRefused if the tokenizer has none, UsageProblem if it is unknown).
    `messages` are role and content in order, without the `system` message, after whose change the next turn runs the
    whole chat again.
    """

    @checked
    def __init__(
        self,
        model: TextModel,
        settings: GenerationSettings | None = None,
        *,
        template: str = TOKENIZER,
        system: str = "",
    ) -> None:
        require_template(model.tokenizer, template)
        given = model.defaults.but(eos_token_id=model.chat_ends) if settings is None else settings
        self._settings = answer_settings(given, template)
        self._model, self._template = model, template
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._conversation = Conversation()
        self._ran: list[int] = []

    def reset(self) -> None:
        self.messages, self._conversation, self._ran = [], Conversation(), []

    def ask(self, text: str) -> Iterator[TextPiece]:
        """The answer, piece by piece, kept as far as it was read; InputRefused if the chat cannot be encoded."""
        if not isinstance(text, str):
            raise UsageProblem(f"the message is {kind_of(text)}, not a string", hint="give one `str`")
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages, most = [*system, *self.messages, asked], self._model.longest_prompt
        tokens = self._model.without_images(self._model.encode_chat(messages, self._template, most=most))
        ids = continued(self._ran, tokens, self._model.tokenizer.decode)
        answer: list[str] = []
        self._ran, before = list(ids), self._ran
        begun = False
        stream = self._model.stream([ids], self._settings, self._conversation)
        try:
            with closing(stream) as pieces:  # closing it keeps the cache
                for piece in pieces:
                    begun = True
                    if piece.token is not None and piece.finish != "eos":
                        self._ran.append(piece.token)
                    answer.append(piece.text)
                    yield piece
        finally:
            if begun:
                self.messages += [asked, {"role": "assistant", "content": "".join(answer)}]
            else:
                self._ran = before


def answer_settings(defaults: GenerationSettings, template: str, **given: Any) -> GenerationSettings:
    """The settings for answers of `Chat`: a template's stop strings, `given` fields, else `ANSWER_TOKENS` tokens."""
    settings = defaults.but(**given)
    if settings.max_new_tokens is None and settings.max_length is None:
        settings = settings.but(max_new_tokens=ANSWER_TOKENS)
    return settings.but(stop_strings=tuple(dict.fromkeys((*settings.stop_strings, *find_template(template).stops))))


def continued(ran: Sequence[int], ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Tokens of a chat that start with `ran` if the text allows it, else `ids`, the tokenizer's tokens of the chat.

    A model may write a text with other tokens than the tokenizer would. Keeping the tokens that have run, with the
    answers as the model gave them, avoids running them again. `decode` includes special tokens.
    """
    ids = list(ids)
    if not ran or ids[: len(ran)] == list(ran):
        return ids
    text = decode(ids)
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        candidate = [*ran, *ids[len(ran) + shift :]]
        if 0 < len(ran) + shift < len(ids) and decode(candidate) == text:
            return candidate
    return ids
