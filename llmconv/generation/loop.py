"""The loop of greedy search and sampling: a prefill, or an earlier cache, then steps of the model.

A step runs one token, and with it tokens that are guessed to come; those that the model picks itself are kept. A call
with 1 + k tokens takes less time than 1 + k calls, because it reads the weights once. Which tokens are picked does not
depend on the guesses. `Lookup` guesses that the text repeats itself ("prompt lookup decoding", as in transformers'
`prompt_lookup_num_tokens`); `draft.py` asks a smaller model.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmconv.generation.row import Past, PositionRule, Row, RowStart, TextPiece
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.extra_inputs import ExtraValues, GivenInputs, ModelCall, batch_values
from llmconv.runtime.runner import (
    Cache,
    PlacedEmbeddings,
    Runner,
    Step,
    can_be_cut,
    cut,
    default_positions,
    is_lost,
    moved_right,
    rows_of,
    taken_back,
)
from llmconv.tensors import Array

if TYPE_CHECKING:
    from llmconv.generation.structured import TokenMask


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Ids and attention mask, both int64 [batch, longest prompt], padded with id 0 on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


LOOKUP, OFF, MTP = "lookup", "off", "mtp"  # what `speculate` may be besides a draft model
MOST = 15  # tokens guessed per call
WIDTHS = (1, 2, 4, 8, 16)  # tokens per call
LONGEST = 16  # last tokens that are compared
# how often a guess is right, at first, by the bit length of the number of tokens that it follows
PRIOR = {1: 0.2, 2: 0.35, 3: 0.6, 4: 0.8, 5: 0.9}
RATE, SECONDS_RATE = 0.1, 0.3  # weights of the latest guess and of the latest call in the averages
FORGET = 0.998  # factor per call of the time of other widths, so that a slow call is tried again
# time that wrong guesses may cost, in calls of one token: at first, per call of one token, and at most
CREDIT, ALLOWED, MOST_CREDIT = 1.0, 0.01, 8.0


class Guesser(ABC):
    """Guesses the next tokens of one sequence; how many depends on earlier guesses, and on the time of earlier calls.

    Attributes:
        is_on: whether it guesses at all.
    """

    least_gain = 1.05  # expected gain in tokens per second from which on it guesses
    # whether the time of the first call of a width counts, which takes several times as long as others
    counts_first_calls = True

    def __init__(self) -> None:
        self.is_on = True
        self._seconds, self._credit = dict[int, float](), CREDIT
        self._warm = set[int]()  # widths that have run
        self._guess_seconds = 0.0  # time of one guess

    @abstractmethod
    def guess(self, ids: Array, most: int) -> Array:
        """At most `most` tokens that may follow `ids`, int64 [tokens]; none if they would not save time."""

    def read(self, first: int, hidden: Array) -> None:  # noqa: B027 - few guessers read them
        """Notes the hidden states [tokens, hidden] of the tokens from number `first` on."""

    def took(self, tokens: int, seconds: float, kept: int = 1) -> bool:
        """Notes the seconds of a call that ran `tokens` tokens and gave `kept` new ones; whether they count."""
        width = next((width for width in WIDTHS if width >= tokens), WIDTHS[-1])
        if tokens > 1 and width not in self._warm and not self.counts_first_calls:
            self._warm.add(width)
            return False
        self._seconds = {known: FORGET * value for known, value in self._seconds.items()}
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + SECONDS_RATE * (seconds - before)
        saved = ALLOWED if tokens == 1 else kept - seconds / self._seconds.get(1, seconds)
        self._credit = min(self._credit + saved, MOST_CREDIT)
        return True

    def _count(self, hit: float, most: int) -> int:
        """Number of guesses with the most expected tokens per second, at most `most`; `hit`: how often one is right."""
        if 1 not in self._seconds:
            return 0
        best, count = self.least_gain, 0
        width_cost = 1.0
        for width in WIDTHS[1:]:
            known = self._seconds.get(width)
            width_cost = known / self._seconds[1] if known else 1.1 * width_cost  # an unknown width is tried
            guesses = min(width - 1, most)
            cost = width_cost + guesses * self._guess_seconds / self._seconds[1]
            gain = sum(hit**place for place in range(guesses + 1)) / cost
            if guesses > 0 and gain > best and cost - 1 <= self._credit:
                best, count = gain, guesses
        return count


class Lookup(Guesser):
    """Guesses the tokens that followed the longest earlier occurrence of the last ones, in prompt or new text."""

    def __init__(self) -> None:
        super().__init__()
        self._hits = dict(PRIOR)
        self._source = 0  # place in the text of the token that comes next if an earlier passage goes on
        self._guess, self._level, self._length = np.empty(0, np.int64), 0, 0

    def guess(self, ids: Array, most: int) -> Array:
        self._learn(ids)
        matched, self._source = longest_match(ids, self._source)
        if not matched or not self.is_on:
            self._guess = ids[:0]
            return self._guess
        self._level, self._length = matched.bit_length(), len(ids)
        self._guess = np.resize(ids[self._source :], MOST)  # a passage that reaches the end repeats itself
        return self._guess[: self._count(self._hits[self._level], most)]

    def _learn(self, ids: Array) -> None:
        """Compares the latest guess with the tokens that came, also where they were not run."""
        came = ids[self._length :][: len(self._guess)]
        for guessed, token in zip(self._guess.tolist(), came.tolist(), strict=False):
            self._hits[self._level] += RATE * ((guessed == token) - self._hits[self._level])
            if guessed != token:
                break
        self._source = min(self._source + len(ids) - self._length, len(ids)) if len(self._guess) else 0


def longest_match(ids: Array, preferred: int) -> tuple[int, int]:
    """Number of last tokens that also precede an earlier place, at most `LONGEST`, and that place, the latest such.

    Among equally long matches `preferred` is taken; if there is none of two tokens, `preferred` with a length of 1; 0
    and 0 if that is not in the text.
    """
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    matched = 1 if len(ends) else 0
    while len(ends) and matched < LONGEST:
        longer = ends[ends >= matched]
        longer = longer[ids[longer - matched] == ids[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    goes_on = 0 < preferred < len(ids)
    if matched < 2:
        return (1, preferred) if goes_on else (0, 0)
    return matched, preferred if goes_on and preferred - 1 in ends else int(ends[-1]) + 1


class Batch:
    """Rows generated together after the cache `past`; ended rows are removed once they are half of all.

    A row that is alone runs tokens that `guesser` guesses, if it is given.
    """

    def __init__(
        self,
        runner: Runner,
        rows: Sequence[Row],
        positions: PositionRule = default_positions,
        guesser: Guesser | None = None,
    ) -> None:
        self._runner, self._position_ids = runner, positions
        self._may_shrink = runner.max_batch_size is None
        self.rows = [row for row in rows if not row.finish]
        self.past: Past | None = None
        columns = max((row.length + row.room for row in self.rows), default=0)
        self._mask = np.ones((len(self.rows), columns), dtype=np.int64)
        self._ids, self._most = self._mask[:, :0], 0
        self._placed: PlacedEmbeddings | None = None
        self._longest = max((len(row.prompt) for row in self.rows), default=0)
        self._guesser = None if any(map(self._reads_whole, self.rows)) else guesser
        self._guess = self._ids[:0].ravel()
        self._before: Past | None = None  # what the latest call continued
        self._pending = 1  # last tokens of the row, or of each row, that are not in the cache
        self._started = 0.0
        self._number: int | None = None  # that of the first token of the latest step; None if a whole text ran

    def start(self, past: Past | None = None, most: int = 0) -> None:
        """Pads the prompts, which `read` then runs after `past`, at most `most` columns per step; 0 for all."""
        self._ids, mask = pad_left([row.prompt for row in self.rows])
        self._placed = PlacedEmbeddings.of(
            [row.embeddings for row in self.rows], [len(row.prompt) for row in self.rows]
        )
        self._mask = np.concatenate([mask, np.ones_like(self._mask)], axis=1)
        self.past = past
        in_parts = (
            most
            and not any(map(self._reads_whole, self.rows))
            and self._runner.reads_in_parts(self._ids.shape[1])
            and self._runner.continues_in_one_run(len(mask), (past.tokens if past else 0) + most, most)
        )
        self._most = most if in_parts else self._ids.shape[1]

    def _reads_whole(self, row: Row) -> bool:
        """Whether tokens of a prompt attend to later ones."""
        of_images = row.embeddings is not None and row.embeddings.read_whole
        return of_images or ExtraValues(self._runner.extra_inputs, row.inputs.values).both_ways

    def read(self) -> Step | None:
        """Runs the next columns of the prompts; None while more remain."""
        past, longest = self.past, self._ids.shape[1]
        done = past.tokens if past else 0
        end = min(done + self._most, longest)
        mask = self._mask[:, :end]
        call = ModelCall(self._ids[:, done:end], mask, self._position_ids(mask, end - done))
        given = *call.arrays, past.cache if past else None
        placed = self._placed.columns(done, end) if self._placed else None
        step = self._runner.prefill(*given, self._extras(call), placed, last_only=True)
        self.past = Past(step.present, end)
        self._hear(step, done, end - done)
        return step if end == longest else None

    def _hear(self, step: Step, first: int, tokens: int) -> None:
        """Passes the hidden states of the first tokens of a step of a row that is alone to what guesses."""
        if len(self.rows) == 1 and step.hidden is not None:
            self.hear(first, step.hidden[0, :tokens])

    def hear(self, first: int, hidden: Array) -> None:
        """Passes hidden states [tokens, hidden] of the only row to what guesses, `first` the number of the first."""
        if self._guesser:
            self._guesser.read(first, hidden)

    @property
    def is_settled(self) -> bool:
        """Whether the cache contains all tokens but the last one of each row."""
        return self._pending == 1

    def step(self, *, guesses: bool = True) -> Step:
        """Runs the next token of each row; of a row that is alone also those that are guessed, unless not `guesses`."""
        assert self.past
        if self._may_shrink:
            # removes ended rows once they are half of all: each removal copies the cache
            kept = [at for at, row in enumerate(self.rows) if not row.finish]
            if self.past and len(kept) <= len(self.rows) // 2:
                self.rows = [self.rows[at] for at in kept]
                self._mask = self._mask[kept]
                self.past = Past(rows_of(self.past.cache, kept), self.past.tokens)
        if len(self.rows) == 1 and self._runner.reads_again(self.past.tokens):
            # runs a whole row that outgrows the original context, as transformers does, see `LengthSwitch`
            ids = self.rows[0].all_ids[None]
            mask = self._mask[:, : ids.shape[1]]
            call = ModelCall(ids, mask, self._position_ids(mask, ids.shape[1]))
            step = self._runner.prefill(*call.arrays, None, self._extras(call), self._placed, last_only=True)
            self.past, self._number = Past(step.present, ids.shape[1]), None
            return step
        self._started = time.perf_counter()
        ids = np.stack([row.all_ids[-1:] for row in self.rows])
        if len(self.rows) == 1:
            self._number = self.rows[0].all_ids.size - self._pending
            self._guess = self._guessed(self.rows[0]) if guesses else self._ids[:0].ravel()
            ids = np.concatenate([self.rows[0].all_ids[-self._pending :], self._guess])[None]
        columns = self.past.tokens + ids.shape[1]
        mask = self._mask[:, :columns]
        call = ModelCall(ids, mask, self._position_ids(mask, ids.shape[1]))
        step = self._runner.decode(*call.arrays, self.past.cache, self._extras(call))
        self._before, self.past = self.past, Past(step.present, columns)
        return step

    def _guessed(self, row: Row) -> Array:
        """Tokens to run after those of a row that is alone, in the same call."""
        if self._guesser is None or self.past is None:
            return self._guess[:0]
        if not self._runner.scores_all(self.past.tokens, self._pending + 1):  # none is looked for in vain
            return self._guess[:0]
        guess = self._guesser.guess(row.all_ids, row.room - 1)
        tokens = self._pending + len(guess)
        total = self.past.tokens + tokens
        if not self._runner.reads_in_parts(total) or not self._runner.scores_all(self.past.tokens, tokens):
            return guess[:0]
        return guess

    def advance(self, step: Step) -> list[TextPiece]:
        """The pieces of all rows that have not ended: one each, or those of a row's guessed tokens that are right."""
        guess, pending = self._guess, self._pending
        self._guess, self._pending = guess[:0], 1
        if not len(guess):
            if self._number is not None:
                self._hear(step, self._number, pending)
            pieces = [row.advance(step, at) for at, row in enumerate(self.rows) if not row.finish]
            if self._guesser and self._started and pending == 1:
                self._guesser.took(1, time.perf_counter() - self._started)
            return pieces
        assert self._guesser and self.past and self._before
        row = self.rows[0]
        pieces = []
        if step.scored == pending + len(guess):
            for column, guessed in enumerate((*guess.tolist(), -1), pending - 1):
                token = row.pick(step, 0, column, rounding=ROUNDING)
                if token is None:
                    break
                pieces.append(replace(row.push(token), guessed=column >= pending))
                if row.finish or token != guessed:
                    break
        else:  # the graph returns those of the last token only
            self._guesser.is_on = False
        if self._number is not None:
            self._hear(step, self._number, pending - 1 + len(pieces))
        kept = self._before.tokens + pending - 1 + len(pieces)
        if kept < self.past.tokens:
            self.past, self._pending = self._without_wrong(kept)
        self._guesser.took(pending + len(guess), time.perf_counter() - self._started, len(pieces))
        return pieces or [TextPiece(row.index, "", None, "")]

    def _without_wrong(self, kept: int) -> tuple[Past, int]:
        """The cache of the first `kept` columns, and how many tokens of the row the next call runs before others."""
        assert self.past and self._before
        if can_be_cut(self.past.cache):
            return Past(taken_back(self.past.cache, self._runner.virtual_tokens + kept), kept), 1
        # states of all tokens cannot be cut: the next call continues the earlier cache
        return self._before, kept - self._before.tokens + 1

    def _extras(self, call: ModelCall) -> dict[str, Array]:
        return batch_values([row.inputs for row in self.rows], call, self._longest, self._runner.extra_inputs)


class SharedSteps(Protocol):
    """Streams that run together, see `shared_batch`."""

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether these rows may run with others."""

    def rest(self, batch: Batch) -> Iterator[TextPiece]:
        """The pieces of the only row of `batch`, whose prompt has run."""


def grow(
    batch: Batch, past: Past | None = None, most: int = 0, others: SharedSteps | None = None
) -> Generator[TextPiece]:
    """The pieces of all rows, in turn, until all have ended; one `next()` runs at most one step of the model.

    Prompts run after the columns `past`, at most `most` columns per step, 0 for all; each step but the last yields an
    empty piece. After its prompt a row that is alone runs together with `others`.
    """
    batch.start(past, most)
    while (step := batch.read()) is None:
        yield TextPiece(batch.rows[0].index, "", None, "")
    while True:
        yield from batch.advance(step)
        if all(row.finish for row in batch.rows):
            return
        if others:
            yield from others.rest(batch)
            return
        step = batch.step()


class Conversation:
    """One growing sequence; the tokens (`ids`) in its cache that the next prompt shares with it do not run again."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache, cut to the tokens that the one prompt begins with; None if the cache cannot be cut there."""
        if self.cache is None or len(prompts) != 1 or is_lost(self.cache):
            return None
        if not runner.reads_in_parts(max(len(self.ids), len(prompts[0]))):
            return None  # other frequencies than those of the whole prompt
        same = common_length([self.ids, prompts[0]], most=len(prompts[0]) - 1)
        if same == 0 or not runner.continues_in_one_run(1, same, len(prompts[0]) - same):
            return None
        if same == len(self.ids):
            return Past(self.cache, same)
        return Past(cut(self.cache, runner.virtual_tokens + same), same) if can_be_cut(self.cache) else None

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Stores the cache of the tokens `ids` after a single prompt; without arguments after an interrupted step."""
        self.ids, self.cache = list(map(int, ids)), cache


class SharedPrefix:
    """Tokens `ids` that many prompts begin with; they run only once, at `positions` by the model's rule."""

    def __init__(self, ids: Sequence[int], positions: PositionRule = default_positions) -> None:
        self._ids, self._positions = list(ids), positions
        self._cache: Cache | None = None

    def past(self, prompts: Sequence[Sequence[int]], runner: Runner) -> Past | None:
        """The cache, with one row per prompt, each after the padding of that row."""
        longest = max(map(len, prompts))
        same = common_length([self._ids, *prompts], most=min(map(len, prompts)) - 1)
        in_parts = same > 0 and runner.reads_in_parts(longest)
        if not in_parts or not runner.continues_in_one_run(len(prompts), same, longest - same):
            return None
        cache = self._run(runner)
        shifts = [longest - len(prompt) for prompt in prompts]
        if same == len(self._ids) and not any(shifts):
            return Past(rows_of(cache, [0] * len(prompts)), same)
        if not can_be_cut(cache):
            return None
        virtual = runner.virtual_tokens
        return Past(moved_right(cut(cache, virtual + same), shifts, virtual), same)

    def keep(self, ids: Sequence[int] = (), cache: Cache | None = None) -> None:
        """Does nothing: the prefix stays the same."""

    def _run(self, runner: Runner) -> Cache:
        if self._cache is None or is_lost(self._cache):
            ids, mask = pad_left([self._ids])
            positions = self._positions(mask, len(self._ids))
            present = runner.prefill(ids, mask, positions, None, last_only=True).present
            self._cache = rows_of(present, [0])  # a copy: some runners reuse the memory
        return self._cache


def common_length(sequences: Sequence[Sequence[int]], most: int) -> int:
    """Number of first tokens that all sequences share, at most `most`."""
    same = 0
    for tokens in zip(*sequences, strict=False):
        if same >= most or len(set(tokens)) > 1:
            break
        same += 1
    return same


ROUNDING = 2**-9  # relative to the largest logit: more than calls with other numbers of tokens or rows differ by
PrefixCache = Conversation | SharedPrefix  # a cache of the first columns of a batch, which then do not run again
Decode = Callable[[Sequence[int]], str]  # tokens to text


@dataclass(frozen=True)
class LoopEngine:
    """llmconv's own loop: a prefill, then steps; room for the last token is needed if `runs_last_token`."""

    runner: Runner
    positions: PositionRule
    folder: Path  # has `config.json`, read for the size of the logits in a beam search
    guesser: Callable[[], Guesser] | None = None  # a new one for each text
    mask: Callable[[GenerationSettings], TokenMask | None] = lambda settings: None  # that of a new text
    runs_last_token = False

    def grow(
        self,
        starts: Sequence[RowStart],
        settings: GenerationSettings,
        decode: Decode,
        cache: PrefixCache | None = None,
        most: int = 0,
        others: SharedSteps | None = None,
    ) -> Generator[TextPiece]:
        """Continues a batch by greedy search or sampling, after `cache`, with at most `most` prompt tokens per step.

        A single row shares the steps of `others`, if it can.
        """
        longest = max((len(start.prompt) + start.limit for start in starts), default=0)
        if len(starts) > 1 and not self.runner.reads_in_parts(longest):  # a longer one would change the others
            for index, start in enumerate(starts):
                for piece in self.grow([start], settings, decode, None, most):
                    yield replace(piece, index=index)
            return
        rows = [self._row(index, start, settings, decode) for index, start in enumerate(starts)]
        yield from (TextPiece(row.index, "", None, row.finish) for row in rows if row.finish)
        batch = Batch(self.runner, rows, self.positions, self.guesser() if self.guesser else None)
        if not batch.rows:
            return
        is_whole = False
        try:
            past = cache.past([row.prompt for row in batch.rows], self.runner) if cache else None
            together = others if others and others.takes(batch.rows) else None
            with closing(grow(batch, past, most, together)) as pieces:
                for piece in pieces:
                    is_whole = True
                    yield piece
                    is_whole = False
            is_whole = True
        finally:  # an interrupted step may have left the cache half written
            if cache and len(rows) == 1:
                cache.keep(*((rows[0].ids[: batch.past.tokens], batch.past.cache) if is_whole and batch.past else ()))

    def beams(
        self,
        prompt: Sequence[int],
        limit: int,
        settings: GenerationSettings,
        count: int,
        inputs: GivenInputs | None = None,
    ) -> Sequence[list[int]]:
        """The at most `limit` new tokens of each of the `count` best beams of a prompt, best first, by transformers."""
        if not limit:
            return [[]] * count
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds, and only beams need it

        from llmconv.generation.logits_processors import GraphModel, search  # noqa: PLC0415 - imports torch

        config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        return search(GraphModel(self.runner, self.positions, vocabulary, inputs), prompt, limit, settings, count)

    def _row(self, index: int, start: RowStart, settings: GenerationSettings, decode: Decode) -> Row:
        mask = self.mask(settings)
        if not settings.needs_processors:
            return Row(index, start, settings, decode, None, mask)
        from llmconv.generation.logits_processors import processor  # noqa: PLC0415 - imports torch

        tokens = len(start.prompt) - (start.embeddings.before if start.embeddings else 0)
        is_own = settings.rules is not None and settings.rules.penalizes  # the row then penalizes repetition itself
        others = settings.but(repetition_penalty=1.0) if is_own else settings
        return Row(index, start, settings, decode, processor(others, tokens, start.limit), mask)
