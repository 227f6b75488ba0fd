"""The shards of a LLaMA2-Accessory (or Meta) folder, joined to whole tensors under Accessory's own names.

Split (Accessory `util/tensor_parallel.py`, `model/peft.py`): column-parallel layers along dim 0 with their bias and
`lora_b`; row-parallel layers and `lora_a` of such along dim 1; embeddings along dim 1; the rest is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llmconv.convert.algebra.operations import concat, first_missing, listing, slice_rows
from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.formats.meta.names import split_dim
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

SHARD = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model\.pth")
DELTA_FILE = re.compile(r"consolidated\.(\d+)-of-(\d+)\.model-diff\.pth")
META_SHARD = re.compile(r"consolidated\.(\d+)\.pth")

EXPERT = re.compile(r"\.feed_forward\.experts\.\d+\.")
FUSED_EXPERTS = re.compile(r"(.*\.feed_forward)\.(w[123])")
"""mixtral_sparse: all experts in one matrix, and no `.weight` behind the name."""


def open_shards(folder: Path, kind: re.Pattern[str] = SHARD) -> list[dict[str, LazyTensor]]:
    """The shards in order, by name without the `llma.` in front.

    Args:
        folder: with the shards of a model (Accessory's or Meta's), or of a delta.
        kind: `SHARD`, or `DELTA_FILE` for those of a delta.

    Raises:
        InputRefused: there are none, or they are a delta.
        MalformedInput: one is missing, there is one too many, or two sets are mixed.
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    own = [name for name in names if kind.fullmatch(name)]
    if kind is SHARD and any(DELTA_FILE.fullmatch(name) for name in names):
        raise UnsupportedInput(
            f"`{folder.name}` is a delta, which is nothing without its base",
            hint=f"add it to its base, Meta's folder for one: `llmconv delta apply BASE {folder.name} -o OUT`",
        )
    numbers = _numbered(folder, own, kind) if own else _numbered_meta(folder, names)
    if not numbers:
        raise InputRefused(
            f"`{folder}` holds no `consolidated.…` shards", hint="give the folder that training started from, or saved"
        )
    shards = [_open_shard(folder / numbers[number]) for number in sorted(numbers)]
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
            + ("is missing" if missing is not None else f"(`{numbers[extra or 0]}`) is there too"),
            hint="copy the folder again; all shards of one checkpoint are needed, and no others",
        )


def _open_shard(path: Path) -> dict[str, LazyTensor]:
    file = open_torch_file(path)
    content = file.content
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict) or not all(isinstance(ref, TensorRef) for ref in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="it should hold tensors and nothing else")
    return {str(name).removeprefix("llma."): file.tensor(str(name), ref) for name, ref in content.items()}


def _check_same(folder: Path, shards: Sequence[dict[str, LazyTensor]]) -> None:
    """Every shard has the same names, shapes and dtypes, but for whole experts, which one shard has each."""
    layouts = [
        {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items() if not EXPERT.search(name)}
        for shard in shards
    ]
    odd = sorted({name for layout in layouts for name, _ in layout.items() ^ layouts[0].items()})
    if odd:
        raise MalformedInput(
            f"the shards of `{folder.name}` differ in {len(odd)} tensors: {listing(odd)}",
            hint="the shards are of different checkpoints; copy the folder again",
        )
    experts = [name for shard in shards for name in shard if EXPERT.search(name)]
    if len(set(experts)) != len(experts):
        raise MalformedInput(
            f"two shards of `{folder.name}` hold the same expert",
            hint="a shard was copied twice; copy the folder again",
        )


def join(
    shards: Sequence[dict[str, LazyTensor]], repeated: Iterable[str], experts: int, source: str
) -> dict[str, LazyTensor]:
    """Whole tensors under Accessory's names; experts in one matrix become one tensor each, as in the other layout.

    Args:
        shards: from `open_shards`.
        repeated: names of layers that every shard holds whole, though their names say otherwise.
        experts: their number, where they lie in one matrix.
        source: folder name for error messages.

    Raises:
        MalformedInput: the parts do not fit together.
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
                f"`{name}` of `{source}` does not join: {error}", hint="the configuration belongs to another model"
            ) from error
    return whole


def peek(folder: Path) -> dict[str, LazyTensor]:
    """The tensors under Accessory's own names, joined as far as the names alone tell.

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
    """Each shard holds a part of every expert (`mixtral_sparse.py`, `_sparse_expert_merge`); w2 lies transposed."""
    rows = parts[0].num_rows
    if not experts or rows % experts:
        raise ValueError(f"{rows} rows do not divide among {experts} experts")
    step = rows // experts
    pieces = {
        number: concat([slice_rows(part, number * step, (number + 1) * step) for part in parts], 0)
        for number in range(experts)
    }
    return {
        f"{prefix}.experts.{number}.{layer}.weight": transposed(piece) if layer == "w2" else piece
        for number, piece in pieces.items()
    }


def differing_copies(shards: Sequence[dict[str, LazyTensor]], names: Iterable[str]) -> list[str]:
    """Those of the (small) tensors `names` that are not the same in every shard, though each holds them whole."""
    return [name for name in names if name in shards[0] and len({shard[name].read().tobytes() for shard in shards}) > 1]
