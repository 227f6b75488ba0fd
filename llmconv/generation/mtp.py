"""Guesses of a model's own MTP head (`mtp.onnx`); `loop` keeps those that are right.

The head reads the hidden state of each token and the token after it, and predicts the one after that. Further guesses
are chained, as in vLLM: the head reads its own hidden state and its own guess.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.draft import Draft
from llmconv.generation.runners import in_form
from llmconv.output.manifest import MTP, mtp_entry
from llmconv.runtime.extra_inputs import PREVIOUS_HIDDEN
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, for_concurrent_use
from llmconv.runtime.runner import BufferedCache, Runner, default_positions, taken_back
from llmconv.runtime.tokenizer import UNKNOWN
from llmconv.tensors import Array


def open_head(
    folder: Path, runner: Runner, settings: SessionSettings | None, form: str, context_length: int | None
) -> partial[MtpGuesser]:
    """Makes a guesser for each text, all of which share one session; arguments as for `TextModel.open`.

    Raises InputRefused: the folder has no graph of an MTP head, or graphs that do not return what it reads;
    UsageProblem: the model does not run as graphs here.
    """
    if not isinstance(runner, OrtRunner):
        raise UsageProblem(
            "`--speculate mtp` is for graphs that run here, without a tuned prefix", hint="give `--speculate lookup`"
        )
    entry = mtp_entry(folder)
    if entry is None or not runner.returns_hidden:
        raise InputRefused(
            f"`{folder}` has no `{MTP}`" if entry is None else f"the graphs of `{folder}` return no hidden state",
            hint="`llmconv export MODEL --mtp --overwrite` writes the graph of the MTP head and those that feed it",
        )
    own = in_form(settings or SessionSettings(), form, entry.paths(folder))
    own = replace(for_concurrent_use(own), extra_inputs=lambda: (PREVIOUS_HIDDEN,))
    graph = open_graph(folder, entry, own)
    head = OrtRunner(graph, graph)
    head.length_switch = runner.length_switch
    size = graph.outputs["logits"][-1]
    vocabulary = size if isinstance(size, int) else UNKNOWN
    return partial(MtpGuesser, graph, head, vocabulary, context_length)


class MtpGuesser(Draft):
    """Guesses the tokens that an MTP head finds likeliest, after the hidden states that `read` has noted."""

    least_gain = 1.05  # one layer, whose head and embeddings are those of the model

    def __init__(self, graph: OrtGraph, runner: Runner, vocabulary: int, context_length: int | None = None) -> None:
        super().__init__(runner, default_positions, vocabulary, context_length)
        self._graph = graph
        # number of the first token whose hidden state the cache contains, and of the first that it does not contain
        self._first = self._next = 0
        self._states: Array | None = None  # hidden states from `_next` on, [1, tokens, hidden]

    def read(self, first: int, hidden: Array) -> None:
        """Notes the hidden states [tokens, hidden] of the tokens from number `first` on."""
        known = self._next + (0 if self._states is None else self._states.shape[1])
        if self._states is None and self._cache is None or first > known:  # tokens before were not read here
            self._first = self._next = first
            self._states, self._cache = hidden[None], None
            return
        new = hidden[None, max(self._next - first, 0) :]
        before = self._states[:, : max(first - self._next, 0)] if self._states is not None else new[:, :0]
        self._states = np.concatenate([before, new], axis=1)

    def _continued(self, ids: Array, count: int) -> Array:
        started = time.perf_counter()
        new = len(ids) - 1 - self._next
        if self._states is None or new < 1 or self._states.shape[1] < new:
            return ids[:0]
        is_prompt, position = self._cache is None, self._next + 1
        tokens, states, cache = ids[None, position:], self._states[:, :new], self._cache
        guess, kept = ids[:0], self._cache
        while True:
            total = position - 1 - self._first + tokens.shape[1]
            at = np.arange(position, position + tokens.shape[1])[None]
            given: dict[str, Any] = {PREVIOUS_HIDDEN.name: states}
            step = self._graph.run(tokens, np.ones((1, total), np.int64), at, cache, given)
            if not len(guess):
                kept, is_first = step.present, is_prompt
                self._reading = time.perf_counter() - started if is_first else 0.0
            assert step.hidden is not None
            guess = np.append(guess, step.logits[0, -1].argmax())
            if len(guess) == count:
                break
            position, cache = position + tokens.shape[1], step.present
            tokens, states = guess[None, -1:], step.hidden[:, -1:]
        self._next += new
        # chained guesses do not stay in the cache
        self._cache = taken_back(step.present, self._next - self._first) if isinstance(kept, BufferedCache) else kept
        self._states = self._states[:, new:]
        self._spent = time.perf_counter() - started - self._reading
        self._time(count - bool(self._reading))
        return guess
