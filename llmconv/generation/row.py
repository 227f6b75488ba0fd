"""One sequence of a batch while it is generated: its positions, how the next token is picked, and its text as it grows.

transformers' filters in their order: repetition penalty, then (when sampling) temperature, top-k, top-p, min-p. A
filter narrows `TokenCandidates` down; one uniform random number then picks among them in the order of the vocabulary,
so that a seed always gives the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UsageProblem
from llmconv.files.paths import kind_of
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.extra_inputs import GivenInputs
from llmconv.runtime.runner import Cache, PromptEmbeddings, Step, default_positions
from llmconv.tensors import Array

if TYPE_CHECKING:
    from llmconv.generation.structured import TokenMask
    from llmconv.generation.token_rules import TokenLogprob

# attention mask and number of new tokens to position ids, as `default_positions`
PositionRule = Callable[[Array, int], Array]


def positions_of(folder: Path) -> PositionRule:
    """The rule in the input map of the folder's `model_type`; the default rule if there is none.

    All built-in families use the default rule, so the registry (which imports torch) is loaded only where an installed
    package or the calling program may have added a family.
    """
    if "llmconv.export.families" not in sys.modules and not entry_points(group="llmconv.input_maps"):
        return default_positions
    from llmconv.export.families import known_input_maps  # noqa: PLC0415 - imports torch

    path = folder / "config.json"
    row = known_input_maps().get(read_json(path).get("model_type", "") if path.is_file() else "")
    return row.positions if row else default_positions


@dataclass(frozen=True)
class Past:
    """The cache of the first `tokens` columns of a batch, padding included."""

    cache: Cache
    tokens: int


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into pieces of text.

    A token may be part of a UTF-8 character, and its text may depend on the token before (a leading space). So each
    piece is the difference between two decodings of a short window, held back while it ends in an incomplete character.
    A byte that makes no character changes how `ByteFallback` decodes those before it, too; these are shown already.
    `before` are the last tokens of a text that is continued: sentencepiece's decoder drops the space before a whole
    text, and here the text has begun.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        known = decode(before) if before else ""
        self._tokens: list[int] = [] if known.endswith(INCOMPLETE) else list(before)  # the window
        self._shown = len(self._tokens)  # how many of them are already in the output
        self._text = known if self._tokens else ""  # the text of those

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._text):
            return ""
        piece = self._rest(text)
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        self._text = self._decode(self._tokens)
        return piece

    def close(self) -> str:
        """The text that was held back; an incomplete character becomes U+FFFD."""
        piece = self._rest(self._decode(self._tokens))
        self._tokens, self._shown, self._text = [], 0, ""
        return piece

    def _rest(self, text: str) -> str:
        """What of the window's text is not in the output."""
        return text[len(self._text) :] if text.startswith(self._text) else self._decode(self._tokens[self._shown :])


def of_earlier_tokens(piece: str) -> int:
    """Number of first characters of a `TextStream`'s piece that are of tokens before its last: bytes that make none."""
    return len(piece) - len(piece.lstrip(INCOMPLETE))


class StopStrings:
    """Passes text on up to the first stop string, which may span several pieces; ignores empty stop strings.

    `include` says whether the stop string is passed on, too.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = [stop for stop in stops if stop], include
        self._held, self._shown = "", b""  # the text, and for each of its characters whether it is passed on
        self.found = False

    def push(self, piece: str, shown: bool = True) -> str:
        """The text that cannot be part of a stop string; nothing after a stop string.

        A piece that is not `shown`, that of a special token, is only looked at.
        """
        if self.found or not self._stops:
            return piece if shown and not self.found else ""
        text, flags = self._held + piece, self._shown + bytes([shown]) * len(piece)
        places = [(place, len(stop)) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            start, length = min(places)
            self.found, self._held, self._shown = True, "", b""
            return _shown(text[: start + length * self._include], flags)
        final = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held, self._shown = text[final:], flags[final:]
        return _shown(text[:final], flags)

    def close(self) -> str:
        """The text that was held back as a possible start of a stop string."""
        held, flags = self._held, self._shown
        self._held, self._shown = "", b""
        return _shown(held, flags)


def _shown(text: str, flags: bytes) -> str:
    return "".join(compress(text, flags))


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of `text` that may be the start of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)


class OrderedWriter:
    """Writes texts in order from index `start`, each between `heading(index)` and `end`; the first one as it grows."""

    def __init__(
        self,
        write: Callable[[str], object],
        start: int = 0,
        end: str = "\n",
        heading: Callable[[int], str] = lambda index: "",
    ) -> None:
        self._write, self._end, self._heading = write, end, heading
        self._waiting: dict[int, str] = {}
        self._done: set[int] = set()
        self._current = start

    def push(self, index: int, piece: str, done: bool) -> None:
        """Adds a piece to text `index`; if it is the last (`done`), the end follows."""
        begun = self._waiting.get(index)
        self._waiting[index] = (self._heading(index) if begun is None else begun) + piece + self._end * done
        if done:
            self._done.add(index)
        while text := self._waiting.get(self._current):
            self._write(text)
            self._waiting[self._current] = ""
            if self._current not in self._done:
                return
            del self._waiting[self._current]
            self._current += 1


class RowStart(NamedTuple):
    """What a row begins with."""

    prompt: Sequence[int]  # token ids
    limit: int  # maximum number of new tokens
    sample: int = 0  # number of its random generator, or the rank of a beam
    embeddings: PromptEmbeddings | None = None  # in place of those of some tokens
    inputs: GivenInputs | None = None  # values of extra inputs; None for their defaults
    continues: bool = False  # whether the new text is read behind that of the prompt


BEFORE = 4  # tokens of a prompt by which the text behind it is decoded


@dataclass(frozen=True)
class TextPiece:
    """A piece of one text: what one new token adds to it.

    Attributes:
        index: index of the prompt.
        text: new text that is final; empty while a character or a stop string may be incomplete.
        token: the new token, or the end token; None if no token was generated.
        finish: why this is the last piece: `eos`, `length` or `stop`; or `too_long`; empty if it is not.
        guessed: whether the token came from the call of the token before it, see `lookup`.
        logprob: that of the token, if the settings ask for it.
    """

    index: int
    text: str
    token: int | None
    finish: str
    guessed: bool = False
    logprob: TokenLogprob | None = None


class Row:
    """The tokens of one prompt and the new tokens after it.

    `processor` maps tokens [length] and logits [vocabulary] to scores [vocabulary]; None for llmconv's own filters.
    `mask` says which tokens may come; None for all.
    """

    def __init__(
        self,
        index: int,
        start: RowStart,
        settings: GenerationSettings,
        decode: Callable[[Sequence[int]], str],
        processor: Callable[[Array, Array], Array] | None = None,
        mask: TokenMask | None = None,
    ) -> None:
        self.index, self.prompt, self.settings = index, list(start.prompt), settings
        self.room, self.sample = start.limit, start.sample
        self._processor, self._mask, self.embeddings = processor, mask, start.embeddings
        self._before = self.embeddings.before if self.embeddings else 0
        self._generator = np.random.default_rng(settings.seed_of(start.sample))
        self._rules, self._logits = settings.rules, np.empty(0)  # those of the latest token that was picked
        included = self._rules is not None and self._rules.include_stop
        before = self.prompt[-BEFORE:] if start.continues and mask is None else ()  # a form begins with its first token
        self._text, self._stops = TextStream(decode, before), StopStrings(settings.stop_strings, included)
        self._read = 0  # characters of the text so far, stop strings included
        # texts of special tokens, which are not in the text, but may be part of a stop string
        stops, special = settings.stop_strings, getattr(decode, "special_texts", {})
        self._special = {token: text for token, text in special.items() if any(text in stop for stop in stops)}
        self.inputs = start.inputs or GivenInputs(len(self.prompt))
        if self.embeddings and self.embeddings.inputs:
            self.inputs = replace(self.inputs, values={**self.embeddings.inputs, **self.inputs.values})
        self.length = len(self.prompt)
        self._ids = np.empty(self.length + min(self.room, 1024), dtype=np.int64)
        self._ids[: self.length] = self.prompt
        self.finish = "" if self.room else "length"

    @property
    def ids(self) -> Array:
        """Tokens of the prompt and new tokens, int64 [length], without embeddings that stand for no token."""
        return self._ids[self._before : self.length]

    @property
    def all_ids(self) -> Array:
        """As `ids`, with those that stand for embeddings."""
        return self._ids[: self.length]

    def advance(self, step: Step, at: int) -> TextPiece:
        """Picks the next token from row `at` of the last position of the step."""
        token = self.pick(step, at)
        assert token is not None
        return self.push(token)

    def push(self, token: int, is_last: bool = False) -> TextPiece:
        """Appends `token`, the last one of the sequence if `is_last`, and returns the text that is final now."""
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self.length] = token
        self.length += 1
        self.room -= 1
        ended = token in self.settings.eos_token_id
        is_whole = not ended and self._mask is not None and self._mask.push(token)
        piece = "" if ended else self._text.push(token)
        logprob = self._logprob(token, self._read + of_earlier_tokens(piece))
        self._read += len(piece)
        if self._rules and self.length - len(self.prompt) < self._rules.min_tokens:
            text = piece
        else:
            text = self._stops.push(piece)
            if token in self._special:
                text += self._stops.push(self._text.close()) if ended else ""
                text += self._stops.push(self._special[token], shown=False)
        if ended:
            self.finish = "eos"
        elif self._stops.found or is_whole:
            self.finish = "stop"
        else:
            self.finish = "" if self.room and not is_last else "length"
        return TextPiece(self.index, text + self.rest(), token, self.finish, logprob=logprob)

    def _logprob(self, token: int, start: int) -> TokenLogprob | None:
        """That of the token which was picked last, after `start` characters, if the settings ask for it."""
        if not self._rules or self._rules.top_logprobs is None or not len(self._logits):
            return None
        from llmconv.generation.token_rules import TokenLogprob  # noqa: PLC0415 - few texts have them

        return TokenLogprob.of(self._logits, token, self._rules.top_logprobs, start)

    def rest(self) -> str:
        """The text that was held back, at the end of the sequence; may contain a stop string."""
        if not self.finish or self._stops.found:
            return ""
        text = self._stops.push(self._text.close())
        if self._stops.found:
            self.finish = "stop"
            return text
        return text + self._stops.close()

    def pick(self, step: Step, at: int, column: int = -1, *, rounding: float = 0.0) -> int | None:
        """The next token after a token of the step, by default the last.

        None where the greedy choice is uncertain: where a score less than `rounding` below the largest one, relative to
        the largest magnitude, could have been the largest in a call with other tokens.
        """
        settings, generator = self.settings, self._generator
        if step.choices is not None:
            self._require_choices()
            scores = step.choices.scores[at, column]
            require_numbers(scores)
            if rounding and settings.is_greedy and is_close(scores, rounding):
                return None
            return pick_choice(step.choices.tokens[at, column], scores, settings, generator)
        self._logits = step.logits[at, column]
        require_numbers(self._logits)
        scores = self._adjusted(self._logits)
        if self._processor:
            scores = self._processed(scores, self._processor)
        if self._mask and not self._processor:  # top-k and the like then choose among the tokens that may come
            scores = self._mask.scores(scores)
        if rounding and settings.is_greedy and is_close(scores, rounding):
            return None
        return (pick_scored if self._processor else pick_token)(scores, settings, generator)

    def _require_choices(self) -> None:
        """Raises UsageProblem where the tokens that the graph chose are not enough."""
        hint = "export without `--postprocess`"
        if self._mask:
            what = "structured output needs"
        elif self._rules and self._rules.needs_scores:
            what = "log-probabilities, biases and penalties of tokens need"
        elif self._processor or self.settings.repetition_penalty != 1:
            what, hint = "penalties need", "give `--repetition-penalty 1`, or export without `--postprocess`"
        else:
            return
        raise UsageProblem(f"{what} all logits, but the graph returns only the tokens that it chose", hint=hint)

    def _adjusted(self, logits: Array) -> Array:
        """The scores [vocabulary] with biases and penalties, for which that of repetition is left to a processor.

        Not where other penalties follow it.
        """
        rules = self._rules if self._rules and self._rules.changes_scores else None
        new, scores = self._ids[len(self.prompt) : self.length], logits
        if rules:
            scores = rules.biased(scores, new, self.settings.eos_token_id)
        if self.settings.repetition_penalty != 1 and (not self._processor or (rules and rules.penalizes)):
            scores = penalized(scores, self.ids, self.settings.repetition_penalty)
        return rules.penalized(scores, new) if rules else scores

    def _processed(self, logits: Array, processor: Callable[[Array, Array], Array]) -> Array:
        """Scores [vocabulary] of transformers' processors, which include top-k and the like.

        So the mask comes before them, and again after them, since some raise scores. Where they leave no token that may
        come, the mask alone decides.
        """
        if not self._mask:
            return processor(self.ids, logits)
        masked = self._mask.scores(logits)
        scores = self._mask.scores(processor(self.ids, masked))
        return scores if (scores > -np.inf).any() else masked


def require_numbers(scores: Array) -> None:
    """Raises MalformedInput for logits, or log-probabilities, of which one is NaN or infinitely large."""
    if not scores.max() < np.inf:
        raise MalformedInput("the logits of the model are NaN or infinite", hint="run `llmconv verify` on the folder")


def is_close(scores: Array, rounding: float) -> bool:
    """Whether the two largest scores differ by less than `rounding` times the largest magnitude, or are not numbers."""
    first = int(scores.argmax())
    largest = float(scores[first])
    others = np.concatenate([scores[:first], scores[first + 1 :]])
    if not len(others):
        return False
    scale = max(abs(largest), float(np.abs(others[np.isfinite(others)]).max(initial=1.0)))
    return not largest - float(others.max()) >= rounding * scale


def pieces_of(row: Row, tokens: Sequence[int]) -> Iterator[TextPiece]:
    """The pieces of a row without new tokens, given all its new tokens, up to a stop string."""
    for token in tokens:
        piece = row.push(token)
        yield piece
        if piece.finish:
            break
    if not row.finish or not tokens:
        row.finish = "length"
        yield TextPiece(row.index, row.rest(), None, row.finish)


BINS, BINS_PER_E = 2048, 16  # number of bins of scores, and bins per power of e


@dataclass(frozen=True)
class TokenCandidates:
    """Tokens that may be picked: ids int64 [n], ascending, and scores (logits over temperature) float64 [n]."""

    tokens: Array
    scores: Array

    def __getitem__(self, kept: Array) -> TokenCandidates:
        return TokenCandidates(self.tokens[kept], self.scores[kept])

    def sample(self, generator: np.random.Generator) -> int:
        """One token, sampled by the inverse of the cumulative distribution."""
        cumulative = softmax(self.scores).cumsum()
        return int(self.tokens[np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")])


def pick_token(logits: Array, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """The next token by logits [vocabulary], greedily the lowest id among equals."""
    if settings.is_greedy:
        return int(logits.argmax())
    kept = keep_top_k(logits, settings.top_k)
    candidates = TokenCandidates(kept, logits[kept].astype(np.float64) / settings.temperature)
    return narrowed(candidates, settings).sample(generator)


def pick_choice(tokens: Array, scores: Array, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """The next token from the likeliest ones that the graph chose; the same as from all logits, except for ties.

    `tokens` are int64 [K], likeliest first, `scores` their log-probabilities [K]. Raises UsageProblem if the settings
    need other tokens: to sample, `top_k` is from 1 to K.
    """
    if settings.is_greedy:
        return int(tokens[0])
    if not 0 < settings.top_k <= len(tokens):
        raise UsageProblem(
            f"the graph returns its likeliest tokens alone ({len(tokens)}), and top-k "
            f"{settings.top_k or 'of all'} needs more",
            hint=f"give `--temperature 0`, or `--top-k {len(tokens)}`, or export another `--postprocess`",
        )
    kept = np.sort(keep_top_k(scores, settings.top_k))
    kept = kept[np.argsort(tokens[kept])]
    candidates = TokenCandidates(tokens[kept], scores[kept].astype(np.float64) / settings.temperature)
    return narrowed(candidates, settings).sample(generator)


def pick_scored(scores: Array, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """The next token by filtered scores [vocabulary]: minus infinity for tokens that may not be picked."""
    if settings.is_greedy:
        return int(np.argmax(scores))
    kept = np.flatnonzero(scores > -np.inf)
    return TokenCandidates(kept, scores[kept].astype(np.float64)).sample(generator)


def narrowed(candidates: TokenCandidates, settings: GenerationSettings) -> TokenCandidates:
    """The candidates that top-p keeps, of which min-p keeps those that are likely enough next to the likeliest."""
    candidates = keep_top_p(candidates, settings.top_p)
    if not settings.min_p:
        return candidates
    probabilities = softmax(candidates.scores)
    return candidates[np.flatnonzero(probabilities >= settings.min_p * probabilities.max())]


def penalized(logits: Array, seen: Array, penalty: float) -> Array:
    """A copy of logits [vocabulary] with the repetition penalty: above 1 it makes the token ids `seen` less likely."""
    changed = logits.copy()
    scores = logits[seen]
    changed[seen] = np.where(scores < 0, scores * penalty, scores / penalty)
    return changed


def keep_top_k(scores: Array, top_k: int) -> Array:
    """Indices of the `top_k` largest scores, ascending, including ties; all for 0."""
    if not 0 < top_k < len(scores):
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])


def keep_top_p(candidates: TokenCandidates, top_p: float) -> TokenCandidates:
    """The smallest set of likeliest tokens whose probabilities add up to at least `top_p`."""
    if top_p >= 1:
        return candidates
    probabilities = softmax(candidates.scores)
    # Sorting a whole vocabulary is too slow: only the bin in which the sum reaches p is sorted.
    bins = np.minimum((candidates.scores.max() - candidates.scores) * BINS_PER_E, BINS - 1).astype(np.int64)
    sums = np.bincount(bins, weights=probabilities).cumsum()
    last = min(int(np.searchsorted(sums, top_p, side="left")), len(sums) - 1)
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(-probabilities[inside], kind="stable")]
    reached = probabilities[inside].cumsum() + (sums[last - 1] if last else 0.0)
    count = int(np.searchsorted(reached, top_p, side="left")) + 1
    return candidates[np.sort(np.concatenate([np.flatnonzero(bins < last), inside[:count]]))]


def softmax(scores: Array) -> Array:
    """Probabilities of one row of scores."""
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def is_streamer(value: Any) -> TypeGuard[Any]:
    """Whether an object has the methods of transformers' `BaseStreamer`."""
    return (
        not isinstance(value, type) and callable(getattr(value, "put", None)) and callable(getattr(value, "end", None))
    )


def require_streamer(streamer: Any, prompts: int, settings: GenerationSettings | None = None) -> None:
    """Raises UsageProblem if a streamer lacks a method, or for several texts or beams, which it cannot tell apart."""
    if not is_streamer(streamer):
        problem = f"`streamer` is {kind_of(streamer)}, not a streamer"
        raise UsageProblem(problem, hint="give `TextStreamer(tokenizer)` of transformers")
    if prompts != 1:
        raise UsageProblem(f"a streamer takes one text at a time, not {prompts}", hint="give one prompt")
    if settings and settings.num_beams > 1:
        problem = "a streamer takes no beam search, whose text is known only at its end"
        raise UsageProblem(problem, hint="leave out `num_beams`")


def feed(streamer: Any, prompt: Sequence[int], pieces: Generator[TextPiece]) -> Generator[TextPiece]:
    """Passes pieces on; gives the streamer the prompt's token ids, each new token, and the end, also after an error."""
    try:
        streamer.put(np.array([prompt], dtype=np.int64))
        with closing(pieces):
            for piece in pieces:
                if piece.token is not None:
                    streamer.put(np.array([piece.token], dtype=np.int64))
                yield piece
    finally:
        streamer.end()
