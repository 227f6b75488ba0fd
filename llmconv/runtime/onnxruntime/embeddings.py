"""EmbeddingGraph: the token embedding of a multimodal checkpoint, for decoder graphs that take `inputs_embeds`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.runtime.onnxruntime.device import as_array
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.tensors import Array

EMBEDDINGS = "embeddings.onnx"
INPUTS_EMBEDS = "inputs_embeds"


class EmbeddingGraph:
    """Maps `input_ids` to `inputs_embeds`.

    Args:
        path: file of the graph.
        settings: session settings; onnxruntime's defaults if None.

    Raises:
        MalformedInput: the file is refused, see `guard`, or onnxruntime cannot open it.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False).last

    def run(self, input_ids: Array) -> Array:
        """Embeddings, float [batch, tokens, hidden], of `input_ids` int64 [batch, tokens]."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int64)
        (embedded,) = self._session.run_with_ort_values([INPUTS_EMBEDS], {"input_ids": as_input(ids)})
        return as_array(embedded)
