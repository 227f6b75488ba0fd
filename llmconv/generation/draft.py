"""Guesses of a smaller model, as in transformers' "assisted generation"; `loop` keeps those that are right."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from llmconv.errors import UnsupportedInput
from llmconv.generation.loop import FORGET, RATE, SECONDS_RATE, Guesser
from llmconv.generation.row import PositionRule
from llmconv.runtime.runner import Cache, Runner, can_be_cut, is_lost, taken_back
from llmconv.runtime.tokenizer import UNKNOWN
from llmconv.tensors import Array

PRIOR = 0.6  # how often a guess is right, at first
FIRST = 2  # most guesses while the time of one is unknown
MOST_OTHERS = 0.01  # share of tokens that may differ between both vocabularies


class Draft(Guesser):
    """Guesses the tokens that a smaller model, which `runner` runs, finds likeliest; it has a cache of its own.

    `vocabulary` is the number of token ids that both models have.
    """

    least_gain = 1.2  # two models in turn push each other's weights out of the processor's caches
    counts_first_calls = False

    def __init__(
        self, runner: Runner, positions: PositionRule, vocabulary: int, context_length: int | None = None
    ) -> None:
        super().__init__()
        self._runner, self._positions, self._vocabulary = runner, positions, vocabulary
        self._longest = min(context_length or UNKNOWN, runner.cache_capacity or UNKNOWN)
        self._ids: Array = np.empty(0, np.int64)  # the tokens in the cache
        self._cache: Cache | None = None
        self._guess, self._length, self._hit = self._ids, 0, PRIOR
        self._spent = self._reading = 0.0  # seconds of the latest guesses, and those of a prompt before them
        self._is_cold = True  # the first run of a shape takes several times as long as others

    def guess(self, ids: Array, most: int) -> Array:
        for guessed, token in zip(self._guess.tolist(), ids[self._length :].tolist(), strict=False):
            self._hit += RATE * ((guessed == token) - self._hit)
            if guessed != token:
                break
        self._guess, self._length = ids[:0], len(ids)
        self._spent = self._reading = 0.0  # a call may have ended without `took`
        most = min(most, self._longest - len(ids), most if self._guess_seconds else FIRST)
        count = self._count(self._hit, most) if self.is_on else 0
        if not count or not self._runner.reads_in_parts(len(ids) + count) or ids.max() >= self._vocabulary:
            self._hit += (1 - FORGET) * (PRIOR - self._hit)  # so that it is tried again
            self._guess_seconds *= FORGET
            return self._guess
        self._guess = self._continued(ids, count)
        return self._guess

    def took(self, tokens: int, seconds: float, kept: int = 1) -> bool:
        counts = super().took(tokens, seconds - self._spent - self._reading, kept)
        if counts:
            self._credit -= self._spent / self._seconds.get(1, seconds)
        self._spent = self._reading = 0.0
        return counts

    def _continued(self, ids: Array, count: int) -> Array:
        """The `count` likeliest tokens after `ids`, each after those before it."""
        started = time.perf_counter()
        same, cache = self._known(ids)
        text, guess = ids, ids[:0]
        while len(guess) < count:
            mask = np.ones((1, len(text)), np.int64)
            call = text[None, same:], mask, self._positions(mask, len(text) - same)
            run = partial(self._runner.prefill, last_only=True) if cache is None else self._runner.decode
            step = run(*call, cache)
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
        self._time(count - bool(self._reading))
        return guess

    def _time(self, runs: int) -> None:
        """Records the time of the latest guesses, which took `runs` runs."""
        if self._is_cold:
            self._is_cold = not runs
        elif runs:
            each = self._spent / runs
            self._guess_seconds += (SECONDS_RATE if self._guess_seconds else 1.0) * (each - self._guess_seconds)

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
    """Number of first ids that two tokenizers of transformers have; UnsupportedInput if more than 1 % differ.

    A few special tokens may have other names; guesses of these are wrong, which costs time alone.
    """
    ours, theirs = ({at: token for token, at in one.get_vocab().items()} for one in (model, draft))
    shared = min(max(tokens, default=-1) + 1 for tokens in (ours, theirs))
    others = [at for at in range(shared) if ours.get(at) != theirs.get(at)]
    if len(others) > MOST_OTHERS * shared:
        names = " and ".join(f"{tokens.get(others[0])!r:.60}" for tokens in (ours, theirs))
        raise UnsupportedInput(
            f"the smaller model has another vocabulary: {len(others)} of {shared} tokens differ, such as {others[0]}, "
            f"which is {names}",
            hint="give `--speculate` a model of the same family, with the same tokenizer",
        )
    return shared
