"""Compares graphs that take embeddings with the eager model on embeddings that are not those of any token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmconv.errors import LlmconvError
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import Candidate, fold, with_checked_noise
from llmconv.verify.reference.chain_runs import rows_of
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check
from llmconv.verify.results.sigma import ExpectedOutput, Gates, Measure, measure
from llmconv.verify.scenarios.calls import Call

NAME = "own embeddings"
BATCH, TOKENS, SEED = 2, 6, 29


def check_own_embeddings(graph: OrtGraph, eager: Eager, gates: Gates) -> list[Check]:
    """One check per output, of two prompts in which most embeddings are random numbers of the table's size.

    Args:
        graph: takes embeddings.
        eager: the model.
        gates: the largest sigma that passes.
    """
    blank = Check(NAME, graph.name, "")
    call, placed = _call(eager)
    candidate = Candidate(graph.name, OrtRunner(graph, graph), (graph,))
    if reason := candidate.refuses(call):
        return [replace(blank, output="logits", verdict="skip", detail=reason)]
    given = call.input_ids, call.attention_mask, call.position_ids
    truths = eager.outputs_of(call, lambda model: model.prefill(*given, placed=placed))
    try:
        step = candidate.runner.prefill(*given, placed=placed)
    except LlmconvError as error:
        return [replace(blank, output="logits", verdict="fail", detail=error.message)]
    rows = rows_of(step)
    if step.choices is not None:
        rows.pop("logits")
    expected = {name: truth for name, truth in truths.items() if name in rows or step.choices is None}
    if candidate.last_logits and "logits" in expected:
        expected["logits"] = expected["logits"].last()
    return [fold(blank, name, [_measure(truth, rows.get(name), gates)], gates) for name, truth in expected.items()]


def _measure(truth: ExpectedOutput, rows: Array | None, gates: Gates) -> Measure:
    if rows is None:
        return Measure(problem="missing output")
    return with_checked_noise(truth, lambda truth: measure(truth, rows), gates)


def _call(eager: Eager) -> tuple[Call, PlacedEmbeddings]:
    """A call of two rows, and random embeddings for all of their tokens but the first and the last."""
    random = np.random.default_rng(SEED)
    ids = random.integers(0, eager.facts().vocab_size, (BATCH, TOKENS))
    mask = np.ones_like(ids)
    table = eager.embed(ids)[0]
    where = np.zeros(ids.shape, dtype=bool)
    where[:, 1:-1] = True
    size = float(np.sqrt((table**2).mean()))
    rows = (size * random.standard_normal((int(where.sum()), table.shape[-1]))).astype(np.float32)
    if eager.dtype in ("float16", "bfloat16"):  # the graph's input rounds them
        rows = _rounded(rows, eager.dtype)
    return Call(ids, mask, default_positions(mask, TOKENS)), PlacedEmbeddings(where, rows)


def _rounded(rows: Array, dtype: str) -> Array:
    if dtype == "float16":
        return rows.astype(np.float16).astype(np.float32)
    bits = rows.view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)
