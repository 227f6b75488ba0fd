"""Importance matrices of llama.cpp: how much each column of a matrix counts on a text, for the blocks of GGUF files.

Source of the form: llama.cpp `tools/imatrix/imatrix.cpp`; `convert/formats/gguf/importance.py` reads it. The text runs
through the model's float32 graph in pieces, as for `export --quant`: the weights of one piece are in memory at a time.
As in llama.cpp, matrices of layers are measured, embeddings and heads are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from llmconv.argument_checks import OWN, checked
from llmconv.checkpoint import Checkpoint, is_conv1d, open_checkpoint
from llmconv.convert.formats.gguf.importance import COUNTS, SUMS
from llmconv.convert.formats.gguf.save import Stored, gguf_pieces, gguf_tensors
from llmconv.convert.from_hugging_face import open_model, require_new_file
from llmconv.errors import UnsupportedInput
from llmconv.export.calibration import text_run
from llmconv.export.language_model import open_language_model
from llmconv.export.quantization.calibration import column_importance
from llmconv.files.paths import Written, output_path
from llmconv.files.sources import fetches, local_path, reading_safely
from llmconv.output.plan import Plan, Shard
from llmconv.output.writer import write_file
from llmconv.runtime.tokenizer import TOKENS, CalibrationText
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

LAYER = "blk."
MATRIX = 2


@fetches
@checked
def importance_matrix(
    model: str | Path, output: Annotated[Written, OWN], *, calibrate: str | Path = "default", overwrite: bool = False
) -> None:
    """Writes the importance matrix of a model, which `to_gguf(imatrix=…)` and llama.cpp's programs read.

    Args:
        model: a Hugging Face folder, or its URI or hub id.
        output: the GGUF file to make.
        calibrate: the text file, of which 4,096 tokens are used; `default` for llmconv's own.
        overwrite: replace an existing file.

    Raises:
        InputRefused: the model or the text cannot be used, or activations are not finite; UnsupportedInput: llama.cpp
            has no such model, or it has no graph that takes tokens.
    """
    text, path = CalibrationText.read(calibrate), output_path(output)
    require_new_file(path, overwrite=overwrite)
    with reading_safely(model):
        named = open_model(folder := local_path(model))
    stored = open_checkpoint(folder)
    run = text_run(open_language_model(stored), stored, {}, text, TOKENS)
    weights = by_gguf_name(named, column_importance(run))
    if not weights:
        raise UnsupportedInput(
            f"no matrix of `{folder.name}` could be measured on the text", hint="leave out `--calibrate`"
        )
    tokens = sum(one.size for one in run.texts)
    tensors: dict[str, LazyTensor] = {}
    for name, columns in weights.items():  # [experts, columns]
        tensors[name + SUMS] = in_memory(columns * np.float32(tokens), BY_NAME["float32"])
        tensors[name + COUNTS] = in_memory(np.full((len(columns), 1), tokens, np.float32), BY_NAME["float32"])
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": [text.name],
        "imatrix.chunk_count": len(run.texts),
        "imatrix.chunk_size": max(one.size for one in run.texts),
    }
    kinds = {name: Stored("F32", one.shape, one) for name, one in tensors.items()}
    shard = Shard(path.name, tensors, partial(gguf_pieces, metadata=metadata, stored=kinds))
    sources = sorted(entry for entry in folder.iterdir() if entry.is_file())
    write_file(Plan(stored, (shard,)), path, sources=sources, overwrite=overwrite)


def by_gguf_name(model: Checkpoint, importance: Mapping[str, Array]) -> dict[str, Array]:
    """Importance of columns by llama.cpp's name, float32 [experts, columns], from that by Hugging Face's.

    A model whose rows all are the importance of their columns is given llama.cpp's names and orders.
    """
    marked = {name: _marked(name, one, importance.get(name), model) for name, one in model.items()}
    found = {}
    for name, tensor in gguf_tensors(replace(model, tensors=marked)).items():
        if not name.startswith(LAYER) or not name.endswith(".weight") or len(tensor.shape) < MATRIX:
            continue
        is_stack = len(tensor.shape) > MATRIX
        rows = [tensor.rows(at, at + 1) for at in range(tensor.shape[0] if is_stack else 1)]
        columns = np.stack([row.reshape(-1, tensor.shape[-1])[0] for row in rows]).astype(np.float32)
        if np.isfinite(columns).all():
            found[name] = columns
    return found


def _marked(name: str, tensor: LazyTensor, importance: Array | None, model: Checkpoint) -> LazyTensor:
    """A tensor of the same shape whose elements are the importance of their columns; not a number if it is unknown."""
    shape = tensor.shape
    if len(shape) < MATRIX:
        return tensor
    turned = is_conv1d(model.config, name)  # [columns, rows]
    columns = shape[0] if turned else shape[-1]
    known = np.full(columns, np.nan, np.float32) if importance is None else importance
    if known.shape not in {(columns,), (*shape[:-2], columns)}:
        known = np.full(columns, np.nan, np.float32)

    def rows(start: int, stop: int) -> Array:
        size = (stop - start, *shape[1:])
        if turned:
            return np.broadcast_to(known[start:stop, None], size).astype(np.float32)
        own = known[start:stop, None, :] if known.ndim > 1 else known
        return np.broadcast_to(own, size).astype(np.float32)

    return LazyTensor(BY_NAME["float32"], shape, rows)
