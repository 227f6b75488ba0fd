"""Opens a MindSpore checkpoint: a `.ckpt`, MindSpore's safetensors, or a folder of either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmconv.convert.algebra.operations import concat, first_missing
from llmconv.convert.formats.mindformers.mindspore import Strategy, find_strategy, is_mindspore_ckpt, read_ckpt
from llmconv.convert.state_dicts.files import joined, without_duplicates
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.files.safetensors_file import read_header
from llmconv.tensors import LazyTensor

RANK = re.compile(r"rank_(\d+)")
SUFFIXES = (".ckpt", ".safetensors")

MINDFORMERS_NAMES = re.compile(
    r"\.embedding_(?:weight|table)$|\.norm_out\.weight$|(?:layernorm\d?|ln_f|norm)\.gamma$|\.attention_norm\.weight$"
)
"""Tensor names of MindFormers that Hugging Face models do not have, for files without the metadata `ms`."""

NOT_THE_MODEL = re.compile(
    r"^[^.]+$"  # epoch_num, step_num, loss_scale, global_step, beta1_power, …
    r"|^(?:adam_[a-z]+|accu_grads|moments?|momentum|velocity|pma_weight|ema_weight|clone_param32)\."
    r"|__param_key__"
    r"|(?:^|\.)(?:key|value)_(?:past|cache)(?:\.|$)"
)
"""Optimizer states, counters and caches that training and serving save among the weights."""


@dataclass(frozen=True)
class Parameters:
    """A model in MindFormers' names, the strategy that joined ranks, and phrases about other content (`dropped`)."""

    tensors: dict[str, LazyTensor]
    warnings: tuple[str, ...] = ()
    files: int = 1
    dropped: tuple[str, ...] = ()
    strategy: Path | None = None


def is_mindspore(path: Path) -> bool:
    """Whether `path` is a MindSpore file, or a folder of them (rank folders included)."""
    if path.is_file():
        return _is_file(path)
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return bool(_rank_files(path)) or any(_is_file(entry) for entry in _candidates(path))


def _is_file(path: Path) -> bool:
    return _is_ms_safetensors(path) if path.suffix == ".safetensors" else is_mindspore_ckpt(path)


def _is_ms_safetensors(path: Path) -> bool:
    try:
        header = read_header(path)
    except (LlmconvError, OSError):
        return False
    return header.metadata.get("format") == "ms" or any(MINDFORMERS_NAMES.search(name) for name in header.tensors)


def _candidates(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix in SUFFIXES and entry.is_file())


def _rank_files(folder: Path) -> dict[int, Path]:
    """Rank to its checkpoint, the last in name order as in MindFormers."""
    files: dict[int, Path] = {}
    for entry in folder.iterdir():
        match = RANK.fullmatch(entry.name)
        if match and entry.is_dir() and (found := [file for file in _candidates(entry) if _is_file(file)]):
            files[int(match[1])] = found[-1]
    return dict(sorted(files.items()))


def open_parameters(path: Path, strategy: Path | None = None) -> Parameters:
    """Opens a path that `is_mindspore`, by headers; `strategy` is the run's, None: in or next to the folder.

    Raises UsageProblem for a superfluous `strategy`, UnsupportedInput for encrypted or quantized files, or ranks
    without one, MalformedInput for missing or damaged files.
    """
    ranks = _rank_files(path) if path.is_dir() else {}
    if strategy and len(ranks) < 2:
        raise UsageProblem(f"`{path.name}` is not divided into ranks", hint="leave out `--strategy`")
    found = _open_ranks(path, ranks, strategy) if ranks else _open_files(path)
    model = {name: tensor for name, tensor in found.tensors.items() if not NOT_THE_MODEL.search(name)}
    others = len(found.tensors) - len(model)
    dropped = (f"{others} tensors of the optimizer and the run",) if others else ()
    left_out = tuple(f"left out {what}" for what in dropped)
    return Parameters(model, (*found.warnings, *left_out), found.files, dropped, found.strategy)


def peek(path: Path) -> dict[str, LazyTensor]:
    """The tensors in MindFormers' names (of every rank if not joinable); InputRefused if headers are unreadable."""
    try:
        return open_parameters(path).tensors
    except InputRefused:
        ranks = _rank_files(path).items() if path.is_dir() else ()
        files = {f"rank_{rank}": file for rank, file in ranks}
        files = files or {file.name: file for file in ([path] if path.is_file() else _candidates(path))}
        return joined({name: _open_file(file).tensors for name, file in files.items()})


def _open_files(path: Path) -> Parameters:
    files = [path] if path.is_file() else [entry for entry in _candidates(path) if _is_file(entry)]
    if len(files) > 1 and any(file.suffix == ".ckpt" for file in files):
        raise InputRefused(
            f"`{path}` holds {len(files)} checkpoints: {listing([file.name for file in files])}",
            hint=f"give one of them, such as `{files[-1]}`",
        )
    # the tensors of several files of one model (the output of `unified_safetensors`)
    parts = [_open_file(file) for file in files]
    tensors = without_duplicates(path.name, [part.tensors for part in parts])
    return Parameters(tensors, tuple(warning for part in parts for warning in part.warnings), len(parts))


def _open_file(path: Path) -> Parameters:
    if path.suffix != ".safetensors":
        file = read_ckpt(path)
        return Parameters(file.tensors, file.warnings)
    header = read_header(path)
    packed = [name for name in header.tensors if header.metadata.get(name) == "Int4"]
    if packed:
        raise UnsupportedInput(
            f"`{path.name}` holds {len(packed)} tensors of packed int4 values: {listing(packed)}",
            hint="only plain float, integer and bool tensors can be converted; dequantize it first",
        )
    return Parameters(dict(header.tensors))


def _open_ranks(folder: Path, files: Mapping[int, Path], given: Path | None) -> Parameters:
    missing = first_missing(files, max(files) + 1)
    if missing is not None:
        raise MalformedInput(
            f"`{folder.name}` has {len(files)} ranks, but `rank_{missing}` is missing",
            hint="copy the missing folder; all ranks are needed",
        )
    opened = {rank: _open_file(file) for rank, file in files.items()}
    warnings = tuple(dict.fromkeys(warning for part in opened.values() for warning in part.warnings))
    if len(opened) == 1:
        return opened[0]
    strategy = find_strategy(folder, given)
    if strategy is None:
        raise UnsupportedInput(
            f"`{folder.name}` holds {len(opened)} ranks, but no strategy file describes how they are divided",
            hint="name the run's `strategy` folder (`ckpt_strategy_rank_*.ckpt`) with `--strategy`",
        )
    shards = {
        rank: {name: tensor for name, tensor in part.tensors.items() if not NOT_THE_MODEL.search(name)}
        for rank, part in opened.items()
    }
    return Parameters(merge_ranks(folder, shards, strategy), warnings, len(opened), strategy=strategy.path)


def merge_ranks(
    folder: Path, shards: Mapping[int, Mapping[str, LazyTensor]], strategy: Strategy
) -> dict[str, LazyTensor]:
    """Joins the tensors of all ranks (rank to tensors by name); of equal copies, the one of the lowest rank is read.

    Raises UnsupportedInput for an uneven division, MalformedInput for a missing layout or rank, or contradictions.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in sorted(shards.items()):
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    unknown = [name for name in holders if name not in strategy.layouts]
    if unknown:
        raise MalformedInput(
            f"the strategy `{strategy.path}` contains no layout for {len(unknown)} tensors of `{folder.name}`: "
            + listing(unknown),
            hint="give the strategy files of all stages of this run",
        )
    return {
        name: _merge(folder, name, {rank: shards[rank][name] for rank in ranks}, strategy, len(shards))
        for name, ranks in holders.items()
    }


def _merge(folder: Path, name: str, parts: Mapping[int, LazyTensor], strategy: Strategy, ranks: int) -> LazyTensor:
    """Joins one tensor from the ranks that hold it, maybe not all (`remove_redundancy` keeps one copy of each part)."""
    layout = strategy.layouts[name]
    if layout.uneven:
        raise _unsupported(folder, name, "unevenly or in nested parts")
    if ranks % layout.ranks:
        raise MalformedInput(
            f"`{folder.name}` has {ranks} ranks, but the strategy `{strategy.path}` divides `{name}` "
            f"among {layout.ranks}",
            hint="a rank folder is missing, or the strategy belongs to another run",
        )
    pieces = {layout.coordinates_of(rank % layout.ranks): parts[rank] for rank in sorted(parts, reverse=True)}
    if any(len(layout.axes) > len(part.shape) for part in pieces.values()) or len(pieces) != prod(layout.grid()):
        raise MalformedInput(
            f"`{folder.name}` holds {len(pieces)} of {prod(layout.grid())} parts of `{name}`, or it has other axes",
            hint=f"a rank folder is incomplete, or the strategy `{strategy.path}` belongs to another run",
        )
    return _assemble(folder, name, pieces, strategy)


def _unsupported(folder: Path, name: str, how: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{name}` of `{folder.name}` is divided {how}, which is unsupported",
        hint="merge it first with MindSpore's `transform_checkpoints(src, dst, prefix, src_strategy, None)`",
    )


def _assemble(folder: Path, name: str, pieces: Mapping[tuple[int, ...], LazyTensor], strategy: Strategy) -> LazyTensor:
    grid = strategy.layouts[name].grid()
    if any(count > 1 for count in grid[2:]):
        raise _unsupported(folder, name, f"along {len(grid)} axes")
    rows, columns = (*grid[:2], 1, 1)[:2] if grid else (1, 1)
    rest = (0,) * max(0, len(grid) - 2)
    try:
        lines = [
            concat([pieces[(row, column, *rest)[: len(grid)]] for column in range(columns)], 1) for row in range(rows)
        ]
        return concat(lines, 0)
    except ValueError as error:
        raise MalformedInput(
            f"the parts of `{name}` in `{folder.name}` cannot be joined: {error}",
            hint=f"ranks of different runs are mixed, or the strategy `{strategy.path}` belongs to another run",
        ) from error
