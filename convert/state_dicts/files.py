"""State dicts in torch files: one file, or several that share one, with their names, tensors and other contents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts save the state dict of the model."""

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

QUANTIZED = re.compile(
    r"\.(?:qweight|qzeros|SCB|weight_format|absmax|quant_map|quant_state\b.*|_packed_params\b.*|weight_scale(?:_inv)?)$"
)
"""Parts of a quantized matrix: GPTQ, AWQ, bitsandbytes, torch's own, float8 with scales."""

OBJECT = (
    "is an object, not a plain tensor",
    "save a full (unsharded, unquantized) state dict of plain tensors",
)


@dataclass(frozen=True)
class StateFile:
    """The state dict of one file, or of several shards.

    Attributes:
        state: name to a TensorRef, a LazyTensor, or any other value.
        tensor: `tensor(name, leaf)` returns the LazyTensor of a leaf.
        around: the dict that contains the state dict; empty if there is none.
    """

    path: Path
    state: Mapping[str, Any]
    tensor: Callable[[str, Any], LazyTensor] = field(repr=False)
    around: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    shards: int = 1

    def tensors(self) -> dict[str, LazyTensor]:
        """Name to tensor; UnsupportedInput if there is another object or the tensors are quantized."""
        refuse_quantized(self.state, self.path.name)
        refuse_objects(self.state, self.path.name)
        leaves = {name: leaf for name, leaf in self.state.items() if isinstance(leaf, TensorRef | LazyTensor)}
        return {name: self.tensor(name, leaf) for name, leaf in leaves.items()}


def refuse_quantized(names: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedInput if there are packed parts of quantized matrices."""
    found = [name for name in names if QUANTIZED.search(name)]
    if found:
        raise UnsupportedInput(
            f"`{source}` is quantized: it contains {listing(found)}", hint="give the weights from before quantization"
        )


def refuse_objects(state: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedInput for the first object (`ShardedTensor`, `NF4Tensor` and the like) among the tensors."""
    name = next((name for name, leaf in state.items() if isinstance(leaf, Stub)), None)
    if name is not None:
        raise UnsupportedInput(f"`{name}` in `{source}` {OBJECT[0]}", hint=OBJECT[1])


def open_state(path: Path) -> StateFile | None:
    """The state dict in a torch file, flat or under a key of `WRAPPERS`, or None; InputRefused if malformed."""
    file = open_torch_file(path)
    content = file.content
    if not isinstance(content, dict):
        return None
    if any(isinstance(leaf, TensorRef) and "." in str(key) for key, leaf in content.items()):
        return StateFile(path, _named(content), file.tensor)
    for key in WRAPPERS:
        inner = content.get(key)
        if isinstance(inner, dict) and any(isinstance(leaf, TensorRef) for leaf in inner.values()):
            return StateFile(path, _named(inner), file.tensor, content)
    return None


def peek_state(path: Path) -> StateFile | None:
    """As `open_state`, but None if the file is unreadable: for detection."""
    try:
        return open_state(path) if is_torch_file(path) else None
    except LlmconvError:
        return None


def torch_files(folder: Path) -> Iterator[Path]:
    """The torch files of a folder in name order, detected by suffix and content."""
    yield from (entry for entry in sorted(folder.iterdir()) if entry.suffix in SUFFIXES and is_torch_file(entry))


def _named(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): leaf for key, leaf in state.items()}


def union(path: Path, files: list[StateFile]) -> StateFile:
    """The shards of one state dict as one; MalformedInput if a tensor is in two of them."""
    homes = without_duplicates(path.name, [dict.fromkeys(file.state, file) for file in files])
    state = {name: file.state[name] for name, file in homes.items()}
    return StateFile(path, state, lambda name, leaf: homes[name].tensor(name, leaf), shards=len(files))


def without_duplicates(source: str, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of several dicts; MalformedInput if a key is in two of them."""
    whole: dict[str, Any] = {}
    for part in parts:
        if duplicate := sorted(whole.keys() & part.keys()):
            raise MalformedInput(
                f"duplicate keys in the files of `{source}`: {listing(duplicate)}",
                hint="files of different checkpoints are mixed; copy the folder again",
            )
        whole |= part
    return whole


EMBEDDING = re.compile(r"(?<!embedding\.)\b(?:embed_tokens|wte|embed_in|word_embeddings|embeddings?)\.weight$")
"""Names of Hugging Face's input embeddings; Megatron's is in a module `embedding`."""

ADAPTER_NAMES = re.compile(r"lora_|\.modules_to_save\.|prompt_embeddings")
MEGATRON_KEY = "checkpoint_version"
"""A key of Megatron's checkpoints (its `checkpointing.py`), which are unsupported."""


@dataclass(frozen=True)
class Sign:
    """Content that only the state dicts of one system have.

    Attributes:
        keys: keys next to the state dict; any of them identifies the system, whatever the names of the tensors.
        names: a pattern that matches the name of some tensor; None if the keys are enough.
    """

    keys: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None

    def has_key(self, found: StateFile) -> bool:
        """Whether one of the keys is in the file."""
        return bool(set(self.keys) & {str(key) for key in found.around})

    def has_names(self, found: StateFile) -> bool:
        """Whether the tensors have names of this system."""
        return self.names is None or any(self.names.search(name) for name in found.state)


def has_hugging_face_names(found: StateFile) -> bool:
    """Whether the tensors have the names of a transformers model; False for an adapter."""
    if MEGATRON_KEY in found.around or found.path.name.startswith("adapter_model."):
        return False
    if all(ADAPTER_NAMES.search(name) for name in found.state):
        return False
    return any(EMBEDDING.search(name) for name in found.state)
