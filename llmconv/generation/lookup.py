"""Prompt lookup: a call runs tokens that the text is likely to repeat, and keeps those that the model picks itself.

The next tokens are guessed to be those that followed an earlier occurrence of the last ones, in the prompt or in the
new text ("prompt lookup decoding", as in transformers' `prompt_lookup_num_tokens`). A call with 1 + k tokens takes less
time than 1 + k calls, because it reads the weights once. Which tokens are picked does not depend on the guesses.
"""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array

LOOKUP = "lookup"
SPECULATIONS = (LOOKUP, "off")
MOST = 15  # tokens guessed per call
WIDTHS = (1, 2, 4, 8, 16)  # tokens per call
LONGEST = 16  # last tokens that are compared
# how often a guess is right, at first, by the bit length of the number of tokens that it follows
PRIOR = {1: 0.2, 2: 0.35, 3: 0.6, 4: 0.8, 5: 0.9}
GAIN = 1.05  # least expected gain in tokens per second
RATE, SECONDS_RATE = 0.1, 0.3  # weights of the latest guess and of the latest call in the averages
FORGET = 0.998  # factor per call of the time of other widths, so that a slow call is tried again
# time that wrong guesses may cost, in calls of one token: at first, per call of one token, and at most
CREDIT, ALLOWED, MOST_CREDIT = 1.0, 0.01, 8.0


class Lookup:
    """Guesses the next tokens of one sequence; how many depends on earlier guesses, and on the time of earlier calls.

    Attributes:
        is_on: whether it guesses at all.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._hits, self._seconds, self._credit = dict(PRIOR), dict[int, float](), CREDIT
        self._source = 0  # place in the text of the token that comes next if an earlier passage goes on
        self._guess, self._level, self._length = np.empty(0, np.int64), 0, 0

    def guess(self, ids: Array, most: int) -> Array:
        """At most `most` tokens that may follow `ids`, int64 [tokens]; none if they would not save time."""
        self._learn(ids)
        matched, self._source = longest_match(ids, self._source)
        if not matched or not self.is_on:
            self._guess = ids[:0]
            return self._guess
        self._level, self._length = matched.bit_length(), len(ids)
        self._guess = np.resize(ids[self._source :], MOST)  # a passage that reaches the end repeats itself
        return self._guess[: self._count(self._hits[self._level], most)]

    def took(self, tokens: int, seconds: float, kept: int = 1) -> None:
        """Notes the seconds of a call that ran `tokens` tokens and gave `kept` new ones."""
        width = next((width for width in WIDTHS if width >= tokens), WIDTHS[-1])
        self._seconds = {known: FORGET * value for known, value in self._seconds.items()}
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + SECONDS_RATE * (seconds - before)
        saved = ALLOWED if tokens == 1 else kept - seconds / self._seconds.get(1, seconds)
        self._credit = min(self._credit + saved, MOST_CREDIT)

    def _learn(self, ids: Array) -> None:
        """Compares the latest guess with the tokens that came, also where they were not run."""
        came = ids[self._length :][: len(self._guess)]
        for guessed, token in zip(self._guess.tolist(), came.tolist(), strict=False):
            self._hits[self._level] += RATE * ((guessed == token) - self._hits[self._level])
            if guessed != token:
                break
        self._source = min(self._source + len(ids) - self._length, len(ids)) if len(self._guess) else 0

    def _count(self, hit: float, most: int) -> int:
        """Number of guesses with the most expected tokens per second, at most `most`; `hit`: how often one is right."""
        if 1 not in self._seconds:
            return 0
        best, count = GAIN, 0
        cost = 1.0
        for width in WIDTHS[1:]:
            known = self._seconds.get(width)
            cost = known / self._seconds[1] if known else 1.1 * cost  # an unknown width is tried
            guesses = min(width - 1, most)
            gain = sum(hit**place for place in range(guesses + 1)) / cost
            if guesses > 0 and gain > best and cost - 1 <= self._credit:
                best, count = gain, guesses
        return count


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
