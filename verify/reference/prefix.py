"""The eager model after a trained prefix (virtual tokens): it continues the keys and values of the prefix.

The trained tensor is read from the folder; its keys and values are computed here independently of the exporter.
Layouts: peft `PeftModel.get_prompt` for `prefix_tuning`, PaddleNLP `pre_caches.npy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import read_header
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.graph_entry import PrefixEntry
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Cache, Extras, Runner, Step
from llmconv.tensors import Array

KeyValues = list[tuple[Array, Array]]
"""Key and value of each layer, `[1, kv_heads, P, head_dim]`."""

PARTS = ("key", "value")


@dataclass(frozen=True)
class PrefixStart:
    """The cache of a prefix: keys and values by layer."""

    layers: KeyValues

    @property
    def length(self) -> int:
        """Number of virtual tokens."""
        return int(self.layers[0][0].shape[2])

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`."""
        pairs = enumerate(self.layers)
        return {f"present.{layer}.{part}": a for layer, pair in pairs for part, a in zip(PARTS, pair, strict=True)}

    def of_batch(self, batch: int) -> PrefixStart:
        """The same prefix for each sequence of a batch."""
        return PrefixStart(
            [(np.repeat(key, batch, axis=0), np.repeat(value, batch, axis=0)) for key, value in self.layers]
        )


@dataclass(frozen=True)
class PrefixedRunner(Runner):
    """A runner that puts the prefix before every sequence; callers see it only in the length of the cache.

    `first_position` is added to all positions.
    """

    runner: EagerRunner
    start: PrefixStart
    first_position: int

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """As `Runner.prefill`; without a past the prefix is the past."""
        mask = np.pad(attention_mask, ((0, 0), (self.start.length, 0)), constant_values=1)
        past = past or self.start.of_batch(len(input_ids))
        return self.runner.prefill(input_ids, mask, position_ids + self.first_position, past, extras, placed)


Start = Callable[[EagerRunner], PrefixStart]
"""Keys and values of a prefix, for the precision of a runner."""

StartOf = Callable[[Path, PrefixEntry], Start]
"""The prefix of a folder."""


def trained_start(folder: Path, entry: PrefixEntry) -> Callable[[EagerRunner], PrefixStart]:
    """Computes the prefix from the trained tensor, in the precision of the runner that it is given.

    Raises:
        MalformedInput: the manifest declares an unknown kind, or the file lacks the tensor.
    """
    content = _read(folder, entry, "adapter")
    make = _MAKERS.get(entry.kind)
    if make is None:
        raise MalformedInput(
            f"unsupported prefix kind in the manifest: `{entry.kind}`", hint="run `llmconv export` again"
        )
    return lambda runner: PrefixStart(make(content, runner))


def stored_start(folder: Path, entry: PrefixEntry, layers: int) -> Callable[[EagerRunner], PrefixStart]:
    """Returns the stored keys and values of a manifest's prefix that the graphs map, for any runner."""
    names = [(f"prefix.{layer}.key", f"prefix.{layer}.value") for layer in range(layers)]
    start = PrefixStart([(_read(folder, entry, key), _read(folder, entry, value)) for key, value in names])
    return lambda runner: start


def _read(folder: Path, entry: PrefixEntry, name: str) -> Array:
    tensors = read_header(folder / entry.file).tensors if (folder / entry.file).is_file() else {}
    if name not in tensors:
        raise MalformedInput(f"missing key in `{entry.file}`: `{name}`", hint="run `llmconv export` again")
    return tensors[name].read()


def _of_rows(content: Array, runner: EagerRunner) -> KeyValues:
    """`[P, 2 * layers * heads * size]`: `view(P, 2 * layers, heads, size)`, then `permute(1, 2, 0, 3)`."""
    shapes = _shapes(runner)
    rows = content.reshape(len(content), 2 * len(shapes), *shapes[0]).transpose(1, 2, 0, 3)
    return [(rows[i : i + 1], rows[i + 1 : i + 2]) for i in range(0, len(rows), 2)]


def _of_caches(content: Array, runner: EagerRunner) -> KeyValues:
    """`[layers, 2, heads, P, size]`, keys first."""
    return [(layer[0:1], layer[1:2]) for layer in content]


def _of_embeddings(content: Array, runner: EagerRunner) -> KeyValues:
    """`[P, hidden]`: embeddings that the model runs before the tokens."""
    arrays = runner.run_embedded(content[None]).arrays()
    return [(arrays[f"present.{layer}.key"], arrays[f"present.{layer}.value"]) for layer in range(len(arrays) // 2)]


def _shapes(runner: EagerRunner) -> list[tuple[int, int]]:
    one = np.zeros((1, 1), dtype=np.int64)
    present = runner.prefill(one, one + 1, one).present.arrays()
    return [(array.shape[1], array.shape[3]) for name, array in present.items() if name.endswith(".key")]


_MAKERS: dict[str, Callable[[Array, EagerRunner], KeyValues]] = {
    "prefix_tuning": _of_rows,
    "pre_caches": _of_caches,
    "soft_prompt": _of_embeddings,
}
