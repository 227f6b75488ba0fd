"""Speculation: a call also runs tokens that are guessed to come, and keeps those that the model picks itself.

A call with 1 + k tokens takes less time than 1 + k calls, because it reads the weights once. Which tokens are picked
does not depend on the guesses. `Lookup` guesses that the text repeats itself ("prompt lookup decoding", as in
transformers' `prompt_lookup_num_tokens`); `Draft` asks a smaller model ("assisted generation", its `assistant_model`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.runtime.runner import Cache, Runner, can_be_cut, is_lost, taken_back
from llmconv.tensors import Array

if TYPE_CHECKING:
    from llmconv.generation.row import PositionRule

LOOKUP, OFF = "lookup", "off"  # what `speculate` may be besides a draft model
MOST = 15  # tokens guessed per call
WIDTHS = (1, 2, 4, 8, 16)  # tokens per call
LONGEST = 16  # last tokens that are compared
# how often a guess is right, at first, by the bit length of the number of tokens that it follows
PRIOR = {1: 0.2, 2: 0.35, 3: 0.6, 4: 0.8, 5: 0.9}
DRAFT_PRIOR = 0.6  # the same for a draft model
GAIN = 1.05  # least expected gain in tokens per second
RATE, SECONDS_RATE = 0.1, 0.3  # weights of the latest guess and of the latest call in the averages
FORGET = 0.998  # factor per call of the time of other widths, so that a slow call is tried again
# time that wrong guesses may cost, in calls of one token: at first, per call of one token, and at most
CREDIT, ALLOWED, MOST_CREDIT = 1.0, 0.01, 8.0


class Guesser:
    """Guesses the next tokens of one sequence; how many depends on earlier guesses, and on the time of earlier calls.

    Attributes:
        is_on: whether it guesses at all.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._seconds, self._credit = dict[int, float](), CREDIT
        self._guess_seconds = 0.0  # time of one guess

    def guess(self, ids: Array, most: int) -> Array:
        """At most `most` tokens that may follow `ids`, int64 [tokens]; none if they would not save time."""
        raise NotImplementedError

    def took(self, tokens: int, seconds: float, kept: int = 1) -> None:
        """Notes the seconds of a call that ran `tokens` tokens and gave `kept` new ones."""
        width = next((width for width in WIDTHS if width >= tokens), WIDTHS[-1])
        self._seconds = {known: FORGET * value for known, value in self._seconds.items()}
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + SECONDS_RATE * (seconds - before)
        saved = ALLOWED if tokens == 1 else kept - seconds / self._seconds.get(1, seconds)
        self._credit = min(self._credit + saved, MOST_CREDIT)

    def _count(self, hit: float, most: int) -> int:
        """Number of guesses with the most expected tokens per second, at most `most`; `hit`: how often one is right."""
        if 1 not in self._seconds:
            return 0
        best, count = GAIN, 0
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


class Draft(Guesser):
    """Guesses the tokens that a smaller model, with the same vocabulary, finds likeliest; it has a cache of its own.

    Args:
        runner: runs the smaller model.
        positions: its rule for position ids.
        vocabulary: number of token ids that both models have.
        context_length: tokens that the smaller model was made for; None if unknown.
    """

    def __init__(
        self, runner: Runner, positions: PositionRule, vocabulary: int, context_length: int | None = None
    ) -> None:
        super().__init__()
        self._runner, self._positions, self._vocabulary = runner, positions, vocabulary
        limits = [limit for limit in (context_length, runner.cache_capacity) if limit is not None]
        self._longest = min(limits, default=None)
        self._ids: Array = np.empty(0, np.int64)  # the tokens in the cache
        self._cache: Cache | None = None
        self._guess, self._length, self._hit = self._ids, 0, DRAFT_PRIOR
        self._spent = self._reading = 0.0  # seconds of the latest guesses, and those of a prompt before them

    def guess(self, ids: Array, most: int) -> Array:
        for guessed, token in zip(self._guess.tolist(), ids[self._length :].tolist(), strict=False):
            self._hit += RATE * ((guessed == token) - self._hit)
            if guessed != token:
                break
        self._guess, self._length, self._spent = ids[:0], len(ids), 0.0
        if self._longest is not None:
            most = min(most, self._longest - len(ids))
        count = self._count(self._hit, most) if self.is_on else 0
        if not count or not self._runner.reads_in_parts(len(ids) + count) or ids.max() >= self._vocabulary:
            self._hit += (1 - FORGET) * (DRAFT_PRIOR - self._hit)  # so that it is tried again
            return self._guess
        self._guess = self._continued(ids, count)
        return self._guess

    def took(self, tokens: int, seconds: float, kept: int = 1) -> None:
        spent, reading = self._spent, self._reading
        self._spent = self._reading = 0.0
        super().took(tokens, seconds - spent - reading, kept)
        self._credit -= spent / self._seconds.get(1, seconds)

    def _continued(self, ids: Array, count: int) -> Array:
        """The `count` likeliest tokens after `ids`, each after those before it."""
        started = time.perf_counter()
        same, cache = self._known(ids)
        text, guess = ids, ids[:0]
        while len(guess) < count:
            mask = np.ones((1, len(text)), np.int64)
            call = text[None, same:], mask, self._positions(mask, len(text) - same)
            step = self._runner.prefill(*call) if cache is None else self._runner.decode(*call, cache)
            if cache is None:
                self._reading = time.perf_counter() - started
            same, cache = len(text), step.present
            if len(text) == len(ids) or can_be_cut(cache):  # states stay those of the text without guesses
                self._ids, self._cache = text, cache
            if step.choices is None:
                next_token = step.logits[0, -1:, : self._vocabulary].argmax(axis=1)
            else:
                next_token = step.choices.tokens[0, -1, :1]
            guess, text = np.append(guess, next_token), np.append(text, next_token)
        self._spent = time.perf_counter() - started - self._reading
        runs = count - bool(self._reading)
        if runs:
            each = self._spent / runs
            self._guess_seconds += (SECONDS_RATE if self._guess_seconds else 1.0) * (each - self._guess_seconds)
        return guess

    def _known(self, ids: Array) -> tuple[int, Cache | None]:
        """How many first tokens of `ids`, not all of them, are in the cache, and that cache; None if none are."""
        cache = self._cache
        if cache is None or is_lost(cache):
            return 0, None
        most = min(len(self._ids), len(ids) - 1)
        differs = np.flatnonzero(self._ids[:most] != ids[:most])
        same = int(differs[0]) if len(differs) else most
        if same == len(self._ids):
            return same, cache
        if not same or not can_be_cut(cache):
            return 0, None
        return same, taken_back(cache, self._runner.virtual_tokens + same)


def shared_vocabulary(model: Any, draft: Any) -> int:
    """Number of token ids that two tokenizers of transformers share; UnsupportedInput if one has other tokens there."""
    ours, theirs = model.get_vocab(), draft.get_vocab()
    shared = min(max(vocabulary.values(), default=-1) + 1 for vocabulary in (ours, theirs))
    for token, at in {**theirs, **ours}.items():
        ids = ours.get(token), theirs.get(token)
        if ids[0] != ids[1] and at < shared:
            raise UnsupportedInput(
                f"the smaller model has another vocabulary: {token!r:.60} is {' and '.join(map(_id, ids))}",
                hint="give `--speculate` a model of the same family, with the same tokenizer",
            )
    return shared


def _id(token: int | None) -> str:
    return "no token" if token is None else f"token {token}"
