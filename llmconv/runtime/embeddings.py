"""The embedding table of a multi-modal checkpoint as a graph, beside the graphs that take its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.errors import MalformedInput
from llmconv.runtime.bound import as_input
from llmconv.runtime.guard import load_guarded, weight_bytes
from llmconv.runtime.session_settings import CPU
from llmconv.runtime.time_limit import TOO_LONG, LimitedSession, TimeLimit
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
        limit = TimeLimit(weight_bytes(load_guarded(path)))
        try:
            self._session = LimitedSession(path, options, providers, limit)
        except TimeoutError as error:
            raise MalformedInput(f"`{path.name}` cannot be opened: {error}", hint=TOO_LONG) from error

    def run(self, input_ids: Array) -> Array:
        """Float [batch, tokens, hidden] of int64 [batch, tokens]."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int64)
        (embedded,) = self._session.run_with_ort_values([INPUTS_EMBEDS], {"input_ids": as_input(ids)})
        return np.asarray(embedded.numpy())
