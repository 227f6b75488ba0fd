"""OrtRunner: the exported graphs in onnxruntime; the cache stays in onnxruntime's memory between calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from llmconv.errors import InputRefused, LlmconvError, MalformedInput
from llmconv.manifest import read_manifest
from llmconv.runtime.buffers import BufferedSession, FixedSizes, as_input
from llmconv.runtime.embeddings import EMBEDDINGS, INPUTS_EMBEDS, EmbeddingGraph
from llmconv.runtime.guard import load_guarded, nodes
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}
PAST_NAME = re.compile(r"past_key_values\.(\d+)\.(key|value)")
TENSOR_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}

LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disable": "ORT_DISABLE_ALL",
}


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime opens a graph.

    Attributes:
        threads: threads per operator, 0 for one per core.
        prepack: copies weights into a layout of its own: prefill 20-25 % faster, but each session then holds the
            weights once more and two sessions no longer share the mapped file.
        optimization: `all`, `extended`, `basic` or `disable`.
        garbage: buffers of a fixed length start with large numbers in place of zeros, for `verify`.
    """

    threads: int = 0
    prepack: bool = False
    optimization: str = "all"
    garbage: bool = False

    def options(self) -> ort.SessionOptions:
        """As onnxruntime's own object."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # failures are raised, so that they are told once
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[self.optimization])
        options.add_session_config_entry("session.disable_prepacking", "0" if self.prepack else "1")
        return options


@dataclass(frozen=True)
class OrtCache:
    """Keys and values as OrtValues: key and value of layer 0, of layer 1, …"""

    values: Sequence[ort.OrtValue]

    @property
    def length(self) -> int:
        """Tokens in the cache, padding included."""
        return int(self.values[0].shape()[2]) if self.values else 0

    def arrays(self) -> list[tuple[Array, Array]]:
        """Key and value by layer, each [batch, kv_heads, length, head_dim]."""
        arrays = [value.numpy() for value in self.values]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    @classmethod
    def of(cls, arrays: Sequence[tuple[Array, Array]]) -> OrtCache:
        """A cache from numpy arrays by layer."""
        return cls([ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for pair in arrays for array in pair])


class OrtGraph:
    """One graph in one session; what it takes is read from what the session declares.

    Attributes:
        name: the file's name.
        inputs, outputs: name to declared shape (ints and symbols), in the graph's order.
        dtype: element type of the logits.
        sizes: of a graph that fills buffers in place; None where the cache grows.

    Raises:
        MalformedInput: the guard or onnxruntime refuses the file.
    """

    def __init__(self, path: Path, settings: SessionSettings | None = None) -> None:
        model = load_guarded(path)
        settings = settings or SessionSettings()
        self.name = path.name
        try:
            self._session = ort.InferenceSession(path, settings.options(), ["CPUExecutionProvider"])
            self._embeddings = self._embedding_graph(path, settings)
        except LlmconvError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise MalformedInput(
                f"onnxruntime cannot open `{path.name}`: {_first_line(error)}", hint="run `llmconv export` again"
            ) from error
        declared, results = self._session.get_inputs(), self._session.get_outputs()
        self.inputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in declared}
        self.outputs: dict[str, list[int | str]] = {arg.name: arg.shape for arg in results}
        self.types: dict[str, str] = {arg.name: arg.type for arg in [*declared, *results]}
        self.past_names = [arg.name for arg in declared if PAST_NAME.fullmatch(arg.name)]
        self.present_names = [arg.name for arg in results if arg.name.startswith("present.")]
        self.takes_positions = "position_ids" in self.inputs
        self.dtype = np.dtype(TENSOR_DTYPES.get(self.types.get("logits", ""), np.float32))
        single = any(node.op_type == "GroupQueryAttention" for node in nodes(model))
        self.sizes = FixedSizes.of(self.inputs, self.outputs, single)
        self._buffered = (
            BufferedSession(self._session, self.sizes, self.embed, settings.garbage) if self.sizes else None
        )

    def _embedding_graph(self, path: Path, settings: SessionSettings) -> EmbeddingGraph | None:
        """What turns tokens into the input of a graph that takes none itself."""
        if not any(port.name == INPUTS_EMBEDS for port in self._session.get_inputs()):
            return None
        return EmbeddingGraph(path.with_name(EMBEDDINGS), settings.options())

    def embed(self, input_ids: Array) -> dict[str, Array]:
        """`input_ids`, or `inputs_embeds` where the graph takes those."""
        if self._embeddings is None:
            return {"input_ids": input_ids}
        return {INPUTS_EMBEDS: self._embeddings.run(input_ids)}

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Continues `past` by `input_ids`; arguments as in `Runner.prefill`.

        Raises:
            MalformedInput: onnxruntime cannot run the graph on them.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        try:
            if self._buffered:
                return self._buffered.run(**given, past=past)
            return self._grow(given, past)
        except LlmconvError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise MalformedInput(
                f"`{self.name}` fails in onnxruntime: {_first_line(error)}", hint="run `llmconv verify` on the folder"
            ) from error

    def _grow(self, given: dict[str, Array], past: Cache | None) -> Step:
        """Runs a graph whose present is its past and what is new."""
        rows = len(given["input_ids"])
        tokens = {**given, **self.embed(given["input_ids"])}
        feeds = {name: as_input(array) for name, array in tokens.items() if name in self.inputs}
        feeds |= zip(self.past_names, self._past_values(past, rows), strict=False)
        logits, *present = self._session.run_with_ort_values(["logits", *self.present_names], feeds)
        return Step(logits.numpy(), OrtCache(present))

    def _past_values(self, past: Cache | None, batch: int) -> Sequence[ort.OrtValue]:
        if past is None:
            return [self._empty(name, batch) for name in self.past_names]
        return past.values if isinstance(past, OrtCache) else OrtCache.of(past.arrays()).values

    def _empty(self, name: str, batch: int) -> ort.OrtValue:
        shape = self.inputs[name]
        dtype = TENSOR_DTYPES.get(self.types[name], np.float32)
        return ort.OrtValue.ortvalue_from_shape_and_type([batch, int(shape[1]), 0, int(shape[3])], dtype)


class OrtRunner:
    """The prefill graph for the prompt and the decode graph for the steps; one graph may serve as both."""

    def __init__(self, prefill: OrtGraph, decode: OrtGraph) -> None:
        self._prefill, self._decode = prefill, decode

    @classmethod
    def from_folder(cls, folder: Path, settings: SessionSettings | None = None) -> OrtRunner:
        """The graphs that `llmconv export` left in `folder`.

        Raises:
            InputRefused: there are none.
            MalformedInput: one cannot be used.
        """
        files = graph_files(folder)
        if {"prefill", "decode"} <= files.keys():
            return cls(OrtGraph(files["prefill"], settings), OrtGraph(files["decode"], settings))
        if not files:
            raise InputRefused(
                f"`{folder}` holds no graphs", hint=f"make them: `llmconv export {folder}`, or give `--backend torch`"
            )
        decoders = [path for path in files.values() if path.name != EMBEDDINGS]
        graph = OrtGraph(files.get("unified") or decoders[0], settings)
        return cls(graph, graph)

    def prefill(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs the prompt on the prefill graph."""
        return self._prefill.run(input_ids, attention_mask, position_ids, past)

    def decode(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """Runs a step on the decode graph."""
        return self._decode.run(input_ids, attention_mask, position_ids, past)


def graph_files(folder: Path) -> dict[str, Path]:
    """Role (`prefill`, `decode`, `unified`) to file: as the manifest says, else by the usual names.

    Raises:
        MalformedInput: the manifest names a file that is no plain name.
    """
    listed = read_manifest(folder).graphs
    names = {role: entry.get("file", "") for role, entry in listed.items()} or {
        role: name for role, name in GRAPH_FILES.items() if (folder / name).is_file()
    }
    for role, name in names.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise MalformedInput(f"the manifest names {name!r} as the {role} graph", hint="run `llmconv export` again")
    return {role: folder / name for role, name in names.items()}


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
