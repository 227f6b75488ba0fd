"""Reads DeepSpeed's model states: names and shapes of parameters, frozen and tied ones, and the module's tensors.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `_save_checkpoint`; `checkpoint/constants.py`): one dict per file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmconv.errors import MalformedInput
from llmconv.files.pickles.machine import Stub
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import BY_NAME, LazyTensor, cast

NUMEL_LIMIT = 1 << 48
RANK_LIMIT = 16


class ModelStates:
    """One file of model states, opened.

    Attributes:
        path: the file.
        content: the saved dict; its tensors are TensorRef.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_torch_file(path)
        self.path = path
        if not isinstance(self._file.content, dict):
            refuse(path, "does not contain a dict")
        self.content: Mapping[Any, Any] = self._file.content

    def tensors(self, field: str) -> dict[str, LazyTensor]:
        """Name to tensor of a dict in the file; empty if there is no such dict."""
        return {name: self._file.tensor(name, ref) for name, ref in self._refs(field)}

    def _refs(self, field: str) -> Iterator[tuple[str, TensorRef]]:
        for name, ref in self._dict(field).items():
            if isinstance(name, str) and isinstance(ref, TensorRef):
                yield name, ref

    def _dict(self, field: str) -> Mapping[Any, Any]:
        value = self.content.get(field)
        return value if isinstance(value, dict) else {}

    def objects(self, field: str) -> list[str]:
        """Names of the values of a dict in the file that are unknown objects, such as distributed tensors."""
        return [str(name) for name, value in self._dict(field).items() if isinstance(value, Stub)]

    def buffers(self) -> dict[str, LazyTensor]:
        """The module's persistent buffers; those of 16 bits become float32, as in `zero_to_fp32`."""
        names = self.content.get("buffer_names")
        persistent = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        module = self.tensors("module")
        return {name: cast(module[name], BY_NAME["float32"]) for name in module if name in persistent}

    def param_shapes(self) -> list[dict[str, tuple[int, ...]]] | None:
        """Shapes of the trained parameters, one dict per parameter group, in the order in which they were flattened.

        None if nothing was flattened (stage 0).

        Raises:
            MalformedInput: it is not a list of such dicts, or a name is duplicate.
        """
        value = self.content.get("param_shapes")
        if value is None:
            return None
        groups = [value] if isinstance(value, dict) else value
        if not isinstance(groups, list):
            refuse(self.path, "has `param_shapes` that are not a list")
        checked = [self._shapes(group, "param_shapes") for group in groups]
        names = [name for group in checked for name in group]
        if len(set(names)) != len(names):
            refuse(self.path, "has a duplicate parameter name in two groups")
        return checked

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the frozen parameters; stage 1 does not store them."""
        return self._shapes(self.content.get("frozen_param_shapes") or {}, "frozen_param_shapes")

    def _shapes(self, value: Any, field: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(value, dict):
            refuse(self.path, f"has `{field}` that are not a dict")
        for name, shape in value.items():
            if not isinstance(name, str) or not _is_shape(shape):
                refuse(self.path, f"has an invalid shape for `{str(name)[:80]}` in `{field}`")
        return dict(value)

    def shared(self) -> dict[str, str]:
        """Name of a tied parameter to the name under which it is stored."""
        pairs = self._dict("shared_params").items()
        return {name: stored for name, stored in pairs if isinstance(name, str) and isinstance(stored, str)}

    @property
    def version(self) -> str:
        """The version of DeepSpeed; empty if unknown."""
        version = self.content.get("ds_version")
        return version[:40] if isinstance(version, str) and version.isprintable() else ""


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > RANK_LIMIT:
        return False
    return all(type(size) is int and size >= 0 for size in value) and prod(filter(None, value)) < NUMEL_LIMIT


def refuse(path: Path, problem: str) -> NoReturn:
    """Raises MalformedInput with the message "`path` `problem`"."""
    raise MalformedInput(
        f"`{path.name}` {problem}", hint="the file is damaged or was changed; copy it again from where it was saved"
    )
