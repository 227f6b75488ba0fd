"""Reads Megatron core's distributed checkpoints (`torch_dist`): whole tensors, layers and experts possibly stacked.

Layout (Megatron core `dist_checkpointing/`, `transformer/{transformer_block,mlp}.py`, `moe/experts.py`): torch's DCP
next to `common.pt`; `decoder.layers.mlp.….weight` [layers, …] or `decoder.layers.N.….weight`; experts in the same two
forms; gate and up as one tensor, all gate rows first, or as two, with `_w` and `_v` at the end of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmconv.convert.algebra.operations import concat
from llmconv.convert.formats.megatron.names import EXTRA_HEADS, IGNORED, WRAPPERS, core_name
from llmconv.convert.formats.megatron.rank_files import PARTS, namespace
from llmconv.convert.formats.megatron.save_folder import COMMON, RunState
from llmconv.convert.state_dicts.distributed.folder import DistributedFolder, named_leaves, open_folder
from llmconv.convert.state_dicts.distributed.metadata import TensorItem
from llmconv.errors import MalformedInput
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import LazyTensor

OTHERS = re.compile(r"^(?:chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine|lr_schedulers)\b")
"""First words of the keys of everything but the model."""

STACKED_LAYERS = re.compile(r"^(decoder\.layers)\.(?!\d)(.+)$")
EXPERTS = re.compile(r"^(.+\.mlp\.experts)\.experts\.(.+)$")
"""Megatron's key of experts, which are stacked unless a number follows."""

HALVES = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias)(?:\d+)?)_([wv])$")


def read_common(folder: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    """The arguments in `common.pt`, by name (empty if there are none), and all of its content."""
    if not (folder / COMMON).is_file():
        return {}, {}
    content = open_torch_file(folder / COMMON).content
    if not isinstance(content, dict):
        raise MalformedInput(f"`{COMMON}` in `{folder.name}` does not contain a dict", hint="copy the folder again")
    return namespace(content.get("args")), content


def open_distributed(path: Path, source: str) -> RunState:
    """The whole tensors of a distributed checkpoint, a folder with `.metadata`; none is read.

    Raises MalformedInput if it is damaged or a tensor is not as Megatron stacks it, UnsupportedInput for an element
    type that safetensors does not have.
    """
    folder = open_folder(path)
    found: dict[str, LazyTensor] = {}
    dropped: dict[str, None] = {}
    heads = 0
    for keys, item in named_leaves(folder.tree):
        own = ".".join(map(str, keys))
        if other := OTHERS.match(own):
            dropped[PARTS.get(other[1], "the state of the run")] = None
            continue
        plain = WRAPPERS.sub("", own)
        heads += bool(EXTRA_HEADS.match(plain)) and isinstance(item, TensorItem)
        if not isinstance(item, TensorItem) or IGNORED.search(own) or EXTRA_HEADS.match(plain):
            continue
        for name, tensor in _apart(folder, plain, item):
            if found.setdefault(core_name(name), tensor) is not tensor:
                raise MalformedInput(
                    f"duplicate key in `{source}`: `{own}` is a second `{core_name(name)}`",
                    hint="it holds several models; save the language model alone",
                )
    extra = (f"{heads} tensors of heads that predict later tokens",) if heads else ()
    return RunState(_joined(found, source), folder.shards, "torch_dist", (*dropped, *extra))


def _apart(folder: DistributedFolder, name: str, item: TensorItem) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors stacked in an item, by their names with the numbers of layer and expert."""
    layers = STACKED_LAYERS.match(name)
    template = f"{layers[1]}.{{}}.{layers[2]}" if layers else name.replace("{", "(").replace("}", ")")
    experts = EXPERTS.match(template)
    if experts:
        number = "" if re.match(r"\d+\.", experts[2]) else ".{}"
        template = f"{experts[1]}{number}.{experts[2]}"
    axes = template.count("{}")
    if not axes:
        yield template, folder.tensor(name, item)
        return
    for index, tensor in folder.elements(name, item, axes).items():
        yield template.format(*index), tensor


def _joined(found: Mapping[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """The tensors with gate and up in one, gate rows first."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in found.items():
        match = HALVES.fullmatch(name)
        if not match:
            tensors[name] = tensor
        elif match[2] == "w":
            up = found.get(f"{match[1]}_v")
            if up is None or up.shape[1:] != tensor.shape[1:] or up.dtype != tensor.dtype:
                raise MalformedInput(
                    f"`{source}` contains `{name}` without a matching `_v`", hint="copy the folder again"
                )
            tensors[match[1]] = concat([tensor, up], 0)
        elif f"{match[1]}_w" not in found:
            raise MalformedInput(f"`{source}` contains `{name}` without `_w`", hint="copy the folder again")
    return tensors
