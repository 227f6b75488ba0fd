"""Universal checkpoints: one folder per parameter, whose `fp32.pt` holds the whole float32 master weight.

Layout (deepspeedai/DeepSpeed `checkpoint/ds_to_universal.py`, `merge_tp_slices`): `zero/NAME/fp32.pt`, a dict with
`param`; beside it the optimizer's moments.
"""

from __future__ import annotations

from pathlib import Path

from llmconv.convert.deepspeed.states import refuse
from llmconv.errors import MalformedInput
from llmconv.pickle_data import TensorRef
from llmconv.tensors import LazyTensor
from llmconv.torch_file import open_torch_file

WEIGHTS = "fp32.pt"


def open_universal(folder: Path) -> dict[str, LazyTensor]:
    """Name to master weight of every parameter below `folder`.

    Raises:
        MalformedInput: a parameter has no weights, or its file holds no tensor.
    """
    tensors = {}
    for place in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        if not (place / WEIGHTS).is_file():
            raise MalformedInput(
                f"`{WEIGHTS}` is missing from `{folder.name}/{place.name}`", hint="copy the folder again, all of it"
            )
        tensors[place.name] = _read(place / WEIGHTS, place.name)
    return tensors


def _read(path: Path, name: str) -> LazyTensor:
    file = open_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        refuse(path, f"holds no tensor for `{name}`")
    return file.tensor(name, ref)
