"""Joins the state dicts that the ranks of a run saved one by one, with tensors that torch sharded over the ranks.

Such a tensor is pickled whole, with its place (pytorch `torch/_utils.py`, `_rebuild_wrapper_subclass`). A `DTensor`
(`torch/distributed/tensor/_api.py`) has `_local_tensor` and `_spec`: a mesh of ranks, and per dim of the mesh a
placement. Its classes are found by name, since their modules moved: `torch.distributed._tensor` before 2.5. A mesh has
its ranks in `mesh` (before 2.10), or in `_rank_map` with a `_layout` of strides into it. A `ShardedTensor`
(`torch/distributed/_shard/sharded_tensor/api.py`) has a list of local shards with offsets and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from llmconv.convert.algebra import replicated
from llmconv.convert.state_dicts.distributed import BlobLocation, Chunk, assemble, is_kind, is_tiled, shown
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import RANK_LIMIT, Global, TensorRef
from llmconv.files.torch_reader import TorchFile, open_torch_blob
from llmconv.tensors import BY_NAME, DType, LazyTensor

REBUILT = "torch._utils._rebuild_wrapper_subclass"
EARLY = "torch.distributed._tensor."  # the package of DTensor before torch 2.5
AXES = 32  # most sizes in the layout of a mesh, those of flattened dims included
AGAIN = "copy the files of all ranks again, from one save"
Sizes = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a tensor that one rank holds: its first element, its sizes, and what is in it."""

    offsets: Sizes
    sizes: Sizes
    tensor: LazyTensor


class Described(NamedTuple):
    """A tensor as one rank describes it."""

    dtype: DType
    shape: Sizes
    pieces: list[Piece]


class Mesh(NamedTuple):
    """The mesh of a tensor: the number of ranks along each dim, and where the rank of the file is."""

    sizes: Sizes
    place: Sizes


def join_ranks(source: str, files: Mapping[int, Path]) -> dict[str, Any]:
    """Name to LazyTensor, or to any other value of the first rank, of the state dicts in `files`, by rank.

    The files are read one after the other, their tensors not at all. Copies that several ranks hold are compared when
    they are read. Raises MalformedInput if a file belongs to another rank or model, or the pieces of a tensor do not
    tile it, UnsupportedInput for partial sums and unknown placements.
    """
    leaves: dict[str, Any] = {}
    for rank, path in files.items():
        reader = _RankFile(path, rank, len(files))
        state = reader.state()
        if leaves and (differing := sorted(state.keys() ^ leaves.keys())):
            first = next(iter(files.values())).name
            raise MalformedInput(f"not both of `{path.name}` and `{first}` have {listing(differing)}", hint=AGAIN)
        for name, value in state.items():
            found = reader.described(name, value)
            known = leaves.setdefault(name, _Whole(name, found.dtype, found.shape) if found else value)
            if isinstance(known, _Whole) != bool(found):
                reader.refuse(f"has {shown(name)} as another kind of value than the files before it")
            if found:
                known.add(found, path.name)
    return {name: leaf.joined(source) if isinstance(leaf, _Whole) else leaf for name, leaf in leaves.items()}


@dataclass
class _Whole:
    """A tensor whose pieces are collected, rank after rank."""

    name: str
    dtype: DType
    shape: Sizes
    pieces: dict[tuple[Sizes, Sizes], list[LazyTensor]] = field(default_factory=dict)

    def add(self, found: Described, file: str) -> None:
        if (found.dtype, found.shape) != (self.dtype, self.shape):
            raise MalformedInput(
                f"{shown(self.name)} is {found.dtype.name} {list(found.shape)} in `{file}` and {self.dtype.name} "
                f"{list(self.shape)} in the files before it",
                hint=AGAIN,
            )
        for offsets, sizes, tensor in found.pieces:
            if prod(sizes):
                self.pieces.setdefault((offsets, sizes), []).append(tensor)

    def joined(self, source: str) -> LazyTensor:
        chunks = [Chunk(offsets, sizes, BlobLocation("", 0, 0)) for offsets, sizes in self.pieces]
        if not is_tiled(self.shape, chunks):
            raise MalformedInput(
                f"the ranks' pieces of {shown(self.name)} in `{source}` overlap, leave a gap or lie outside of it",
                hint=AGAIN,
            )
        difference = MalformedInput(
            f"the ranks of `{source}` hold different values of {shown(self.name)}, of which they should have copies",
            hint="the files are of different steps, or of a run whose ranks drifted apart; " + AGAIN,
        )
        parts = {offsets: replicated(copies, difference) for (offsets, _), copies in self.pieces.items()}
        if len(parts) == 1:
            return next(iter(parts.values()))
        return assemble(self.dtype, self.shape, chunks, lambda chunk: parts[chunk.offsets])


class _RankFile:
    """The file of one rank of `world`."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self.path, self.rank, self.world = path, rank, world
        # not `open_torch_file`, which keeps what it opened: only the places of the tensors are needed
        self.file: TorchFile = open_torch_blob(path, 0, path.stat().st_size)
        self.meshes: dict[int, Mesh] = {}

    def refuse(self, problem: str) -> NoReturn:
        raise MalformedInput(f"`{self.path.name}` {problem}", hint=f"it is damaged or hostile; {AGAIN}")

    def state(self) -> dict[str, Any]:
        content = self.file.content
        if not isinstance(content, dict) or not content:
            self.refuse("contains no state dict")
        if not all(isinstance(name, str) for name in content):
            self.refuse("contains keys that are not names")
        return content

    def described(self, name: str, value: Any) -> Described | None:
        """The tensor `value` of the state dict, and what of it the rank has; None if it is not a tensor."""
        if isinstance(value, TensorRef):
            tensor = self.file.tensor(name, value)
            return Described(tensor.dtype, tensor.shape, [Piece((0,) * len(tensor.shape), tensor.shape, tensor)])
        kind = value.args[0] if isinstance(value, Stub) and str(value.function) == REBUILT and value.args[2:] else None
        read = READERS.get(kind.name) if isinstance(kind, Global) else None
        if read is None or not isinstance(kind, Global) or not kind.module.startswith("torch.distributed."):
            return None
        named, shape = value.args[1:3]
        if not _are_sizes(shape) or not isinstance(named, Global):
            self.refuse(f"describes {shown(name)} without a shape or an element type")
        pieces = read(self, name, value.state, shape)
        dtypes = {piece.tensor.dtype for piece in pieces}
        for piece in pieces:
            inside = len(piece.sizes) == len(piece.offsets) == len(shape) and all(
                start + size <= most for start, size, most in zip(piece.offsets, piece.sizes, shape, strict=True)
            )
            other = piece.tensor.shape != piece.sizes
            if not inside or (other and prod(piece.sizes) + prod(piece.tensor.shape)):
                self.refuse(f"has a piece of {shown(name)} with the shape {list(piece.tensor.shape)}, not its own")
        declared = BY_NAME.get(named.name) if named.module == "torch" else None
        if declared is None:
            raise UnsupportedInput(
                f"tensor {shown(name)} in `{self.path.name}` has the element type `{named.name[:40]}`",
                hint="only plain float, integer and bool tensors can be converted; dequantize it first",
            )
        if dtypes - {declared}:
            self.refuse(f"has a piece of {shown(name)} with another element type")
        return Described(declared, shape, pieces)

    def dtensor(self, name: str, state: Any, shape: Sizes) -> list[Piece]:
        """The piece of a DTensor (FSDP2, tensor parallelism, FSDP1 with a mesh)."""
        fields = _attributes(state)
        local, spec = fields.get("_local_tensor"), fields.get("_spec")
        if not isinstance(local, TensorRef) or not isinstance(spec, Stub) or _kind(spec) != "DTensorSpec":
            if isinstance(local, Stub):
                raise UnsupportedInput(
                    f"{shown(name)} in `{self.path.name}` has a shard that is an object, not a plain tensor",
                    hint="save a plain (unquantized) state dict",
                )
            self.refuse(f"describes {shown(name)} without its shard or its placements")
        described = _attributes(spec.state)
        mesh = self.mesh(described.get("mesh"))
        offsets, sizes = [0] * len(shape), [*shape]
        for dim, axes in self.orders(name, described, mesh, len(shape)).items():
            for axis in axes:  # torch's `chunk`: all but the last non-empty one are equally long
                step = -(-sizes[dim] // mesh.sizes[axis])
                start = min(step * mesh.place[axis], sizes[dim])
                sizes[dim] = min(step, sizes[dim] - start)
                offsets[dim] += start
        return [Piece(tuple(offsets), tuple(sizes), self.file.tensor(name, local))]

    def orders(self, name: str, spec: Mapping[Any, Any], mesh: Mesh, rank: int) -> dict[int, list[int]]:
        """Dim of the tensor to the dims of the mesh that split it, in order."""
        placements = spec.get("placements")
        if not isinstance(placements, tuple | list) or len(placements) != len(mesh.sizes):
            self.refuse(f"has another number of placements of {shown(name)} than dims of its mesh")
        orders: dict[int, list[int]] = {}
        strided = False
        # a later dim splits what the ones before it left, except that `_StridedShard` comes after those that make up
        # its factor: FSDP2 on top of tensor parallelism
        for axis in reversed(range(len(placements))):
            kind = _kind(placements[axis])
            if kind not in ("Shard", "_StridedShard", "Replicate"):
                problem = f"{shown(name)} in `{self.path.name}` has the placement `{kind[:40] or 'of no known class'}`"
                what = ", a sum that was not finished" if kind.endswith("Partial") else ""
                raise UnsupportedInput(problem + what, hint="save a full state dict where it was trained")
            if kind == "Replicate":
                continue
            fields = _attributes(placements[axis].state)
            dim, factor = fields.get("dim"), fields.get("split_factor", 1) if kind == "_StridedShard" else 1
            if type(dim) is not int or not 0 <= dim < rank or type(factor) is not int:
                self.refuse(f"has {shown(name)} sharded along a dim that it does not have")
            order, before = orders.setdefault(dim, []), 0
            while before < len(order) and prod(mesh.sizes[one] for one in order[:before]) != factor:
                before += 1
            if prod(mesh.sizes[one] for one in order[:before]) != factor:
                raise UnsupportedInput(
                    f"{shown(name)} in `{self.path.name}` is a `_StridedShard` with the factor {factor}, which no "
                    "later dims of its mesh have",
                    hint="save a full state dict where it was trained",
                )
            order.insert(before, axis)
            strided = strided or kind == "_StridedShard"
        if any(sum(mesh.sizes[axis] > 1 for axis in order) > 1 for order in orders.values()) and _is_early(placements):
            raise UnsupportedInput(
                f"{shown(name)} in `{self.path.name}` is sharded twice along one dim by a torch before 2.5, whose "
                "files have the same placements in either order",
                hint="save a full state dict where it was trained, or load and save the run with torch 2.5 or later",
            )
        return orders if strided else self.ordered(name, orders, spec.get("shard_order"))

    def ordered(self, name: str, orders: dict[int, list[int]], stored: Any) -> dict[int, list[int]]:
        """The orders that a spec of torch 2.10 and later states itself; those of the placements where it does not."""
        if stored is None:
            return orders
        found: dict[int, list[int]] = {}
        for entry in stored if isinstance(stored, tuple | list) else ():
            match entry.args if _kind(entry) == "ShardOrderEntry" else ():
                case (int() as dim, tuple() as axes):
                    found[dim] = [*axes]
        same = found.keys() == orders.keys() and all(
            all(type(axis) is int for axis in axes) and sorted(axes) == sorted(orders[dim])
            for dim, axes in found.items()
        )
        if not same:
            self.refuse(f"has placements of {shown(name)} and an order of them that contradict each other")
        return found

    def mesh(self, stub: Any) -> Mesh:
        """The mesh of an object of the file, which most tensors share; MalformedInput if the rank is not in it."""
        if id(stub) in self.meshes:
            return self.meshes[id(stub)]
        fields = _attributes(stub.state) if is_kind(stub, "DeviceMesh") else {}
        if isinstance(fields.get("mesh"), TensorRef):
            ranks = self.numbers(fields["mesh"])
            sizes, place = tuple(ranks.shape), self.position(ranks)
        else:
            (position,) = self.position(self.numbers(fields.get("_rank_map")).reshape(-1))
            axes = self.axes(fields.get("_layout"))
            sizes, place = tuple(prod(size for size, _ in axis) for axis in axes), ()
            for axis in axes:
                along = 0
                for size, stride in axis:
                    along = along * size + position // stride % size
                place = (*place, along)
        stored = fields.get("_coordinate_on_dim")
        if stored is not None and (not isinstance(stored, tuple | list) or not _same(stored, place)):
            self.refuse(f"was not saved by rank {self.rank}, whose name it has: its place in the mesh is another")
        self.meshes[id(stub)] = Mesh(sizes, place)
        return self.meshes[id(stub)]

    def numbers(self, ref: Any) -> Any:
        """A small tensor of ranks, as an array."""
        if not isinstance(ref, TensorRef) or not ref.dtype or ref.dtype.name not in ("int32", "int64"):
            self.refuse("has a tensor without a mesh of ranks")
        if not 0 < prod(ref.shape) <= self.world:
            self.refuse(f"has a mesh of {prod(ref.shape)} ranks, in a run of {self.world}")
        return self.file.tensor("the mesh", ref).read()

    def position(self, ranks: Any) -> Sizes:
        where = np.argwhere(ranks == self.rank)
        if len(where) != 1:
            self.refuse(f"has a mesh of ranks in which {self.rank} is not, or more than once")
        return tuple(map(int, where[0]))

    def axes(self, layout: Any) -> list[list[tuple[int, int]]]:
        """Per dim of a mesh the sizes and strides that make it up; torch 2.13 has one object per dim."""
        fields = _attributes(layout.state) if isinstance(layout, Stub) else {}
        pairs: list[tuple[Any, Any]] = []
        if isinstance(parts := fields.get("axes"), tuple | list):
            dims = [_attributes(part.state) if isinstance(part, Stub) else {} for part in parts[:AXES]]
            pairs = [(part.get("shape"), part.get("stride")) for part in dims]
        elif isinstance(shape := fields.get("shape"), tuple) and isinstance(stride := fields.get("stride"), tuple):
            pairs = [*zip(shape[:AXES], stride[:AXES], strict=False)] if len(shape) == len(stride) else []
        elif type(fields.get("shape")) is int:
            pairs = [(fields["shape"], fields.get("stride"))]
        found = [[*zip(_flat(shape), _flat(stride), strict=False)] for shape, stride in pairs]
        every = sorted((stride, size) for axis in found for size, stride in axis if size > 1)
        # each stride a multiple of all that the smaller ones reach: then a rank has one place
        apart = all(above % (stride * size) == 0 for (stride, size), (above, _) in pairwise(every))
        matching = all(len(_flat(shape)) == len(_flat(stride)) for shape, stride in pairs)
        sizes = [size for axis in found for size, _ in axis]
        if not pairs or not matching or not apart or any(stride < 1 for stride, _ in every) or 0 in sizes:
            self.refuse("has a mesh with an impossible layout")
        if len(sizes) > AXES or prod(sizes) > self.world:
            self.refuse(f"has a mesh of more than {self.world} ranks, which the run has")
        return [[(size, max(1, stride)) for size, stride in axis] for axis in found]

    def sharded_tensor(self, name: str, state: Any, shape: Sizes) -> list[Piece]:
        """The pieces of a ShardedTensor (FSDP1 without a mesh); a rank may have none."""
        parts: Sequence[Any] = state[:3] if isinstance(state, tuple) and len(state) > 3 else (None, None, None)
        shards, metadata, process = parts
        size = _attributes(metadata.state).get("size") if _kind(metadata) == "ShardedTensorMetadata" else None
        if not isinstance(shards, list) or size != shape:
            self.refuse(f"describes {shown(name)} without its shards")
        group = _attributes(process.state) if isinstance(process, Stub) else {}
        for key, expected in {"global_rank": self.rank, "global_world_size": self.world}.items():
            if group.get(key, expected) != expected:
                self.refuse(f"was not saved by rank {self.rank} of {self.world}, whose name it has (`{key}`)")
        pieces = []
        for shard in shards[: self.world]:
            fields = _attributes(shard.state) if _kind(shard) == "Shard" else {}
            box = fields.get("metadata")
            place = _attributes(box.state) if isinstance(box, Stub) and _kind(box) == "ShardMetadata" else {}
            offsets, sizes = _sizes(place.get("shard_offsets")), _sizes(place.get("shard_sizes"))
            tensor = fields.get("tensor")
            if offsets is None or sizes is None or not isinstance(tensor, TensorRef):
                self.refuse(f"has a shard of {shown(name)} without a place")
            pieces.append(Piece(offsets, sizes, self.file.tensor(name, tensor)))
        return pieces


READERS = {"DTensor": _RankFile.dtensor, "ShardedTensor": _RankFile.sharded_tensor}


def _kind(value: Any) -> str:
    """The class of torch's that a stub stands for, without its module; empty for anything else."""
    known = isinstance(value, Stub) and isinstance(value.function, Global)
    return value.function.name if known and value.function.module.startswith("torch.distributed.") else ""


def _is_early(placements: Sequence[Any]) -> bool:
    """Whether a torch before 2.5 wrote the placements, whose `fully_shard` has no `_StridedShard`.

    Over tensor parallelism it splits what that left, and calls it (Shard, Shard), as DTensor (and FSDP1) call the other
    order (torch 2.4, `_composable/fsdp/_fsdp_param.py` and `_tensor/_redistribute.py`).
    """
    return any(isinstance(one, Stub) and str(one.function).startswith(EARLY) for one in placements)


def _attributes(state: Any) -> dict[Any, Any]:
    """The attributes in the state of an object: a dict, or one of them and one of its slots."""
    if isinstance(state, tuple) and len(state) == 2:
        return {key: value for part in state if isinstance(part, dict) for key, value in part.items()}
    return state if isinstance(state, dict) else {}


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= RANK_LIMIT
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _sizes(values: Any) -> Sizes | None:
    """Sizes that a file has as a list; None if they are none."""
    found = tuple(values[: RANK_LIMIT + 1]) if isinstance(values, list | tuple) else None
    return found if found is not None and _are_sizes(found) else None


def _same(stored: Sequence[Any], place: Sizes) -> bool:
    return len(stored) == len(place) and all(type(one) is int for one in stored) and tuple(stored) == place


def _flat(value: Any) -> list[int]:
    """The numbers of a size or stride of a layout, which may be nested; negative ones become 0, which is refused."""
    return [*_leaves(value, 0)][: AXES + 1]


def _leaves(value: Any, depth: int) -> Iterator[int]:
    if type(value) is int:
        yield max(0, min(value, 1 << 62))
    elif isinstance(value, tuple) and depth < RANK_LIMIT:
        for one in value[: AXES + 1]:
            yield from _leaves(one, depth + 1)
