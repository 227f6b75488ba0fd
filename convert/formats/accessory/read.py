"""Reads the shards of a LLaMA2-Accessory (or Meta) folder and joins them, in Accessory's own names.

Split (Accessory `util/tensor_parallel.py`, `model/peft.py`): column-parallel layers along dim 0 with their bias and
`lora_b`; row-parallel layers and their `lora_a` along dim 1; embeddings along dim 1; all others are copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llmconv.convert.algebra.operations import concat, first_missing, slice_rows
from llmconv.convert.formats.meta.read import open_shard, split_dim
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed

SHARD = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model\.pth")
DELTA_FILE = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model-diff\.pth")
META_SHARD = re.compile(r"consolidated\.(\d+)\.pth")

EXPERT = re.compile(r"\.feed_forward\.experts\.\d+\.")
FUSED_EXPERTS = re.compile(r"(.*\.feed_forward)\.(w[123])")
"""mixtral_sparse: all experts in one matrix, whose name does not end with `.weight`."""


def open_shards(folder: Path, kind: re.Pattern[str] = SHARD) -> list[dict[str, LazyTensor]]:
    """The shards in order: name, without the prefix `llma.`, to tensor.

    Args:
        folder: contains the shards of a model (Accessory's or Meta's), or of a delta.
        kind: `SHARD`, or `DELTA_FILE` for those of a delta.

    Raises:
        InputRefused: there are no shards, or they are a delta.
        MalformedInput: a shard is missing or superfluous, or two sets are mixed.
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    own = [name for name in names if kind.fullmatch(name)]
    if kind is SHARD and any(DELTA_FILE.fullmatch(name) for name in names):
        raise UnsupportedInput(
            f"`{folder.name}` is a delta, not a model",
            hint=f"add it to its base, such as Meta's folder: `llmconv delta apply BASE {folder.name} -o OUT`",
        )
    numbers = _numbered(folder, own, kind) if own else _numbered_meta(folder, names)
    if not numbers:
        raise InputRefused(
            f"`{folder}` contains no `consolidated.…` shards",
            hint="give the folder that training started from, or that it saved",
        )
    shards = [_without_prefix(open_shard(folder / numbers[number], "model")) for number in sorted(numbers)]
    _check_same(folder, shards)
    return shards


def _numbered(folder: Path, names: Iterable[str], kind: re.Pattern[str]) -> dict[int, str]:
    found = {name: tuple(map(int, match.groups())) for name in names if (match := kind.fullmatch(name))}
    counts = {count for _, count in found.values()}
    others = [META_SHARD, SHARD] if kind is DELTA_FILE else [META_SHARD]
    if (
        len(counts) != 1
        or len(set(found.values())) != len(found)
        or any(other.fullmatch(entry.name) for entry in folder.iterdir() for other in others)
    ):
        raise MalformedInput(
            f"`{folder.name}` mixes shards of different checkpoints", hint="keep one set of shards in a folder"
        )
    (count,) = counts
    numbers = {number: name for name, (number, _) in found.items()}
    _check_numbers(folder, numbers, count)
    return numbers


def _numbered_meta(folder: Path, names: Iterable[str]) -> dict[int, str]:
    numbers = {int(match[1]): name for name in names if (match := META_SHARD.fullmatch(name))}
    _check_numbers(folder, numbers, max(numbers, default=-1) + 1)
    return numbers


def _check_numbers(folder: Path, numbers: Mapping[int, str], count: int) -> None:
    missing = first_missing(numbers, count)
    extra = min((number for number in numbers if number >= count), default=None)
    if missing is not None or extra is not None:
        raise MalformedInput(
            f"`{folder.name}` should have {count} shards, but number {extra if missing is None else missing} "
            + ("is missing" if missing is not None else f"(`{numbers[extra or 0]}`) is superfluous"),
            hint="copy the folder again; it must contain all shards of one checkpoint, and no others",
        )


def _without_prefix(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {name.removeprefix("llma."): tensor for name, tensor in tensors.items()}


def _check_same(folder: Path, shards: Sequence[dict[str, LazyTensor]]) -> None:
    """Refuses shards that differ in names, shapes or dtypes; each whole expert must lie in one shard only."""
    layouts = [
        {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items() if not EXPERT.search(name)}
        for shard in shards
    ]
    different = sorted({name for layout in layouts for name, _ in layout.items() ^ layouts[0].items()})
    if different:
        raise MalformedInput(
            f"the shards of `{folder.name}` differ in {len(different)} tensors: {listing(different)}",
            hint="the shards belong to different checkpoints; copy the folder again",
        )
    experts = [name for shard in shards for name in shard if EXPERT.search(name)]
    if len(set(experts)) != len(experts):
        raise MalformedInput(
            f"two shards of `{folder.name}` contain the same expert",
            hint="a shard was copied twice; copy the folder again",
        )


def join(
    shards: Sequence[dict[str, LazyTensor]], repeated: Iterable[str], experts: int, source: str
) -> dict[str, LazyTensor]:
    """Joins the shards; a matrix of all experts becomes one tensor per expert, as in the other layout.

    Args:
        shards: from `open_shards`.
        repeated: last words of layers that every shard holds whole, in addition to the usual ones.
        experts: number of experts, if they lie in one matrix.
        source: name of the checkpoint's folder, for error messages.

    Returns:
        Accessory's name to tensor.

    Raises:
        MalformedInput: the parts cannot be joined.
    """
    whole: dict[str, LazyTensor] = {}
    copies = set(repeated)
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        try:
            if fused := FUSED_EXPERTS.fullmatch(name):
                whole |= _split_experts(fused[1], fused[2], parts, experts)
            else:
                dim = None if EXPERT.search(name) else split_dim(name, copies)
                whole[name] = parts[0] if dim is None else concat(parts, dim)
        except ValueError as error:
            raise MalformedInput(
                f"the parts of `{name}` in `{source}` cannot be joined: {error}",
                hint="the configuration belongs to another model",
            ) from error
    return whole


def peek(folder: Path) -> dict[str, LazyTensor]:
    """The tensors in Accessory's own names, joined as far as possible by their names alone.

    Raises:
        InputRefused: see `open_shards`.
    """
    shards = open_shards(folder)
    whole: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        parts = [shard[name] for shard in shards if name in shard]
        dim = 0 if FUSED_EXPERTS.fullmatch(name) else None if EXPERT.search(name) else split_dim(name)
        whole[name] = parts[0] if dim is None or len(parts[0].shape) <= dim else concat(parts, dim)
    return whole


def _split_experts(prefix: str, layer: str, parts: Sequence[LazyTensor], experts: int) -> dict[str, LazyTensor]:
    """Joins a part of every expert from each shard (`mixtral_sparse.py`, `_sparse_expert_merge`); w2 is transposed."""
    rows = parts[0].num_rows
    if not experts or rows % experts:
        raise ValueError(f"{rows} rows cannot be divided among {experts} experts")
    step = rows // experts
    whole_experts = {
        number: concat([slice_rows(part, number * step, (number + 1) * step) for part in parts], 0)
        for number in range(experts)
    }
    return {
        f"{prefix}.experts.{number}.{layer}.weight": transposed(expert) if layer == "w2" else expert
        for number, expert in whole_experts.items()
    }


def differing_copies(shards: Sequence[dict[str, LazyTensor]], names: Iterable[str]) -> list[str]:
    """Which of the (small) tensors `names`, copied in every shard, differ between shards."""
    return [name for name in names if name in shards[0] and len({shard[name].read().tobytes() for shard in shards}) > 1]
