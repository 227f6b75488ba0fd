"""TorchRunner: the Hugging Face model as transformers itself would generate with it, on one growing cache."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.files.sources import local_path
from llmconv.runtime.eager.cache import EagerCache, to_numpy
from llmconv.runtime.eager.runner import EagerRunner, forget_lengths
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array


@dataclass(frozen=True)
class TorchCache:
    """transformers' cache, which the next call grows in place: only the latest step's can be gone on from.

    Attributes:
        cache: a DynamicCache.
        length: tokens in it, padding included.
    """

    cache: Any
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """By name, see `Cache.arrays`."""
        return self._named.arrays()

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return self._named.has_recurrent_state

    @property
    def _named(self) -> EagerCache:
        none = np.zeros((1, self.length), dtype=np.int64)
        return EagerCache(self.cache, none, none)


class TorchRunner(EagerRunner):
    """The model with the attention that transformers chooses, in the dtype of its weights.

    Args:
        folder: a Hugging Face folder.
        dtype: `auto` for that of the weights, or a float type by name.
        code: see `EagerRunner`.
        adapter: a folder of PEFT, whose adapter is kept apart from the weights.
        threads: of torch, in this process; 0 leaves them as they are.

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
        threads: int = 0,
    ) -> None:
        super().__init__(folder, dtype, code=code)
        if threads:
            torch.set_num_threads(threads)
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            self._fixed = {"logits_to_keep": 1}
        if adapter is not None:
            self.model = _with_adapter(self.model, adapter)

    def _run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None) -> Step:
        if past is None:
            forget_lengths(self.model)
        cache = past.cache if isinstance(past, TorchCache) else self._cache(past)
        new, done = input_ids.shape[1], past.length if past else 0
        pieces = range(new) if past and new > 1 and self._counts_alone(past) else [slice(0, new)]
        for piece in pieces:
            at = slice(piece, piece + 1) if isinstance(piece, int) else piece
            logits = self._forward(input_ids[:, at], attention_mask[:, : done + at.stop], position_ids[:, at], cache)
        return Step(to_numpy(logits[:, -1:]), TorchCache(cache, done + new))

    def _counts_alone(self, past: Cache) -> bool:
        """Whether a state can be continued by one token only."""
        named = past if isinstance(past, TorchCache) else TorchCache(self._cache(past), past.length)
        return not self._continues and named.has_recurrent_state


def _with_adapter(model: Any, adapter: Path) -> Any:
    """The model with an adapter of PEFT around its layers."""
    adapter = local_path(adapter)
    if not (adapter / ADAPTER_CONFIG).is_file() or not (adapter / ADAPTER_WEIGHTS).is_file():
        raise InputRefused(
            f"`{adapter}` is not an adapter of PEFT", hint=f"it needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        )
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise UsageProblem(
            "an adapter beside its model needs the library peft",
            hint="`pip install peft`, or merge it: `llmconv merge-lora BASE ADAPTER -o OUT`",
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft about its own use of transformers
            tuned = peft.PeftModel.from_pretrained(model, adapter).eval()
    except Exception as error:  # every kind of tuner has exceptions of its own
        raise InputRefused(
            f"PEFT cannot put `{adapter}` on the model: {first_line(error)}", hint="is it an adapter of this model?"
        ) from error
    if tuned.active_peft_config.is_prompt_learning:
        raise InputRefused(
            f"`{adapter}` holds a tuned prefix, which no layer has", hint="`llmconv export MODEL --prefix ADAPTER`"
        )
    return tuned
