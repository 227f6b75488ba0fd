"""Reads universal checkpoints: one folder per parameter, whose `fp32.pt` holds the whole float32 master weight.

Layout (deepspeedai/DeepSpeed `checkpoint/ds_to_universal.py`, `merge_tp_slices`): `zero/NAME/fp32.pt`, a dict with
`param`; next to it the optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from llmconv.convert.formats.deepspeed.flat_tensor import FlatSlice, joined
from llmconv.convert.formats.deepspeed.model_states import refuse
from llmconv.errors import MalformedInput, listing
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

WEIGHTS = "fp32.pt"


def open_universal(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """Name to master weight of every parameter of the model.

    Args:
        folder: contains one folder per parameter.
        shapes: of the parameters; those from stage 3 are stored flat.

    Raises:
        MalformedInput: a parameter has no weights, or a shape mismatch.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    whole = {name for name in names if (folder / name / WEIGHTS).is_file()}
    missing = sorted({*shapes, *names} - whole)
    if missing:
        raise MalformedInput(
            f"missing keys: `{folder.name}` lacks the weights of {len(missing)} parameters: {listing(missing)}",
            hint=f"each has a folder with `{WEIGHTS}`; copy the folder again, all of it",
        )
    return {name: _read(folder / name / WEIGHTS, name, shapes.get(name)) for name in names}


def _read(path: Path, name: str, shape: tuple[int, ...] | None) -> LazyTensor:
    file = open_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        refuse(path, f"contains no tensor for `{name}`")
    tensor = file.tensor(name, ref)
    if shape is None or tensor.shape == shape:
        return tensor
    if len(tensor.shape) != 1 or tensor.shape[0] != prod(shape):
        refuse(path, f"has a shape mismatch for `{name}`: expected {list(shape)}, got {list(tensor.shape)}")
    return joined([FlatSlice(tensor, 0, tensor.shape[0])], shape, tensor.dtype)
