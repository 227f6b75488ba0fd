"""Chat: messages that grow turn by turn over one cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.generation.chat.conversation import Conversation
from llmconv.generation.chat.templates import TOKENIZER, find_template
from llmconv.generation.model import TextModel
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling.settings import GenerationSettings

ANSWER_TOKENS = 2048
"""At most so many, where nothing says how many; the context may end before."""
LOOKED_FOR = 16
"""Tokens by which an answer may be longer or shorter when its text is tokenized again."""


class Chat:
    """A conversation with a model; a turn runs only what is new.

    Args:
        model: what answers.
        settings: `model.defaults` when left out.
        template: as `TextModel.encode_chat` takes it.
        system: what the model is told before the first message; empty for nothing.

    Attributes:
        messages: role and content, in order, without the system's.
        system: may be changed between turns, which then run everything once more.
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
        self._model, self._settings, self._template = model, settings or model.defaults, template
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._conversation = Conversation()
        self._ran: list[int] = []

    def reset(self) -> None:
        """Forgets the messages; the system message stays."""
        self.messages, self._conversation, self._ran = [], Conversation(), []

    def ask(self, text: str) -> Iterator[TextPiece]:
        """The answer, piece by piece; what was said when the iterator is closed stays said.

        Raises:
            InputRefused: the template refuses the messages, or they have no room in the context; nothing has changed.
        """
        if not isinstance(text, str):
            raise UsageProblem(f"the message is {kind_of(text)}, not a text", hint="give one `str`")
        ids = self._encode([*self.messages, {"role": "user", "content": text}])
        said: list[str] = []
        self._ran, before = list(ids), self._ran
        begun = False
        stream = self._model.stream([ids], self._settings, self._conversation)
        try:
            with closing(stream) as pieces:  # closing it keeps what was run
                for piece in pieces:
                    begun = True
                    if piece.token is not None and piece.finish != "eos":
                        self._ran.append(piece.token)
                    said.append(piece.text)
                    yield piece
        finally:
            if begun:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(said)}]
            else:
                self._ran = before

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The messages as tokens that begin with those that were run, wherever that is the same text."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self._model.encode_chat([*system, *messages], self._template)
        return continued(self._ran, ids, self._model.tokenizer.decode)


def answer_settings(defaults: GenerationSettings, template: str, **given: Any) -> GenerationSettings:
    """The settings of an answer in a template: `defaults` under what is given, and long where neither sets a length.

    Raises:
        UsageProblem: there is no such template, or a setting cannot be.
    """
    settings = defaults.but(**given)
    if settings.max_new_tokens is None and settings.max_length is None:
        settings = settings.but(max_new_tokens=ANSWER_TOKENS)
    stops = (*settings.stop_strings, *find_template(template).stops)
    return settings.but(stop_strings=tuple(dict.fromkeys(stops)))


def continued(ran: Sequence[int], ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """`ids`, or the same text as `ran` and what comes after.

    A model may spell a text with other tokens than the tokenizer does. Then the tokens of a whole chat do not begin
    with those that were run, although its text does: taken as they were run, nothing needs to run again.

    Args:
        ran: tokens of the chat so far, the answer as the model gave it.
        ids: the whole chat as the tokenizer has it.
        decode: tokens to text, special ones included.
    """
    ids = list(ids)
    if not ran or ids[: len(ran)] == list(ran):
        return ids
    text = decode(ids)
    for shift in sorted(range(-LOOKED_FOR, LOOKED_FOR + 1), key=abs):
        candidate = [*ran, *ids[len(ran) + shift :]]
        if 0 < len(ran) + shift < len(ids) and decode(candidate) == text:
            return candidate
    return ids
