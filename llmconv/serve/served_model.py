"""From a request to the pieces of its answers; everything here runs in the scheduler's thread."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmconv.generation import GenerationSettings, TextModel
from llmconv.generation.chat.templates import TOKENIZER, find_template
from llmconv.generation.chat_session import ANSWER_TOKENS
from llmconv.serve.api_errors import ApiError
from llmconv.serve.cache_pool import ConversationPool
from llmconv.serve.openai_schema import CompletionRequest, SamplingOptions

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
"""Our words for why a text ends to OpenAI's."""

PROMPT_STEP = 256
"""Tokens of a prompt that are run before the next answer has its turn."""


@dataclass(frozen=True)
class CompletionChoice:
    """One answer to be made.

    Attributes:
        ids: of the prompt.
        settings: how it is continued.
        echo: text that the answer begins with.
    """

    ids: tuple[int, ...]
    settings: GenerationSettings
    echo: str = ""


@dataclass(frozen=True)
class ChoiceDelta:
    """What one step adds.

    Attributes:
        choice: index of the answer.
        text: may be empty.
        tokens: new ones, 0 or 1.
        finish: empty, `stop` or `length`.
        cached: tokens of the prompt that an earlier answer had run.
    """

    choice: int
    text: str
    tokens: int
    finish: str
    cached: int = 0


class ServedModel:
    """A model under a name, with the server's own limits.

    Args:
        model: what runs.
        name: that clients ask for.
        template: of chats, as `TextModel.encode_chat` takes it; UsageProblem where there is none of that name.
        system: message of chats that begin without one.
        max_new_tokens: of answers to requests that set no limit; None for the model's own, else 2048.
        kept: how many caches of earlier answers are kept.
    """

    def __init__(
        self,
        model: TextModel,
        name: str,
        *,
        template: str = TOKENIZER,
        system: str = "",
        max_new_tokens: int | None = None,
        kept: int = 4,
    ) -> None:
        self.model, self.name = model, name
        self._template, self._system = template, system
        self._max_new_tokens = max_new_tokens or model.defaults.max_new_tokens or ANSWER_TOKENS
        self._conversations = ConversationPool(kept, model.runner)
        self._stops = find_template(template).stops

    @property
    def chats(self) -> bool:
        """Whether there is a template for chats; without one the model only continues texts."""
        return self._template != TOKENIZER or bool(self.model.tokenizer.chat_template)

    def choices(self, request: CompletionRequest) -> list[CompletionChoice]:
        """Every prompt as tokens, as often as answers to it are wanted.

        Raises:
            ApiError: the model has another name, or the context is too short.
            InputRefused: the chat template refuses the messages, or a prompt has no tokens.
        """
        if request.model not in (None, self.name):
            raise ApiError(
                f"the model `{str(request.model)[:80]}` does not exist, this server has `{self.name}`",
                status=404,
                parameter="model",
                code="model_not_found",
            )
        prompts = [self._chat(request)] if request.is_chat else [self._encode(prompt) for prompt in request.prompts]
        return [
            CompletionChoice(tuple(ids), self._settings(request, len(ids), number), self._echo(request, ids))
            for ids in prompts
            for number in range(request.sampling.choices)
        ]

    def steps(self, choices: Sequence[CompletionChoice]) -> Iterator[ChoiceDelta]:
        """The answers one after another: a request has one cache at a time, however many answers it wants."""
        for index, choice in enumerate(choices):
            conversation = self._conversations.take(choice.ids)
            past = conversation.past([choice.ids], self.model.runner)
            cached = past.tokens if past else 0
            pieces = self.model.stream([choice.ids], choice.settings, conversation, PROMPT_STEP)
            try:
                if choice.echo:
                    yield ChoiceDelta(index, choice.echo, 0, "")
                for piece in pieces:
                    finish = FINISH[piece.finish] if piece.finish else ""
                    yield ChoiceDelta(index, piece.text, int(piece.token is not None), finish, cached)
                    cached = 0
            finally:
                pieces.close()  # which keeps its cache
                self._conversations.give_back(conversation)

    def _chat(self, request: CompletionRequest) -> list[int]:
        told = self._system and request.messages[0]["role"] != "system"
        system = [{"role": "system", "content": self._system}] if told else []
        return self.model.encode_chat([*system, *request.messages], self._template)

    def _encode(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            return self.model.encode(prompt)
        most = len(self.model.tokenizer)
        if any(not 0 <= token < most for token in prompt):
            raise ApiError(f"`prompt` holds a token that is none of the {most} of the model", parameter="prompt")
        return list(prompt)

    def _echo(self, request: CompletionRequest, ids: Sequence[int]) -> str:
        return self.model.decode(ids) if request.echo else ""

    def _settings(self, request: CompletionRequest, prompt_tokens: int, number: int) -> GenerationSettings:
        wanted = request.sampling
        sampled = wanted.temperature is not None or wanted.top_p is not None
        return self.model.defaults.but(
            max_new_tokens=self._room(prompt_tokens, wanted.max_tokens, "messages" if request.is_chat else "prompt"),
            do_sample=True if sampled else None,
            temperature=wanted.temperature,
            top_p=None if wanted.top_p is None else max(wanted.top_p, 1e-9),
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            num_beams=1,  # a beam has no certain text before its end
            stop_strings=self._stop_strings(request) or None,
            seed=_seed(wanted, number),
        )

    def _stop_strings(self, request: CompletionRequest) -> tuple[str, ...]:
        stops = (*self.model.defaults.stop_strings, *request.sampling.stop, *(self._stops if request.is_chat else ()))
        return tuple(dict.fromkeys(stops))

    def _room(self, prompt_tokens: int, wanted: int | None, parameter: str) -> int:
        context = self.model.context_length
        if context is None:
            return self._max_new_tokens if wanted is None else wanted
        room = context - prompt_tokens
        if room < (wanted or 1):
            asked = f" and {wanted} more were asked for" if wanted else ""
            raise ApiError(
                f"the prompt has {prompt_tokens} tokens{asked}, and the model's context is {context} tokens",
                parameter=parameter,
                code="context_length_exceeded",
            )
        return min(room, self._max_new_tokens) if wanted is None else wanted


def _seed(wanted: SamplingOptions, number: int) -> int:
    """Every answer of a request has a seed of its own, and one that was asked for gives the same answers again."""
    first: Any = secrets.randbits(62) if wanted.seed is None else wanted.seed
    return int(first + number) % 2**63
