"""What quantisation cost: the graph as it is shipped against the model at full precision, token by token.

Divergence is KL(model || graph) of the next token, in nats; a perplexity is exp of the mean negative log-likelihood of
a text's tokens, in pieces that do not overlap, of which the first token is given.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused
from llmconv.runtime.runner import Cache, Runner, default_positions
from llmconv.runtime.tokenizer import load_tokenizer
from llmconv.tensors import Array
from llmconv.verify.results.measure import divergence_of, log_probabilities
from llmconv.verify.results.quantization import Cost
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import ModelFacts

CHECK = "cost of quantisation"
PIECE = {"quick": 256, "full": 1024}
"""Tokens of a piece at most."""
TOKENS = {"quick": 1024, "full": 16384}
"""Tokens in all at most."""
PERCENTILES = {"median": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(frozen=True)
class Limits:
    """What a user demands; None where nothing.

    Attributes:
        divergence: nats per token, of the mean.
        agreement: share of tokens whose likeliest next one is the model's.
    """

    divergence: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Sample:
    """What the two are compared on.

    Attributes:
        pieces: token ids, `[1, tokens]` each.
        is_text: they are a text, so they have a perplexity.
    """

    pieces: Sequence[Array]
    is_text: bool


def sample_of(
    text: Path | None, folder: Path, facts: ModelFacts, suite: str, trust_remote_code: bool = False
) -> Sample:
    """The beginning of a text file as tokens of the model, or as many random tokens, always the same.

    Raises:
        InputRefused: the file is no text, or too short; or the model's folder has no tokenizer.
    """
    length = min(PIECE[suite], facts.max_positions or PIECE[suite])
    if text is None:
        rng = np.random.default_rng(zlib.crc32(CHECK.encode()))
        count = TOKENS[suite] // length
        return Sample([rng.integers(0, facts.vocab_size, (1, length)) for _ in range(count)], is_text=False)
    ids = _tokens(text, folder, trust_remote_code)[: TOKENS[suite]]
    pieces = [np.array([ids[start : start + length]], dtype=np.int64) for start in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if piece.shape[1] > 1]
    if not pieces:
        raise InputRefused(f"`{text}` has {len(ids)} tokens", hint="give a text of some pages")
    if int(max(piece.max() for piece in pieces)) >= facts.vocab_size:
        raise InputRefused(f"the tokenizer of `{folder}` has tokens that the model has not", hint="copy the right one")
    return Sample(pieces, is_text=True)


def _tokens(text: Path, folder: Path, trust_remote_code: bool) -> list[int]:
    try:
        content = read_small(text).decode()
    except OSError as error:
        raise InputRefused(f"cannot read `{text}`: {error.strerror}", hint="`--text` takes a file") from error
    except UnicodeDecodeError as error:
        raise InputRefused(f"`{text}` is no text in UTF-8", hint="`--text` takes a plain text file") from error
    tokenizer = load_tokenizer(folder, trust_remote_code)
    ids: list[int] = tokenizer(content, verbose=False)["input_ids"]
    return ids


def measure_cost(graph: str, shipped: Runner, model: Runner, sample: Sample) -> Cost:
    """Runs both on every piece.

    Args:
        graph: its name.
        shipped: the graph.
        model: at full precision.
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
    return Cost(
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


def check_cost(cost: Cost, limits: Limits) -> list[Check]:
    """One check where a limit was given."""
    problems = []
    mean = cost.divergence["mean"]
    if limits.divergence is not None and not mean <= limits.divergence:
        problems.append(f"mean divergence {mean:.3g} nats, more than {limits.divergence:g}")
    if limits.agreement is not None and not cost.agreement >= limits.agreement:
        problems.append(f"agreement {cost.agreement:.4f}, less than {limits.agreement:g}")
    if limits == Limits():
        return []
    verdict, detail = ("fail", "; ".join(problems)) if problems else ("pass", cost.text)
    return [Check(CHECK, cost.graph, "", verdict=verdict, detail=detail, agreement=cost.agreement, divergence=mean)]


def _logits(runner: Runner, ids: Array) -> Array:
    """Logits of every token, `[tokens, vocabulary]` in float64; one by one where only the last one's are given."""
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
