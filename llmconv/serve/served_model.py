"""ServedModel turns a request into the steps of its answers, which a `Scheduler` runs in turn."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.generation import Conversation, GenerationSettings, TextModel
from llmconv.generation.chat_session import ANSWER_TOKENS
from llmconv.generation.loop import common_length
from llmconv.generation.prompts import EncodedPrompt
from llmconv.generation.row import TextPiece, TextStream, of_earlier_tokens
from llmconv.generation.token_rules import TokenLogprob, TokenRules, prompt_logprobs
from llmconv.memory import available_memory
from llmconv.progress import warn
from llmconv.runtime.chat_templates import find_template, require_valid
from llmconv.runtime.runner import Cache, PromptEmbeddings, RemoteCache
from llmconv.runtime.tokenizer import TOKENIZER, TokenDecoder, TooManyTokens, starts_twice, token_ids
from llmconv.serve.answer_format import AnswerFormat, AnswerPlan
from llmconv.serve.answer_forms import made
from llmconv.serve.answer_parser import AnswerParser
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import CompletionRequest
from llmconv.serve.tool_dialects import CALL, Part

PROMPT_SECONDS = 0.1  # aim for the time of a step of a prompt: after each step the next answers have their turn
PROMPT_STEP, PROMPT_STEPS = 64, (32, 64, 128, 256, 512)  # prompt tokens per step, at first and later
KEPT = 0.1  # share of the free memory that caches of earlier answers may take


@dataclass(frozen=True)
class CompletionChoice:
    """One answer to generate, OpenAI's "choice": tokens, `echo` their text, `embeddings` computes images' or None."""

    ids: tuple[int, ...]
    settings: GenerationSettings
    echo: str = ""
    embeddings: Callable[[], PromptEmbeddings] | None = None
    plan: AnswerPlan = field(default_factory=AnswerPlan)
    calls: bool = True  # several calls of tools; else the answer ends after the first
    decode: TokenDecoder | None = None  # tokens to text; None for the model's own
    generates: bool = True  # else only the prompt is wanted
    scores_prompt: bool = False  # the answer begins with the log-probabilities of its prompt
    every_logprob: bool = False  # those of tokens come, too, that end the answer and are not in its text
    echo_decode: TokenDecoder | None = None  # tokens of the prompt to `echo`; None for `decode`


@dataclass(frozen=True)
class ChoiceDelta:
    """What one step adds to an answer."""

    choice: int  # index of the answer
    text: str  # new text; may be empty
    tokens: int  # number of new tokens, 0 or 1
    finish: str  # empty, `stop`, `length` or `tool_calls`
    cached: int = 0  # tokens of the prompt that were in a cache
    parts: tuple[Part, ...] = ()  # of an answer that is taken apart; `text` is empty then
    logprobs: tuple[TokenLogprob, ...] = ()  # those of tokens whose text has come with this or earlier steps


Deltas = tuple[ChoiceDelta, ...]


class Places(Protocol):
    """Places for answers that are generated at the same time, beyond one per request."""

    def take(self) -> bool:
        """Takes a place if one is free."""

    def give(self) -> None:
        """Gives one back."""


class NoPlaces:
    """No further place."""

    def take(self) -> bool:
        return False

    def give(self) -> None:
        """Nothing was taken."""


class ServedModel:
    """A model with its public name (`name`, which clients send) and the server's limits.

    `template` is as for `TextModel.encode_chat`, `system` the message of chats that have none; `max_new_tokens` is for
    requests that set none (default: the model's own, else 2048); `pool` has the caches of earlier answers;
    `tool_parser` and `reasoning_parser` are as for `AnswerFormat`. Raises InputRefused for an invalid or endless
    template (a warning for a tokenizer's own, without which texts are continued), UsageProblem for an unknown one.
    """

    def __init__(
        self,
        model: TextModel,
        name: str,
        *,
        template: str = TOKENIZER,
        system: str = "",
        max_new_tokens: int | None = None,
        pool: ConversationPool | None = None,
        tool_parser: str = "",
        reasoning_parser: bool = True,
    ) -> None:
        self.model, self.name = model, name
        self.format = AnswerFormat(model, template, tool_parser, reasoning_parser)
        self._template, self._system = template, system
        self._max_new_tokens = max_new_tokens or model.defaults.max_new_tokens or ANSWER_TOKENS
        self._conversations, self._others = pool or ConversationPool(4), model.shared_batch()
        self._prompt_step = PROMPT_STEP
        self._stops = find_template(template).stops
        self.shown = TokenDecoder(model.tokenizer, frozenset(model.decode.special_texts))
        self._bytes: Sequence[bytes] | None = None
        self._warned = False  # of a prompt with two start tokens
        if self.chats:
            try:
                require_valid(self.model.tokenizer, self._template)
            except InputRefused as error:
                if self._template != TOKENIZER:
                    raise
                warn(f"{error.message}: chat requests are refused unless `--template` gives another")
        token_ids(model.tokenizer, "a")  # the first call changes a tokenizer; later ones run while others decode

    @property
    def context_length(self) -> int | None:
        return self.model.context_length

    @property
    def chats(self) -> bool:
        """Whether there is a chat template; without one the model only continues texts."""
        return self._template != TOKENIZER or bool(self.model.tokenizer.chat_template)

    @property
    def sees(self) -> bool:
        """Whether chats may contain images: the tokenizer's own template writes their placeholders."""
        return self.model.images is not None and self._template == TOKENIZER and self.chats

    @property
    def defaults(self) -> dict[str, float | bool | int]:
        """What a chat without options is answered with; without `do_sample` the likeliest token is picked."""
        settings, context = self.model.defaults, self.model.context_length
        return {
            "do_sample": not settings.is_greedy,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "max_tokens": self._max_new_tokens if context is None else min(self._max_new_tokens, context),
        }

    def choices(self, request: CompletionRequest) -> list[CompletionChoice]:
        """The answers to generate: for every prompt, as many as the request asks for.

        Raises ApiError for a context that is too short or tokens that the model does not have, InputRefused if the chat
        template fails on the messages, or a prompt has no tokens.
        """
        try:
            prompts = (
                [self.prompt_of(request)]
                if request.is_chat
                else [self._encode(prompt, request.add_special_tokens) for prompt in request.prompts]
            )
        except TooManyTokens as error:
            raise _too_long(error.message, "messages" if request.is_chat else "prompt") from None
        plans = [self.format.plan(request, prompt.ids) for prompt in prompts]
        self._require(request, plans)
        decode = None if request.sampling.skip_special_tokens else self.shown
        echoes = [
            self._echo(given, prompt.ids, decode) if request.echo else ("", None)
            for given, prompt in zip(request.prompts or [""], prompts, strict=True)
        ]
        return [
            CompletionChoice(
                tuple(prompt.ids),
                self._settings(request, len(prompt.ids), number, plan),
                echo,
                prompt.embeddings,
                plan,
                request.tools.several,
                decode or plan.decode,
                request.sampling.max_tokens != 0,
                request.echo and request.logprobs is not None,
                not request.is_chat,
                echo_decode,
            )
            for prompt, plan, (echo, echo_decode) in zip(prompts, plans, echoes, strict=True)
            for number in range(request.sampling.choices)
        ]

    def _echo(
        self, given: str | Sequence[int], ids: Sequence[int], decode: TokenDecoder | None
    ) -> tuple[str, TokenDecoder | None]:
        """A prompt as it was given, or the text of tokens; and what makes its text of its tokens, None for `decode`."""
        if not isinstance(given, str):
            return (decode or self.model.decode)(ids), None
        return given, self.shown if self.shown(ids) == given else None  # special tokens are in a text where it has them

    def _require(self, request: CompletionRequest, plans: Sequence[AnswerPlan]) -> None:
        """Raises ApiError for what the model, or the form of an answer, excludes."""
        wanted, rules = request.sampling, _rules(request)
        tokens = {"logit_bias": rules.logit_bias if rules else (), "stop_token_ids": wanted.stop_token_ids}
        for name, ids in tokens.items():
            if any(token >= len(self.model.tokenizer) for token in ids):
                most = len(self.model.tokenizer)
                raise ApiError(f"`{name}` has a token id outside the model's vocabulary of {most}", parameter=name)
        for structure in {plan.structure for plan in plans}:
            for name, given in (("ignore_eos", wanted.ignore_eos), ("min_tokens", wanted.rules.min_tokens)):
                if structure and given:
                    problem = f"`{name}`: an answer that has a form ends when the form does"
                    raise ApiError(problem, parameter=name)
            settings = self.model.defaults.but(num_beams=1, structure=structure, rules=rules)
            made(partial(self.model.require_structure, settings), structure.name if structure else "logprobs")

    def bytes_of(self, token: int) -> bytes:
        """The text of a token in UTF-8, of which it may have a part of a character."""
        if self._bytes is None:
            try:
                self._bytes = self.model.grammars.vocabulary.texts
            except UnsupportedInput:  # tokens have no text of their own: the nearest is that of one alone
                self._bytes = ()
        if token < len(self._bytes):
            return self._bytes[token]
        return self.shown([token]).encode("utf-8", "replace") if not self._bytes else b""

    def steps(self, choices: Sequence[CompletionChoice], places: Places | None = None) -> Iterator[Deltas]:
        """Generates the answers; each item has what one step adds to those that are generated at the time.

        The first has a place; others begin next to it, in steps that they share, as long as `places` gives them one,
        and in sequence otherwise, so that a request uses one cache at a time.
        """
        waiting, scored = deque(enumerate(choices)), dict[tuple[int, ...], tuple[TokenLogprob, ...]]()
        shares = self._others.is_possible and not any(one.embeddings or one.scores_prompt for one in choices)
        places = places if places and shares and len(choices) > 1 else NoPlaces()
        going: list[Generator[ChoiceDelta]] = []
        reading: Generator[ChoiceDelta] | None = None  # the answer whose prompt runs: one after another
        seen: set[tuple[int, ...]] = set()
        extra = 0
        try:
            while waiting or going:
                if waiting and (not going or (reading is None and places.take())):
                    extra += bool(going)
                    index, choice = waiting.popleft()
                    cached = 0 if choice.ids in seen else None
                    several = choice.generates and waiting and waiting[0][1].ids == choice.ids
                    if cached is None and shares and several:
                        cached = yield from self._prompt_read(index, choice)
                    seen.add(choice.ids)
                    going.append(reading := self._answer(index, choice, scored, cached))
                deltas = [(answer, next(answer, None)) for answer in going]
                if any(answer is reading and not (delta and is_prompt(delta)) for answer, delta in deltas):
                    reading = None
                going = [answer for answer, delta in deltas if delta]
                while extra > max(len(going) - 1, 0):
                    extra -= 1
                    places.give()
                if found := tuple(delta for _, delta in deltas if delta):
                    yield found
        finally:
            for answer in going:
                answer.close()
            for _ in range(extra):
                places.give()

    def _prompt_read(self, index: int, choice: CompletionChoice) -> Generator[Deltas, None, int]:
        """Runs a prompt that several answers have, for its cache; returns the number of tokens that had run before."""
        conversation = self._conversations.continued(choice.ids)
        past = conversation.past([choice.ids], self.model.runner)
        greedy = self.model.defaults.but(max_new_tokens=1, do_sample=False, num_beams=1)
        pieces = self.model.stream([choice.ids], greedy, conversation, self._prompt_step)
        try:
            for _ in self._paced(pieces, self._prompt_step):
                yield (ChoiceDelta(index, "", 0, ""),)
        finally:
            pieces.close()
            self._conversations.keep(conversation)
        return past.tokens if past else 0

    def _answer(
        self,
        index: int,
        choice: CompletionChoice,
        scored: dict[tuple[int, ...], tuple[TokenLogprob, ...]],
        cached: int | None,
    ) -> Generator[ChoiceDelta]:
        """One answer. `scored` has the log-probabilities of prompts so far.

        `cached` tokens of the prompt were in a cache before this request; None for those that are in one now.
        """
        if choice.scores_prompt and choice.ids not in scored:
            scored[choice.ids] = yield from self._scored(index, choice)
            cached = 0
        if choice.echo or choice.scores_prompt:
            yield ChoiceDelta(index, choice.echo, 0, "", logprobs=scored.get(choice.ids, ()))
        if not choice.generates:
            yield ChoiceDelta(index, "", 0, "length")
            return
        # tokens do not tell images apart, so prompts with images keep no cache
        conversation = Conversation() if choice.embeddings else self._conversations.continued(choice.ids)
        past = conversation.past([choice.ids], self.model.runner)
        cached = (past.tokens if past else 0) if cached is None else cached
        placed = [choice.embeddings()] if choice.embeddings else []
        parser = choice.plan.parser
        given: dict[str, Any] = {"embeddings": placed, "others": self._others, "decode": choice.decode}
        given["continues"] = [choice.every_logprob]  # a completion, whose text follows that of its prompt
        pieces = self.model.stream([choice.ids], choice.settings, conversation, self._prompt_step, **given)
        paced = self._paced(pieces, self._prompt_step)
        try:
            plain = plainly(index, paced, choice.every_logprob)
            for delta in apart(plain, parser(), choice.calls) if parser else plain:
                if choice.echo and delta.logprobs:
                    moved = (replace(one, start=one.start + len(choice.echo)) for one in delta.logprobs)
                    delta = replace(delta, logprobs=tuple(moved))
                yield replace(delta, cached=cached) if cached else delta
                cached = 0
        finally:
            pieces.close()  # keeps its cache
            self._conversations.keep(conversation)

    def _scored(self, index: int, choice: CompletionChoice) -> Generator[ChoiceDelta, None, tuple[TokenLogprob, ...]]:
        """The log-probabilities of a prompt, whose cache is kept for its answer; each step yields an empty piece."""
        rules = choice.settings.rules
        steps = prompt_logprobs(self.model, choice.ids, (rules and rules.top_logprobs) or 0, self._prompt_step)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found, cache = end.value
                break
            yield ChoiceDelta(index, "", 0, "")
        conversation = Conversation()
        conversation.keep(choice.ids, cache)
        self._conversations.keep(conversation)
        decode = choice.echo_decode or choice.decode or self.model.decode
        stream, length, placed = TextStream(decode), 0, []
        for one in found:
            piece = stream.push(one.token)
            placed.append(replace(one, start=min(length + of_earlier_tokens(piece), len(choice.echo))))
            length += len(piece)
        return tuple(placed)

    def _paced(self, pieces: Iterator[TextPiece], tokens: int) -> Iterator[TextPiece]:
        """The pieces of an answer; the time of steps of its prompt decides about the steps of later prompts."""
        is_prompt = True
        while True:
            started = time.perf_counter()
            piece = next(pieces, None)
            if piece is None:
                return
            is_prompt = is_prompt and piece.token is None and not piece.finish
            if is_prompt:
                most = tokens * PROMPT_SECONDS / (time.perf_counter() - started)
                self._prompt_step = max((count for count in PROMPT_STEPS if count <= most), default=PROMPT_STEPS[0])
            yield piece

    def prompt_of(self, request: CompletionRequest) -> EncodedPrompt:
        """The tokens of a chat, with the system message of the server; raises as `choices`, and TooManyTokens."""
        is_missing = self._system and request.messages[0]["role"] != "system"
        system = [{"role": "system", "content": self._system}] if is_missing else []
        messages, most = [*system, *self.format.messages(request.messages)], self.model.longest_prompt
        variables = self.format.variables(request)
        if len(messages) > most:  # each has a token at least
            raise _too_long(
                f"the chat has {len(messages)} messages, but the model's context is {most} tokens", "messages"
            )
        if not request.images:
            ids = self.model.encode_chat(messages, self._template, most=most, variables=variables)
            return EncodedPrompt(self.model.without_images(ids))
        if not self.sees:
            raise ApiError("this server takes no images", parameter="messages")
        return self.model.encode_images(messages, request.images, self._template, variables=variables)

    def _encode(self, prompt: str | tuple[int, ...], special: bool) -> EncodedPrompt:
        if isinstance(prompt, str):
            ids = self.model.encode(prompt, add_special_tokens=special, most=self.model.longest_prompt)
            if not self._warned and starts_twice(self.model.tokenizer, ids):
                self._warned = True  # once, as a client repeats it
                token = self.model.tokenizer.bos_token
                warn(f"a prompt begins with `{token}` twice: the tokenizer adds it to the one that the client sends")
            return EncodedPrompt(self.model.without_images(ids))
        most = self.model.vocabulary
        if (odd := next((token for token in prompt if not 0 <= token < most), None)) is not None:
            problem = f"`prompt` has the token id {odd}, outside the model's vocabulary of {most}"
            raise ApiError(problem, parameter="prompt")
        return EncodedPrompt(self.model.without_images(list(prompt)))

    def _settings(
        self, request: CompletionRequest, prompt_tokens: int, number: int, plan: AnswerPlan
    ) -> GenerationSettings:
        wanted = request.sampling
        ends = self.model.chat_ends if request.is_chat else self.model.defaults.eos_token_id
        stops = (*self.model.defaults.stop_strings, *wanted.stop, *(self._stops if request.is_chat else ()))
        return self.model.defaults.but(
            # nothing is generated for 0
            max_new_tokens=self._room(prompt_tokens, wanted.max_tokens, "messages" if request.is_chat else "prompt")
            or 1,
            eos_token_id=wanted.stop_token_ids | (frozenset() if wanted.ignore_eos else ends),
            rules=_rules(request),
            do_sample=True if wanted.temperature is not None or wanted.top_p is not None else None,
            temperature=wanted.temperature,
            top_p=None if wanted.top_p is None else max(wanted.top_p, 1e-9),
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            num_beams=1,  # the text of a beam search is known only at its end
            stop_strings=tuple(dict.fromkeys(stops)) or None,
            structure=plan.structure,
            # a different seed for every answer of a request; the same again if the request has a `seed`
            seed=((secrets.randbits(62) if wanted.seed is None else wanted.seed) + number) % 2**63,
        )

    def _room(self, prompt_tokens: int, wanted: int | None, parameter: str) -> int:
        context = self.model.context_length
        if context is None:
            return self._max_new_tokens if wanted is None else wanted
        room = context - prompt_tokens
        if room < (1 if wanted is None else wanted):
            requested = f" and the request asks for {wanted} more" if wanted else ""
            raise _too_long(
                f"the prompt has {prompt_tokens} tokens{requested}, but the model's context is {context} tokens",
                parameter,
            )
        return min(room, self._max_new_tokens) if wanted is None else wanted


def is_prompt(delta: ChoiceDelta) -> bool:
    """Whether a step was one of the prompt."""
    return not delta.tokens and not delta.finish


def _rules(request: CompletionRequest) -> TokenRules | None:
    """The rules for tokens of a request; None if they change nothing."""
    rules = request.sampling.rules
    return None if rules == TokenRules() else rules


def plainly(index: int, pieces: Iterator[TextPiece], every: bool = False) -> Iterator[ChoiceDelta]:
    """The pieces of answer number `index`, with the log-probabilities of tokens whose text is out.

    Those of an end token, and of a stop string that is not a part of the answer, come at the end if `every` one does.
    """
    waiting: deque[TokenLogprob] = deque()
    length = 0
    for piece in pieces:
        length += len(piece.text)
        if piece.logprob:
            waiting.append(piece.logprob)
        ready = []
        while waiting and (waiting[0].start < length or piece.finish == "length" or (every and piece.finish)):
            ready.append(waiting.popleft())
        finish = "stop" if piece.finish == "eos" else piece.finish  # the other reasons have OpenAI's names
        yield ChoiceDelta(index, piece.text, int(piece.token is not None), finish, logprobs=tuple(ready))


def apart(plain: Iterator[ChoiceDelta], parser: AnswerParser, several: bool) -> Iterator[ChoiceDelta]:
    """The parts of an answer, which ends after its first call if it may not have `several`."""
    has_called = False
    for delta in plain:
        parts = [*parser.push(delta.text), *(parser.close() if delta.finish else ())]
        first = next((at for at, part in enumerate(parts) if part.kind == CALL), None)
        has_called = has_called or first is not None
        is_last = first is not None and not several
        parts = parts[: first + 1] if is_last and first is not None else parts
        finish = "tool_calls" if has_called and (is_last or delta.finish == "stop") else delta.finish
        yield replace(delta, text="", finish=finish, parts=tuple(parts))
        if is_last:
            return


def _too_long(message: str, parameter: str) -> ApiError:
    return ApiError(message, parameter=parameter, code="context_length_exceeded")


class ConversationPool:
    """Caches of the latest prompts with their answers, for later prompts that begin with the same tokens.

    Any number of answers may continue one. At most `most` are kept (0 for none), and the latest of them that together
    have at most `nbytes` (None for a tenth of the free memory, which the pools of several `models` share). Not
    thread-safe.
    """

    def __init__(self, most: int, nbytes: int | None = None, *, models: int = 1) -> None:
        self._most = most
        self._nbytes = int(KEPT * (available_memory() or 0)) // models if nbytes is None else nbytes
        self._kept: list[Conversation] = []
        self._sizes: dict[Conversation, int] = {}

    def continued(self, prompt: Sequence[int]) -> Conversation:
        """A conversation that continues the kept cache which shares most tokens with a prompt, or a new one."""
        ids, tokens, best = list(prompt), 0, None
        for kept in self._kept:
            if kept.ids[: tokens + 1] == ids[: tokens + 1]:
                tokens, best = common_length([kept.ids, ids], most=len(ids) - 1), kept
        made = Conversation()
        if best is not None and tokens:
            self._kept.remove(best)
            self._kept.append(best)
            made.keep(best.ids, best.cache)
        return made

    def keep(self, conversation: Conversation) -> None:
        """Adds a conversation, drops those that it continues, and the oldest ones beyond the maximum."""
        if conversation.cache is None:
            return
        ids = conversation.ids
        self._kept = [kept for kept in self._kept if ids[: len(kept.ids)] != kept.ids]
        self._kept.append(conversation)
        self._sizes[conversation] = _nbytes(conversation.cache)
        self._sizes = {kept: self._sizes[kept] for kept in self._kept}
        while self._kept and (len(self._kept) > self._most or sum(self._sizes.values()) > self._nbytes):
            del self._sizes[self._kept.pop(0)]


def _nbytes(cache: Cache) -> int:
    """Size of a cache; 0 for one in another process."""
    return 0 if isinstance(cache, RemoteCache) else sum(array.nbytes for array in cache.arrays().values())
