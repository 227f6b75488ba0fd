"""TorchRunner: the Hugging Face model with the attention and the growing cache that transformers' `generate` uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmconv.argument_checks import require_threads
from llmconv.runtime.eager.cache import EagerCache, to_numpy
from llmconv.runtime.eager.computed_tensors import ComputedTensor
from llmconv.runtime.eager.peft_adapter import without_adapter
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.extra_inputs import ExtraInput, ModelCall
from llmconv.runtime.extra_values import ExtraValues
from llmconv.runtime.library_patches import reset_dynamic_rope
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Cache, Extras, Step
from llmconv.tensors import FLOATS, Array, LazyTensor


@dataclass(frozen=True)
class TorchCache:
    """transformers' cache, which the next call extends in place: only the cache of the latest step can be continued.

    Attributes:
        cache: a DynamicCache.
        length: number of tokens, padding included.
    """

    cache: Any
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """See `Cache.arrays`."""
        return self._named.arrays()

    @property
    def has_recurrent_state(self) -> bool:
        """Whether any layer has a recurrent state."""
        return self._named.has_recurrent_state

    @property
    def _named(self) -> EagerCache:
        ids = np.zeros((1, self.length), dtype=np.int64)  # only the length is used
        return EagerCache(self.cache, ids, ids)


class TorchRunner(EagerRunner):
    """The model with the default attention of transformers.

    Args:
        folder: a Hugging Face folder.
        dtype: `auto` for the dtype of the weights, or a float type by name.
        code: see `EagerRunner`.
        adapter: folder of a PEFT adapter, which is applied without merging.
        tensors: the weights in place of those in the folder, by the same names.
        threads: number of torch threads in this process; 0 for no change.
        device: torch's name of the device.
        extra_inputs: extra inputs of the family.

    Raises:
        InputRefused: transformers cannot load the folder, or PEFT the adapter.
    """

    attention = None

    def __init__(
        self,
        folder: Path,
        dtype: str = "auto",
        *,
        code: Path | None = None,
        adapter: Path | None = None,
        tensors: Mapping[str, LazyTensor] | None = None,
        threads: int = 0,
        device: str = "cpu",
        extra_inputs: Sequence[ExtraInput] = (),
    ) -> None:
        self._tensors = tensors
        super().__init__(folder, dtype, code=code, device=device, adapter=adapter, extra_inputs=extra_inputs)
        if threads:
            torch.set_num_threads(require_threads(threads))
        if "logits_to_keep" in inspect.signature(without_adapter(self.model).forward).parameters:
            self._fixed = {"logits_to_keep": 1}

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        if self._tensors is None:
            return super()._load(folder, fields, dtype)
        if dtype == "auto":
            dtype = _dtype_of(fields, self._tensors)
        tensors = {name: ComputedTensor(tensor) for name, tensor in self._tensors.items()}
        return self._built(folder, fields, dtype, tensors)

    def _run(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        if past is None:
            reset_dynamic_rope(self.model)
        cache = past.cache if isinstance(past, TorchCache) else self.cache_of(past)
        values = ExtraValues(self.extra_inputs, extras or {})
        new, done = call.input_ids.shape[1], past.length if past else 0
        width = 1 if past and new > 1 and self._needs_single_tokens(past) else new
        for start in range(0, new, width):
            at = slice(start, start + width)
            seen = call.attention_mask[:, : done + min(at.stop, new)]
            piece = ModelCall(call.input_ids[:, at], seen, call.position_ids[:, at])
            own = placed.columns(start, start + width) if placed else None
            logits = self._forward(piece, cache, values.of(piece, call, start), own)
        return Step(to_numpy(logits[:, -1:]), TorchCache(cache, done + new))

    def _needs_single_tokens(self, past: Cache) -> bool:
        """Whether the model continues a recurrent state correctly by one token at a time only."""
        named = past if isinstance(past, TorchCache) else TorchCache(self.cache_of(past), past.length)
        return not self._continues and named.has_recurrent_state


def _dtype_of(fields: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """The dtype that transformers finds for `auto`: that of `config.json`, else of the first floating-point tensor."""
    named = fields.get("dtype") or fields.get("torch_dtype")
    first = next((tensor.dtype.name for tensor in tensors.values() if tensor.dtype.name in FLOATS), "float32")
    found: torch.dtype = getattr(torch, named if named in FLOATS else first)
    return found
