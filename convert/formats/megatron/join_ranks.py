"""Joins the tensors of Megatron's ranks, or of its distributed checkpoints (`torch_dist`), into whole ones.

Files of ranks (Megatron-LM `training/checkpointing.py`, `generate_state_dict`): `args` (a Namespace),
`checkpoint_version`, `iteration`, `model` (or `model0`, `model1`, … with virtual pipeline stages); layers count from 0
in each stage. NeMo 1 has `state_dict`, or the state dict alone.

Axes (Megatron core `tensor_parallel/layers.py`, `transformer/{attention,mlp}.py`, `moe/experts.py`): tensor ranks
divide the rows of the embedding, the head, QKV and the first feed-forward matrix (in each: gate rows, then up rows),
and the columns of the two output projections; everything else is equal on all of them. Expert ranks divide the experts.

The first grouped layers (`GroupedMLP`, `--moe-grouped-gemm` until 0.9) keep the experts in two matrices: the memory of
`weight1` is [experts, hidden, rows of the first matrix], that of `weight2` [experts, columns of the second, hidden], so
each expert's matrices are transposed.

Distributed checkpoints (Megatron core `dist_checkpointing/`, `transformer/{transformer_block,mlp}.py`,
`moe/experts.py`): torch's DCP next to `common.pt`; `decoder.layers.mlp.….weight` [layers, …] or
`decoder.layers.N.….weight`; experts in the same two forms; gate and up as one tensor, all gate rows first, or as two,
with `_w` and `_v` at the end of their names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import transposed
from llmconv.convert import algebra
from llmconv.convert.formats.megatron import save_folder
from llmconv.convert.formats.megatron.config import head_dim, latent_rows, query_groups
from llmconv.convert.formats.megatron.experts import Arguments
from llmconv.convert.state_dicts.distributed import DistributedFolder, TensorItem, named_leaves, open_folder
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import Global, TensorRef
from llmconv.files.torch_reader import TorchFile, open_torch_file
from llmconv.tensors import LazyTensor

CHUNK = re.compile(r"model(\d{0,3})")
STATE_DICT = "state_dict"
DEPTH_LIMIT = 8
# NeMo writes no version, and always had the order of rows of the newest one (but with `megatron_legacy`)
NEMO_VERSION = 3.0
SAME = (  # arguments that all ranks of a run have in common
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts"),
    *("swiglu", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)

PARTS = {
    **dict.fromkeys(("optimizer", "optimizer_states"), "the optimizer's state"),
    **dict.fromkeys(("opt_param_scheduler", "lr_scheduler", "lr_schedulers"), "the learning rate schedule"),
    "rng_state": "the random number generators",
    "rerun_state_machine": "the state of the run",
}


@dataclass(frozen=True)
class Rank:
    """The opened file of one rank."""

    numbers: tuple[int, ...]  # in its folder's name
    path: Path
    arguments: Mapping[str, Any] = field(repr=False)  # of the run, by name; empty if there are none
    version: float  # `checkpoint_version`; 0 if there is none
    iteration: int | None
    # for each virtual pipeline stage, name to tensor in core's names, layers counted from 0
    stages: Sequence[Mapping[str, LazyTensor]] = field(repr=False)
    old: frozenset[str] = field(repr=False)  # names of fused attention matrices whose rows `version` orders
    dropped: tuple[str, ...] = ()  # descriptions of the other contents


def open_ranks(save: save_folder.Save) -> list[Rank]:
    """The ranks of a save in order, unread; MalformedInput: damaged or mixed, UnsupportedInput: objects for tensors."""
    ranks = [_open_rank(numbers, path, save) for numbers, path in sorted(save.rank_files.items())]
    values: dict[str, list[Any]] = {
        "checkpoint_version": [rank.version for rank in ranks],
        "iteration": [rank.iteration for rank in ranks],
        **{name: [rank.arguments.get(name) for rank in ranks] for name in SAME},
    }
    for name, found in values.items():
        if len(words := {str(value)[:40] for value in found}) > 1:
            raise MalformedInput(
                f"the ranks of `{save.path.name}` are of different saves: `{name}` {listing(sorted(words))}",
                hint="copy the files of all ranks of one save",
            )
    return ranks


def _open_rank(numbers: tuple[int, ...], path: Path, save: save_folder.Save) -> Rank:
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
            f"`{_shown(path)}` has the unknown `checkpoint_version` {short(version)}",
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
    complete = set(found) == {""} or (found and "" not in found and algebra.first_missing(numbers, len(found)) is None)
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
        if save_folder.IGNORED.search(own) or not isinstance(leaf, TensorRef | Stub):
            continue
        if isinstance(leaf, Stub):
            raise UnsupportedInput(
                f"`{own}` in `{_shown(file.path)}` is an object, not a plain tensor",
                hint="weights in 8 or 4 bits (`--fp8-param-gather`) must be saved in 16 bits first",
            )
        name = save_folder.core_name(own)
        if name in tensors:
            raise MalformedInput(
                f"duplicate key in `{_shown(file.path)}`: `{own}` is `{name}` a second time",
                hint="two checkpoints are mixed in one file",
            )
        tensors[name] = file.tensor(own, leaf)
        if own.rpartition(".")[0].endswith("attention.query_key_value"):  # whose rows `checkpoint_version` orders
            old.add(name)
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
    """For each stage in order, its names to those with whole layer numbers; MalformedInput: a layer is missing."""
    first, renamed = 0, list[dict[str, str]]()
    for stage in stages:
        matches = {name: save_folder.LAYER.fullmatch(name) for name in stage}
        numbers = Counter(int(match[1]) for match in matches.values() if match)
        if (missing := algebra.first_missing(numbers, len(numbers))) is not None:
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


ROWS = re.compile(
    r"\.(?:linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(?:weight|bias)$"
)
COLUMNS = re.compile(r"\.(?:linear_proj|linear_fc2)\.weight$")

Place = tuple[int, int]  # tensor rank and expert rank
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


def join_ranks(ranks: Sequence[Rank], arguments: Arguments) -> save_folder.RunState:
    """The whole tensors; InputRefused: a rank is missing, MalformedInput, UnsupportedInput: how experts divide."""
    old = max(rank.numbers[0] for rank in ranks) + 1
    tensor = arguments.count("tensor_model_parallel_size", default=arguments.values.get("model_parallel_size") or old)
    expert_tensor = arguments.count("expert_tensor_parallel_size", default=tensor)
    if expert_tensor not in (1, tensor) and arguments.values.get("num_experts"):
        raise arguments.unsupported("expert_tensor_parallel_size")
    pipeline, expert = (arguments.count(f"{kind}_model_parallel_size", default=1) for kind in ("pipeline", "expert"))
    grid = Grid(arguments.source, tensor, pipeline, expert, expert_tensor)
    parts = _parts(grid, {_place(grid, rank): rank for rank in ranks}, arguments)
    rows = latent_rows(arguments)
    tensors = {
        name: _whole(grid, name, places, gated=arguments.flag("swiglu"), rows=rows.get(name.split(".")[-2]))
        for name, places in _globally(grid, parts, arguments).items()
    }
    dropped = [phrase for rank in ranks[:1] for phrase in rank.dropped]
    return save_folder.RunState(tensors, len(ranks), f"checkpoint version {ranks[0].version:g}", tuple(dropped))


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
        # checks for exactly the ranks 0 … `count` - 1 of the kind `what`; InputRefused: missing, MalformedInput: more
        numbers = [place[number] for place in ranks]
        if (missing := algebra.first_missing(set(numbers), count)) is not None:
            raise InputRefused(
                f"`{grid.source}` was saved by {count} {what}-parallel ranks; rank {missing} is missing",
                hint="give the folder of the save (`iter_…`) with the files of all ranks",
            )
        if max(numbers) >= count:
            raise MalformedInput(
                f"`{grid.source}` was saved by {count} {what}-parallel ranks, and has a rank {max(numbers)}",
                hint="two saves were written into one folder; keep the folders of one of them",
            )
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
        return algebra.interleave_rows(algebra.split(tensor, 0, 3), [dim] * 3)
    return algebra.permute_rows(tensor, [3 * row + part for part in range(3) for row in range(dim)])


def _globally(grid: Grid, parts: Parts, arguments: Arguments) -> Parts:
    """The parts with global numbers of experts; those of expert rank `e` follow those of `e - 1`."""
    whole: Parts = {}
    local = arguments.count("num_experts", default=1) // grid.expert if arguments.values.get("num_experts") else 0
    for name, places in _separated(grid, parts, local, arguments).items():
        if not (match := save_folder.EXPERT.fullmatch(name)):
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


def _whole(
    grid: Grid, name: str, places: Mapping[Place, Sequence[LazyTensor]], *, gated: bool, rows: int | None
) -> LazyTensor:
    """One tensor from its parts; copies must be equal, which is checked while they are read.

    `rows` are those of the whole, where the ranks may hold them all; None where `name` decides.
    """
    is_expert = save_folder.EXPERT.fullmatch(name) is not None
    has_parts = name in (save_folder.EMBEDDING, save_folder.HEAD) or ROWS.search(name) or COLUMNS.search(name)
    is_shared_out = bool(has_parts)
    if rows is not None:
        is_shared_out = any(tensor.num_rows != rows for tensors in places.values() for tensor in tensors)
    count = (grid.expert_tensor if is_expert else grid.tensor) if is_shared_out else 1
    by_rank: defaultdict[int, list[LazyTensor]] = defaultdict(list)
    for (tensor_rank, _), tensors in sorted(places.items()):
        by_rank[tensor_rank if count > 1 else 0] += tensors
    if (missing := algebra.first_missing(by_rank, count)) is not None:
        raise _mixed(grid, f"tensor rank {missing} lacks `{name}`")
    different = UnsupportedInput(
        f"the ranks of `{grid.source}` hold different copies of `{name}`",
        hint="ranks of different saves are mixed, or the run was damaged; copy all ranks of one save again",
    )
    with algebra.fitting(
        f"the parts of `{name}` in `{grid.source}` cannot be joined", "ranks of different runs are mixed"
    ):
        pieces = []
        for copies in (by_rank[number] for number in range(count)):
            if len({(copy.shape, copy.dtype) for copy in copies}) > 1:
                raise ValueError(f"copies have the shapes {[copy.shape for copy in copies[:4]]}")
            pieces.append(algebra.replicated(copies, different))
        if COLUMNS.search(name):
            return algebra.concat(pieces, 1)
        if gated and save_folder.FC1.search(name) and count > 1:
            halves = [algebra.split(piece, 0, 2) for piece in pieces]
            return algebra.concat([half[side] for side in range(2) for half in halves], 0)
        return algebra.concat(pieces, 0) if is_shared_out else pieces[0]


MATRICES = {".mlp.experts.weight1": "linear_fc1", ".mlp.experts.weight2": "linear_fc2"}


def grouped_matrix(name: str) -> str | None:
    """`linear_fc1` or `linear_fc2` if a tensor contains this matrix of all experts of a rank, else None."""
    return next((matrix for end, matrix in MATRICES.items() if name.endswith(end)), None)


def separate_experts(name: str, tensor: LazyTensor, experts: int, hidden: int) -> Iterator[tuple[str, LazyTensor]]:
    """Experts' matrices of a rank from [hidden, experts · rows] or [experts · columns, hidden], else ValueError."""
    matrix = grouped_matrix(name)
    own = 0 if matrix == "linear_fc1" else 1
    if len(tensor.shape) != 2 or tensor.shape[own] != hidden or not experts or tensor.shape[1 - own] % experts:
        raise ValueError(f"{list(tensor.shape)} does not hold {experts} experts")
    size = tensor.shape[1 - own] // experts
    rows, columns = (hidden, size) if own == 0 else (size, hidden)
    stacked = algebra.reshaped(tensor, (experts * rows, columns))
    stem = name.rpartition(".")[0]
    for expert in range(experts):
        part = algebra.slice_rows(stacked, expert * rows, (expert + 1) * rows)
        yield f"{stem}.{expert}.{matrix}.weight", transposed(part)


# First words of the keys of everything but the model
OTHERS = re.compile(r"^(?:chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine|lr_schedulers)\b")
STACKED_LAYERS = re.compile(r"^(decoder\.layers)\.(?!\d)(.+)$")
# Megatron's key of experts, which are stacked unless a number follows
EXPERTS = re.compile(r"^(.+\.mlp\.experts)\.experts\.(.+)$")
HALVES = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias)(?:\d+)?)_([wv])$")


def read_common(folder: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    """The arguments in `common.pt`, by name (empty if there are none), and all of its content."""
    if not (folder / save_folder.COMMON_FILE).is_file():
        return {}, {}
    content = open_torch_file(folder / save_folder.COMMON_FILE).content
    if not isinstance(content, dict):
        raise MalformedInput(
            f"`{save_folder.COMMON_FILE}` in `{folder.name}` does not contain a dict", hint="copy the folder again"
        )
    return namespace(content.get("args")), content


def open_distributed(path: Path, source: str) -> save_folder.RunState:
    """The whole tensors of a distributed checkpoint, a folder with `.metadata`; none is read.

    Raises MalformedInput if it is damaged or a tensor is not as Megatron stacks it, UnsupportedInput for an element
    type that safetensors does not have.
    """
    folder = open_folder(path)
    found: dict[str, LazyTensor] = {}
    dropped: dict[str, None] = {}
    for keys, item in named_leaves(folder.tree):
        own = ".".join(map(str, keys))
        if other := OTHERS.match(own):
            dropped[PARTS.get(other[1], "the state of the run")] = None
            continue
        plain = save_folder.WRAPPERS.sub("", own)
        if not isinstance(item, TensorItem) or save_folder.IGNORED.search(own):
            continue
        for name, tensor in _apart(folder, plain, item):
            if found.setdefault(save_folder.core_name(name), tensor) is not tensor:
                raise MalformedInput(
                    f"duplicate key in `{source}`: `{own}` is a second `{save_folder.core_name(name)}`",
                    hint="it holds several models; save the language model alone",
                )
    return save_folder.RunState(_joined(found, source), folder.shards, "torch_dist", tuple(dropped))


def _apart(folder: DistributedFolder, name: str, item: TensorItem) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors stacked in an item, by their names with the numbers of layer and expert."""
    layers = STACKED_LAYERS.match(name)
    template = f"{layers[1]}.{{}}.{layers[2]}" if layers else name.replace("{", "(").replace("}", ")")
    if experts := EXPERTS.match(template):
        number = "" if re.match(r"\d+\.", experts[2]) else ".{}"
        template = f"{experts[1]}{number}.{experts[2]}"
    if not (axes := template.count("{}")):
        yield template, folder.tensor(name, item)
        return
    for index, tensor in folder.elements(name, item, axes).items():
        yield template.format(*index), tensor


def _joined(found: Mapping[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """The tensors with gate and up in one, gate rows first."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in found.items():
        if not (match := HALVES.fullmatch(name)):
            tensors[name] = tensor
        elif match[2] == "w":
            up = found.get(f"{match[1]}_v")
            if up is None or up.shape != tensor.shape or up.dtype != tensor.dtype:
                raise MalformedInput(
                    f"`{source}` contains `{name}` without a matching `_v`", hint="copy the folder again"
                )
            tensors[match[1]] = algebra.concat([tensor, up], 0)
        elif f"{match[1]}_w" not in found:
            raise MalformedInput(f"`{source}` contains `{name}` without `_w`", hint="copy the folder again")
    return tensors
