"""EagerRunner: the Hugging Face model itself; in float64 it is the truth that graphs are measured against.

It shares nothing with the exporter: transformers' own eager attention, its own DynamicCache, no patch. Where layers
keep a recurrent state, several tokens after a past are computed by running all tokens again from the first: some scans
of transformers (Mamba's) start from zeros whatever the cache holds.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging as transformers_logging

from llmconv.checkpoint import INDEX, SINGLE, read_json
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.model_kinds import require_causal
from llmconv.not_a_model_folder import refused_model
from llmconv.runtime.custom_code import blaming, own_classes, runs_own_code
from llmconv.runtime.eager.cache import EagerCache, fresh_cache, restore, to_numpy
from llmconv.runtime.eager.limit_margins import Reach
from llmconv.runtime.eager.scale_factors import Factors
from llmconv.runtime.eager.stored_tensors import stored_tensors
from llmconv.runtime.onnxruntime.process_heap import trim
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array

CONTINUES = "mamba2_chunk_scan"
"""A scan of transformers that is given the state to continue."""

SMALL_MODEL = 10_000_000
"""Parameters up to which one thread is faster than several that wait for each other."""

LOW_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class KeepDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to a lower float into casts to float64.

    `model.double()` alone is no float64 computation: norms, rotary tables and softmax cast to float32 inside.

    Args:
        reach: sees every operator.
    """

    def __init__(self, reach: Reach | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reach = reach or Reach()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in LOW_FLOATS:
            kwargs = {**kwargs, "dtype": torch.float64}
        self._reach.see(func, args, kwargs)
        return func(*args, **kwargs)


class EagerRunner:
    """AutoModelForCausalLM with eager attention.

    Attributes:
        attention: transformers' name of the implementation; None for its own choice.
        reach: how near the model came to its own limits, in float64.

    Args:
        folder: a Hugging Face folder with safetensors weights; nothing in it is executed.
        code: a folder that is trusted: the model's own code there builds it, if it has any.
        dtype: `float64` (computed wholly in float64 from the float32 buffers), `float32`, `float16` or `bfloat16`.
        factors: scale the weights as they are read.
        like: the same in float32, whose weights are copied instead of read and scaled again.

    Raises:
        InputRefused: transformers cannot load the folder.
    """

    attention: str | None = "eager"

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        *,
        code: Path | None = None,
        factors: Factors | None = None,
        like: EagerRunner | None = None,
    ) -> None:
        transformers_logging.disable_progress_bar()
        # It tells that compiled scans are missing, which would be no reference.
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
        fields = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        require_causal(fields, folder)
        if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
            raise refused_model(folder)
        self._code = code if runs_own_code(fields, code is not None) else None
        self._factors, self.dtype, self.reach = factors, dtype, Reach()
        self._folder, self._fields = folder, fields
        self._model: Any = self._ready(copy.deepcopy(like.model)) if like else self._loaded()
        model = self._model
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self._cache_name = "cache_params" if "cache_params" in arguments else "past_key_values"
        self._continues = hasattr(sys.modules[type(model).__module__], CONTINUES)
        self._fixed: dict[str, Any] = {}  # arguments of every call
        self._is_small = model.num_parameters() <= SMALL_MODEL

    def _loaded(self) -> Any:
        """The model, ready to run."""
        folder, fields = self._folder, self._fields
        load = "float32" if self.dtype == "float64" else self.dtype
        try:
            with blaming(self._code):
                model = self._load(folder, fields, getattr(torch, load, load))
        except LlmconvError:
            raise
        except Exception as error:  # a config may be wrong in ways that only some line of a model's code finds
            raise_if_out_of_memory(error, f"while `{folder.name}` was loaded")
            raise InputRefused(
                f"transformers cannot load `{folder}`: {first_line(error)}",
                hint="the folder needs config.json and safetensors weights of a causal language model",
            ) from error
        return self._ready(model)

    def _ready(self, model: Any) -> Any:
        """The model in its precision."""
        if self.attention == "eager" and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the fused ones know no float64
        if self.dtype == "float64":
            for name, layer in layers_of(model).items():
                layer.register_forward_pre_hook(partial(_begin, self.reach, name))
        return (model.double() if self.dtype == "float64" else model).eval()

    @property
    def model(self) -> Any:
        """transformers' model; one that was released is loaded again."""
        if self._model is None:
            self._model = self._loaded()
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    def release(self) -> None:
        """Drops the model until it is asked for again; a small one stays."""
        if not self._is_small:
            self._model = None
            gc.collect()  # modules know each other
            trim()

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        """The model of a folder whose `config.json` says `fields`."""
        if self._factors:
            load = getattr(torch, str(dtype).removeprefix("torch."))
            return self._built(folder, fields, dtype, stored_tensors(folder, load, self._factors))
        source = own_classes(self._code, fields)[1] if self._code else _class_of(folder)
        model, report = source.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=self.attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        _require_all(report["missing_keys"], folder)
        return model

    def _built(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str, tensors: Mapping[str, Any]) -> Any:
        """The model of a folder's config and of tensors by the names of its files."""
        if self._code:
            config_class, source = own_classes(self._code, fields)
            config = config_class.from_pretrained(folder)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
            source = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
        return source.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=self.attention,
            local_files_only=True,
        )

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
        new_tokens = input_ids.shape[1]
        all_ids, all_positions = input_ids, position_ids
        if isinstance(past, EagerCache):
            all_ids = np.concatenate([past.input_ids, input_ids], axis=1)
            all_positions = np.concatenate([past.position_ids, position_ids], axis=1)
            if new_tokens > 1 and past.has_recurrent_state and not self._continues:
                past, input_ids, position_ids = None, all_ids, all_positions
        if past is None:
            forget_lengths(self.model)
        cache = self._cache(past)
        logits = self._forward(input_ids, attention_mask, position_ids, cache)
        return Step(to_numpy(logits)[:, -new_tokens:], EagerCache(cache, all_ids, all_positions))

    def _cache(self, past: Cache | None) -> Any:
        """transformers' cache of that past, which stays as it was."""
        if isinstance(past, EagerCache):
            return copy.deepcopy(past.cache)
        cache = fresh_cache(self.config)
        for name, array in past.arrays().items() if past else ():
            restore(cache, name, torch.from_numpy(array).to(self.model.dtype))
        return cache

    def _forward(self, input_ids: Array, attention_mask: Array, position_ids: Array, cache: Any) -> torch.Tensor:
        """Logits of the new tokens; `cache` grows."""
        if self._cache_name == "cache_params":  # these models take the mask of the new tokens alone
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.takes_positions:
            inputs["position_ids"] = position_ids
        return self._call(inputs, cache)

    def run_embedded(self, inputs_embeds: Array) -> Cache:
        """The cache of virtual tokens at positions 0, 1, …, given as embeddings [batch, tokens, hidden]."""
        batch, length, _ = inputs_embeds.shape
        inputs = {"inputs_embeds": inputs_embeds, "attention_mask": np.ones((batch, length), dtype=np.int64)}
        if self.takes_positions:
            inputs["position_ids"] = np.arange(length)[None].repeat(batch, axis=0)
        cache = self._cache(None)
        self._call(inputs, cache)
        none = np.zeros((batch, 0), dtype=np.int64)
        return EagerCache(cache, none, none)

    def _call(self, inputs: dict[str, Array], cache: Any) -> torch.Tensor:
        """Runs the model and returns the logits; floats are cast to its precision first."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
        tensors = {name: t.to(self.model.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        with one_thread() if self._is_small else nullcontext(), self._computing():
            cached = {self._cache_name: cache, "use_cache": True}
            self.reach.begin()
            logits: torch.Tensor = self.model(**tensors, **cached, **self._fixed).logits
        return logits

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """What holds while the model runs."""
        exact: Any = KeepDouble(self.reach) if self.dtype == "float64" else nullcontext()
        with torch.no_grad(), exact, blaming(self._code):
            yield


def _begin(reach: Reach, name: str, *_: Any) -> None:
    """Before a layer runs."""
    reach.begin(name)


def _require_all(missing: Iterable[str], folder: Path) -> None:
    """Refuses a folder that lacks weights: transformers would initialize them at random, anew in every run.

    Raises:
        MalformedInput: names the first.
    """
    if names := sorted(missing):
        raise MalformedInput(
            f"missing keys: the weights in `{folder}` lack {len(names)} of the model, first `{names[0]}`",
            hint="is this the config.json of these weights?",
        )


def _class_of(folder: Path) -> Any:
    """The class that loads a folder: of a language model, or of one that takes images too."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def forget_lengths(model: Any) -> None:
    """Dynamic rotary frequencies are those of the longest sequence so far: a new one begins with the original ones."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and "dynamic" in kind:
                prefix = f"{layer_type}_" if layer_type else ""
                setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The elements of lists of modules, but for lists inside such elements."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{layer}.") for layer in found):
            found |= {f"{name}.{index}": layer for index, layer in module.named_children()}
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch runs on one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
