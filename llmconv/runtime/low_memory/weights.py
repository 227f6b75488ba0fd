"""StreamedWeights: a model on the meta device, whose weights are loaded only while they are needed.

transformers loads each part itself, so that experts are stacked and matrices split as in `from_pretrained`. Bytes are
read with `pread`; no file stays mapped. Large matrices of `nn.Linear` that are stored as they are used are read as they
are stored: the product converts blocks of their rows (`lazy_matrices`), which takes a quarter of the memory of float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from llmconv.errors import UnsupportedInput
from llmconv.runtime.eager.stored_tensors import StoredTensor
from llmconv.runtime.library_patches import load_tensors, loaded_names
from llmconv.runtime.low_memory.matrix_memory import MatrixMemory
from llmconv.runtime.low_memory.pass_scheduler import LOW_MEMORY_HINT
from llmconv.runtime.onnxruntime.process_heap import trim

AS_STORED = 1 << 20
"""Least number of elements of a matrix that is not converted when it is read."""


class MetaTensor:
    """A `StoredTensor` without values, from which transformers builds a model on the meta device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, key: Any) -> MetaTensor:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the meta device, whatever the requested device."""
        return torch.empty(self.shape, dtype=dtype, device="meta")


class StreamedWeights:
    """Loads the weights of parts of a model and drops them again.

    Args:
        model: a transformers model on the meta device.
        stored: the tensors of its folder.
        dtype: dtype requested for the model.
        memory: of large matrices; shared with other runners of the same weights.

    Raises:
        UnsupportedInput: the model is quantized.
    """

    def __init__(
        self,
        model: Any,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        memory: MatrixMemory | None = None,
    ) -> None:
        if getattr(model.config, "quantization_config", None):
            raise UnsupportedInput("a quantized model cannot be streamed", hint=LOW_MEMORY_HINT)
        self._model, self._stored, self._dtype = model, stored, dtype
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._aliases: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self._tensors.items():
            self._aliases[id(tensor)].append(name)
        self._sources, self._renamed = loaded_names(model, stored)
        self._as_stored = self._unconverted()
        self._memory = memory or MatrixMemory()

    def _unconverted(self) -> set[str]:
        """Names of the matrices that are kept in the dtype of their file."""
        linear = [name for name, module in self._model.named_modules() if type(module) is nn.Linear]
        names = [f"{name}.weight" for name in linear if f"{name}.weight" in self._tensors]
        large = [name for name in names if self._tensors[name].numel() >= AS_STORED]
        found = {name: self.stored_parameter(self._tensors[name]) for name in large}
        exact = self._dtype is torch.float32
        return {name for name, stored in found.items() if stored and (exact or stored.dtype is self._dtype)}

    def names(self, prefix: str) -> list[str]:
        """Parameters and persistent buffers of a module."""
        return [name for name in self._tensors if name.startswith(f"{prefix}.")]

    def stored_parameter(self, parameter: torch.Tensor) -> StoredTensor | None:
        """The stored tensor with the values of this parameter, up to a cast; None if it is computed from others."""
        names = [name for name in self._aliases.get(id(parameter), ()) if name in self._renamed]
        found = self._stored[self._renamed[names[0]]] if names else None
        return found if found and found.shape == tuple(parameter.shape) else None

    def keep(self, names: Iterable[str]) -> None:
        """Loads tensors that stay in memory."""
        wanted = list(names)
        self._load(wanted, stays=True)
        for name in wanted:
            self._tensors[name] = _get(self._model, name)

    @contextmanager
    def loaded(self, prefix: str) -> Iterator[None]:
        """Context in which the tensors of a module are in memory."""
        try:
            self._load([name for name in self.names(prefix) if self._tensors[name].is_meta])
            yield
        finally:
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if tensor is not self._tensors[name]:
                    _set(self._model, name, self._tensors[name])
            trim()

    def _load(self, names: list[str], *, stays: bool = False) -> None:
        self._memory.begin()
        for name in [name for name in names if name in self._as_stored]:
            if stored := self.stored_parameter(self._tensors[name]):
                value = self._memory.read(name, stored, stays=stays)
                _set(self._model, name, nn.Parameter(value, requires_grad=False))
        self._load_converted([name for name in names if name not in self._as_stored])

    def _load_converted(self, names: list[str]) -> None:
        """Loads tensors as transformers does."""
        if not names:
            return
        shared = {alias for name in names for alias in self._aliases[id(self._tensors[name])]}
        sources = {source: self._stored[source] for name in shared for source in self._sources.get(name, ())}
        load_tensors(self._model, sources, self._dtype)
        for name in names:
            _set(self._model, name, self._loaded_value(name))

    def _loaded_value(self, name: str) -> torch.Tensor:
        """The loaded value of a tensor, under its own name or that of a tensor it is tied to."""
        found = [_get(self._model, alias) for alias in self._aliases[id(self._tensors[name])]]
        value = next((tensor for tensor in found if not tensor.is_meta), None)
        if value is None:
            raise UnsupportedInput(f"`{name}` cannot be loaded by itself", hint=LOW_MEMORY_HINT)
        return value


def _get(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), last)
    return found


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)
