"""Reads the files of Megatron's ranks: their arguments, and their tensors with the layers' numbers in the whole model.

Layout (Megatron-LM `training/checkpointing.py`, `generate_state_dict`): `args` (a Namespace), `checkpoint_version`,
`iteration`, `model` (or `model0`, `model1`, … with virtual pipeline stages); layers count from 0 in each stage.
NeMo 1 has `state_dict`, or the state dict alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.convert.algebra.operations import first_missing
from llmconv.convert.formats.megatron.names import IGNORED, LAYER, core_name, has_old_name
from llmconv.convert.formats.megatron.save_folder import Save
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import Global, TensorRef
from llmconv.files.torch_reader import TorchFile, open_torch_file
from llmconv.tensors import LazyTensor

CHUNK = re.compile(r"model(\d{0,3})")
STATE_DICT = "state_dict"
DEPTH_LIMIT = 8
NEMO_VERSION = 3.0
"""NeMo writes no version, and always had the order of rows of the newest one (but with `megatron_legacy`)."""

SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "swiglu",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
"""Arguments that all ranks of a run have in common."""

PARTS = {
    "optimizer": "the optimizer's state",
    "optimizer_states": "the optimizer's state",
    "opt_param_scheduler": "the learning rate schedule",
    "lr_scheduler": "the learning rate schedule",
    "lr_schedulers": "the learning rate schedule",
    "rng_state": "the random number generators",
    "rerun_state_machine": "the state of the run",
}


@dataclass(frozen=True)
class Rank:
    """The opened file of one rank.

    Attributes:
        numbers: in its folder's name.
        arguments: of the run, by name; empty if there are none.
        version: `checkpoint_version`; 0 if there is none.
        stages: for each virtual pipeline stage, name to tensor in core's names, layers counted from 0.
        old: names of fused attention matrices whose rows `version` orders.
        dropped: descriptions of the other contents.
    """

    numbers: tuple[int, ...]
    path: Path
    arguments: Mapping[str, Any] = field(repr=False)
    version: float
    iteration: int | None
    stages: Sequence[Mapping[str, LazyTensor]] = field(repr=False)
    old: frozenset[str] = field(repr=False)
    dropped: tuple[str, ...] = ()


def open_ranks(save: Save) -> list[Rank]:
    """The ranks of a save, in order; reads no tensor. MalformedInput for a damaged file or ranks of different saves.

    Raises UnsupportedInput for objects in place of tensors.
    """
    ranks = [_open_rank(numbers, path, save) for numbers, path in sorted(save.rank_files.items())]
    _require_one_save(save.path.name, ranks)
    return ranks


def _require_one_save(source: str, ranks: Sequence[Rank]) -> None:
    values: dict[str, list[Any]] = {
        "checkpoint_version": [rank.version for rank in ranks],
        "iteration": [rank.iteration for rank in ranks],
        **{name: [rank.arguments.get(name) for rank in ranks] for name in SAME},
    }
    for name, found in values.items():
        if len(words := {str(value)[:40] for value in found}) > 1:
            raise MalformedInput(
                f"the ranks of `{source}` are of different saves: `{name}` {listing(sorted(words))}",
                hint="copy the files of all ranks of one save",
            )


def _open_rank(numbers: tuple[int, ...], path: Path, save: Save) -> Rank:
    file = open_torch_file(path)
    content = file.content
    if not isinstance(content, dict):
        raise MalformedInput(f"`{_shown(path)}` does not contain a dict", hint="copy it again from where it was saved")
    states, old = _stages(path, content), set[str]()
    stages = [_tensors(file, state, old) for state in states]
    version = content.get("checkpoint_version", NEMO_VERSION if save.nemo else 0)
    iteration = content.get("iteration")
    if not isinstance(version, int | float) or not 0 <= version <= 3:
        raise UnsupportedInput(
            f"`{_shown(path)}` has the unknown `checkpoint_version` {str(version)[:40]}",
            hint="save it with Megatron-LM, which writes 3.0",
        )
    return Rank(
        numbers,
        path,
        namespace(content.get("args")),
        float(version),
        iteration if type(iteration) is int else None,
        stages,
        frozenset(old),
        tuple(dict.fromkeys(PARTS[str(key)] for key in content if str(key) in PARTS and content[key])),
    )


def namespace(value: Any) -> dict[str, Any]:
    """The fields of a pickled `argparse.Namespace`, which is read as data; empty for anything else."""
    known = isinstance(value, Stub) and isinstance(value.function, Global) and value.function.name == "Namespace"
    fields = value.state if known else value
    if not isinstance(fields, dict):
        return {}
    return {name: field for name, field in fields.items() if isinstance(name, str)}


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _stages(path: Path, content: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The state dicts of a rank: one, or one for each virtual pipeline stage."""
    if isinstance(content.get(STATE_DICT), dict):
        return [content[STATE_DICT]]
    matches = ((CHUNK.fullmatch(str(key)), value) for key, value in content.items())
    found = {match[1]: value for match, value in matches if match and isinstance(value, dict)}
    if not found and any(isinstance(value, TensorRef) for value in content.values()):
        return [content]
    numbers = {int(number) for number in found if number}
    complete = set(found) == {""} or (found and "" not in found and first_missing(numbers, len(found)) is None)
    if not complete:
        raise MalformedInput(
            f"`{_shown(path)}` has no `model`, or not all of its virtual stages: {listing(sorted(map(str, content)))}",
            hint="the run may have saved the optimizer alone (`--no-save-model`); give another save",
        )
    return [found[key] for key in sorted(found, key=lambda key: int(key or 0))]


def _tensors(file: TorchFile, state: Mapping[Any, Any], old: set[str]) -> dict[str, LazyTensor]:
    """The tensors of one stage by their name in Megatron core; `old` gets the names of old attention matrices."""
    tensors: dict[str, LazyTensor] = {}
    for own, leaf in _leaves(state, ""):
        if IGNORED.search(own) or not isinstance(leaf, TensorRef | Stub):
            continue
        if isinstance(leaf, Stub):
            raise UnsupportedInput(
                f"`{own}` in `{_shown(file.path)}` is an object, not a plain tensor",
                hint="weights in 8 or 4 bits (`--fp8-param-gather`) must be saved in 16 bits first",
            )
        name = core_name(own)
        if name in tensors:
            raise MalformedInput(
                f"duplicate key in `{_shown(file.path)}`: `{own}` is `{name}` a second time",
                hint="two checkpoints are mixed in one file",
            )
        tensors[name] = file.tensor(own, leaf)
        old |= {name} if has_old_name(own) else set()
    return tensors


def _leaves(state: Mapping[Any, Any], above: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values in nested dicts, their keys joined with dots."""
    for key, value in state.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and depth < DEPTH_LIMIT:
            yield from _leaves(value, f"{name}.", depth + 1)
        else:
            yield name, value


def whole_numbers(source: str, stages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each stage (layers from 0) in order, its names to those with the layers' numbers in the whole model.

    Raises MalformedInput if a stage lacks a layer, or has a tensor that belongs in another one.
    """
    first, renamed = 0, list[dict[str, str]]()
    for stage in stages:
        matches = {name: LAYER.fullmatch(name) for name in stage}
        numbers = Counter(int(match[1]) for match in matches.values() if match)
        if (missing := first_missing(numbers, len(numbers))) is not None:
            raise MalformedInput(
                f"a pipeline stage of `{source}` lacks its layer {missing}", hint="copy the files of all ranks again"
            )
        renamed.append(
            {
                name: f"decoder.layers.{first + int(match[1])}.{match[2]}" if match else name
                for name, match in matches.items()
            }
        )
        first += len(numbers)
    return renamed


def require_complete(source: str, numbers: Sequence[int], count: int, what: str) -> None:
    """Checks that the ranks 0 … `count` - 1 of the kind `what`, such as `tensor`, are there, and no others.

    Raises InputRefused if one is missing, MalformedInput if there are more.
    """
    missing = first_missing(set(numbers), count)
    if missing is not None:
        raise InputRefused(
            f"`{source}` was saved by {count} {what}-parallel ranks; rank {missing} is missing",
            hint="give the folder of the save (`iter_…`) with the files of all ranks",
        )
    if max(numbers) >= count:
        raise MalformedInput(
            f"`{source}` was saved by {count} {what}-parallel ranks, and has a rank {max(numbers)}",
            hint="two saves were written into one folder; keep the folders of one of them",
        )
