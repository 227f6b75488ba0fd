"""Report: the checks of a verification, the verdict, and their lines for terminal and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from llmconv.errors import LlmconvError, OutOfMemory
from llmconv.runtime.extra_inputs import is_present
from llmconv.tensors import lists_by_key
from llmconv.verify.sigma import Evidence, sigma_text

WHOLE = "whole"  # the method that runs whole models
NAME_LIMIT = 200
LINE_LIMIT = 1000
SUMMARY_LIMIT = 2 * LINE_LIMIT
"""Characters of a name, of a line, and of the last line, which is never cut: it ends with what was not found."""


@dataclass(frozen=True)
class Check:
    """The result for one output of one graph in one scenario, over all its steps; or of an audit (sigma 0).

    Attributes:
        name: the scenario, or `structure`, `weights`, `prefill and decode agree`.
        graph: file name of the graph.
        output: such as `logits` or `present.3.key`.
        sigma: the largest over the steps; the gates are `measure.GATES`.
        row_sigma: the largest of a single row.
        max_abs: the largest absolute difference.
        verdict: `pass`, `fail` or `skip`.
        step: the step with the largest sigma; on failure the first that fails.
        steps: number of steps.
        row: (sequence in the batch, token) of the worst row.
        detail: the reason for the verdict, in words.
        divergence: of logits, the largest Kullback-Leibler divergence of a row in nats.
        agreement: of logits, the share of rows with the same likeliest token, in the worst step.
    """

    name: str
    graph: str
    output: str
    sigma: float = 0.0
    row_sigma: float = 0.0
    max_abs: float = 0.0
    verdict: str = "pass"
    step: int = 0
    steps: int = 1
    row: tuple[int, int] = (0, 0)
    detail: str = ""
    divergence: float = 0.0
    agreement: float = 1.0

    @property
    def is_measured(self) -> bool:
        """Whether an output was compared; audits of files, weights and structure compare none."""
        return bool(self.output) and self.verdict != "skip"


Checks: TypeAlias = Iterator[list[Check]]  # checks as they are made, a list at a time


def audited(name: str, graph: str, problems: Sequence[str], passed: str = "", shown: int = 5) -> Check:
    """The check of an audit: failed with the first problems if there are any, else `passed`."""
    more = f"; and {len(problems) - shown} more" if problems[shown:] else ""
    detail = "; ".join(problems[:shown]) + more if problems else passed
    return Check(name, graph, "", verdict="fail" if problems else "pass", detail=detail)


def problem_of(error: LlmconvError) -> str:
    """What an error says about a graph; raises an error of memory again, which says nothing about it."""
    if isinstance(error, OutOfMemory):
        raise error
    return error.message


@dataclass(frozen=True)
class Where:
    """The location of a failure: the first scenario, step and output that fail, in words (`text`) too."""

    scenario: str
    graph: str  # its file name
    step: int
    # the first layer whose keys or values differ; None if only the logits do. With a `node`, its layer, or None outside
    # the layers
    layer: int | None
    output: str
    text: str
    node: str = ""  # the first node that differs; empty if none was searched for or found
    scope: str = ""  # the node's module, such as `model.layers.7.self_attn.q_norm`
    finding: str = ""  # a description of the fault; empty if it is of an unknown kind


@dataclass(frozen=True)
class UnmatchedNode:
    """A node whose value the eager model does not compute."""

    node: str
    operator: str  # such as `Where`
    scope: str  # its module; empty if its name does not contain one


@dataclass(frozen=True)
class Statement:
    """A part of the proof that a graph is the model."""

    name: str  # `structure`, `weights`, `base`, `step` or `composition`
    shown: bool  # whether all its checks passed and there were some
    text: str  # a description of what was shown

    @property
    def word(self) -> str:
        """`SHOWN` or `OPEN`."""
        return "SHOWN" if self.shown else "OPEN"


@dataclass
class Report:
    """All checks of a folder; true when the graphs equal the eager model.

    Attributes:
        folder: name of the folder or the graphs.
        reference: name of the model's folder.
        suite: `quick` or `full`.
        checks: one per graph, scenario and output, in order.
        where: the location of a failure; None if nothing failed.
        notes: remarks for the reader, one line each.
        unseen: kinds of faults that these runs could not have found; also in the summary.
        versions: versions of the libraries, by name.
        settings: threads and optimization level of onnxruntime, number of runs, gates, seeds by scenario.
        evidence: the data of the figures, by graph.
        copies: for each graph with the same bytes as another, the name of the other, which alone is run and shown.
        unmatched: by graph, the nodes whose values the model does not compute; empty if they were not searched for.
        quantization: results for quantized weights; None for other graphs.
        method: `whole`, `induction` over layers, or `structure`, which compares no numbers.
        statements: of an induction, the parts of the proof.
        odd_layers: by number, the layers of a graph that differ from the others of their kind, in words.
        budget: of time, as plain data; None without a limit.
    """

    folder: str
    reference: str
    suite: str
    checks: list[Check] = field(default_factory=list)
    where: Where | None = None
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    unmatched: dict[str, list[UnmatchedNode]] = field(default_factory=dict)
    quantization: Quantization | None = None
    method: str = WHOLE
    statements: list[Statement] = field(default_factory=list)
    odd_layers: dict[int, str] = field(default_factory=dict)
    budget: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    def __repr__(self) -> str:
        return f"<Report of {self.folder}: {self.summary()}>"

    @property
    def verdict(self) -> str:
        """`pass`, `fail`, or `inconclusive` if no output of some graph was compared."""
        if any(check.verdict == "fail" for check in self.checks):
            return "fail"
        if self.method == "structure" or self.statements:
            shown = bool(self.statements) and all(statement.shown for statement in self.statements)
            return "pass" if shown else "inconclusive"
        passed = [check for check in self.checks if check.verdict == "pass" and check.output]
        compared = {name for check in passed for name in check.graph.split("+")}
        graphs = {check.graph for check in self.checks if check.graph.endswith(".onnx") and "+" not in check.graph}
        return "pass" if compared and graphs <= compared else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 5 for inconclusive."""
        return {"pass": 0, "fail": 1, "inconclusive": 5}[self.verdict]

    @property
    def worst(self) -> Check | None:
        measured = (check for check in self.checks if check.output and check.sigma)
        return max(measured, key=lambda check: check.sigma, default=None)

    def highlights(self) -> list[Check]:
        """The worst check of every scenario, graph and kind of output, without copies."""
        groups = groups_of(self.shown())
        return [max(group, key=lambda check: (check.verdict != "pass", check.sigma)) for group in groups]

    def shown(self) -> list[Check]:
        """All checks except those of copies."""
        return [check for check in self.checks if check.graph not in self.copies]

    def copy_lines(self) -> list[str]:
        return [f"`{first}` and `{name}` are the same bytes, run once" for name, first in self.copies.items()]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, equal for equal runs; NaN and infinity are strings."""
        content = {
            "schema": 1,
            "verdict": self.verdict,
            "folder": self.folder,
            "reference": self.reference,
            "suite": self.suite,
            "method": self.method,
            "versions": self.versions,
            "settings": self.settings,
            "notes": self.notes,
            "unseen": list(dict.fromkeys(self.unseen)),
            "checks": [_plain(asdict(check)) for check in self.checks],
            "logits": {name: evidence.as_dict() for name, evidence in self.evidence.items()},
        }
        if self.odd_layers:
            content["odd_layers"] = {str(number): text for number, text in self.odd_layers.items()}
        if self.statements:
            content["statements"] = [asdict(statement) for statement in self.statements]
        if self.unmatched:
            content["unmatched"] = {name: [asdict(node) for node in nodes] for name, nodes in self.unmatched.items()}
        if self.budget:
            content["budget"] = self.budget
        if self.quantization:
            content["quantization"] = self.quantization.as_dict()
        if self.where:
            content["where"] = asdict(self.where)
        return content

    def lines(self) -> list[str]:
        """Lines for the terminal: one per group of checks, beginning with the verdict, then the closing lines."""
        return [*lines_of(self.checks), *self.closing_lines()]

    def closing_lines(self) -> list[str]:
        """Notes, the location of a failure, and the summary."""
        lines = [f"NOTE | {clean(note, LINE_LIMIT)}" for note in [*self.copy_lines(), *self.notes]]
        found = self.quantization.lines() if self.quantization else []
        lines += [f"QUANTIZATION | {clean(line, LINE_LIMIT)}" for line in found]
        lines += [f"{one.word} | {one.name} | {one.text}" for one in self.statements]
        return [*lines, *self.short_lines()]

    def short_lines(self) -> list[str]:
        """The location of a failure, if there is one, and the summary."""
        where = [f"WHERE | {clean(self.where.text, LINE_LIMIT)}"] if self.where else []
        return [*where, self.summary()]

    def summary(self) -> str:
        """The last line: the verdict, numbers of checks, largest sigma, cost of quantization, what was not found."""
        passed, failed, skipped = (
            sum(check.verdict == verdict for check in self.checks) for verdict in ("pass", "fail", "skip")
        )
        worst, tail = self.worst, ""
        if worst:
            tail = f", largest sigma {sigma_text(worst.sigma)} ({clean(worst.name)}, {clean(worst.output)})"
        if failed and not (worst and worst.verdict == "fail"):
            first = next(check for check in self.checks if check.verdict == "fail")
            tail = f", first {clean(check_line(first, first.output).partition(' | ')[2], LINE_LIMIT)}"
        cost = (
            f"; quantization: {self.quantization.cost.summary}" if self.quantization and self.quantization.cost else ""
        )
        hidden = "; ".join(dict.fromkeys(self.unseen))
        unseen = f"; could not have found: {clean(hidden, LINE_LIMIT)}" if hidden else ""
        method = "" if self.method == WHOLE else f" by {self.method}"
        counts = f"{passed} checks passed, {failed} differ, {skipped} skipped"
        return f"{self.verdict.upper()}{method}: {counts}{tail}{cost}{unseen}"


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with NaN and infinity as strings, which JSON lacks."""
    return {name: str(v) if isinstance(v, float) and not isfinite(v) else v for name, v in fields.items()}


WORDS = {"pass": "PASSED", "fail": "FAILED", "skip": "SKIPPED"}


def lines_of(checks: Sequence[Check]) -> list[str]:
    return [group_line(group) for group in groups_of(checks)]


def groups_of(checks: Sequence[Check]) -> list[list[Check]]:
    """The checks grouped by scenario, graph and kind of output: logits, tokens, scores, or the whole cache."""
    kinds = ["present" if is_present(check.output) else check.output for check in checks]
    pairs = (((one.name, one.graph, kind), one) for one, kind in zip(checks, kinds, strict=True))
    return list(lists_by_key(pairs).values())


def group_line(group: list[Check]) -> str:
    """The line of a group: its worst check if all passed, else the first failed check and the number of others."""
    failed = [check for check in group if check.verdict != "pass"]
    if len(group) == 1:
        return check_line(group[0], group[0].output)
    if failed:
        return check_line(
            failed[0], f"{failed[0].output} and {len(failed) - 1} more" if failed[1:] else failed[0].output
        )
    return check_line(max(group, key=lambda check: check.sigma), f"present, {len(group)} outputs")


def check_line(check: Check, what: str) -> str:
    """A line such as `PASSED | decode chain, 16 steps | decode.onnx logits | sigma 1.02 | max abs 3.1e-07`."""
    name = check.name
    if check.verdict == "fail" and check.steps > 1:
        name += f", step {check.step}"
    parts = [WORDS[check.verdict], name, f"{check.graph} {what}".strip()]
    if check.sigma or check.max_abs:
        parts += [f"sigma {sigma_text(check.sigma)}", f"worst row {sigma_text(check.row_sigma)}"]
        parts.append(f"max abs {check.max_abs:.1e}")
    return " | ".join(clean(part) for part in [*parts, check.detail] if part)


def clean(text: str, limit: int = NAME_LIMIT) -> str:
    """Text from a file without control characters, cut to `limit` characters."""
    return re.sub(r"[^\x20-\x7e\u00a0-\ud7ff\ue000-\ufffd]", "?", text)[:limit]


TEXT, OWN_TEXT, RANDOM = "text", "evaluation text", "random tokens"
"""Sources of tokens: a file of the user, the text that ships with llmconv, a random generator."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, and its standard error, as if the tokens were independent."""

    value: float
    error: float

    def __str__(self) -> str:
        """Both without exponents, such as `1018 ± 10`."""
        value, error = float(f"{self.value:.4g}"), float(f"{self.error:.1g}")
        return " ± ".join(np.format_float_positional(number, trim="-") for number in (value, error))


UNSUITED = 2
"""Perplexity of the full model, relative to equal probabilities, above which the text is reported as unsuitable."""


@dataclass(frozen=True)
class Perplexities:
    """Perplexity of a text for the model and for a graph, and their ratio, whose error is that of paired tokens."""

    model: Estimate
    graph: Estimate
    ratio: Estimate


@dataclass(frozen=True)
class AccuracyCost:
    """The difference between a graph and the model at full precision over the tokens of some texts."""

    graph: str
    tokens: int  # number of compared tokens
    divergence: Mapping[str, float]  # KL(model || graph) of the next token in nats: mean, median, p99, p99_9, max
    divergence_error: float  # standard error of the mean
    agreement: float  # share of tokens with the same most likely next token
    source: str = RANDOM  # `text`, `evaluation text` or `random tokens`
    perplexities: Perplexities | None = None  # None for random tokens
    uniform: float = float("inf")  # mean divergence of equal probabilities for all tokens, in nats
    vocabulary: int = 0  # number of logits; the perplexity of equal probabilities

    @property
    def text(self) -> str:
        """One line for the report."""
        nats = self.divergence
        spread = f"median {nats['median']:.3g}, p99 {nats['p99']:.3g}, max {nats['max']:.3g}"
        kl = f"KL divergence mean {Estimate(nats['mean'], self.divergence_error)}, {spread} nats"
        same = f"same most likely token after {self.agreement:.1%} of {self.tokens} tokens ({self.source})"
        if self.perplexities is None:
            return f"{kl}; {same}; no perplexity for random tokens (give `--text FILE`)"
        found = self.perplexities
        text = f"{kl}; {same}; perplexity {found.model} before, {found.graph} after (x {found.ratio})"
        if 0 < UNSUITED * self.vocabulary < found.model.value:
            text += (
                f"; equal probabilities have {self.vocabulary}: the text does not suit the model, give `--text FILE`"
            )
        return text

    @property
    def summary(self) -> str:
        factor = f", perplexity x {self.perplexities.ratio.value:.3g}" if self.perplexities else ""
        same = f"same most likely token in {self.agreement:.0%}"
        return f"{same}{factor}, KL {self.divergence['mean']:.2g}" + (" (random tokens)" if not factor else "")

    def as_dict(self) -> dict[str, Any]:
        perplexity = None
        if found := self.perplexities:
            perplexity = {
                "model": found.model.value,
                "graph": found.graph.value,
                "ratio": found.ratio.value,
                "errors": {"model": found.model.error, "graph": found.graph.error, "ratio": found.ratio.error},
            }
        return {
            "graph": self.graph,
            "tokens": self.tokens,
            "source": self.source,
            "divergence": dict(self.divergence),
            "divergence_error": self.divergence_error,
            "uniform": self.uniform,
            "agreement": self.agreement,
            "perplexity": perplexity,
        }


@dataclass
class Quantization:
    """The section of a report."""

    # `graph`, `tensor`, `stored` (format) and `relative_error` of every quantized matrix
    weights: list[dict[str, Any]] = field(default_factory=list)
    # operators that round activations at run time; correctness is checked without this rounding
    rounded: list[str] = field(default_factory=list)
    cost: AccuracyCost | None = None  # the loss of accuracy; None if it was not measured
    # the same with codes of plain rounding to nearest, for a folder of llmconv with 4 bits
    rounding: AccuracyCost | None = None
    excess: Estimate | None = None  # mean divergence of the graph less that of plain rounding
    preset: str = ""  # of a folder of llmconv
    max_divergence: float | None = None  # limits of the loss of accuracy, if any
    min_agreement: float | None = None

    def lines(self) -> list[str]:
        errors = sorted((one["relative_error"], one["tensor"]) for one in self.weights)
        lines = []
        if errors:
            least, most, count = errors[0], errors[-1], len({tensor for _, tensor in errors})
            span = f"relative error {least[0]:.2g} to {most[0]:.2g} (`{most[1]}`)"
            lines.append(f"{count} quantized matrices, {span}")
        lines += [self.cost.text] if self.cost else []
        return lines + ([f"plain rounding with the same bits: {self.rounding.text}"] if self.rounding else [])

    def as_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "rounded_activations": self.rounded,
            "cost": self.cost.as_dict() if self.cost else None,
            "preset": self.preset,
            "plain_rounding": self.rounding.as_dict() if self.rounding else None,
            "excess": {"mean": self.excess.value, "error": self.excess.error} if self.excess else None,
            "limits": {"max_divergence": self.max_divergence, "min_agreement": self.min_agreement},
        }
