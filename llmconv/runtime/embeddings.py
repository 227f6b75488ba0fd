"""The embedding table of a multi-modal checkpoint as a graph, beside the graphs that take its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.runtime.guard import load_guarded
from llmconv.runtime.session_settings import CPU
from llmconv.tensors import Array

EMBEDDINGS = "embeddings.onnx"
INPUTS_EMBEDS = "inputs_embeds"


class EmbeddingGraph:
    """`input_ids` to `inputs_embeds`.

    Args:
        path: of the graph.
        options: of the session.
        providers: what runs its operators, best first.

    Raises:
        MalformedInput: the guard refuses the file.
    """

    def __init__(self, path: Path, options: ort.SessionOptions, providers: Sequence[Any] = (CPU,)) -> None:
        load_guarded(path)
        self._session = ort.InferenceSession(path, options, list(providers))

    def run(self, input_ids: Array) -> Array:
        """Float [batch, tokens, hidden] of int64 [batch, tokens]."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int64)
        embedded: Array = self._session.run([INPUTS_EMBEDS], {"input_ids": ids})[0]
        return embedded
