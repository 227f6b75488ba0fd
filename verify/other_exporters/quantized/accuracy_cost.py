"""The loss of accuracy by quantization: the unchanged graph and the model at full precision, token by token.

Divergence is KL(model || graph) of the next token, in nats; perplexity is exp of the mean negative log-likelihood of a
text's tokens, without the first token of each of its non-overlapping pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused
from llmconv.runtime.runner import Cache, Runner, default_positions
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.tensors import Array
from llmconv.verify.results.quantization import AccuracyCost
from llmconv.verify.results.report import Check
from llmconv.verify.results.sigma import divergence_of, log_probabilities
from llmconv.verify.scenarios.calls import ModelFacts

CHECK = "cost of quantization"
SEED = 992720280
"""Seed of the random tokens; fixed, so that figures of different versions can be compared."""
PIECE = {"quick": 256, "full": 1024}
"""Maximum number of tokens per piece."""
TOKENS = {"quick": 1024, "full": 16384}
"""Maximum total number of tokens."""
PRESET_LIMITS = {"a8w8": 0.2}
"""Maximum mean divergence in nats by preset, unless the user gives limits.

Measured with SmolLM2-135M: 0.07 nats on a text and 0.13 on random tokens, but 0.50 and 0.58 if activations with
outliers are rounded to 8 bits, too.
"""
PERCENTILES = {"median": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(frozen=True)
class AccuracyLimits:
    """Limits of the loss of accuracy; None for no limit.

    Attributes:
        divergence: maximum mean divergence in nats per token.
        agreement: minimum share of tokens with the same most likely next token.
    """

    divergence: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class TokenSample:
    """The tokens of a comparison.

    Attributes:
        pieces: token ids, int64 `[1, tokens]` each.
        is_text: whether they are a text, which has a perplexity.
    """

    pieces: Sequence[Array]
    is_text: bool


def token_sample(
    text: Path | None, folder: Path, facts: ModelFacts, suite: str, trust_remote_code: bool = False
) -> TokenSample:
    """The tokens of the beginning of a text, or the same number of random tokens with a fixed seed.

    Args:
        text: a text file; None for random tokens.
        folder: folder of the model with its tokenizer.
        facts: sizes of the model.
        suite: `quick` or `full`.
        trust_remote_code: whether custom code of the tokenizer may run.

    Raises:
        InputRefused: the file is not a text or too short, or the folder has no matching tokenizer.
    """
    length = min(PIECE[suite], facts.max_positions or PIECE[suite])
    if text is None:
        rng = np.random.default_rng(SEED)
        count = TOKENS[suite] // length
        return TokenSample([rng.integers(0, facts.vocab_size, (1, length)) for _ in range(count)], is_text=False)
    ids = _tokens(text, folder, trust_remote_code)[: TOKENS[suite]]
    pieces = [np.array([ids[start : start + length]], dtype=np.int64) for start in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if piece.shape[1] > 1]
    if not pieces:
        raise InputRefused(f"`{text}` has {len(ids)} tokens", hint="give a text of some pages")
    if int(max(piece.max() for piece in pieces)) >= facts.vocab_size:
        raise InputRefused(
            f"the tokenizer of `{folder}` has more tokens than the model", hint="copy the model's tokenizer"
        )
    return TokenSample(pieces, is_text=True)


def _tokens(text: Path, folder: Path, trust_remote_code: bool) -> list[int]:
    try:
        content = read_small(text).decode()
    except OSError as error:
        raise InputRefused(f"cannot read `{text}`: {error.strerror}", hint="`--text` takes a file") from error
    except UnicodeDecodeError as error:
        raise InputRefused(f"`{text}` is not UTF-8 text", hint="`--text` takes a plain text file") from error
    tokenizer = load_tokenizer(folder, trust_remote_code)
    ids: list[int] = tokenizer(content, verbose=False)["input_ids"]
    return ids


def measure_cost(graph: str, shipped: Runner, model: Runner, sample: TokenSample) -> AccuracyCost:
    """Runs the graph and the model on every piece and compares their logits.

    Args:
        graph: name of the graph.
        shipped: the unchanged graph.
        model: the model at full precision.
        sample: the tokens.
    """
    nats: list[Array] = []
    agreed: list[Array] = []
    losses: list[list[Array]] = []
    for piece in sample.pieces:
        wanted, found = (log_probabilities(_logits(runner, piece)) for runner in (model, shipped))
        nats.append(divergence_of(wanted, found))
        agreed.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
        following = piece[0, 1:, None]
        losses.append([-np.take_along_axis(one[:-1], following, -1)[:, 0] for one in (wanted, found)])
    each = np.concatenate(nats)
    perplexities = [float(np.exp(np.concatenate(one).mean())) for one in zip(*losses, strict=True)]
    return AccuracyCost(
        graph=graph,
        tokens=len(each),
        divergence={
            "mean": float(each.mean()),
            **{name: float(np.percentile(each, share)) for name, share in PERCENTILES.items()},
            "max": float(each.max()),
        },
        agreement=float(np.concatenate(agreed).mean()),
        perplexity=(perplexities[0], perplexities[1]) if sample.is_text else None,
    )


def check_cost(cost: AccuracyCost, limits: AccuracyLimits) -> list[Check]:
    """One check if there are limits, else none."""
    problems = []
    mean = cost.divergence["mean"]
    if limits.divergence is not None and not mean <= limits.divergence:
        problems.append(f"mean divergence {mean:.3g} nats, limit {limits.divergence:g}")
    if limits.agreement is not None and not cost.agreement >= limits.agreement:
        problems.append(f"agreement {cost.agreement:.4f}, limit {limits.agreement:g}")
    if limits == AccuracyLimits():
        return []
    verdict, detail = ("fail", "; ".join(problems)) if problems else ("pass", cost.text)
    return [Check(CHECK, cost.graph, "", verdict=verdict, detail=detail, agreement=cost.agreement, divergence=mean)]


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


def _float64(logits: Array) -> Array:
    rows: Array = logits[0].astype(np.float64)
    return rows
