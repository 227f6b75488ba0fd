"""ServedModel turns a request into the steps of its answers; a Scheduler runs those of the active ones in turn.

One thread owns the model and runs one step of each answer; another one prepares prompts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from llmconv.errors import InputRefused, LlmconvError
from llmconv.generation import Conversation, GenerationSettings, TextModel
from llmconv.generation.chat_session import ANSWER_TOKENS
from llmconv.generation.chat_templates import find_template, require_valid
from llmconv.generation.loop import common_length
from llmconv.generation.prompts import TOKENIZER, EncodedPrompt
from llmconv.generation.row import TextPiece
from llmconv.memory import available_memory
from llmconv.progress import warn
from llmconv.runtime.runner import Cache, PromptEmbeddings, RemoteCache
from llmconv.runtime.tokenizer import TooManyTokens, token_ids
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


@dataclass(frozen=True)
class ChoiceDelta:
    """What one step adds to an answer."""

    choice: int  # index of the answer
    text: str  # new text; may be empty
    tokens: int  # number of new tokens, 0 or 1
    finish: str  # empty, `stop`, `length` or `tool_calls`
    cached: int = 0  # tokens of the prompt that were in a cache
    parts: tuple[Part, ...] = ()  # of an answer that is taken apart; `text` is empty then


class ServedModel:
    """A model with its public name (`name`, which clients send) and the server's limits.

    `template` is as for `TextModel.encode_chat`, `system` the message of chats that have none; `max_new_tokens` is for
    requests that set none (default: the model's own, else 2048); `kept` caches of earlier answers stay; `tool_parser`
    and `reasoning_parser` are as for `AnswerFormat`. Raises InputRefused for an invalid or endless template (a warning
    for a tokenizer's own, without which texts are continued), UsageProblem for an unknown one.
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
        tool_parser: str = "",
        reasoning_parser: bool = True,
    ) -> None:
        self.model, self.name = model, name
        self.format = AnswerFormat(model, template, tool_parser, reasoning_parser)
        self._template, self._system = template, system
        self._max_new_tokens = max_new_tokens or model.defaults.max_new_tokens or ANSWER_TOKENS
        self._conversations, self._others = ConversationPool(kept), model.shared_batch()
        self._prompt_step = PROMPT_STEP
        self._stops = find_template(template).stops
        if self.chats:
            try:
                require_valid(self.model.tokenizer, self._template)
            except InputRefused as error:
                if self._template != TOKENIZER:
                    raise
                warn(f"{error.message}: chat requests are refused unless `--template` gives another")
        token_ids(model.tokenizer, "a")  # the first call changes a tokenizer; later ones run while others decode

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

        Raises ApiError for an unknown model name or a context that is too short, InputRefused if the chat template
        fails on the messages, or a prompt has no tokens.
        """
        if request.model not in (None, self.name):
            raise ApiError(
                f"the model `{str(request.model)[:80]}` does not exist; this server has `{self.name}`",
                status=404,
                parameter="model",
                code="model_not_found",
            )
        try:
            prompts = [self._chat(request)] if request.is_chat else [self._encode(prompt) for prompt in request.prompts]
        except TooManyTokens as error:
            raise _too_long(error.message, "messages" if request.is_chat else "prompt") from None
        plans = [self.format.plan(request, prompt.ids) for prompt in prompts]
        for plan in plans:
            if plan.structure:
                made(
                    partial(
                        self.model.require_structure, self.model.defaults.but(num_beams=1, structure=plan.structure)
                    ),
                    plan.structure.name,
                )
        return [
            CompletionChoice(
                tuple(prompt.ids),
                self._settings(request, len(prompt.ids), number, plan),
                self.model.decode(prompt.ids) if request.echo else "",
                prompt.embeddings,
                plan,
                request.tools.several,
            )
            for prompt, plan in zip(prompts, plans, strict=True)
            for number in range(request.sampling.choices)
        ]

    def steps(self, choices: Sequence[CompletionChoice]) -> Iterator[ChoiceDelta]:
        """Generates the answers in sequence, so that a request uses one cache at a time."""
        for index, choice in enumerate(choices):
            # tokens do not tell images apart, so prompts with images keep no cache
            conversation = Conversation() if choice.embeddings else self._conversations.continued(choice.ids)
            past = conversation.past([choice.ids], self.model.runner)
            cached = past.tokens if past else 0
            placed = [choice.embeddings()] if choice.embeddings else []
            decode, parser = choice.plan.decode, choice.plan.parser
            given: dict[str, Any] = {"embeddings": placed, "others": self._others, "decode": decode}
            pieces = self.model.stream([choice.ids], choice.settings, conversation, self._prompt_step, **given)
            paced = self._paced(pieces, self._prompt_step)
            try:
                if choice.echo:
                    yield ChoiceDelta(index, choice.echo, 0, "")
                for delta in apart(index, paced, parser(), choice.calls) if parser else plainly(index, paced):
                    yield replace(delta, cached=cached) if cached else delta
                    cached = 0
            finally:
                pieces.close()  # keeps its cache
                self._conversations.keep(conversation)

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

    def _chat(self, request: CompletionRequest) -> EncodedPrompt:
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

    def _encode(self, prompt: str | tuple[int, ...]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(self.model.without_images(self.model.encode(prompt, most=self.model.longest_prompt)))
        most = len(self.model.tokenizer)
        if any(not 0 <= token < most for token in prompt):
            raise ApiError(f"`prompt` has a token id outside the model's vocabulary of {most}", parameter="prompt")
        return EncodedPrompt(list(prompt))

    def _settings(
        self, request: CompletionRequest, prompt_tokens: int, number: int, plan: AnswerPlan
    ) -> GenerationSettings:
        wanted = request.sampling
        stops = (*self.model.defaults.stop_strings, *wanted.stop, *(self._stops if request.is_chat else ()))
        return self.model.defaults.but(
            max_new_tokens=self._room(prompt_tokens, wanted.max_tokens, "messages" if request.is_chat else "prompt"),
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
        if room < (wanted or 1):
            requested = f" and the request asks for {wanted} more" if wanted else ""
            raise _too_long(
                f"the prompt has {prompt_tokens} tokens{requested}, but the model's context is {context} tokens",
                parameter,
            )
        return min(room, self._max_new_tokens) if wanted is None else wanted


def plainly(index: int, pieces: Iterator[TextPiece]) -> Iterator[ChoiceDelta]:
    """The pieces of answer number `index`."""
    for piece in pieces:
        finish = "stop" if piece.finish == "eos" else piece.finish  # the other reasons have OpenAI's names
        yield ChoiceDelta(index, piece.text, int(piece.token is not None), finish)


def apart(index: int, pieces: Iterator[TextPiece], parser: AnswerParser, several: bool) -> Iterator[ChoiceDelta]:
    """The parts of answer number `index`, which ends after its first call if it may not have `several`."""
    has_called = False
    for delta in plainly(index, pieces):
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
    have at most `nbytes` (None for a tenth of the free memory). Not thread-safe.
    """

    def __init__(self, most: int, nbytes: int | None = None) -> None:
        self._most = most
        self._nbytes = int(KEPT * (available_memory() or 0)) if nbytes is None else nbytes
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


Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger("llmconv.serve")
MAX_RETRY_AFTER = 60  # maximum of `Retry-After`, in seconds
LAST_STEP_SECONDS = 10  # time for the last step when the server stops


class ShuttingDown(ApiError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", status=503, code="shutting_down")


class Job(Generic[Item]):
    """A request in progress: its steps, a turn each, run in the worker thread; items arrive in the event loop."""

    def __init__(self, steps: Iterator[Item]) -> None:
        self.steps = steps
        self.canceled = False
        self.started = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Ends the job at its next turn; callable from any thread."""
        self.canceled = True

    def deliver(self, item: Item | BaseException | None) -> None:
        """Sends an item, the error that ended the job, or None for its end; called in the worker thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)

    async def items(self, every: float | None = None) -> AsyncIterator[Item | None]:
        """The items as they arrive, None when nothing came for `every` seconds; raises what the steps raised."""
        while True:
            try:
                async with asyncio.timeout(every):
                    item = await self._arrived.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item


class Scheduler:
    """Runs a limited number of jobs in turn, and lets a limited number wait; calls that prepare them wait, too.

    Each of the `active` jobs has its own cache; at most `waiting` jobs and calls are in the queue, further ones are
    refused.
    """

    def __init__(self, active: int, waiting: int) -> None:
        self._most_active, self._most_waiting = active, waiting
        self._active: deque[Job[Any]] = deque()
        self._waiting: deque[Job[Any]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_preparing = False  # a call runs
        self._change = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._mean_seconds = 1.0
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._work, "llmconv-model"), (self._prepare, "llmconv-prompts"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, steps: Iterator[Item]) -> Job[Item]:
        """Adds a job, in the event loop; raises ApiError 429 if the queue is full, 503 while the server stops."""
        job = Job(steps)
        with self._change:
            self._require_room()
            self._waiting.append(job)
            self._admit()
            self._change.notify_all()
        return job

    async def call(self, function: Callable[[], Result]) -> Result:
        """Calls `function` in the thread of prompts, one call at a time, since the tokenizer is not thread-safe.

        A call that is canceled while it waits is not made. Raises what the function raises, and as `submit`.
        """
        future: Future[Result] = Future()
        with self._change:
            self._require_room()
            self._calls.append((future, function))
            self._change.notify_all()
        return await asyncio.wrap_future(future)

    def load(self) -> dict[str, int]:
        """The number of active and of waiting requests."""
        with self._change:
            return {"active": len(self._active), "waiting": self._count_waiting()}

    def drain(self, grace: float) -> None:
        """Refuses jobs, ends active ones after `grace` seconds; called in a signal handler, so it takes no lock."""
        self._deadline = time.monotonic() + grace
        threading.Thread(target=self._wake, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Ends all jobs now and waits for the current step."""
        self.drain(0)
        with self._change:
            self._ended = True
            self._change.notify_all()
        end = time.monotonic() + LAST_STEP_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(end - time.monotonic(), 0))

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def _prepare(self) -> None:
        """The thread of prompts."""
        while True:
            with self._change:
                while not (self._calls or self._ended):
                    self._change.wait()
                if self._ended:
                    break
                future, function = self._calls.popleft()
                self._is_preparing = is_wanted = future.set_running_or_notify_cancel()
            if not is_wanted:
                continue
            try:
                deliver = partial(future.set_result, function())
            except Exception as caught:
                deliver = partial(future.set_exception, caught)
            with self._change:  # before its client can send the next request
                self._is_preparing = False
            deliver()
        for future, _ in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShuttingDown())

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._active or self._waiting or self._ended):
                    self._change.wait()
                if self._ended:
                    break
                # the job whose turn it is; with the lock held. After the deadline all jobs are ended
                if self._deadline is not None:
                    self._refuse(self._waiting)
                    if time.monotonic() >= self._deadline:
                        self._refuse(self._active)
                self._admit()
                job = self._active[0] if self._active else None
            if job:
                self._turn(job)
        for job in (*self._active, *self._waiting):
            job.deliver(ShuttingDown())

    def _admit(self) -> None:
        """Moves waiting jobs to free places; with the lock held."""
        while self._waiting and len(self._active) < self._most_active:
            job = self._waiting.popleft()
            job.started = time.monotonic()
            self._active.append(job)

    def _refuse(self, jobs: deque[Job[Any]]) -> None:
        for job in jobs:
            _close(job)
            job.deliver(ShuttingDown())
        jobs.clear()

    def _turn(self, job: Job[Any]) -> None:
        """Runs one step of a job, which then goes to the end of the queue."""
        going = False
        last: Exception | None = None
        try:
            if not job.canceled:
                job.deliver(next(job.steps))
                going = True
        except StopIteration:
            pass
        except Exception as error:
            if not isinstance(error, ApiError | LlmconvError):
                log.exception("an answer failed")
            last = error
        if not going:
            _close(job)
        with self._change:
            self._active.remove(job)
            if going:
                self._active.append(job)
            else:
                self._mean_seconds += (time.monotonic() - job.started - self._mean_seconds) / 4
        if not going:  # after its place is free: its client can send the next request at once
            job.deliver(last)

    def _require_room(self) -> None:
        """Refuses a further request if the queue is full, or the server is shutting down; with the lock held."""
        if self._deadline is not None:
            raise ShuttingDown
        if len(self._active) + self._count_waiting() >= self._most_active + self._most_waiting:
            seconds = self._mean_seconds * (self._count_waiting() + 1) / self._most_active
            problem = f"the server is busy ({self._most_active} active, queue of {self._most_waiting} is full)"
            headers = {"Retry-After": str(min(max(round(seconds), 1), MAX_RETRY_AFTER))}
            raise ApiError(f"{problem}: try again later", status=429, code="queue_full", headers=headers)

    def _count_waiting(self) -> int:
        """Number of jobs and calls that wait or are prepared, without those whose clients left; with the lock held."""
        self._waiting = deque(job for job in self._waiting if not job.canceled)
        self._calls = deque(call for call in self._calls if not call[0].done())
        return len(self._waiting) + len(self._calls) + self._is_preparing


def _close(job: Job[Any]) -> None:
    try:
        getattr(job.steps, "close", lambda: None)()
    except Exception:  # an error must not end the thread
        log.exception("an answer could not be closed")
