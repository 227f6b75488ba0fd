"""OrtRunner: runs prompts and steps on exported graphs with onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.files.sources import export_command
from llmconv.output.manifest import GraphEntry, graph_entries, single_pass_entries
from llmconv.runtime.extra_inputs import HIDDEN, ExtraInput, ModelCall
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.session_settings import (
    SessionSettings,
    WidenedWeights,
    for_concurrent_use,
    short_provider,
)
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Runner, Step
from llmconv.tensors import Array


class OrtRunner(Runner):
    """The prefill graph for the prompt, the decode graph (or the same) for steps; masks lack the tuned prefix."""

    def __init__(self, prefill: OrtGraph, decode: OrtGraph) -> None:
        self._prompt_graph, self._step_graph = prefill, decode
        self._prefix = prefill.entry.prefix

    @classmethod
    def from_folder(cls, folder: Path, settings: SessionSettings | None = None, options: str = "") -> OrtRunner:
        """The graphs that `llmconv export` wrote to `folder`; InputRefused without any, MalformedInput if invalid.

        `options` follow the folder in the `llmconv export` of the hint, such as ` --lora-inputs all-linear`.
        """
        entries = {entry.role: entry for entry in graph_entries(folder)}
        if {"prefill", "decode"} <= entries.keys():
            return cls(*_open_pair(folder, entries["prefill"], entries["decode"], settings))
        if not entries:
            others = [entry.name for entry in single_pass_entries(folder)]
            raise InputRefused(
                f"`{folder}` has no graphs that generate" + (f", only `{others[0]}` without a cache" if others else ""),
                hint=f"run `{export_command(folder, options)}`, or give `--backend torch`"
                + ("; `llmconv embed` runs graphs of embeddings, classes and scores" if others else ""),
            )
        graph = require_right(
            open_graph(folder, entries.get("unified") or next(iter(entries.values())), settings), settings
        )
        return cls(graph, graph)

    @classmethod
    def from_files(
        cls, prefill: Path, decode: Path | None = None, settings: SessionSettings | None = None
    ) -> OrtRunner:
        """Graphs by their paths, `prefill` for the steps, too, if alone; MalformedInput if one is invalid."""
        if decode is None:
            graph = require_right(open_graph(prefill.parent, _entry_of(prefill), settings), settings)
            return cls(graph, graph)
        entries = _entry_of(prefill), _entry_of(decode)
        if prefill.parent.resolve() == decode.parent.resolve():
            return cls(*_open_pair(prefill.parent, *entries, settings))
        first = require_right(open_graph(prefill.parent, entries[0], for_concurrent_use(settings)), settings)
        return cls(first, require_right(open_graph(decode.parent, entries[1], settings), settings))

    @property
    def lora_inputs(self) -> Mapping[str, Sequence[int | str]]:
        """Declared shapes of the inputs for LoRA factors that all graphs have, by name."""
        others = self._step_graph.lora_inputs
        return {name: shape for name, shape in self._prompt_graph.lora_inputs.items() if others.get(name) == shape}

    def with_factors(self, factors: Mapping[str, Array]) -> OrtRunner:
        """The same graphs, sharing their memory, with the LoRA factors of an adapter.

        `factors` are A [rank, in] and B [out, rank] by input name, see `lora_names`; others keep the base model's.
        Raises InputRefused if the graphs have no such inputs, or inputs of other shapes.
        """
        from llmconv.runtime.onnxruntime.lora_names import require_factors  # noqa: PLC0415 - most models have none

        require_factors(factors, self.lora_inputs)
        prefill = self._prompt_graph.with_factors(factors)
        is_one = self._step_graph is self._prompt_graph
        made = OrtRunner(prefill, prefill if is_one else self._step_graph.with_factors(factors))
        made.length_switch = self.length_switch
        return made

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens of the prefill graph's tuned prefix."""
        return self._prefix.length if self._prefix else 0

    @property
    def returns_hidden(self) -> bool:
        """Whether all graphs return the hidden state that an MTP head reads."""
        return HIDDEN in self._prompt_graph.outputs and HIDDEN in self._step_graph.outputs

    @property
    def dtype(self) -> np.dtype[Any]:
        """The float type that the prefill graph computes in."""
        return self._prompt_graph.dtype

    @property
    def max_batch_size(self) -> int | None:
        """The smallest fixed batch size of the graphs."""
        return self._smallest("rows")

    @property
    def cache_capacity(self) -> int | None:
        """The smallest fixed cache length of the graphs."""
        capacity = self._smallest("capacity")
        return None if capacity is None else capacity - self.virtual_tokens

    def continues_in_one_run(self, batch: int, past: int, new: int) -> bool:
        """Whether the fixed sizes of the prefill graph allow that in one run."""
        if (sizes := self._prompt_graph.sizes) is None:
            return True
        fits = not sizes.refusal(batch, past + self.virtual_tokens, new)
        return fits and (new == 1 or sizes.width(batch, past, new) > 1)

    def scores_all(self, past: int, new: int) -> bool:
        graph = self._step_graph
        if graph.scores_last or graph.rounds_activations or not graph.is_on_host:
            return False
        sizes = graph.sizes
        past += self.virtual_tokens
        return sizes is None or (not sizes.refusal(1, past, new) and sizes.width(1, past, new) >= new)

    @property
    def runs_rows_apart(self) -> bool:
        return not self._step_graph.scales_batches

    def _smallest(self, name: str) -> int | None:
        sizes = [getattr(graph.sizes, name) for graph in (self._prompt_graph, self._step_graph) if graph.sizes]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        """Those of the prefill graph; the decode graph has the same."""
        return self._prompt_graph.extra_inputs

    @property
    def embedding_size(self) -> int | None:
        """Size of the embeddings that the prefill graph takes."""
        return self._prompt_graph.embedding_size

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        self._require_whole(len(call.input_ids), call.attention_mask.shape[1], call.input_ids.shape[1])
        # images are read in one run, and what follows a prefix in the graph: only a run without a past begins with it
        if call.last_only and placed is None and not self._prefix and self._prompt_graph.is_on_host:
            call = replace(call, in_parts=self.reads_in_parts(call.attention_mask.shape[1]))
        return self._prompt_graph.run_call(self._after_prefix(call, past), past, extras, placed)

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        has_prefix = self._prefix and past is None  # which only the prefill graph has
        graph = self._prompt_graph if has_prefix else self._step_graph
        return graph.run_call(self._after_prefix(call, past), past, extras)

    def _require_whole(self, rows: int, tokens: int, new: int) -> None:
        """Refuses to read a prompt in pieces of a fixed size where each piece would have other rotary frequencies."""
        sizes = self._prompt_graph.sizes
        if sizes is None or self.reads_in_parts(tokens) or sizes.width(rows, tokens - new, new) >= new:
            return
        most = self.length_switch.tokens if self.length_switch else 0
        raise InputRefused(
            f"the prompt has {tokens} tokens, which this graph would read in pieces: beyond {most} tokens the rotary "
            "frequencies of this model depend on the length, so that each piece would have its own",
            hint="shorten the prompt, or export with `--shapes dynamic`",
        )

    def _after_prefix(self, call: ModelCall, past: Cache | None) -> ModelCall:
        prefix = self._prefix if past is not None else None  # the cache begins with it
        return call.after(prefix.length, prefix.first_position) if prefix else call


def _open_pair(
    folder: Path, first: GraphEntry, second: GraphEntry, settings: SessionSettings | None
) -> tuple[OrtGraph, OrtGraph]:
    """Prefill and decode graph of a folder: one session if they have the same content, else with shared weights."""
    settings = settings or SessionSettings()
    if first.content_key(folder) == second.content_key(folder):
        graph = require_right(open_graph(folder, second, settings), settings)
        return graph.under(first), graph
    settings = replace(settings, widened=WidenedWeights())
    opened = open_graph(folder, first, for_concurrent_use(settings)), open_graph(folder, second, settings)
    return require_right(opened[0], settings), require_right(opened[1], settings)


# `verify` fails graphs of releases before the first that is supported (docs/targets.md)
RIGHT = (1, 28)


def require_right(graph: OrtGraph, settings: SessionSettings | None) -> OrtGraph:
    """The graph; UnsupportedInput for one that the installed release is known to compute wrongly on its provider."""
    release = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if graph.sizes and release < RIGHT and short_provider((settings or SessionSettings()).provider) == "webgpu":
        raise UnsupportedInput(
            f"onnxruntime {ort.__version__} computes `{graph.name}` wrongly on WebGPU, since its cache is a buffer",
            hint="run `llmconv export --target ort-webgpu`, whose cache grows, or install onnxruntime-webgpu 1.28",
        )
    return graph


def _entry_of(path: Path) -> GraphEntry:
    """A graph's entry in the manifest; that of all stages for the path of any stage."""
    entries = [entry for entry in graph_entries(path.parent) if path.name in entry.files]
    return entries[0] if entries else GraphEntry("", (path.name,))
