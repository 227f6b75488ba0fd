"""Opens a Composer run as one nested dict, whether it lies in one file or several.

Layout (mosaicml/composer `core/state.py`, `utils/checkpoint.py`): `state.model`, `state.integrations.huggingface`,
`state.metadata`, and other parts that are not read. Every branch may be missing (`ignore_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.convert.formats.composer import run_folder
from llmconv.convert.formats.composer.sharded import is_sharded, open_sharded, refuse_rank_file
from llmconv.files.torch.reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class ComposerRun:
    """An opened run.

    Attributes:
        content: the nested dict, as `torch.load` of one whole file returns it; its tensors are leaves for `tensor`.
        tensor: `tensor(name, leaf)` returns the LazyTensor of a leaf; the name is for error messages.
        shards: number of files with weights.
        other_parts: description to bytes of the parts outside `content`, which are not converted.
    """

    content: Mapping[str, Any]
    tensor: Callable[[str, Any], LazyTensor]
    shards: int = 1
    other_parts: Mapping[str, int] = field(default_factory=dict)

    def branch(self, *keys: str) -> dict[Any, Any]:
        """The dict under `keys`, or an empty one."""
        return branch(self.content, *keys)


def branch(value: Any, *keys: str) -> dict[Any, Any]:
    """The dict under the nested `keys`, or an empty one."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def is_run(path: Path) -> bool:
    """Whether `path` is a Composer run, by its content."""
    if run_folder.is_folder(path):
        return True
    if not is_torch_file(path):
        return is_sharded(path)
    content = open_torch_file(path).content
    # a state dict of a torch optimizer has a `state`, too
    return isinstance(content, dict) and "state" in content and "param_groups" not in content


def open_run(path: Path) -> ComposerRun:
    """Opens the run at `path`; no tensor is read.

    Raises:
        InputRefused: it is malformed or of an unsupported kind.
    """
    if is_sharded(path):
        return ComposerRun(*open_sharded(path))
    if run_folder.is_folder(path):
        model = open_torch_file(run_folder.model_file(path))
        return ComposerRun(
            run_folder.content(path, model.content), model.tensor, other_parts=run_folder.other_parts(path)
        )
    file = open_torch_file(path)
    refuse_rank_file(path, branch(file.content, "state", "model"))
    return ComposerRun(file.content, file.tensor)
