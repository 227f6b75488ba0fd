"""PrefixedRunner: a model whose cache begins with the keys and values of a tuned prefix."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.runtime.array_cache import TOKEN_AXIS, ArrayCache, RemoteCache
from llmconv.runtime.cache_names import is_state
from llmconv.runtime.extra_inputs import PAST, POSITIONS, TOTAL, ExtraInput
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.prefix.trained import Prefix
from llmconv.runtime.runner import Cache, Extras, Runner, Step, default_positions
from llmconv.tensors import Array

OPTION = "`--prefix-tuning`"
IN_THE_GRAPH = "make it part of the graphs: `llmconv export MODEL --prefix PATH`"


class PrefixedRunner(Runner):
    """Begins every prompt with a tuned prefix: an empty past is replaced with the keys and values of the prefix.

    Callers pass masks and positions without the prefix; they are extended here.

    Args:
        runner: runs the model; `with_prefix` checks that the prefix is one of this model.
        content: keys and values `[1, kv_heads, P, head_dim]` by the names of the graph's outputs.
        first_position: position of the first token after the prefix: P or 0.
    """

    def __init__(self, runner: Runner, content: Mapping[str, Array], first_position: int) -> None:
        self._runner, self._content, self._first_position = runner, content, first_position
        self._length: int = next(iter(content.values())).shape[TOKEN_AXIS]
        self.length_switch = runner.length_switch

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens of the prefix."""
        return self._length

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        """Those of the model, without inputs of all tokens, which would have to cover the prefix."""
        known = self._runner.extra_inputs.items()
        return {name: extra for name, extra in known if not {PAST, TOTAL} & {*extra.axes}}

    @property
    def embedding_size(self) -> int | None:
        """That of the model."""
        return self._runner.embedding_size

    @property
    def max_batch_size(self) -> int | None:
        """That of the model."""
        return self._runner.max_batch_size

    @property
    def cache_capacity(self) -> int | None:
        """That of the model, without the prefix."""
        capacity = self._runner.cache_capacity
        return None if capacity is None else capacity - self._length

    def continues_in_one_run(self, batch: int, past: int, new: int) -> bool:
        """Whether the model can continue the prefix and a past in one run."""
        return self._runner.continues_in_one_run(batch, past + self._length, new)

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """Runs the prompt after the prefix."""
        given = self._after_prefix(input_ids, attention_mask, position_ids, past)
        return self._runner.prefill(*given, self._moved(extras), placed)

    def decode(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
    ) -> Step:
        """Runs one step; without a past after the prefix."""
        given = self._after_prefix(input_ids, attention_mask, position_ids, past)
        return self._runner.decode(*given, self._moved(extras))

    def _moved(self, extras: Extras | None) -> Extras | None:
        """The values with positions that count from the prefix on."""
        if extras is None or POSITIONS not in extras:
            return extras
        return {**extras, POSITIONS: extras[POSITIONS] + self._first_position}

    def _after_prefix(
        self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None
    ) -> tuple[Array, Array, Array, Cache]:
        rows = len(input_ids)
        ones = np.ones((rows, self._length), dtype=np.int64)
        mask = np.concatenate([ones, attention_mask], axis=1)
        return input_ids, mask, position_ids + self._first_position, past or self._cache(rows)

    def _cache(self, rows: int) -> Cache:
        return ArrayCache({name: np.repeat(array, rows, axis=0) for name, array in self._content.items()}, self._length)


def with_prefix(runner: Runner, prefix: Prefix) -> PrefixedRunner:
    """The model with a tuned prefix before every prompt.

    One token is run, whose cache has the names and shapes of all layers. The keys and values of a soft prompt are
    computed by the runner.

    Raises:
        InputRefused: the prefix is of another model, or longer than the cache.
        UnsupportedInput: the model keeps more than keys and values, or keeps codes of them.
        UsageProblem: the graphs contain a prefix, or the model runs in other processes.
    """
    if runner.virtual_tokens:
        raise UsageProblem(
            f"{OPTION}: the graphs begin with a prefix of {runner.virtual_tokens} tokens already",
            hint="leave the option out, or export the graphs again without `--prefix`",
        )
    capacity = runner.cache_capacity
    if capacity is not None and prefix.length >= capacity:
        raise InputRefused(
            f"the prefix has {prefix.length} tokens, but the graphs' cache has room for {capacity}",
            hint="export again with a larger --max-seq-len",
        )
    shapes = _shapes(runner)
    if prefix.kind == "soft_prompt":
        content = dict(_embedded(runner, prefix).arrays())
    else:
        layers = prefix.keys_and_values([shape for name, shape in shapes.items() if name.endswith(".key")])
        arrays = (array[None] for pair in layers for array in pair)
        content = dict(zip(shapes, arrays, strict=True))
    return PrefixedRunner(runner, content, prefix.first_position)


def _shapes(runner: Runner) -> dict[str, tuple[int, int]]:
    """(kv_heads, head_dim) by output name, read from the cache of one token: graphs may declare symbols instead."""
    ids, mask = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.int64)
    cache = runner.prefill(ids, mask, default_positions(mask, 1)).present
    if isinstance(cache, RemoteCache):
        raise UsageProblem(f"{OPTION} does not reach stages in other processes", hint=IN_THE_GRAPH)
    arrays = cache.arrays()
    reason = _reason_against(arrays)
    if reason:
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


def _embedded(runner: Runner, prefix: Prefix) -> Cache:
    """The cache of a soft prompt, whose embeddings take the places of any tokens."""
    size, (length, given) = runner.embedding_size, prefix.content.shape
    if size is None:
        raise UsageProblem(
            "a soft prompt consists of embeddings, and the graphs take tokens",
            hint=f"{IN_THE_GRAPH}; or give `--backend torch`",
        )
    if given != size:
        raise InputRefused(
            f"hidden size mismatch: the soft prompt has {given}, the model {size}",
            hint="it was trained on another model; give the prompt of this one",
        )
    ids, mask = np.zeros((1, length), dtype=np.int64), np.ones((1, length), dtype=np.int64)
    placed = PlacedEmbeddings(mask.astype(bool), prefix.content)
    return runner.prefill(ids, mask, default_positions(mask, length), placed=placed).present
