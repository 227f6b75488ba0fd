"""SinglePassGraph: a graph without a cache, which returns embeddings, scores or logits of whole texts in one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llmconv.errors import InputRefused, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.onnxruntime.device import as_array
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array


class SinglePassGraph:
    """One graph without a cache; `inputs` and `outputs` are declared shapes by name; raises MalformedInput."""

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        self._session = SessionChain([path], settings or SessionSettings(), joins=False)
        self.inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in self._session.get_inputs()}
        self.outputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in self._session.get_outputs()}
        self._path = path

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array | None = None) -> Mapping[str, Array]:
        """All outputs by name; the arguments are int64 [batch, tokens], the mask 0 for padding on either side.

        Positions are counted from the mask if None. Raises InputRefused if onnxruntime cannot run the graph on these
        tokens.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "position_ids" in self.inputs:
            given["position_ids"] = (
                default_positions(attention_mask, input_ids.shape[1]) if position_ids is None else position_ids
            )
        feeds = {name: as_input(np.ascontiguousarray(array, dtype=np.int64)) for name, array in given.items()}
        try:
            values = self._session.run_with_ort_values(list(self.outputs), feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise_if_out_of_memory(error, f"while `{self._path.name}` was run")
            raise InputRefused(
                f"`{self._path.name}` cannot run on these tokens: {first_line(error)}",
                hint="are they of this model's tokenizer, and no more than its context length?",
            ) from error
        return {name: as_array(value) for name, value in zip(self.outputs, values, strict=True)}
