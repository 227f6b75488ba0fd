"""StreamedWeights: a model on the meta device, whose weights are loaded only while they are needed.

PrecomputedRunner runs many planned calls together, so that each weight is loaded once, and keeps their results in a
temporary file.

transformers loads each part itself, so that experts are stacked and matrices split as in `from_pretrained`. Bytes are
read with `pread`; no file stays mapped. Large matrices of `nn.Linear` that are stored as they are used are read as they
are stored: the product converts blocks of their rows, which takes a quarter of the memory of float64.

LazyMatrices: embedding tables and output heads that are read by rows, never as a whole. A vocabulary of 128k tokens
times a width of 4096 is 4 GB in float64. Such a matrix stays on the meta device: a lookup reads the rows of its tokens,
and a product reads one block of rows after another.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir, mkstemp
from typing import Any, Protocol, runtime_checkable
from weakref import finalize

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llmconv.errors import LlmconvError, OutputFailed, UnsupportedInput, first_line
from llmconv.files.safetensors_file import read_exactly
from llmconv.memory import trim
from llmconv.runtime.eager.stored_tensors import StoredTensor
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.library_patches import load_tensors, loaded_names
from llmconv.runtime.runner import Cache, Choices, Extras, PlacedEmbeddings, Runner, Step, refuse_placed
from llmconv.tensors import Array, lists_by_key

LOW_MEMORY_HINT = "run `llmconv verify` without `--low-memory`"
# maximum number of tokens, past ones included, of the calls that run together; their results are held in memory
MAX_TOKENS = 2048


class RunnerCall(Protocol):
    """The arguments of `Runner.prefill` without the past."""

    @property
    def input_ids(self) -> Array: ...

    @property
    def attention_mask(self) -> Array: ...

    @property
    def position_ids(self) -> Array: ...

    @property
    def extras(self) -> Extras | None: ...


class SpillFile:
    """An unlinked temporary file of arrays, which is freed with this object."""

    def __init__(self) -> None:
        self._fd, name = mkstemp(prefix="llmconv-")
        os.unlink(name)
        self._end = 0
        finalize(self, os.close, self._fd)

    def put(self, array: Array) -> SpilledArray:
        """Appends an array; raises OutputFailed if the disk is full."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        spilled = SpilledArray(self, self._end, array.shape, array.dtype)
        try:
            while content:
                count = os.pwrite(self._fd, content, self._end)
                content, self._end = content[count:], self._end + count
        except OSError as error:
            problem = f"cannot write results to `{gettempdir()}`: {first_line(error)}"
            raise OutputFailed(problem, hint="set TMPDIR to a folder with more room") from error
        return spilled

    def get(self, spilled: SpilledArray) -> Array:
        array: Array = np.empty(spilled.shape, spilled.dtype)
        read_exactly(self._fd, array.reshape(-1).view(np.uint8).data, spilled.offset, Path(gettempdir()))
        return array


@dataclass(frozen=True)
class SpilledArray:
    """An array in a `SpillFile`: its byte offset, shape and dtype."""

    file: SpillFile
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self) -> Array:
        return self.file.get(self)


@runtime_checkable
class KeyedCache(Cache, Protocol):
    """A cache that a key describes completely: equal keys, equal content."""

    @property
    def key(self) -> bytes:
        """Digest of how it came about."""


@dataclass(frozen=True)
class SpilledCache:
    """The cache after precomputed calls, kept in a file."""

    key: bytes  # hash of the calls and edits that produced it
    length: int  # number of tokens, padding included
    spilled: Mapping[str, SpilledArray]  # the arrays by name

    def arrays(self) -> dict[str, Array]:
        return {name: array.read() for name, array in self.spilled.items()}

    def edited(self, edit: ArrayEdit, mask: Array) -> EditedSpilledCache:
        """The cache with an edit; `mask` [batch, tokens] is that of the remaining tokens."""
        return EditedSpilledCache(self, edit, mask)


class ArrayEdit(Protocol):
    """A change of a cache; its text describes it completely."""

    @property
    def drop(self) -> int:
        """Number of tokens that it removes."""

    def of_array(self, name: str, array: Array, mask: Array) -> Array:
        """One changed array of a cache, given the mask of the remaining tokens."""


@dataclass(frozen=True)
class EditedSpilledCache:
    """A cache in a file with an edit made when it is read; `mask` [batch, tokens] is of the remaining tokens."""

    cache: SpilledCache
    edit: ArrayEdit
    mask: Array

    @property
    def key(self) -> bytes:
        """Digest of the cache, the edit and the mask."""
        described = f"{self.edit!r} {self.mask.shape}".encode()
        return hashlib.sha256(self.cache.key + described + self.mask.tobytes()).digest()

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        return self.cache.length - self.edit.drop

    def arrays(self) -> dict[str, Array]:
        return {name: self.edit.of_array(name, array, self.mask) for name, array in self.cache.arrays().items()}


@dataclass(frozen=True)
class _Kept:
    logits: SpilledArray
    present: SpilledCache
    choices: Choices | None


# the past of the first call, and calls that each continue the previous one
CallChain = tuple[KeyedCache | None, Sequence[RunnerCall]]


class PrecomputedRunner(Runner):
    """A runner that computes planned calls in advance; `name`, of the model or graph, is part of their keys.

    `run_all` runs calls, each after the one that it continues, together at most `limit` tokens, past ones included.
    """

    def __init__(
        self,
        name: str,
        run_all: Callable[[Sequence[PlannedCall]], list[Step]],
        file: SpillFile,
        limit: int = MAX_TOKENS,
    ) -> None:
        self._name, self._run_all, self._file, self._limit = name, run_all, file, limit
        self._kept: dict[bytes, _Kept | LlmconvError] = {}

    def precompute(self, chains: Sequence[CallChain]) -> None:
        """Runs the calls of all chains; raises UnsupportedInput if they cannot run together.

        An error of a call is raised when its result is requested.
        """
        batch: list[CallChain] = []
        tokens = 0
        for chain in chains:
            more = sum(call.attention_mask.size for call in chain[1])
            if batch and tokens + more > self._limit:
                self._run(batch)
                batch, tokens = [], 0
            batch, tokens = [*batch, chain], tokens + more
        self._run(batch)

    def _run(self, chains: Sequence[CallChain]) -> None:
        planned: dict[bytes, PlannedCall] = {}
        for past, calls in chains:
            key: bytes = past.key if past else b""
            before: KeyedCache | None = past
            for call in calls:
                parent = list(planned).index(key) if key in planned else None
                key = self._key(key, call)
                if key in self._kept:
                    kept = self._kept[key]
                    before = kept.present if isinstance(kept, _Kept) else before
                elif key not in planned:
                    given = None if parent is not None else before
                    ids, mask, positions = call.input_ids, call.attention_mask, call.position_ids
                    planned[key] = PlannedCall(ids, mask, positions, given, parent, call.extras or {})
        try:
            steps = self._run_all(list(planned.values())) if planned else []
        except UnsupportedInput:
            raise
        except LlmconvError as error:
            self._kept |= dict.fromkeys(planned, error)
            return
        for key, step in zip(planned, steps, strict=True):
            self._kept[key] = self._keep(key, step)

    def _keep(self, key: bytes, step: Step) -> _Kept:
        is_there = isinstance(step.present, SpilledCache) and step.present.spilled  # what the run wrote itself
        spilled = is_there or {name: self._file.put(array) for name, array in step.present.arrays().items()}
        return _Kept(self._file.put(step.logits), SpilledCache(key, step.present.length, spilled), step.choices)

    def _key(self, past: bytes, call: RunnerCall) -> bytes:
        content = hashlib.sha256(past + self._name.encode())
        for array in (call.input_ids, call.attention_mask, call.position_ids):
            content.update(f"{array.shape}".encode() + array.astype(np.int64).tobytes())
        for name, array in sorted((call.extras or {}).items()):
            content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return content.digest()

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        """A call that was not precomputed runs now; raises the LlmconvError of the call."""
        refuse_placed(placed)
        planned = PlannedCall(*call.arrays, extras=extras or {})
        if past is not None and not isinstance(past, KeyedCache):
            return self._run_all([replace(planned, past=past)])[0]
        kept = self._kept_call(past, planned)
        return Step(kept.logits.read(), kept.present, kept.choices)

    def present(self, past: KeyedCache | None, call: RunnerCall) -> SpilledCache:
        """The cache after a call; raises the LlmconvError of the call."""
        return self._kept_call(past, call).present

    def _kept_call(self, past: KeyedCache | None, call: RunnerCall) -> _Kept:
        key = self._key(past.key if past else b"", call)
        if key not in self._kept:
            self._run([(past, [call])])
        kept = self._kept[key]
        if isinstance(kept, LlmconvError):
            raise kept
        return kept


@dataclass(frozen=True)
class PlannedCall:
    """One of several calls of a runner; arguments as in `Runner.prefill`."""

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    past: Cache | None = None  # the cache to continue, if it exists already
    parent: int | None = None  # index of the earlier call whose cache this call continues; None if it continues `past`
    extras: Mapping[str, Array] = field(default_factory=dict)  # values of extra inputs that do not have their defaults

    @property
    def tokens(self) -> ModelCall:
        return ModelCall(self.input_ids, self.attention_mask, self.position_ids)

    @property
    def past_length(self) -> int:
        return int(self.attention_mask.shape[1] - self.input_ids.shape[1])


AS_STORED = 1 << 20  # least number of elements of a matrix that is not converted when it is read


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
    """Loads the weights of parts of a model on the meta device and drops them again.

    `memory`, of large matrices, may be shared with other runners of the same weights. Raises UnsupportedInput for a
    quantized model.
    """

    def __init__(
        self, model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, memory: MatrixMemory | None = None
    ) -> None:
        if getattr(model.config, "quantization_config", None):
            raise UnsupportedInput("a quantized model cannot be streamed", hint=LOW_MEMORY_HINT)
        self._model, self._stored, self._dtype = model, stored, dtype
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._aliases = lists_by_key((id(tensor), name) for name, tensor in self._tensors.items())
        self._sources, self._renamed = loaded_names(model, stored)
        # names of the matrices that are kept in the dtype of their file
        linear = [name for name, module in self._model.named_modules() if type(module) is nn.Linear]
        names = [f"{name}.weight" for name in linear if f"{name}.weight" in self._tensors]
        large = [name for name in names if self._tensors[name].numel() >= AS_STORED]
        found = {name: self.stored_parameter(self._tensors[name]) for name in large}
        exact = self._dtype is torch.float32
        self._as_stored = {name for name, stored in found.items() if stored and (exact or stored.dtype is self._dtype)}
        self._memory = memory or MatrixMemory()

    def names(self, prefix: str) -> list[str]:
        """Parameters and persistent buffers of a module."""
        return [name for name in self._tensors if name.startswith(f"{prefix}.")]

    def stored_parameter(self, parameter: torch.Tensor) -> StoredTensor | None:
        """The stored tensor with the values of this parameter, up to a cast; None if it is computed from others."""
        names = [name for name in self._aliases.get(id(parameter), ()) if name in self._renamed]
        found = self._stored[self._renamed[names[0]]] if names else None
        return found if found and found.shape == tuple(parameter.shape) else None

    def keep(self, names: Iterable[str]) -> None:
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
                _set(self._model, name, nn.Parameter(self._memory.read(name, stored, stays=stays), requires_grad=False))
        self._load_converted([name for name in names if name not in self._as_stored])

    def _load_converted(self, names: list[str]) -> None:
        if not names:
            return
        shared = {alias for name in names for alias in self._aliases[id(self._tensors[name])]}
        sources = {source: self._stored[source] for name in shared for source in self._sources.get(name, ())}
        load_tensors(self._model, sources, self._dtype)
        for name in names:
            # the loaded value of a tensor, under its own name or that of a tensor it is tied to
            found = [_get(self._model, alias) for alias in self._aliases[id(self._tensors[name])]]
            value = next((tensor for tensor in found if not tensor.is_meta), None)
            if value is None:
                raise UnsupportedInput(f"`{name}` cannot be loaded by itself", hint=LOW_MEMORY_HINT)
            _set(self._model, name, value)


def _get(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), last)
    return found


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


BLOCK = 1 << 21  # maximum number of elements of a matrix that is read at a time
CONVERTED = 1 << 20  # elements of a matrix that are converted at a time: a block that stays in the processor's cache


class LazyMatrices(TorchFunctionMode):
    """While active, `embedding` and `linear` read only the required rows of lazy matrices.

    `linear` also accepts a matrix in another dtype than its input, such as weights as they are stored: blocks of its
    rows are converted, so that no converted copy of the matrix is in memory.

    `matrices` are the stored tensors by the id of the meta parameter that represents them; `multiply` computes `linear`
    for the one with that id, an input and a bias.
    """

    def __init__(
        self,
        matrices: Mapping[int, StoredTensor],
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor],
    ) -> None:
        super().__init__()
        self._matrices, self._multiply = matrices, multiply

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and id(args[1]) in self._matrices:
            return self._look_up(args[0], args[1])
        if func is functional.linear and id(args[1]) in self._matrices:
            return self._multiply(id(args[1]), args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func is functional.linear and args[0].dtype is not args[1].dtype:
            return linear_by_blocks(*args, **kwargs)
        return func(*args, **kwargs)

    def _look_up(self, ids: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        stored = self._matrices[id(parameter)]
        tokens, indices = torch.unique(ids, return_inverse=True)
        rows = torch.cat([stored.rows(token, token + 1) for token in tokens.tolist()])
        return functional.embedding(indices, rows.to(parameter.dtype))


def linear_by_blocks(value: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` in the dtype of `value` [..., columns], with a matrix [rows, columns] of another dtype.

    The values of the matrix must be exact in the dtype of `value`; the bias is [rows], or None.
    """
    if matrix.dtype is value.dtype:
        return functional.linear(value, matrix, bias)
    rows, columns = matrix.shape
    step = max(1, CONVERTED // columns)
    flat = value.reshape(-1, columns)
    result = flat.new_empty((len(flat), rows))
    block = flat.new_empty((min(step, rows), columns))
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        result[:, start : start + step] = functional.linear(flat, block[: len(part)].copy_(part))
    if bias is not None:
        result += bias.to(value.dtype)
    return result.reshape(*value.shape[:-1], rows)


def product_by_rows(
    stored: StoredTensor, dtype: torch.dtype, inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> list[torch.Tensor]:
    """`linear(input, matrix, bias)`, [..., rows] in `dtype`, for several inputs; the stored matrix is read once.

    Inputs are pairs of an input [..., columns] and a bias [rows] or None.
    """
    rows, columns = stored.shape
    step = max(1, BLOCK // columns)
    values = [value.to(dtype) for value, _ in inputs]
    together = rows > step  # one product for all inputs; small ones keep the bits of a product of their own
    if together:
        values = [torch.cat([value.reshape(-1, columns) for value in values])]
    results = [value.new_empty((*value.shape[:-1], rows)) for value in values]
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        matrix = stored.rows(block.start, block.stop) if together else stored[...]
        for result, value in zip(results, values, strict=True):
            result[..., block] = linear_by_blocks(value, matrix)
    if together:
        counts = [value[..., 0].numel() for value, _ in inputs]
        shapes = [(*value.shape[:-1], rows) for value, _ in inputs]
        results = [part.reshape(shape) for part, shape in zip(torch.split(results[0], counts), shapes, strict=True)]
    biased = zip(results, inputs, strict=True)
    return [result if bias is None else result + bias.to(dtype) for result, (_, bias) in biased]


Key = tuple[torch.dtype, tuple[int, ...]]


class MatrixMemory:
    """Keeps the first matrices that are read, up to `kept` bytes; reads all others into memory that is used again.

    Several runners of the same weights share one: a matrix is then in memory once.
    """

    def __init__(self, kept: int = 0) -> None:
        self._room, self._kept = kept, dict[str, torch.Tensor]()
        self._buffers: dict[Key, list[torch.Tensor]] = defaultdict(list)
        self._used: dict[Key, int] = defaultdict(int)

    def begin(self) -> None:
        """Reads the matrices of another layer from now on: those of the one before are overwritten."""
        self._used.clear()

    def read(self, name: str, stored: StoredTensor, *, stays: bool = False) -> torch.Tensor:
        """A matrix; with `stays`, it belongs to no layer, and is kept whatever the limit."""
        if name in self._kept:
            return self._kept[name]
        size = stored.read_bytes
        if size > self._room and not stays:
            # the next buffer of that dtype and shape that this layer has not used
            key = stored.dtype, stored.shape
            if self._used[key] == len(self._buffers[key]):
                self._buffers[key].append(stored.empty())
            self._used[key] += 1
            return stored.fill(self._buffers[key][self._used[key] - 1])
        self._room -= size
        self._kept[name] = stored.fill(stored.empty())
        return self._kept[name]

    def release(self) -> None:
        self._room += sum(matrix.nbytes for matrix in self._kept.values())
        self._kept.clear()
        self._buffers.clear()
