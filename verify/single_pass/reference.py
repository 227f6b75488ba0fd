"""The eager model of a task in float64 and in float32: transformers' own class for it, and numpy for what follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from llmconv.checkpoint import open_weights
from llmconv.errors import InputRefused, LlmconvError, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.context_length import length_of, length_switch
from llmconv.runtime.eager.float64_casts import Float64Casts
from llmconv.runtime.eager.loaded_weights import require_loaded
from llmconv.runtime.library_patches import reset_dynamic_rope, silence_kernel_hints, use_eager_experts
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.reference.other_roundings import SEEDS, nudged
from llmconv.verify.results.sigma import ExpectedOutput, NoiseFloor
from llmconv.verify.scenarios.windows import windows_of
from llmconv.verify.single_pass.sentence_head import POOLING, Modules
from llmconv.verify.single_pass.texts import TextLimits, Texts

CLASSES: dict[str, Any] = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "rerank": AutoModelForCausalLM,
    "scoring": AutoModelForCausalLM,
}
"""By the role of the graph."""

HIDDEN, EMBEDDING = "last_hidden_state", "sentence_embedding"
PER_TOKEN = {"scoring": {"logits"}, "embed": {HIDDEN}}
"""Outputs with a row for every token, by role; all others have one for every text."""


class TaskModel:
    """The model of a task in one dtype.

    Attributes:
        model: the transformers model.
        dtype: `float64` or `float32`.

    Args:
        folder: of the model.
        role: of the graph.
        dtype: of the computation.

    Raises:
        InputRefused: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, role: str, dtype: str) -> None:
        transformers_logging.disable_progress_bar()
        silence_kernel_hints()
        self.role, self.dtype, self.modules = role, dtype, Modules(folder)
        self.model = _loaded(folder, role)
        use_eager_experts(self.model)
        self.model = (self.model.double() if dtype == "float64" else self.model).eval()
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

    def outputs(self, texts: Texts) -> dict[str, Array]:
        """All outputs as rows [batch, tokens or 1, features], by name."""
        reset_dynamic_rope(self.model)
        found = self._run(texts)
        return {name: as_rows(self.role, name, array) for name, array in found.items()}

    def _run(self, texts: Texts) -> dict[str, Array]:
        mask, positions = texts.attention_mask, texts.position_ids
        given = {"input_ids": texts.input_ids, "attention_mask": mask}
        if self._takes_positions:
            given["position_ids"] = default_positions(mask, mask.shape[1]) if positions is None else positions
        tensors = {name: torch.from_numpy(array) for name, array in given.items()}
        exact: Any = Float64Casts() if self.dtype == "float64" else nullcontext()
        with torch.no_grad(), exact:
            result = self.model(**tensors, use_cache=False)
        if self.role != "embed":
            logits: Array = result.logits.numpy()
            return {"scores": self.modules.score(logits, mask)} if self.role == "rerank" else {"logits": logits}
        hidden: Array = result.last_hidden_state.numpy()
        if not self.modules.has(POOLING):
            return {HIDDEN: hidden}
        return {HIDDEN: hidden, EMBEDDING: self.modules.embedding(hidden, mask)}


def as_rows(role: str, name: str, array: Array) -> Array:
    """An output as rows: [batch, tokens, features], or [batch, 1, features] for one row per text.

    Args:
        role: of the graph.
        name: of the output.
        array: the output.
    """
    return array if name in PER_TOKEN.get(role, ()) else array.reshape(len(array), 1, -1)


def _loaded(folder: Path, role: str) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    stored = open_weights(folder)
    try:
        model, report = CLASSES[role].from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
        )
    except LlmconvError:
        raise
    except Exception as error:  # an invalid config may raise anything in the model's code
        raise_if_out_of_memory(error, f"while `{folder.name}` was loaded")
        raise InputRefused(
            f"transformers cannot load `{folder}`: {first_line(error)}",
            hint="the folder needs config.json and safetensors weights of the model that was exported",
        ) from error
    require_loaded(model, report, stored, folder)
    return model


class TaskReference:
    """The model of a task, exact and in float32, and the rounding noise between the two.

    Args:
        folder: of the model.
        role: of the graph.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self._role = role
        self._exact, self._rounded = (TaskModel(folder, role, dtype) for dtype in ("float64", "float32"))
        self._floor = NoiseFloor("float32", int(getattr(self._config, "hidden_size", 0) or 0))

    @property
    def _config(self) -> Any:
        return self._exact.model.config.get_text_config(decoder=True)

    @cached_property
    def limits(self) -> TextLimits:
        """What the texts depend on."""
        config = self._config
        fields = config.to_dict()
        padding = config.pad_token_id if self._role == "classify" else None
        vocabulary = int(self._exact.model.get_input_embeddings().weight.shape[0])
        switch = length_switch(fields)
        return TextLimits(vocabulary, padding, length_of(fields), windows_of(config), switch.tokens if switch else None)

    def expected(self, texts: Texts) -> dict[str, ExpectedOutput]:
        """Every output by name, with its noise."""
        exact, rounded = self._exact.outputs(texts), self._rounded.outputs(texts)
        return {name: self._truth(name, exact[name], rounded[name], texts) for name in exact}

    def _truth(self, name: str, exact: Array, rounded: Array, texts: Texts) -> ExpectedOutput:
        valid = texts.attention_mask != 0
        if name not in PER_TOKEN.get(self._role, ()):
            valid = valid.any(axis=1, keepdims=True)
        truth = self._floor.truth(name, exact.astype(np.float64), rounded, valid)
        others: list[Callable[[], Array]] = [partial(self._again, texts, name, seed) for seed in SEEDS]
        return ExpectedOutput(**{**vars(truth), "others": others})

    def _again(self, texts: Texts, name: str, seed: int) -> Array:
        """The output with other roundings."""
        with nudged(seed):
            return self._rounded.outputs(texts)[name]
