"""What a request says about single tokens: biases and penalties of their scores, and their log-probabilities.

Sources: OpenAI's API reference, "Create chat completion", for `logit_bias` and the formula of the penalties, which
count new tokens only: `score - frequency * count - presence * (count > 0)`; vLLM's `SamplingParams` for `min_tokens`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array

if TYPE_CHECKING:
    from llmconv.runtime.runner import Cache, Runner

MOST = 100.0  # a bias of a larger magnitude is taken as this
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; as in vLLM


@dataclass(frozen=True)
class TokenRules:
    """Rules for the tokens of one answer.

    Attributes:
        logit_bias: what is added to the score of a token, by its id; at most 100 and at least -100.
        presence_penalty: what is taken from the score of each token that the answer has already.
        frequency_penalty: what is taken from it for each time that the answer has it.
        min_tokens: number of new tokens before which no end token is picked, and no stop string looked for.
        top_logprobs: number of likeliest tokens that come with each new one, 0 for its own log-probability alone; None
            for no log-probabilities.
        include_stop: whether a stop string that ends the answer is a part of it.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    top_logprobs: int | None = None
    include_stop: bool = False

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the answer are penalized, after what penalizes repetition."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def needs_scores(self) -> bool:
        """Whether the logits of all tokens are needed."""
        return self.changes_scores or self.top_logprobs is not None

    @property
    def changes_scores(self) -> bool:
        return bool(self.logit_bias or self.penalizes or self.min_tokens)

    def biased(self, scores: Array, new: Array, ends: Iterable[int]) -> Array:
        """A copy of scores [vocabulary] with the biases, minus infinity for `ends` before `min_tokens` are `new`."""
        changed = scores.astype(np.float32)
        known = [token for token in self.logit_bias if token < len(changed)]
        changed[known] += np.array([min(max(self.logit_bias[token], -MOST), MOST) for token in known], np.float32)
        if len(new) < self.min_tokens:
            changed[[end for end in ends if end < len(changed)]] = -np.inf
        return changed

    def penalized(self, scores: Array, new: Array) -> Array:
        """The scores with the penalties of the `new` tokens; changes them in place."""
        if self.penalizes and len(new):
            tokens, counts = np.unique(new, return_counts=True)
            scores[tokens] -= (self.presence_penalty + self.frequency_penalty * counts).astype(scores.dtype)
        return scores


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability, natural logarithm, and those of the likeliest ones in its place.

    Attributes:
        token: id of the token.
        logprob: by the model's own logits, before biases, penalties and temperature; None for the first of a prompt.
        top: ids and log-probabilities of the likeliest tokens, likeliest first.
        start: number of characters of the text before the token.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    start: int = 0

    @classmethod
    def of(cls, logits: Array, token: int, top: int, start: int = 0) -> TokenLogprob:
        """Those of `token` and of the `top` likeliest tokens by logits [vocabulary]; MalformedInput for NaN."""
        scores = logits.astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        if np.isnan(scores[token]):
            raise MalformedInput("the logits of the model are NaN", hint="run `llmconv verify` on the folder")
        top = min(top, len(scores))
        likeliest = np.argpartition(scores, -top)[-top:] if top else np.empty(0, np.int64)
        likeliest = likeliest[np.lexsort((likeliest, -scores[likeliest]))]
        found = tuple((int(one), max(float(scores[one]), LEAST_LOGPROB)) for one in likeliest)
        return cls(token, max(float(scores[token]), LEAST_LOGPROB), found, start)


class _Model(Protocol):
    """What `prompt_logprobs` needs of a `TextModel`."""

    @property
    def runner(self) -> Runner: ...

    def positions(self, mask: Array, tokens: int, /) -> Array:
        """See `PositionRule`."""


def prompt_logprobs(
    model: _Model, ids: Sequence[int], top: int, most: int
) -> Generator[None, None, tuple[list[TokenLogprob], Cache]]:
    """The log-probability of every token of a prompt after those before it, and the cache of all of them.

    One `next()` runs at most `most` tokens, so no more logits are in memory. Raises UnsupportedInput for graphs that
    return the last logits, or chosen tokens.
    """
    runner, cache = model.runner, None
    in_parts = runner.reads_in_parts(len(ids)) and runner.continues_in_one_run(1, most, most)
    size = most if in_parts and not runner.virtual_tokens else len(ids)
    found = [TokenLogprob(ids[0], None)]
    for start in range(0, len(ids), size):
        part = np.array([ids[start : start + size]], dtype=np.int64)
        mask = np.ones((1, start + part.shape[1]), dtype=np.int64)
        step = runner.prefill(part, mask, model.positions(mask, part.shape[1]), cache)
        if step.choices is not None or step.logits.shape[1] != part.shape[1]:
            problem = (
                "the graphs return the last logits only, and log-probabilities of a prompt need those of every token"
            )
            raise UnsupportedInput(problem, hint="export them again without `--last-logits` and `--postprocess`")
        cache = step.present
        following = ids[start + 1 : start + size + 1]
        found += [TokenLogprob.of(step.logits[0, at], token, top) for at, token in enumerate(following)]
        yield
    assert cache is not None
    return found, cache
