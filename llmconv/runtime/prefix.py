"""The trained tensor of prefix tuning or prompt tuning, read from its file, and the runner that begins with it.

    kind           file                                       content
    prefix_tuning  PEFT `adapter_model.safetensors`           `prompt_embeddings` [P, 2 * layers * kv_heads * size]
    soft_prompt    the same, of prompt tuning and p-tuning    `prompt_embeddings` [P, hidden]
    pre_caches     PaddleNLP `pre_caches.npy`                 [layers, 2, kv_heads, P, size]

A row of prefix tuning contains the key of layer 0, its value, the key of layer 1, … (peft, `PeftModel.get_prompt`). In
PEFT the first token follows the P virtual tokens and has position P; PaddleNLP's models count tokens from 0, and keys
of the prefix are not rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.files.safetensors_file import read_header
from llmconv.runtime.extra_inputs import PAST, POSITIONS, TOTAL, ExtraInput, ModelCall, is_state
from llmconv.runtime.runner import (
    TOKEN_AXIS,
    ArrayCache,
    Cache,
    Extras,
    PlacedEmbeddings,
    RemoteCache,
    Runner,
    Step,
    default_positions,
)
from llmconv.tensors import Array

PRE_CACHES = "pre_caches.npy"
EMBEDDINGS = "prompt_embeddings"
# PEFT's `peft_type` to the kind in the table above
KINDS = {"PREFIX_TUNING": "prefix_tuning", "PROMPT_TUNING": "soft_prompt", "P_TUNING": "soft_prompt"}
KeyValue = tuple[Array, Array]  # key and value of one layer, float32 `[kv_heads, P, head_dim]`


@dataclass(frozen=True)
class Prefix:
    """Virtual tokens before every prompt."""

    kind: str  # as in the table of the module's docstring
    content: Array  # the trained tensor, float32, in its stored shape
    length: int  # number of virtual tokens
    first_position: int  # position of the first token of a prompt

    def keys_and_values(self, shapes: list[tuple[int, int]]) -> list[KeyValue]:
        """Keys and values by layer, not of a `soft_prompt`; `shapes` are (kv_heads, head_dim); raises InputRefused."""
        return (_split_rows if self.kind == "prefix_tuning" else _split_caches)(self.content, shapes)


def open_prefix(path: Path) -> Prefix:
    """Reads a PEFT adapter folder, a folder with `pre_caches.npy`, or that file; raises InputRefused for others."""
    if not path.exists():
        raise InputRefused(f"`{path}` does not exist", hint="give the folder of a prefix or prompt tuning adapter")
    if path.name == PRE_CACHES and path.is_file():
        return _pre_caches(path)
    if (path / PRE_CACHES).is_file():
        return _pre_caches(path / PRE_CACHES)
    if (path / ADAPTER_CONFIG).is_file():
        found = read_json(path / ADAPTER_CONFIG).get("peft_type")
        if found not in KINDS:
            hint = f"a prefix is one of {', '.join(KINDS)}; `llmconv merge-lora` merges the others into the weights"
            raise UnsupportedInput(f"unsupported prefix: `{path}` is an adapter of type `{found}`", hint=hint)
        if not (path / ADAPTER_WEIGHTS).is_file():
            problem = f"`{path}` has no `{ADAPTER_WEIGHTS}`"
            raise InputRefused(problem, hint="save the adapter with `save_pretrained`, as safetensors")
        tensors = read_header(path / ADAPTER_WEIGHTS).tensors
        if set(tensors) != {EMBEDDINGS}:
            raise MalformedInput(
                f"`{ADAPTER_WEIGHTS}` contains {', '.join(sorted(tensors)[:3]) or 'nothing'} instead of `{EMBEDDINGS}`",
                hint="save the adapter again with `save_pretrained`, out of training mode",
            )
        content = tensors[EMBEDDINGS].read().astype(np.float32)
        if content.ndim != 2 or not content.size:
            problem = f"invalid shape of `{EMBEDDINGS}`: {list(content.shape)}"
            raise MalformedInput(problem, hint="it must have one row per virtual token")
        return Prefix(KINDS[found], content, len(content), len(content))
    hint = f"give a PEFT adapter with `{ADAPTER_CONFIG}`, or a folder with PaddleNLP's `{PRE_CACHES}`"
    raise InputRefused(f"`{path}` does not contain a prefix", hint=hint)


def _pre_caches(path: Path) -> Prefix:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)  # refuses a shape larger than the file
    except (ValueError, OSError, EOFError) as error:
        raise MalformedInput(f"`{path}` is not an array: {error}", hint="copy the file again") from error
    if not isinstance(content, np.ndarray):
        raise MalformedInput(f"`{path}` is not an array", hint="copy the file again")
    if content.dtype in (np.uint16, np.dtype("V2")):  # bfloat16 as saved by PaddleNLP and by numpy
        content = content.view(ml_dtypes.bfloat16)
    is_float = content.dtype.kind == "f" or content.dtype == ml_dtypes.bfloat16
    if not is_float or content.ndim != 5 or content.shape[1] != 2 or not content.size:
        problem = f"`{path}` is not a prefix: {content.dtype} {list(content.shape)}"
        raise MalformedInput(problem, hint="it must be an array of floats [layers, 2, kv_heads, tokens, head_dim]")
    return Prefix("pre_caches", content.astype(np.float32), content.shape[3], 0)


def _split_rows(content: Array, shapes: list[tuple[int, int]]) -> list[KeyValue]:
    length = len(content)
    widths = [heads * size for heads, size in shapes for _ in range(2)]
    if content.shape[1] != sum(widths):
        _refuse(f"{content.shape[1]} numbers per token", f"{sum(widths)}")
    parts = np.split(content, np.cumsum(widths)[:-1], axis=1)
    heads_first = [
        part.reshape(length, heads, size).transpose(1, 0, 2)
        for part, (heads, size) in zip(parts, [shape for shape in shapes for _ in range(2)], strict=True)
    ]
    return list(zip(heads_first[::2], heads_first[1::2], strict=True))


def _split_caches(content: Array, shapes: list[tuple[int, int]]) -> list[KeyValue]:
    found = [(content.shape[2], content.shape[4])] * content.shape[0]
    if found != shapes:
        _refuse(f"{len(found)} layers of (kv_heads, head_dim) {found[0]}", f"{len(shapes)} of {shapes[0]}")
    return [(layer[0], layer[1]) for layer in content]


def _refuse(found: str, wanted: str) -> Any:
    problem = f"shape mismatch for the prefix: expected {wanted}, got {found}"
    raise InputRefused(problem, hint="it was trained on another model; give the prefix of this one")


OPTION = "`--prefix-tuning`"
IN_THE_GRAPH = "make it part of the graphs: `llmconv export MODEL --prefix PATH`"


class PrefixedRunner(Runner):
    """Begins every prompt with a tuned prefix: an empty past is replaced with the keys and values of the prefix.

    Callers pass masks and positions without it; they are extended here. `with_prefix` has checked that its `content`,
    [1, kv_heads, P, head_dim] by names of the graph's outputs, is of the model of `runner`; `first_position`, P or 0,
    is that of the token after it.
    """

    def __init__(self, runner: Runner, content: Mapping[str, Array], first_position: int) -> None:
        self._runner, self._content, self._first_position = runner, content, first_position
        self._length: int = next(iter(content.values())).shape[TOKEN_AXIS]
        self.length_switch = runner.length_switch

    @property
    def virtual_tokens(self) -> int:
        return self._length

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        """Those of the model, without inputs of all tokens, which would have to cover the prefix."""
        return {name: extra for name, extra in self._runner.extra_inputs.items() if not {PAST, TOTAL} & {*extra.axes}}

    @property
    def embedding_size(self) -> int | None:
        return self._runner.embedding_size

    @property
    def max_batch_size(self) -> int | None:
        return self._runner.max_batch_size

    @property
    def cache_capacity(self) -> int | None:
        capacity = self._runner.cache_capacity
        return None if capacity is None else capacity - self._length

    def continues_in_one_run(self, batch: int, past: int, new: int) -> bool:
        return self._runner.continues_in_one_run(batch, past + self._length, new)

    def scores_all(self, past: int, new: int) -> bool:
        return self._runner.scores_all(past + self._length, new)

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        given = *self._after_prefix(call, past), self._moved(extras), placed
        return self._runner.prefill(*given, last_only=call.last_only)

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        return self._runner.decode(*self._after_prefix(call, past), self._moved(extras))

    def _moved(self, extras: Extras | None) -> Extras | None:
        """The values with positions that count from the prefix on."""
        if extras is None or POSITIONS not in extras:
            return extras
        return {**extras, POSITIONS: extras[POSITIONS] + self._first_position}

    def _after_prefix(self, call: ModelCall, past: Cache | None) -> tuple[Array, Array, Array, Cache]:
        return *call.after(self._length, self._first_position).arrays, past or self._cache(len(call.input_ids))

    def _cache(self, rows: int) -> Cache:
        return ArrayCache({name: np.repeat(array, rows, axis=0) for name, array in self._content.items()}, self._length)


def with_prefix(runner: Runner, prefix: Prefix) -> PrefixedRunner:
    """The model with a tuned prefix before every prompt; it computes the keys and values of a soft prompt.

    One token is run, whose cache has the names and shapes of all layers. Raises InputRefused for a prefix of another
    model, or longer than the cache; UnsupportedInput if more than keys and values, or codes of them, are kept;
    UsageProblem if the graphs contain a prefix, or the model runs in other processes.
    """
    if runner.virtual_tokens:
        problem = f"{OPTION}: the graphs begin with a prefix of {runner.virtual_tokens} tokens already"
        raise UsageProblem(problem, hint="leave the option out, or export the graphs again without `--prefix`")
    if (capacity := runner.cache_capacity) is not None and prefix.length >= capacity:
        problem = f"the prefix has {prefix.length} tokens, but the graphs' cache has room for {capacity}"
        raise InputRefused(problem, hint="export again with a larger --max-seq-len")
    shapes = _shapes(runner)
    if prefix.kind == "soft_prompt":
        # the cache of a soft prompt, whose embeddings take the places of any tokens
        size, (length, given) = runner.embedding_size, prefix.content.shape
        if size is None:
            problem = "a soft prompt consists of embeddings, and the graphs take tokens"
            raise UsageProblem(problem, hint=f"{IN_THE_GRAPH}; or give `--backend torch`")
        if given != size:
            problem = f"hidden size mismatch: the soft prompt has {given}, the model {size}"
            raise InputRefused(problem, hint="it was trained on another model; give the prompt of this one")
        ids, mask = np.zeros((1, length), dtype=np.int64), np.ones((1, length), dtype=np.int64)
        placed = PlacedEmbeddings(mask.astype(bool), prefix.content)
        content = dict(runner.prefill(ids, mask, default_positions(mask, length), placed=placed).present.arrays())
    else:
        layers = prefix.keys_and_values([shape for name, shape in shapes.items() if name.endswith(".key")])
        content = dict(zip(shapes, (array[None] for pair in layers for array in pair), strict=True))
    return PrefixedRunner(runner, content, prefix.first_position)


def _shapes(runner: Runner) -> dict[str, tuple[int, int]]:
    """(kv_heads, head_dim) by output name, read from the cache of one token: graphs may declare symbols instead."""
    ids, mask = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.int64)
    cache = runner.prefill(ids, mask, default_positions(mask, 1)).present
    if isinstance(cache, RemoteCache):
        raise UsageProblem(f"{OPTION} does not reach stages in other processes", hint=IN_THE_GRAPH)
    arrays = cache.arrays()
    if reason := _reason_against(arrays):
        raise UnsupportedInput(f"{OPTION}: {reason}", hint="only models that cache keys and values can have a prefix")
    return {name: (array.shape[1], array.shape[3]) for name, array in arrays.items()}


def _reason_against(arrays: Mapping[str, Array]) -> str:
    """Why a cache cannot begin with a prefix; empty if it can."""
    if not arrays or any(is_state(name) for name in arrays):
        return "this model keeps more than keys and values"
    if any(array.dtype.kind in "iu" for array in arrays.values()):
        return "the graphs keep 8-bit codes of keys and values (`export --kv-cache`), and a prefix has numbers"
    keys, values = list(arrays.values())[::2], list(arrays.values())[1::2]
    if any(key.shape != value.shape for key, value in zip(keys, values, strict=True)):
        return "keys and values of this model differ in shape"
    return ""
