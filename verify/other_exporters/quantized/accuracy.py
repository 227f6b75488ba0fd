"""The loss of accuracy by quantization: the unchanged graph and the model at full precision, token by token.

Divergence is KL(model || graph) of the next token, in nats; perplexity is exp of the mean negative log-likelihood of a
text's tokens, without the first token of each of its non-overlapping pieces.

Limits are those of the user, or the default gate of the preset that a folder was made with. How much 4 bits cost
depends on the model far more than on the tool (0.03 nats with 8 billion weights, 0.3 with 135 million), so their gate
is relative: the graph with its codes replaced by those of plain rounding to nearest, symmetric, with the same bits and
blocks. A mean is above a limit if it is so by more than `ERRORS` standard errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused, LlmconvError
from llmconv.runtime.runner import Cache, Runner, default_positions
from llmconv.runtime.tokenizer import first_ids, load_tokenizer
from llmconv.sample_texts import evaluation_text
from llmconv.tensors import Array
from llmconv.verify.results.report import OWN_TEXT, RANDOM, TEXT, AccuracyCost, Check, Estimate, Perplexities
from llmconv.verify.results.sigma import divergence_of, log_probabilities
from llmconv.verify.scenarios.calls import ModelFacts

PERCENTILES = {"median": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass
class TokenCosts:
    """The figures of a graph by token.

    Attributes:
        source: where the tokens are from.
        nats: divergence of the next token.
        agreed: whether the most likely next token is the model's.
        losses: negative log-likelihoods of the text's tokens, of the model and of the graph.
        uniform: divergence of equal probabilities for all tokens.
    """

    graph: str
    source: str
    nats: list[Array] = field(default_factory=list)
    agreed: list[Array] = field(default_factory=list)
    losses: list[tuple[Array, Array]] = field(default_factory=list)
    uniform: list[Array] = field(default_factory=list)
    vocabulary: int = 0

    def add(self, wanted: Array, found: Array, ids: Array) -> None:
        """Adds log-probabilities of model and graph, float64 `[tokens, vocabulary]`, after ids int64 `[1, tokens]`."""
        self.vocabulary = wanted.shape[-1]
        self.nats.append(divergence_of(wanted, found))
        self.uniform.append(divergence_of(wanted, np.full_like(wanted, -np.log(wanted.shape[-1]))))
        self.agreed.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
        following = ids[0, 1:]
        named = np.flatnonzero(following < wanted.shape[1])  # an embedding may have rows for tokens without a logit
        model, graph = (-one[named, following[named]] for one in (wanted, found))
        self.losses.append((model, graph))

    def summary(self, *, is_text: bool) -> AccuracyCost:
        """The means and percentiles; perplexities of a text only."""
        each = np.concatenate(self.nats)
        mean = estimate(each)
        return AccuracyCost(
            graph=self.graph,
            tokens=len(each),
            source=self.source,
            divergence={
                "mean": mean.value,
                **{name: float(np.percentile(each, share)) for name, share in PERCENTILES.items()},
                "max": float(each.max()),
            },
            divergence_error=mean.error,
            agreement=float(np.concatenate(self.agreed).mean()),
            perplexities=self._perplexities() if is_text else None,
            uniform=float(np.concatenate(self.uniform).mean()),
            vocabulary=self.vocabulary,
        )

    def _perplexities(self) -> Perplexities:
        """The error of an exponential is that of the exponent times its value."""
        model, graph = (np.concatenate(one) for one in zip(*self.losses, strict=True))
        logs = [estimate(one) for one in (model, graph, graph - model)]
        return Perplexities(*(Estimate(float(np.exp(log.value)), float(np.exp(log.value)) * log.error) for log in logs))


def estimate(values: Array) -> Estimate:
    """The mean of values of tokens, and its standard error."""
    error = float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def difference(one: TokenCosts, other: TokenCosts) -> Estimate:
    """The mean divergence of one graph less that of another on the same tokens, with the error of this difference."""
    return estimate(np.concatenate(one.nats) - np.concatenate(other.nats))


def measure_costs(graphs: Sequence[tuple[str, Runner]], model: Runner, sample: TokenSample) -> list[TokenCosts]:
    """Runs the model at full precision and the unchanged graphs on every piece, and compares their logits."""
    costs = [TokenCosts(name, sample.source) for name, _ in graphs]
    for piece in sample.pieces:
        wanted = log_probabilities(_logits(model, piece))
        for cost, (_, runner) in zip(costs, graphs, strict=True):
            cost.add(wanted, log_probabilities(_logits(runner, piece)), piece)
    return costs


def _logits(runner: Runner, ids: Array) -> Array:
    """Logits of every token, float64 `[tokens, vocabulary]`; one step per token if a graph returns the last only."""
    mask = np.ones_like(ids)
    step = runner.prefill(ids, mask, default_positions(mask, ids.shape[1]))
    if step.logits.shape[1] == ids.shape[1]:
        return _float64(step.logits)
    found: list[Array] = []
    past: Cache | None = None
    for end in range(1, ids.shape[1] + 1):
        run, seen = (runner.decode if past else runner.prefill), mask[:, :end]
        step = run(ids[:, end - 1 : end], seen, default_positions(seen, 1), past)
        found.append(step.logits)
        past = step.present
    return _float64(np.concatenate(found, axis=1))


def _float64(logits: Any) -> Array:
    rows: Array = logits[0].astype(np.float64)
    return rows


CHECK = "cost of quantization"
ERRORS = 3.0
"""Standard errors by which a mean must exceed a limit."""

NEGLIGIBLE = 0.01
"""Mean divergence in nats that is small with any number of bits."""

KNOWING = 0.999
"""A graph whose divergence is a larger share of that of equal probabilities knows nothing of the model."""


@dataclass(frozen=True)
class AccuracyLimits:
    """Maximum mean divergence in nats per token, minimum share of tokens with the same likeliest next one; or None."""

    divergence: float | None = None
    agreement: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.divergence is not None or self.agreement is not None


@dataclass(frozen=True)
class AccuracyGate:
    """The default gate of a preset: maximum mean divergence in nats per token; None without one.

    `against_rounding` fails if the mean divergence is above that of plain rounding to nearest, unless negligible.
    """

    divergence: float | None = None
    against_rounding: bool = False


CACHE = "kv-cache int8"
RELATIVE = AccuracyGate(against_rounding=True)
GATES = {
    "int8": AccuracyGate(NEGLIGIBLE),
    CACHE: AccuracyGate(NEGLIGIBLE),
    "a8w8": AccuracyGate(0.2),
    "int4": RELATIVE,
    "int4-mixed": RELATIVE,
    "int4-small": RELATIVE,
}
"""By preset of `llmconv export --quant`.

`a8w8`, measured with SmolLM2-135M: 0.07 nats on a text, but 0.50 if activations with outliers are rounded to 8 bits.
"""
STORED = AccuracyGate(NEGLIGIBLE)
"""For the codes of a quantized model: rounding them again to 8 bits, and activations, costs less than 0.01 nats."""


def gate_of(preset: str) -> AccuracyGate:
    """The gate of a preset of `llmconv export --quant`, or of the method of a model that was quantized before.

    The preset is empty for graphs of other exporters, which are measured, and judged by limits of the user alone.
    """
    return GATES.get(preset, STORED) if preset else AccuracyGate()


def check_limits(cost: AccuracyCost, limits: AccuracyLimits) -> list[Check]:
    """One check if there are limits of the user, else none."""
    problems = []
    mean = cost.divergence["mean"]
    if limits.divergence is not None and not mean <= limits.divergence:
        problems.append(f"mean divergence {mean:.3g} nats, limit {limits.divergence:g}")
    if limits.agreement is not None and not cost.agreement >= limits.agreement:
        problems.append(f"agreement {cost.agreement:.4f}, limit {limits.agreement:g}")
    return [_check(cost, "; ".join(problems), cost.text)] if limits.given else []


def check_gate(preset: str, gate: AccuracyGate, cost: AccuracyCost, excess: Estimate | None) -> list[Check]:
    """One check by a preset's gate; `excess` is the mean divergence beyond plain rounding, None if not measured."""
    mean, error = cost.divergence["mean"], cost.divergence_error
    if not preset and not (mean <= NEGLIGIBLE or mean < cost.uniform * KNOWING):
        return [_check(cost, f"mean divergence {mean:.3g} nats: that of equal probabilities for all tokens", "")]
    if gate.divergence is not None:
        limit = f"limit {gate.divergence:g} of `{preset}`"
        found = f"mean divergence {mean:.3g} ± {error:.2g} nats, {limit}"
        return [_check(cost, "" if mean - ERRORS * error <= gate.divergence else found, found)]
    if excess is None:
        return []
    side = "less" if excess.value < 0 else "more"
    against = f"{abs(excess.value):.2g} ± {excess.error:.2g} {side} than with plain rounding"
    found = f"mean divergence {mean:.3g} nats, {against}"
    worse = not mean <= NEGLIGIBLE and not excess.value <= ERRORS * excess.error
    return [_check(cost, f"worse than plain rounding: {found}" if worse else "", found)]


def _check(cost: AccuracyCost, problem: str, found: str) -> Check:
    verdict, detail = ("fail", problem) if problem else ("pass", found)
    mean = cost.divergence["mean"]
    return Check(CHECK, cost.graph, "", verdict=verdict, detail=detail, agreement=cost.agreement, divergence=mean)


SEED = 992720280
"""Seed of the random tokens; fixed, so that figures of different versions can be compared."""
PIECE = {"quick": 256, "full": 1024}
"""Maximum number of tokens per piece."""
TOKENS = {"quick": 1024, "full": 16384}
"""Maximum total number of tokens."""
DISTINCT = 32
"""Minimum number of distinct tokens of a text; a tokenizer that does not know its characters makes fewer."""


@dataclass(frozen=True)
class TokenSample:
    """Pieces int64 `[1, tokens]` of the user's `text`, the `evaluation text` of llmconv, or `random tokens`."""

    pieces: Sequence[Array]
    source: str

    @property
    def is_text(self) -> bool:
        """Whether the tokens are a text, which has a perplexity."""
        return self.source != RANDOM


def token_sample(
    text: Path | None, folder: Path, facts: ModelFacts, suite: str, trust_remote_code: bool = False
) -> TokenSample:
    """The tokens of the beginning of a text file, by the tokenizer in the model's `folder`.

    Without a text they are of the evaluation text of llmconv, or random with a fixed seed if the folder has no
    tokenizer that knows its words. `suite` is `quick` or `full`.

    Raises:
        InputRefused: the file is not a text or too short, or the folder has no matching tokenizer.
    """
    length = min(PIECE[suite], facts.max_positions or PIECE[suite])
    if text is None:
        return _own_sample(folder, facts, length, TOKENS[suite], trust_remote_code)
    pieces = _pieces(_encoded(_content(text), folder, trust_remote_code, TOKENS[suite]), length)
    if not pieces:
        raise InputRefused(f"`{text}` has less than two tokens", hint="give a text of some pages")
    if int(max(piece.max() for piece in pieces)) >= facts.vocab_size:
        raise InputRefused(
            f"the tokenizer of `{folder}` has more tokens than the model", hint="copy the model's tokenizer"
        )
    return TokenSample(pieces, TEXT)


def _own_sample(folder: Path, facts: ModelFacts, length: int, count: int, trusted: bool) -> TokenSample:
    try:
        ids = _encoded(evaluation_text(), folder, trusted, count)
    except LlmconvError:
        ids = []
    if len(set(ids)) >= DISTINCT and max(ids) < facts.vocab_size:
        return TokenSample(_pieces(ids, length), OWN_TEXT)
    rng = np.random.default_rng(SEED)
    return TokenSample([rng.integers(0, facts.vocab_size, (1, length)) for _ in range(count // length)], RANDOM)


def _pieces(ids: Sequence[int], length: int) -> list[Array]:
    pieces = [np.array([ids[start : start + length]], dtype=np.int64) for start in range(0, len(ids), length)]
    return [piece for piece in pieces if piece.shape[1] > 1]


def _content(text: Path) -> str:
    try:
        return read_small(text).decode()
    except OSError as error:
        raise InputRefused(f"cannot read `{text}`: {error.strerror}", hint="`--text` takes a file") from error
    except UnicodeDecodeError as error:
        raise InputRefused(f"`{text}` is not UTF-8 text", hint="`--text` takes a plain text file") from error


def _encoded(content: str, folder: Path, trust_remote_code: bool, most: int) -> list[int]:
    return first_ids(load_tokenizer(folder, trust_remote_code), content, most)
