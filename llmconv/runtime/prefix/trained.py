"""TrainedPrefix: the trained tensor of prefix tuning or prompt tuning, read from its file.

    kind           file                                       content
    prefix_tuning  PEFT `adapter_model.safetensors`           `prompt_embeddings` [P, 2 * layers * kv_heads * size]
    soft_prompt    the same, of prompt tuning and p-tuning    `prompt_embeddings` [P, hidden]
    pre_caches     PaddleNLP `pre_caches.npy`                 [layers, 2, kv_heads, P, size]

A row of prefix tuning contains the key of layer 0, its value, the key of layer 1, … (peft, `PeftModel.get_prompt`). In
PEFT the first token follows the P virtual tokens and has position P; PaddleNLP's models count tokens from 0, and keys
of the prefix are not rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import Array

PRE_CACHES = "pre_caches.npy"
EMBEDDINGS = "prompt_embeddings"
KINDS = {"PREFIX_TUNING": "prefix_tuning", "PROMPT_TUNING": "soft_prompt", "P_TUNING": "soft_prompt"}
"""PEFT's `peft_type` to the kind in the table above."""

KeyValue = tuple[Array, Array]
"""Key and value of one layer, float32 `[kv_heads, P, head_dim]`."""


@dataclass(frozen=True)
class Prefix:
    """Virtual tokens before every prompt.

    Attributes:
        kind: as in the table of the module's docstring.
        content: the trained tensor, float32, in its stored shape.
        length: number of virtual tokens.
        first_position: position of the first token of a prompt.
    """

    kind: str
    content: Array
    length: int
    first_position: int

    def keys_and_values(self, shapes: list[tuple[int, int]]) -> list[KeyValue]:
        """Keys and values by layer, for kinds other than `soft_prompt`, which needs the model to compute them.

        `shapes` are (kv_heads, head_dim) of every layer. Raises InputRefused for a prefix of other shapes.
        """
        return (_split_rows if self.kind == "prefix_tuning" else _split_caches)(self.content, shapes)


def open_prefix(path: Path) -> Prefix:
    """Reads a PEFT adapter folder, a folder with `pre_caches.npy`, or that file; raises InputRefused for others."""
    if not path.exists():
        raise InputRefused(f"`{path}` does not exist", hint="give the folder of a prefix or prompt tuning adapter")
    if path.name == PRE_CACHES and path.is_file():
        return _pre_caches(path)
    if (path / PRE_CACHES).is_file():
        return _pre_caches(path / PRE_CACHES)
    if (path / ADAPTER_CONFIG).is_file():
        return _peft(path)
    raise InputRefused(
        f"`{path}` does not contain a prefix",
        hint=f"give a PEFT adapter with `{ADAPTER_CONFIG}`, or a folder with PaddleNLP's `{PRE_CACHES}`",
    )


def _peft(folder: Path) -> Prefix:
    found = read_json(folder / ADAPTER_CONFIG).get("peft_type")
    if found not in KINDS:
        raise UnsupportedInput(
            f"unsupported prefix: `{folder}` is an adapter of type `{found}`",
            hint=f"a prefix is one of {', '.join(KINDS)}; `llmconv merge-lora` merges the others into the weights",
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputRefused(
            f"`{folder}` has no `{ADAPTER_WEIGHTS}`", hint="save the adapter with `save_pretrained`, as safetensors"
        )
    tensors = read_header(folder / ADAPTER_WEIGHTS).tensors
    if set(tensors) != {EMBEDDINGS}:
        raise MalformedInput(
            f"`{ADAPTER_WEIGHTS}` contains {', '.join(sorted(tensors)[:3]) or 'nothing'} instead of `{EMBEDDINGS}`",
            hint="save the adapter again with `save_pretrained`, out of training mode",
        )
    content = tensors[EMBEDDINGS].read().astype(np.float32)
    if content.ndim != 2 or not content.size:
        raise MalformedInput(
            f"invalid shape of `{EMBEDDINGS}`: {list(content.shape)}", hint="it must have one row per virtual token"
        )
    return Prefix(KINDS[found], content, len(content), len(content))


def _pre_caches(path: Path) -> Prefix:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)  # refuses a shape larger than the file
    except (ValueError, OSError, EOFError) as error:
        raise MalformedInput(f"`{path}` is not an array: {error}", hint="copy the file again") from error
    if not isinstance(content, np.ndarray):
        raise MalformedInput(f"`{path}` is not an array", hint="copy the file again")
    if content.dtype in (np.uint16, np.dtype("V2")):  # bfloat16 as saved by PaddleNLP and by numpy
        content = content.view(ml_dtypes.bfloat16)
    is_float = content.dtype.kind == "f" or content.dtype == ml_dtypes.bfloat16
    if not is_float or content.ndim != 5 or content.shape[1] != 2 or not content.size:
        raise MalformedInput(
            f"`{path}` is not a prefix: {content.dtype} {list(content.shape)}",
            hint="it must be an array of floats [layers, 2, kv_heads, tokens, head_dim]",
        )
    return Prefix("pre_caches", content.astype(np.float32), content.shape[3], 0)


def _split_rows(content: Array, shapes: list[tuple[int, int]]) -> list[KeyValue]:
    length = len(content)
    widths = [heads * size for heads, size in shapes for _ in range(2)]
    if content.shape[1] != sum(widths):
        _refuse(f"{content.shape[1]} numbers per token", f"{sum(widths)}")
    parts = np.split(content, np.cumsum(widths)[:-1], axis=1)
    heads_first = [
        part.reshape(length, heads, size).transpose(1, 0, 2)
        for part, (heads, size) in zip(parts, [shape for shape in shapes for _ in range(2)], strict=True)
    ]
    return list(zip(heads_first[::2], heads_first[1::2], strict=True))


def _split_caches(content: Array, shapes: list[tuple[int, int]]) -> list[KeyValue]:
    found = [(content.shape[2], content.shape[4])] * content.shape[0]
    if found != shapes:
        _refuse(f"{len(found)} layers of (kv_heads, head_dim) {found[0]}", f"{len(shapes)} of {shapes[0]}")
    return [(layer[0], layer[1]) for layer in content]


def _refuse(found: str, wanted: str) -> Any:
    raise InputRefused(
        f"shape mismatch for the prefix: expected {wanted}, got {found}",
        hint="it was trained on another model; give the prefix of this one",
    )
