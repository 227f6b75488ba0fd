"""The embedding table of a multi-modal checkpoint as a graph, beside the graphs that take its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.tensors import Array

EMBEDDINGS = "embeddings.onnx"
INPUTS_EMBEDS = "inputs_embeds"


class EmbeddingGraph:
    """`input_ids` to `inputs_embeds`.

    Args:
        path: of the graph.
        settings: of the session.

    Raises:
        MalformedInput: the guard or onnxruntime refuses the file.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        settings = settings or SessionSettings()
        chain = SessionChain(
            [path], settings.options(), settings.providers(), change=settings.change, seconds=settings.timeout
        )
        self._session = chain.whole

    def run(self, input_ids: Array) -> Array:
        """Float [batch, tokens, hidden] of int64 [batch, tokens]."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int64)
        (embedded,) = self._session.run_with_ort_values([INPUTS_EMBEDS], {"input_ids": as_input(ids)})
        return np.asarray(embedded.numpy())
