"""merged: adapters placed on a base, as one lazy checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.combining.task_vectors import TaskVectors
from llmconv.convert.adapters.merge_options import Recipe, plain_sum
from llmconv.convert.adapters.placement.base_in_memory import base_in_memory
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.adapters.placement.layer_replication import replicated
from llmconv.convert.adapters.placement.naming import AS_STORED
from llmconv.convert.adapters.placement.vocabulary import (
    fit_vocabulary,
    follow_tokens,
    untie,
)
from llmconv.convert.adapters.side_files import side_files_of
from llmconv.convert.adapters.task_head import follow_task
from llmconv.convert.models.dtype import stored_types, with_dtype
from llmconv.convert.models.tied_head import find_embedding, find_head, is_tied
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import FLOATS, DType, LazyTensor


def merged(base: Checkpoint, adapters: Sequence[Adapter], recipe: Recipe | None = None) -> tuple[Checkpoint, Edits]:
    """The merged checkpoint, lazy, and the edits of each tensor.

    Args:
        base: checkpoint of unquantized weights.
        adapters: opened adapters.
        recipe: how to merge (default: the sum of all adapters).

    Raises:
        MalformedInput: an adapter for another base.
        UnsupportedInput: a kind of adapter or base that cannot be merged.
    """
    recipe = recipe or plain_sum(adapters)
    _check_types(base, adapters)
    memory = base_in_memory(base, with_tied_head(base), adapters)
    stored, base = base, replicated(memory.checkpoint() if memory else base, adapters)
    embedding = find_embedding(base)
    head = find_head(base, embedding)
    edits = Edits(dict(with_tied_head(base)), base.config, naming=memory.naming if memory else AS_STORED)
    if embedding and head not in base and head in edits.tensors:
        edits.tied = (embedding, head)
    vectors = TaskVectors(edits, adapters, recipe.weights, recipe.combination)
    for number in vectors.order:
        edits.place(adapters[number], recipe.weights[number])
    follow_tokens(edits, embedding, head)
    config = deepcopy(base.config)
    for adapter in adapters:
        config |= adapter.fields
    resized = fit_vocabulary(edits, embedding, head, config)
    untie(edits, embedding, head, config)
    follow_task(edits, adapters, head, config)
    types = stored_types(edits.tensors, config, recipe.dtype) if recipe.dtype != "keep" else {}
    tensors = {name: _result(edits, vectors, name, types.get(name)) for name in edits.tensors}
    if recipe.dtype != "keep":
        config = with_dtype(config, tensors)
    if memory:
        tensors, edits = memory.restored(tensors, edits)
    side_files, notes = side_files_of(stored, adapters, recipe.tokenizer, config, resized=resized)
    edits.warnings.extend(notes)
    return replace(base, tensors=tensors, config=config, side_files=side_files), edits


def with_tied_head(base: Checkpoint) -> dict[str, LazyTensor]:
    """The tensors of a model, with a tied head that only the embedding stands for."""
    embedding = find_embedding(base)
    head = find_head(base, embedding)
    tied = embedding and head not in base and is_tied(base.config)
    return {**base.tensors, head: base[embedding]} if embedding and tied else dict(base.tensors)


def _check_types(base: Checkpoint, adapters: Sequence[Adapter]) -> None:
    """Refuses another model type, since shapes of another architecture may fit by chance."""
    if base.config.get("quantization_config"):
        raise UnsupportedInput(
            "the base is quantized", hint="merge into the unquantized model the adapter was trained on, then quantize"
        )
    own = base.config.get("model_type")
    other = next((adapter for adapter in adapters if adapter.model_type not in ("", own)), None)
    if other:
        raise MalformedInput(
            f"`{other.name}` was trained on a {other.model_type}, the base is a {own}",
            hint="give the base that the adapter was trained on",
        )


def _result(edits: Edits, vectors: TaskVectors, name: str, dtype: DType | None) -> LazyTensor:
    """The merged tensor, lazy, in `dtype`; in the base's where that is None."""
    kept = edits.tensors[name].dtype
    target = dtype if dtype and kept.name in ("float64", *FLOATS) else kept
    if name in edits.changes and not vectors.summed:
        return vectors.combined(name, edits.current(name), target)
    return edits.result(name, target)
