"""OrtRunner: the exported graphs in onnxruntime; the cache stays in onnxruntime's memory between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.errors import InputRefused, LlmconvError, MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.cache_names import is_past, is_present, is_state
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS, INPUTS_EMBEDS, EmbeddingGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, PrefixEntry, graph_entries
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.session_settings import (
    SessionSettings as SessionSettings,  # its users look for it here
)
from llmconv.runtime.onnxruntime.shared_buffers import BufferedSession, FixedSizes
from llmconv.runtime.onnxruntime.staged_session import SessionChain
from llmconv.runtime.onnxruntime.time_limit import TOO_LONG
from llmconv.runtime.runner import Cache, Choices, Step
from llmconv.tensors import Array

TENSOR_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


@dataclass(frozen=True)
class OrtCache:
    """Keys, values and states as OrtValues.

    Attributes:
        names: of the graph's outputs.
        values: one for each name.
        length: tokens in the cache, padding included.
    """

    names: Sequence[str]
    values: Sequence[ort.OrtValue]
    length: int

    def arrays(self) -> dict[str, Array]:
        """By name, see `Cache.arrays`."""
        return {name: value.numpy() for name, value in zip(self.names, self.values, strict=True)}

    @classmethod
    def of(cls, cache: Cache) -> OrtCache:
        """The cache of another runner."""
        arrays = cache.arrays()
        values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for array in arrays.values()]
        return cls(list(arrays), values, cache.length)


LENGTH_AXIS = 2
"""Of keys and values."""


class OrtGraph:
    """One graph in one session, or one per stage; what it takes is read from what the session declares.

    Attributes:
        entry: what the manifest says of it.
        name: the file's name.
        inputs, outputs: name to declared shape (ints and symbols), in the graph's order.
        dtype: element type of the logits.
        sizes: of a graph that fills buffers in place; None where the cache grows.

    Raises:
        MalformedInput: the guard or onnxruntime refuses the file.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None, *, entry: GraphEntry | None = None) -> None:
        self.entry = entry or GraphEntry("", (path.name,))
        settings = settings or SessionSettings()
        settings = replace(settings, yields=settings.yields or len(self.entry.files) > 1)
        self.name = self.entry.name
        self._fixed = settings.free_dimensions
        self._session = self._connect(self.entry.paths(path.parent), settings)
        declared, results = self._session.get_inputs(), self._session.get_outputs()
        self.inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in declared}
        self.outputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in results}
        self.types: dict[str, str] = {arg.name: arg.type for arg in [*declared, *results]}
        self.past_names = [arg.name for arg in declared if is_past(arg.name)]
        self.present_names = [arg.name for arg in results if is_present(arg.name)]
        self._grows = [at for at, name in enumerate(self.present_names) if not is_state(name)]
        self.result_names = ["logits"] if "logits" in self.outputs else ["tokens", "scores"]
        self.takes_positions = "position_ids" in self.inputs
        self.dtype = np.dtype(TENSOR_DTYPES.get(self.types.get(self.result_names[-1], ""), np.float32))
        single = "GroupQueryAttention" in self._session.op_types
        self.sizes = FixedSizes.of(self.inputs, self.outputs, single, steps=self.entry.role == "decode")
        self._table = None  # what turns tokens into the input of a graph that takes none itself
        if INPUTS_EMBEDS in self.inputs:
            beside = beside_another(settings)
            self._table = EmbeddingGraph(path.with_name(EMBEDDINGS), beside)
        self._buffered = None
        if self.sizes:
            self._buffered = BufferedSession(
                self._session.whole, self.sizes, self.result_names, self.embed, settings.garbage
            )

    def _connect(self, paths: Sequence[Path], settings: SessionSettings) -> Any:
        """What declares inputs and outputs, and runs."""
        rest = (settings.prepack, settings.change, settings.timeout)
        return SessionChain(paths, settings.options(), settings.providers(), *rest)

    def embed(self, input_ids: Array) -> dict[str, Array]:
        """`input_ids`, or `inputs_embeds` where the graph takes those."""
        return {"input_ids": input_ids} if self._table is None else {INPUTS_EMBEDS: self._table.run(input_ids)}

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Continues `past` by `input_ids`; arguments as in `Runner.prefill`.

        Raises:
            MalformedInput: onnxruntime cannot run the graph on them.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        try:
            results, present = self._buffered.run(**given, past=past) if self._buffered else self._grow(given, past)
        except LlmconvError:
            raise
        except TimeoutError as error:
            raise MalformedInput(f"`{self.name}` cannot be run: {error}", hint=TOO_LONG) from error
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise_if_out_of_memory(error, f"in `{self.name}`")
            fixed = ", ".join(f"{name} = {size}" for name, size in self._fixed.items())
            hint = f"free dimensions are fixed to {fixed}" if fixed else "run `llmconv verify` on the folder"
            raise MalformedInput(f"`{self.name}` fails in onnxruntime: {first_line(error)}", hint=hint) from error
        return self._step(results, present)

    def _grow(self, given: dict[str, Array], past: Cache | None) -> tuple[list[Array], Cache]:
        """Runs a graph whose present is its past and what is new."""
        tokens = {**given, **self.embed(given["input_ids"])}
        feeds = {name: as_input(array) for name, array in tokens.items() if name in self.inputs}
        feeds |= zip(self.past_names, self._past_values(past, len(given["input_ids"])), strict=False)
        outputs = self._session.run_with_ort_values([*self.result_names, *self.present_names], feeds)
        results = [value.numpy() for value in outputs[: len(self.result_names)]]
        present = outputs[len(self.result_names) :]
        lengths = [present[at].shape()[LENGTH_AXIS] for at in self._grows]
        return results, OrtCache(self.present_names, present, max(lengths, default=given["attention_mask"].shape[1]))

    def _step(self, results: Sequence[Array], present: Cache) -> Step:
        if self.result_names == ["logits"]:
            return Step(results[0], present)
        # argmax has no last axis
        tokens, scores = (array if array.ndim == 3 else array[..., None] for array in results)
        return Step(np.empty((*tokens.shape[:2], 0), np.float32), present, Choices(tokens, scores))

    def _past_values(self, past: Cache | None, batch: int) -> Sequence[ort.OrtValue]:
        if past is None:
            return [self._empty(name, batch) for name in self.past_names]
        return past.values if isinstance(past, OrtCache) else OrtCache.of(past).values

    def _empty(self, name: str, batch: int) -> ort.OrtValue:
        """No keys and values at all, or a state of zeros.

        A symbol is the length, or stands for heads and head size: `--layout optimum` leaves them open, and such a graph
        gives an empty past its shape itself.
        """
        named = self.inputs[name]
        shape = [axis if isinstance(axis, int) else int(at != LENGTH_AXIS) for at, axis in enumerate(named)]
        dtype = TENSOR_DTYPES.get(self.types[name], np.float32)
        return ort.OrtValue.ortvalue_from_numpy(np.zeros([batch, *shape[1:]], dtype))


class OrtRunner:
    """The prefill graph for the prompt and the decode graph for the steps; one graph may serve as both.

    A prefix of the prefill graph does not show: masks and positions are given as if there were none.
    """

    def __init__(self, prefill: OrtGraph, decode: OrtGraph) -> None:
        self._prefill, self._decode = prefill, decode
        self._prefix = prefill.entry.prefix

    @classmethod
    def from_folder(cls, folder: Path, settings: SessionSettings | None = None) -> OrtRunner:
        """The graphs that `llmconv export` left in `folder`.

        Raises:
            InputRefused: there are none.
            MalformedInput: one cannot be used.
        """
        entries = {entry.role: entry for entry in graph_entries(folder)}
        if {"prefill", "decode"} <= entries.keys():
            prefill = open_graph(folder, entries["prefill"], beside_another(settings))
            return cls(prefill, open_graph(folder, entries["decode"], settings))
        if not entries:
            raise InputRefused(
                f"`{folder}` holds no graphs", hint=f"make them: `llmconv export {folder}`, or give `--backend torch`"
            )
        graph = open_graph(folder, entries.get("unified") or next(iter(entries.values())), settings)
        return cls(graph, graph)

    @classmethod
    def from_files(
        cls, prefill: Path, decode: Path | None = None, settings: SessionSettings | None = None
    ) -> OrtRunner:
        """Graphs by their paths; the first serves as both where there is no second.

        Raises:
            MalformedInput: one cannot be used.
        """
        if decode is not None:
            return cls(_open_file(prefill, beside_another(settings)), _open_file(decode, settings))
        graph = _open_file(prefill, settings)
        return cls(graph, graph)

    @property
    def virtual_tokens(self) -> int:
        """Slots of the cache before the first token of a prompt: those of a tuned prefix."""
        return self._prefix.length if self._prefix else 0

    @property
    def sequences(self) -> int | None:
        """The most rows of a call; None for any number."""
        return self._least("rows")

    @property
    def slots(self) -> int | None:
        """Tokens that the cache has room for, those of a tuned prefix left out; None for any number."""
        slots = self._least("slots")
        return None if slots is None else slots - self.virtual_tokens

    def goes_on(self, rows: int, past: int, new: int) -> bool:
        """Whether the prefill graph takes `new` tokens after `past` ones in one run, with as many rows."""
        sizes = self._prefill.sizes
        if sizes is None:
            return True
        fits = not sizes.refusal(rows, past + self.virtual_tokens, new)
        return fits and (new == 1 or sizes.width(rows, past, new) > 1)

    def _least(self, name: str) -> int | None:
        sizes = [getattr(graph.sizes, name) for graph in (self._prefill, self._decode) if graph.sizes]
        return min((size for size in sizes if size is not None), default=None)

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs the prompt on the prefill graph."""
        return self._prefill.run(input_ids, *self._behind_prefix(attention_mask, position_ids, past), past)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs a step on the decode graph."""
        graph = self._prefill if self._prefix and past is None else self._decode  # only that one has the prefix
        return graph.run(input_ids, *self._behind_prefix(attention_mask, position_ids, past), past)

    def _behind_prefix(self, attention_mask: Array, position_ids: Array, past: Cache | None) -> tuple[Array, Array]:
        """Mask and positions for a cache that begins with the prefix."""
        if self._prefix is None or past is None:
            return attention_mask, position_ids
        return behind_prefix(attention_mask, position_ids, self._prefix)


def beside_another(settings: SessionSettings | None) -> SessionSettings:
    """For a graph whose threads must leave the cores to those of another as soon as it is done."""
    return replace(settings or SessionSettings(), yields=True)


def behind_prefix(attention_mask: Array, position_ids: Array, prefix: PrefixEntry) -> tuple[Array, Array]:
    """Mask and positions of tokens whose cache begins with a prefix, from those of the same tokens without one."""
    ones = np.ones((len(attention_mask), prefix.length), dtype=np.int64)
    return np.concatenate([ones, attention_mask], axis=1), position_ids + prefix.first_position


def open_graph(folder: Path, entry: GraphEntry, settings: SessionSettings | None = None) -> OrtGraph:
    """A graph of a folder, see `OrtGraph`."""
    return OrtGraph(folder / entry.files[0], settings, entry=entry)


def _open_file(path: Path, settings: SessionSettings | None) -> OrtGraph:
    """A graph by its path, as the manifest beside it describes it; any of its stages stands for all."""
    entries = [entry for entry in graph_entries(path.parent) if path.name in entry.files]
    return open_graph(path.parent, entries[0] if entries else GraphEntry("", (path.name,)), settings)
