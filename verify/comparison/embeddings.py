"""Compares the graph of the embedding table with the eager model's embedding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import LlmconvError
from llmconv.runtime.onnxruntime.embeddings import INPUTS_EMBEDS, EmbeddingGraph
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check
from llmconv.verify.results.sigma import GATES, Measure, NoiseFloor, measure

ROWS = 4096
"""Maximum number of compared tokens, evenly spread over the vocabulary."""


def takes_embeddings(models: Iterable[onnx.ModelProto]) -> bool:
    """Whether a graph takes `inputs_embeds` from the graph of the embedding table."""
    return any(port.name == INPUTS_EMBEDS for model in models for port in model.graph.input)


def check_embeddings(path: Path, eager: Eager, settings: SessionSettings | None) -> Check:
    """One check over tokens of the whole vocabulary.

    Args:
        path: the graph of the embedding table.
        eager: the model.
        settings: of onnxruntime.
    """
    blank = Check("embeddings", path.name, INPUTS_EMBEDS)
    count = eager.facts().vocab_size
    ids = np.unique(np.linspace(0, count - 1, min(ROWS, count), dtype=np.int64))[None]
    exact, rounded = eager.embed(ids)
    truth = NoiseFloor(eager.dtype).truth(INPUTS_EMBEDS, exact, rounded, np.ones(ids.shape, dtype=bool))
    try:
        found = measure(truth, EmbeddingGraph(path, settings).run(ids))
    except LlmconvError as error:
        found = Measure(problem=error.message)
    return fold(blank, INPUTS_EMBEDS, [found], GATES[eager.dtype])
