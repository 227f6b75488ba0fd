"""StreamedWeights: a model on the meta device, whose parameters are there only while they are needed.

transformers loads each part itself (`core_model_loading`, with the `conversion_mapping` of the family), so experts are
stacked and matrices split as `from_pretrained` does it. Bytes are read with `pread`: nothing stays mapped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from llmconv.checkpoint import open_weights
from llmconv.errors import UnsupportedInput
from llmconv.runtime.factors import Factors
from llmconv.runtime.heap import trim
from llmconv.runtime.lockstep import HINT
from llmconv.safetensors_io import FileTensor

ALIGNMENT = 64
"""Bytes of a cache line; sums of products depend on where in it a matrix begins."""

SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"

WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""Integers of the size of a float, which torch takes from numpy whatever the float."""


class StoredTensor:
    """A tensor of a safetensors file, read when it is sliced.

    Args:
        stored: the slice of `safe_open`.
        file: where it lies; a tensor that is used as it is stored begins at the same place of a cache line as if the
            file were mapped, which is what `from_pretrained` does.
        dtype: that a load asks for.
        factor: a power of two that every value is multiplied by.
    """

    def __init__(self, stored: Any, file: FileTensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._stored, self._file, self._dtype, self._factor = stored, file, dtype, factor
        self.shape = file.shape

    def __getitem__(self, key: Any) -> torch.Tensor:
        """All of it, which is what transformers asks for."""
        tensor: torch.Tensor = self._stored[key]
        if tensor.dtype is torch.float64:
            return self._scaled(tensor.float())  # as a load in float32 has it
        if self._factor != 1.0:
            return self._scaled(tensor)
        return _placed(tensor, self._file.offset) if tensor.dtype is self._dtype else tensor

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Some rows; a slice of `safe_open` would read the whole tensor for them."""
        words = torch.from_numpy(self._file.rows(start, stop).view(WORDS[self._file.dtype.itemsize]))
        return self._scaled(words.view(getattr(torch, self._file.dtype.name)))

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32 at least, where a factor loses nothing that matters."""
        if self._factor == 1.0 or not tensor.is_floating_point():
            return tensor
        return torch.mul(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), self._factor)


class HollowTensor:
    """The same without content: transformers builds a whole model of them, on the meta device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, key: Any) -> HollowTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Wherever it is asked for, it stays on the meta device."""
        return torch.empty(self.shape, dtype=dtype, device="meta")


def stored_tensors(folder: Path, dtype: torch.dtype, factors: Factors | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weights by name, scaled by `factors`; `dtype` is what a load asks for."""
    found = {name: tensor for name, tensor in open_weights(folder).items() if isinstance(tensor, FileTensor)}
    files = {tensor.path for tensor in found.values()}
    opened: dict[Path, Any] = {path: safe_open(path, "pt", device="cpu", backend="pread") for path in files}
    return {
        name: StoredTensor(opened[t.path].get_slice(name), t, dtype, factors(name, t.shape) if factors else 1.0)
        for name, t in found.items()
    }


def _placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same at an address that has the remainder of `offset` within a cache line."""
    if (tensor.data_ptr() - offset) % ALIGNMENT == 0:
        return tensor
    room = torch.empty(tensor.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = (offset - room.data_ptr()) % ALIGNMENT
    if start % tensor.itemsize:
        return tensor
    return room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


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
