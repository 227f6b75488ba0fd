"""A Composer run as it was stored: one nested dict, wherever its parts lie.

Layout (mosaicml/composer `core/state.py`, `utils/checkpoint.py`): `state.model`, `state.integrations.huggingface`,
`state.metadata`, and much that is not read. Every branch may be missing (`ignore_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.convert.formats.composer import symlink_folder as folder
from llmconv.convert.formats.composer.sharded import is_sharded, open_sharded, refuse_rank_file
from llmconv.files.torch.reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Run:
    """An opened run.

    Attributes:
        content: the nested dict, as `torch.load` of one whole file would give it; its tensors are leaves for `tensor`.
        tensor: `tensor(name, leaf)` gives the LazyTensor of a leaf; the name is for error messages.
        shards: files that the weights lie in.
        beside: what lies next to `content` and is not converted, and how many bytes of it.
    """

    content: Mapping[str, Any]
    tensor: Callable[[str, Any], LazyTensor]
    shards: int = 1
    beside: Mapping[str, int] = field(default_factory=dict)

    def branch(self, *keys: str) -> dict[Any, Any]:
        """The dict under `keys`, or an empty one."""
        return branch(self.content, *keys)


def branch(value: Any, *keys: str) -> dict[Any, Any]:
    """The dict under `keys`, one inside the other, or an empty one."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def is_run(path: Path) -> bool:
    """Whether `path` holds a Composer run, by its content."""
    if folder.is_folder(path):
        return True
    if not is_torch_file(path):
        return is_sharded(path)
    content = open_torch_file(path).content
    # an optimizer of torch has a `state`, too
    return isinstance(content, dict) and "state" in content and "param_groups" not in content


def open_run(path: Path) -> Run:
    """Opens the run at `path`; no tensor is read.

    Raises:
        InputRefused: it is malformed or of an unsupported kind.
    """
    if is_sharded(path):
        return Run(*open_sharded(path))
    if folder.is_folder(path):
        model = open_torch_file(folder.model_file(path))
        return Run(folder.content(path, model.content), model.tensor, beside=folder.beside(path))
    file = open_torch_file(path)
    refuse_rank_file(path, branch(file.content, "state", "model"))
    return Run(file.content, file.tensor)
