"""StreamedWeights: a model on the meta device, whose parameters are there only while they are needed.

transformers loads each part itself (`core_model_loading`, with the `conversion_mapping` of the family), so experts are
stacked and matrices split as `from_pretrained` does it. Bytes are read with `pread`: nothing stays mapped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from llmconv.errors import UnsupportedInput
from llmconv.runtime.eager.stored_tensors import StoredTensor
from llmconv.runtime.low_memory.lockstep import HINT
from llmconv.runtime.onnxruntime.process_heap import trim

SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


class HollowTensor:
    """The same without content: transformers builds a whole model of them, on the meta device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, key: Any) -> HollowTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Wherever it is asked for, it stays on the meta device."""
        return torch.empty(self.shape, dtype=dtype, device="meta")


class StreamedWeights:
    """Loads parts of a model, and drops them again.

    Args:
        model: on the meta device, as `from_pretrained` built it of hollow tensors.
        stored: the tensors of its folder.
        dtype: that a load asks for.

    Raises:
        UnsupportedInput: the folder's tensors need more than to be renamed, cast and joined.
    """

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        if getattr(model.config, "quantization_config", None):
            raise UnsupportedInput("a quantised model cannot be streamed", hint=HINT)
        self._model, self._stored, self._dtype = model, stored, dtype
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._aliases: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self._tensors.items():
            self._aliases[id(tensor)].append(name)
        self._sources, self._plain = _sources(model, stored)

    def names(self, prefix: str) -> list[str]:
        """Parameters and persistent buffers of a module."""
        return [name for name in self._tensors if name.startswith(f"{prefix}.")]

    def plain_source(self, parameter: torch.Tensor) -> StoredTensor | None:
        """The one stored tensor that is this parameter but for a cast; None where it is made of others."""
        names = [name for name in self._aliases.get(id(parameter), ()) if name in self._plain]
        found = self._stored[self._plain[names[0]]] if names else None
        return found if found and found.shape == tuple(parameter.shape) else None

    def keep(self, names: Iterable[str]) -> None:
        """Loads tensors for good."""
        wanted = list(names)
        self._load(wanted)
        for name in wanted:
            self._tensors[name] = _get(self._model, name)

    @contextmanager
    def held(self, prefix: str) -> Iterator[None]:
        """The tensors of a module are there inside."""
        try:
            self._load([name for name in self.names(prefix) if self._tensors[name].is_meta])
            yield
        finally:
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if tensor is not self._tensors[name]:
                    _set(self._model, name, self._tensors[name])
            trim()

    def _load(self, names: list[str]) -> None:
        shared = {alias for name in names for alias in self._aliases[id(self._tensors[name])]}
        sources = {source: self._stored[source] for name in shared for source in self._sources.get(name, ())}
        config = LoadStateDictConfig(
            dtype=self._dtype,
            dtype_plan=self._model._get_dtype_plan(self._dtype),
            weight_mapping=get_model_conversion_mapping(self._model),
        )
        with _without_threads():
            convert_and_load_state_dict_in_model(self._model, sources, config)
        for name in names:
            _set(self._model, name, self._loaded(name))

    def _loaded(self, name: str) -> torch.Tensor:
        """What was loaded for a tensor, under its name or that of one it is tied to."""
        found = [_get(self._model, alias) for alias in self._aliases[id(self._tensors[name])]]
        there = next((tensor for tensor in found if not tensor.is_meta), None)
        if there is None:
            raise UnsupportedInput(f"`{name}` cannot be loaded by itself", hint=HINT)
        return there


def _sources(model: Any, stored: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The stored tensors of every loaded one, and those that are nothing but renamed.

    The rule by which `convert_and_load_state_dict_in_model` names them; of several that one converter makes, the first.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, list[str]] = defaultdict(list)
    plain: dict[str, str] = {}
    for source in stored:
        name, pattern = rename_source_key(source, renamings, converters, prefix, known)
        if name not in known and source in known:
            name, pattern = rename_source_key(source, [], [], prefix, known)
        sources[name].append(source)
        if pattern is None:
            plain[name] = source
    return sources, plain


@contextmanager
def _without_threads() -> Iterator[None]:
    """transformers loads in this thread: those of a pool leave their heaps behind, each time others."""
    before = os.environ.get(SYNCHRONOUS)
    os.environ[SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        os.environ.pop(SYNCHRONOUS) if before is None else os.environ.update({SYNCHRONOUS: before})


def _get(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), last)
    return found


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)
