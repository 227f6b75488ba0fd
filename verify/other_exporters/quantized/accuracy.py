"""The loss of accuracy by quantization: the unchanged graph and the model at full precision, token by token.

Divergence is KL(model || graph) of the next token, in nats; perplexity is exp of the mean negative log-likelihood of a
text's tokens, without the first token of each of its non-overlapping pieces.

Limits are those of the user, or the default gate of the preset that a folder was made with. How much 4 bits cost
depends on the model far more than on the tool (0.03 nats with 8 billion weights, 0.3 with 135 million), so their gate
is relative to the graph with its codes replaced by those of plain rounding to nearest, symmetric, with the same bits
and blocks. A mean is above a limit if it is so by more than `ERRORS` standard errors.

Compares the ranges in which a graph rounds activations with those that the eager model has on a text.

`QuantizeLinear` has a constant scale and zero point: those of the smallest and the largest number that the product
behind it reads on the text, with 0 between them. Where norms are divided by factors, so are these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.checkpoint import read_small
from llmconv.errors import InputRefused, LlmconvError
from llmconv.runtime.low_memory.pieced_graph import PiecedRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.low_memory.weights import PlannedCall
from llmconv.runtime.onnxruntime.guard import nodes
from llmconv.runtime.runner import Cache, Runner, default_positions
from llmconv.runtime.tokenizer import first_ids, load_tokenizer
from llmconv.sample_texts import evaluation_text
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix
from llmconv.verify.results import OWN_TEXT, RANDOM, TEXT, AccuracyCost, Check, Estimate, Perplexities, audited
from llmconv.verify.scenarios.calls import ModelFacts
from llmconv.verify.sigma import divergence_of, log_probabilities

PERCENTILES = {"median": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass
class TokenCosts:
    """The figures of a graph by token."""

    graph: str
    source: str  # where the tokens are from
    nats: list[Array] = field(default_factory=list)  # divergence of the next token
    agreed: list[Array] = field(default_factory=list)  # whether the most likely next token is the model's
    # negative log-likelihoods of the text's tokens, of the model and of the graph
    losses: list[tuple[Array, Array]] = field(default_factory=list)
    uniform: list[Array] = field(default_factory=list)  # divergence of equal probabilities for all tokens
    vocabulary: int = 0

    def add(self, wanted: Array, found: Array, following: Array) -> None:
        """Adds log-probabilities of model and graph, float64 `[tokens, vocabulary]`, and the ids of the next tokens."""
        self.vocabulary = wanted.shape[-1]
        self.nats.append(divergence_of(wanted, found))
        self.uniform.append(divergence_of(wanted, np.broadcast_to(-np.log(wanted.shape[-1]), wanted.shape)))
        self.agreed.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
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
    error = float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def difference(one: TokenCosts, other: TokenCosts) -> Estimate:
    """The mean divergence of one graph less that of another on the same tokens, with the error of this difference."""
    return estimate(np.concatenate(one.nats) - np.concatenate(other.nats))


def measure_costs(graphs: Sequence[tuple[str, Runner]], model: Runner, sample: TokenSample) -> list[TokenCosts]:
    """Runs the model at full precision and the unchanged graphs on every piece, and compares their logits."""
    costs = [TokenCosts(name, sample.source) for name, _ in graphs]
    together = _held(model, sample.pieces)
    runs = [_each(runner, sample.pieces, together) for runner in (model, *(runner for _, runner in graphs))]
    for piece, wanted, *found in zip(sample.pieces, *runs, strict=True):
        for start in range(0, piece.shape[1], ROWS):  # a few rows at a time: a row has the size of the vocabulary
            rows, following = slice(start, start + ROWS), piece[0, start + 1 : start + 1 + ROWS]
            exact = log_probabilities(wanted[rows].astype(np.float64))
            for cost, logits in zip(costs, found, strict=True):
                cost.add(exact, log_probabilities(logits[rows].astype(np.float64)), following)
    return costs


ROWS = 32  # tokens whose log-probabilities are computed at once
LOGITS = 1 << 27  # bytes of logits that are held at once


def _held(model: Runner, pieces: Sequence[Array]) -> int:
    """Number of pieces whose logits are held at once, since a pass over weights that are read again is long."""
    longest = max(piece.shape[1] for piece in pieces)
    return max(1, LOGITS // (4 * model.vocab_size * longest)) if isinstance(model, StreamedRunner) else 1


def _each(runner: Runner, pieces: Sequence[Array], together: int) -> Iterator[Array]:
    """Logits of each piece, `[tokens, vocabulary]`; of what is never held whole for `together` pieces in one pass."""
    if not isinstance(runner, StreamedRunner | PiecedRunner):
        yield from (_logits(runner, piece) for piece in pieces)
        return
    by_token = isinstance(runner, PiecedRunner) and runner.last_logits
    for start in range(0, len(pieces), together):
        calls: list[PlannedCall] = []
        counts = []
        for ids in pieces[start : start + together]:
            counts.append(ids.shape[1] if by_token else 1)
            width = 1 if by_token else ids.shape[1]
            for first in range(0, ids.shape[1], width):
                mask = np.ones_like(ids[:, : first + width])
                positions = default_positions(mask, width)
                parent = len(calls) - 1 if first else None
                calls.append(PlannedCall(ids[:, first : first + width], mask, positions, parent=parent))
        steps = runner.run_all(calls)
        for count in counts:
            logits = [steps.pop(0).logits[0] for _ in range(count)]
            yield logits[0] if count == 1 else np.concatenate(logits)


def _logits(runner: Runner, ids: Array) -> Array:
    """Logits of every token, `[tokens, vocabulary]`; one step per token if a graph returns the last only."""
    mask = np.ones_like(ids)
    step = runner.prefill(ids, mask, default_positions(mask, ids.shape[1]))
    if step.logits.shape[1] == ids.shape[1]:
        rows: Array = step.logits[0]
        return rows
    found: list[Array] = []
    past: Cache | None = None
    for end in range(1, ids.shape[1] + 1):
        run, seen = (runner.decode if past else runner.prefill), mask[:, :end]
        step = run(ids[:, end - 1 : end], seen, default_positions(seen, 1), past)
        found.append(step.logits)
        past = step.present
    several: Array = np.concatenate(found, axis=1)[0]
    return several


CHECK = "cost of quantization"
ERRORS = 3.0  # standard errors by which a mean must exceed a limit
NEGLIGIBLE = 0.01  # mean divergence in nats that is small with any number of bits
KNOWING = 0.999  # A graph whose divergence is a larger share of that of equal probabilities knows nothing of the model


@dataclass(frozen=True)
class AccuracyLimits:
    """Maximum mean divergence in nats per token, minimum share of tokens with the same likeliest next one; or None."""

    divergence: float | None = None
    agreement: float | None = None

    @property
    def given(self) -> bool:
        return self.divergence is not None or self.agreement is not None


@dataclass(frozen=True)
class AccuracyGate:
    """The default gate of a preset."""

    divergence: float | None = None  # maximum mean in nats per token; None for none
    # fails if the mean, and what it is above that of plain rounding to nearest, are not negligible
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
    worse = not mean <= NEGLIGIBLE and not excess.value <= max(ERRORS * excess.error, NEGLIGIBLE)
    return [_check(cost, f"worse than plain rounding: {found}" if worse else "", found)]


def _check(cost: AccuracyCost, problem: str, found: str) -> Check:
    verdict, detail = ("fail", problem) if problem else ("pass", found)
    mean = cost.divergence["mean"]
    return Check(CHECK, cost.graph, "", verdict=verdict, detail=detail, agreement=cost.agreement, divergence=mean)


SEED = 992720280  # seed of the random tokens; fixed, so that figures of different versions can be compared
PIECE = {"quick": 256, "full": 1024}  # maximum number of tokens per piece
TOKENS = {"quick": 1024, "full": 16384}  # maximum total number of tokens
DISTINCT = 32  # minimum number of distinct tokens of a text; a tokenizer that does not know its characters makes fewer


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
    text: Path | None, folder: Path, facts: ModelFacts, suite: str, trust_remote_code: bool = False, most: int = 1 << 30
) -> TokenSample:
    """The tokens of the beginning of a text file, at most `most`, by the tokenizer in the model's `folder`.

    Without a text they are of the evaluation text of llmconv, or random with a fixed seed if the folder has no
    tokenizer that knows its words. `suite` is `quick` or `full`. Raises InputRefused: the file is not a text or too
    short, or the folder has no matching tokenizer.
    """
    count = min(TOKENS[suite], most)
    length = min(PIECE[suite], facts.max_positions or PIECE[suite], count)
    if text is None:
        return _own_sample(folder, facts, length, count, trust_remote_code)
    pieces = _pieces(_encoded(_content(text), folder, trust_remote_code, count), length)
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


NAME = "activation ranges"  # name of the checks in reports
ROUNDING, RESTORING, PRODUCT = "QuantizeLinear", "DequantizeLinear", "MatMul"
STEPS = 255
TOLERANCE = 1e-3  # largest relative difference of a scale, of which rounding noise is a hundredth
NEAREST = 0.5 + STEPS * TOLERANCE / 2  # largest distance of a zero point from its exact place

Extremes = Mapping[str, Array]
"""The smallest and the largest number of every column, float32 [2, K], by name of the matrix."""


@dataclass(frozen=True)
class ActivationRounding:
    """How a graph rounds the other factor of a matrix."""

    codes: str  # name of the initializer with the matrix's codes
    scale: float | None = None  # None, as `zero` is, if it does not; both are the same for the inverse
    zero: int | None = None


def rounds_activations(model: onnx.ModelProto) -> bool:
    return any(node.op_type == ROUNDING for node in nodes(model))


def ranged_activations(model: onnx.ModelProto, constants: Constants) -> frozenset[str]:
    """Rounded activations that only products with dequantized matrices read: those that `check_ranges` checks."""
    products = {id(product): product.input[0] for product, _ in _products(model, constants)}
    found = {*products.values()} - {port.name for port in model.graph.output}
    return frozenset(name for name in found if all(products.get(id(node)) == name for node in constants.users[name]))


def measured_extremes(
    model: torch.nn.Module, runner: Runner, tensors: Mapping[str, LazyTensor], texts: Sequence[Array]
) -> dict[str, Array]:
    """The extremes of the inputs of a model's modules on texts, token ids int64 [1, tokens]."""
    found: dict[str, Array] = {}

    def watch(name: str) -> Any:
        def see(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].flatten(0, -2)
            both = torch.stack([rows.amin(0), rows.amax(0)]).numpy()
            old = found.get(name, both)
            found[name] = np.stack([np.minimum(old[0], both[0]), np.maximum(old[1], both[1])])

        return see

    named = {module: reference_name(f"{name}.weight", tensors) for name, module in model.named_modules()}
    matrices = {module: name for module, name in named.items() if name and len(tensors[name].shape) == 2}
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hooks = [one.register_forward_pre_hook(watch(name)) for one, name in matrices.items() if one is not embedding]
    for _ in _each(runner, texts, _held(runner, texts)):
        pass
    for hook in hooks:
        hook.remove()
    return found


def check_ranges(
    graph: str,
    model: onnx.ModelProto,
    constants: Constants,
    quantized: Sequence[MatchedMatrix],
    extremes: Extremes,
    factors: Mapping[str, LazyTensor],
) -> Check:
    """One check of all products of a graph with dequantized matrices, by eager extremes and smoothing factors."""
    names = {one.stored.name: sorted(one.names) for one in quantized}
    products = _products(model, constants)
    found = [_rounding(codes, constants.makers.get(node.input[0]), constants) for node, codes in products]
    problems = [
        f"what `{name}` is multiplied with {problem}"
        for one in found
        for name in names.get(one.codes) or [one.codes]
        if (problem := _problem(one, extremes.get(name), factors.get(name)))
    ]
    wrong = [f"{len(problems)} of {len(found)} wrong, first: {problems[0]}"] if problems else []
    return audited(NAME, graph, wrong, f"{len(found)} ranges as on the text")


def _products(model: onnx.ModelProto, constants: Constants) -> Iterator[tuple[onnx.NodeProto, str]]:
    for node in nodes(model):
        matrix = constants.makers.get(node.input[1]) if node.op_type == PRODUCT else None
        if matrix is not None and matrix.op_type == RESTORING and (codes := constants.initializer(matrix.input[0])):
            yield node, codes


def _rounding(codes: str, restoring: onnx.NodeProto | None, constants: Constants) -> ActivationRounding:
    rounding = constants.makers.get(restoring.input[0]) if restoring is not None else None
    if restoring is None or rounding is None or (restoring.op_type, rounding.op_type) != (RESTORING, ROUNDING):
        return ActivationRounding(codes)
    pairs = [[constants.array(name) for name in node.input[1:3]] for node in (rounding, restoring)]
    if any(one is None or one.size != 1 for pair in pairs for one in pair) or len(pairs[0]) != len(pairs[1]):
        return ActivationRounding(codes)
    numbers = [[float(one.ravel()[0]) for one in pair if one is not None] for pair in pairs]
    is_inverse = numbers[0] == numbers[1] and len(numbers[0]) == 2
    return ActivationRounding(codes, numbers[0][0], int(numbers[0][1])) if is_inverse else ActivationRounding(codes)


def _problem(found: ActivationRounding, extremes: Array | None, factors: LazyTensor | None) -> str:
    if extremes is None:
        return "was not seen in the model"
    if found.scale is None or found.zero is None:
        return "is not rounded to 8 bits and back by the same constants"
    own = extremes / factors.read().ravel() if factors is not None else extremes
    low, high = min(float(own.min()), 0.0), max(float(own.max()), 0.0)
    scale = (high - low) / STEPS or 1.0
    if not abs(found.scale - scale) <= TOLERANCE * scale:
        return f"has the scale {found.scale:.6g}, on the text {scale:.6g}"
    if not abs(found.zero + low / scale) <= NEAREST:
        return f"has the zero point {found.zero}, on the text {-low / scale:.2f}"
    return ""
