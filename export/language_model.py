"""Decoder: what a checkpoint says of the language model in it, and the graphs of that model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import MalformedInput
from llmconv.export.decoder_graph import build_embeddings, build_graph
from llmconv.export.graph_spec import Form
from llmconv.export.input_maps import InputMap, find_input_map
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.tracing.fake_model import load_config
from llmconv.export.tracing.multimodal import MULTI_MODAL, Part, part_of
from llmconv.progress import say
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE


@dataclass(frozen=True)
class Decoder:
    """One language model.

    Attributes:
        config: of transformers; of the language model alone where the checkpoint has more.
        input_map: the row of its `model_type`.
        part: how its tensors are called in a multi-modal checkpoint; None in one of its own.
    """

    config: Any
    input_map: InputMap
    part: Part | None = None

    @property
    def embeddings(self) -> int | None:
        """Size of the embeddings that the graphs take in the place of tokens; None where they take tokens."""
        return int(self.config.hidden_size) if self.part else None

    def build(self, forms: Mapping[str, Form]) -> tuple[dict[str, TracedGraph], int]:
        """Graphs without weights by role, and how many layers were traced.

        Args:
            forms: the form of every graph; those of one form are one object.

        Raises:
            UnsupportedInput: transformers or torch cannot build or trace the model.
        """
        built = {form: build_graph(self.config, self.input_map, form) for form in dict.fromkeys(forms.values())}
        graphs = {form: traced for form, (traced, _) in built.items()}
        layers = max(layers for _, layers in built.values())
        if self.part is None:
            return {role: graphs[form] for role, form in forms.items()}, layers
        parts = {form: self.part.decoder(traced) for form, traced in graphs.items()}
        table = self.part.table(build_embeddings(self.config))
        return {**{role: parts[form] for role, form in forms.items()}, EMBEDDINGS_ROLE: table}, layers


def open_decoder(checkpoint: Checkpoint, code: Path | None = None) -> Decoder:
    """The language model of a checkpoint.

    Args:
        checkpoint: with its config.
        code: a trusted folder whose own code builds the model.

    Raises:
        MalformedInput: `config.json` names no `model_type`.
        UnsupportedInput: the `model_type` has no input map, or transformers cannot read the config.
    """
    model_type = model_type_of(checkpoint)
    if model_type not in MULTI_MODAL:
        input_map = find_input_map(model_type)
        return Decoder(load_config(checkpoint.config, code), input_map)
    if note := MULTI_MODAL[model_type]:
        say(f"the language model alone: {note}")
    whole = load_config(checkpoint.config)
    config = whole.get_text_config(decoder=True)
    config.tie_word_embeddings = whole.tie_word_embeddings  # the head belongs to the whole
    return Decoder(config, find_input_map(config.model_type), part_of(checkpoint))


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of `config.json`.

    Raises:
        MalformedInput: it has none.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MalformedInput("`config.json` names no `model_type`", hint="copy the config of the original model again")
    return model_type
