"""Joins the tensors of tensor-, pipeline- and expert-parallel ranks into whole ones.

Layout (Megatron core `tensor_parallel/layers.py`, `transformer/{attention,mlp}.py`, `moe/experts.py`): ranks divide the
rows of the embedding, the head, QKV and the first feed-forward matrix (in each: gate rows, then up rows), and the
columns of the two output projections; everything else is equal on all of them. Expert ranks divide the experts.

The first grouped layers (`GroupedMLP`, `--moe-grouped-gemm` until 0.9) keep the experts in two matrices: the memory of
`weight1` is [experts, hidden, rows of the first matrix], that of `weight2` [experts, columns of the second, hidden], so
each expert's matrices are transposed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmconv.convert.algebra.operations import (
    concat,
    first_missing,
    interleave_rows,
    permute_rows,
    replicated,
    slice_rows,
    split,
)
from llmconv.convert.formats.megatron.arguments import Arguments
from llmconv.convert.formats.megatron.config import head_dim, query_groups
from llmconv.convert.formats.megatron.names import EMBEDDING, EXPERT, EXTRA_HEADS, FC1, HEAD
from llmconv.convert.formats.megatron.rank_files import Rank, require_complete, whole_numbers
from llmconv.convert.formats.megatron.save_folder import RunState
from llmconv.convert.state_dicts.distributed.folder import reshaped
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed

ROWS = re.compile(r"\.(?:linear_qkv|linear_fc1)\.(?:weight|bias)$")
COLUMNS = re.compile(r"\.(?:linear_proj|linear_fc2)\.weight$")

Place = tuple[int, int]
"""Tensor rank and expert rank."""

Parts = dict[str, dict[Place, list[LazyTensor]]]
"""Name to the parts of a tensor; several at one place are copies, on different pipeline stages."""


@dataclass(frozen=True)
class Grid:
    """The numbers of tensor-, pipeline- and expert-parallel ranks, and of tensor ranks that share out an expert."""

    source: str
    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def join_ranks(ranks: Sequence[Rank], arguments: Arguments) -> RunState:
    """The whole tensors of a run, from the ranks of `open_ranks`; InputRefused if one is missing.

    Raises MalformedInput for contradictions, UnsupportedInput if experts are divided in a way that is not read.
    """
    grid = _grid(ranks, arguments)
    parts = _parts(grid, {_place(grid, rank): rank for rank in ranks}, arguments)
    extra = [name for name in parts if EXTRA_HEADS.match(name)]
    tensors = {
        name: _whole(grid, name, places, gated=arguments.flag("swiglu"))
        for name, places in _globally(grid, parts, arguments).items()
        if name not in extra
    }
    dropped = [phrase for rank in ranks[:1] for phrase in rank.dropped]
    if extra:
        dropped.append(f"{len(extra)} tensors of heads that predict later tokens")
    return RunState(tensors, len(ranks), f"checkpoint version {ranks[0].version:g}", tuple(dropped))


def _grid(ranks: Sequence[Rank], arguments: Arguments) -> Grid:
    old = max(rank.numbers[0] for rank in ranks) + 1
    tensor = arguments.count("tensor_model_parallel_size", arguments.values.get("model_parallel_size") or old)
    expert_tensor = arguments.count("expert_tensor_parallel_size", tensor)
    if expert_tensor not in (1, tensor) and arguments.values.get("num_experts"):
        raise arguments.unsupported("expert_tensor_parallel_size")
    return Grid(
        arguments.source,
        tensor,
        arguments.count("pipeline_model_parallel_size", 1),
        arguments.count("expert_model_parallel_size", 1),
        expert_tensor,
    )


def _place(grid: Grid, rank: Rank) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank; the second of two numbers is the expert rank without pipeline stages."""
    tensor, *more = rank.numbers
    if len(more) == 1 and grid.pipeline == 1 and grid.expert > 1:
        return tensor, 0, more[0]
    pipeline, expert = (*more, 0, 0)[:2]
    return tensor, pipeline, expert


def _parts(grid: Grid, ranks: Mapping[tuple[int, int, int], Rank], arguments: Arguments) -> Parts:
    """The parts of every tensor by name, with whole numbers of layers, and local numbers of experts."""
    for number, (what, count) in enumerate(
        (("tensor", grid.tensor), ("pipeline", grid.pipeline), ("expert", grid.expert))
    ):
        require_complete(grid.source, [place[number] for place in ranks], count, what)
    chosen = {place[1]: rank for place, rank in reversed(sorted(ranks.items(), key=lambda item: item[0]))}
    virtual = max(len(rank.stages) for rank in chosen.values())
    if any(len(rank.stages) != virtual for rank in ranks.values()):
        raise _mixed(grid, "the number of virtual pipeline stages")
    order = [(stage, pipeline) for stage in range(virtual) for pipeline in range(grid.pipeline)]
    names = whole_numbers(grid.source, [chosen[pipeline].stages[stage] for stage, pipeline in order])
    parts: Parts = defaultdict(lambda: defaultdict(list))
    for (stage, pipeline), renamed in zip(order, names, strict=True):
        for place, rank in ranks.items():
            if place[1] != pipeline:
                continue
            own = rank.stages[stage]
            if odd := sorted(own.keys() ^ renamed.keys()):
                raise _mixed(grid, listing(odd))
            for name, tensor in own.items():
                ordered = _ordered(tensor, rank, arguments, grid) if name in rank.old else tensor
                parts[renamed[name]][place[0], place[2]].append(ordered)
    return parts


def _mixed(grid: Grid, what: str) -> MalformedInput:
    return MalformedInput(
        f"the ranks of `{grid.source}` do not have the same parts: {what}",
        hint="files of different runs are mixed; copy all ranks of one save again",
    )


def _ordered(tensor: LazyTensor, rank: Rank, arguments: Arguments, grid: Grid) -> LazyTensor:
    """A fused attention matrix in the row order since version 2: heads of queries, keys and values alternate.

    Source: Megatron-LM `fix_query_key_value_ordering`; version 0: all queries, keys, values; 1: the three in turn.
    """
    if rank.version >= 2:
        return tensor
    rows, dim = arguments.count("num_attention_heads") * head_dim(arguments) * 3 // grid.tensor, head_dim(arguments)
    if tensor.num_rows != rows or query_groups(arguments) != arguments.count("num_attention_heads"):
        raise MalformedInput(
            f"a fused attention matrix of `{grid.source}` has {tensor.num_rows} rows; expected {rows}",
            hint="its arguments are of another model",
        )
    if rank.version < 1:
        return interleave_rows(split(tensor, 0, 3), [dim] * 3)
    return permute_rows(tensor, [3 * row + part for part in range(3) for row in range(dim)])


def _globally(grid: Grid, parts: Parts, arguments: Arguments) -> Parts:
    """The parts with global numbers of experts; those of expert rank `e` follow those of `e - 1`."""
    whole: Parts = {}
    local = arguments.count("num_experts", 1) // grid.expert if arguments.values.get("num_experts") else 0
    for name, places in _separated(grid, parts, local, arguments).items():
        match = EXPERT.fullmatch(name)
        if not match:
            whole[name] = places
            continue
        if int(match[2]) >= local:
            raise _mixed(grid, f"`{name}`, where each rank has {local} experts")
        for expert in range(grid.expert):
            own = {place: tensors for place, tensors in places.items() if place[1] == expert}
            whole[f"{match[1]}.{int(match[2]) + expert * local}.{match[3]}"] = own
    return whole


def _separated(grid: Grid, parts: Parts, local: int, arguments: Arguments) -> Parts:
    """The parts, with one matrix for each expert."""
    separate: Parts = defaultdict(lambda: defaultdict(list))
    for name, places in parts.items():
        if not grouped_matrix(name):
            separate[name] = places
            continue
        for place, tensor in ((place, tensor) for place, tensors in places.items() for tensor in tensors):
            try:
                for own, matrix in separate_experts(name, tensor, local, arguments.count("hidden_size")):
                    separate[own][place].append(matrix)
            except ValueError as error:
                raise _mixed(grid, f"`{name}` {error}") from error
    return separate


def _whole(grid: Grid, name: str, places: Mapping[Place, Sequence[LazyTensor]], *, gated: bool) -> LazyTensor:
    """One tensor from its parts; copies must be equal, which is checked while they are read."""
    is_expert = EXPERT.fullmatch(name) is not None
    is_shared_out = name in (EMBEDDING, HEAD) or ROWS.search(name) or COLUMNS.search(name)
    count = (grid.expert_tensor if is_expert else grid.tensor) if is_shared_out else 1
    by_rank: defaultdict[int, list[LazyTensor]] = defaultdict(list)
    for (tensor_rank, _), copies in sorted(places.items()):
        by_rank[tensor_rank if count > 1 else 0] += copies
    if (missing := first_missing(by_rank, count)) is not None:
        raise _mixed(grid, f"tensor rank {missing} lacks `{name}`")
    try:
        pieces = [_one(grid, name, by_rank[number]) for number in range(count)]
        if COLUMNS.search(name):
            return concat(pieces, 1)
        if gated and FC1.search(name) and count > 1:
            halves = [split(piece, 0, 2) for piece in pieces]
            return concat([half[side] for side in range(2) for half in halves], 0)
        return concat(pieces, 0) if is_shared_out else pieces[0]
    except ValueError as error:
        raise MalformedInput(
            f"the parts of `{name}` in `{grid.source}` cannot be joined: {error}",
            hint="ranks of different runs are mixed",
        ) from error


def _one(grid: Grid, name: str, copies: Sequence[LazyTensor]) -> LazyTensor:
    if len({(copy.shape, copy.dtype) for copy in copies}) > 1:
        raise ValueError(f"copies have the shapes {[copy.shape for copy in copies[:4]]}")
    return replicated(
        copies,
        UnsupportedInput(
            f"the ranks of `{grid.source}` hold different copies of `{name}`",
            hint="ranks of different saves are mixed, or the run was damaged; copy all ranks of one save again",
        ),
    )


MATRICES = {".mlp.experts.weight1": "linear_fc1", ".mlp.experts.weight2": "linear_fc2"}


def grouped_matrix(name: str) -> str | None:
    """`linear_fc1` or `linear_fc2` if a tensor contains this matrix of all experts of a rank, else None."""
    return next((matrix for end, matrix in MATRICES.items() if name.endswith(end)), None)


def separate_experts(name: str, tensor: LazyTensor, experts: int, hidden: int) -> Iterator[tuple[str, LazyTensor]]:
    """The matrices of the experts of one rank, by their names with local numbers; ValueError for another shape.

    `tensor` is [hidden, experts · rows] or [experts · columns, hidden]; `grouped_matrix` is not None for `name`.
    """
    matrix = grouped_matrix(name)
    own = 0 if matrix == "linear_fc1" else 1
    if len(tensor.shape) != 2 or tensor.shape[own] != hidden or not experts or tensor.shape[1 - own] % experts:
        raise ValueError(f"{list(tensor.shape)} does not hold {experts} experts")
    size = tensor.shape[1 - own] // experts
    rows, columns = (hidden, size) if own == 0 else (size, hidden)
    stacked = reshaped(tensor, (experts * rows, columns))
    stem = name.rpartition(".")[0]
    for expert in range(experts):
        part = slice_rows(stacked, expert * rows, (expert + 1) * rows)
        yield f"{stem}.{expert}.{matrix}.weight", transposed(part)
