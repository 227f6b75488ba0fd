"""EagerRunner: the Hugging Face model itself; in float64 it is the truth that graphs are measured against.

It shares nothing with the exporter: transformers' own eager attention, its own DynamicCache, no patch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.utils import logging as transformers_logging

from llmconv.errors import InputRefused
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array

SMALL_MODEL = 10_000_000
"""Parameters up to which one thread is faster than several that wait for each other."""

LOW_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class KeepDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to a lower float into casts to float64.

    `model.double()` alone is no float64 computation: norms, rotary tables and softmax cast to float32 inside.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in LOW_FLOATS:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class EagerCache:
    """A DynamicCache without sliding layers: every layer keeps every token."""

    cache: Any

    @property
    def length(self) -> int:
        """Tokens in the cache, padding included."""
        return int(self.cache.get_seq_length())

    def arrays(self) -> list[tuple[Array, Array]]:
        """Key and value by layer, each [batch, kv_heads, length, head_dim]; bfloat16 widened to float32."""
        return [(to_numpy(layer.keys), to_numpy(layer.values)) for layer in self.cache.layers]


class EagerRunner:
    """AutoModelForCausalLM with eager attention.

    Args:
        folder: a Hugging Face folder with safetensors weights; nothing in it is executed.
        dtype: `float64` (computed wholly in float64 from the float32 buffers), `float32`, `float16` or `bfloat16`.

    Raises:
        InputRefused: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        transformers_logging.disable_progress_bar()
        load = "float32" if dtype == "float64" else dtype
        try:
            model = _class_of(folder).from_pretrained(
                folder,
                dtype=getattr(torch, load),
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise InputRefused(
                f"transformers cannot load `{folder}`: {str(error).strip().splitlines()[0][:300]}",
                hint="the folder needs config.json and safetensors weights of a causal language model",
            ) from error
        self.model = (model.double() if dtype == "float64" else model).eval()
        self.dtype = dtype
        self.takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

        self._is_small = model.num_parameters() <= SMALL_MODEL

    @property
    def config(self) -> Any:
        """The transformers config of the language model."""
        return self.model.config.get_text_config(decoder=True)

    def embed(self, input_ids: Array) -> Array:
        """What the model makes of tokens before its first layer, [batch, tokens, hidden]."""
        with torch.no_grad():
            return to_numpy(self.model.get_input_embeddings()(torch.from_numpy(input_ids)))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs the prompt; `past` is left as it was."""
        return self._run(input_ids, attention_mask, position_ids, past)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs a step; `past` is left as it was."""
        return self._run(input_ids, attention_mask, position_ids, past)

    def _run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None) -> Step:
        cache = DynamicCache()
        for index, (key, value) in enumerate(past.arrays() if past else []):
            cache.update(
                torch.from_numpy(key).to(self.model.dtype), torch.from_numpy(value).to(self.model.dtype), index
            )
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.takes_positions:
            inputs["position_ids"] = position_ids
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
        exact: Any = KeepDouble() if self.dtype == "float64" else nullcontext()  # type: ignore[no-untyped-call]
        with torch.no_grad(), one_thread() if self._is_small else nullcontext(), exact:
            output = self.model(**tensors, past_key_values=cache, use_cache=True)
        return Step(to_numpy(output.logits), EagerCache(output.past_key_values))


def _class_of(folder: Path) -> Any:
    """The class that loads a folder: of a language model, or of one that takes images too."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch runs on one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def to_numpy(tensor: torch.Tensor) -> Array:
    """A numpy view of a tensor; bfloat16, which numpy lacks, is widened to float32."""
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().numpy()
    return array
