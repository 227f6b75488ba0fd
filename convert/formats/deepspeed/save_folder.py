"""Finds the newest save in a DeepSpeed folder, reads its model states, and joins the flat weights of all ranks.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `_get_ckpt_name`, `_save_checkpoint`, `_save_zero_checkpoint`;
`checkpoint/constants.py`; `utils/zero_to_fp32.py`): `latest` contains the name of a save's folder (its tag), such as
`global_step500`, with model states and, per data-parallel rank, optimizer states. Model states are one dict per file:
names and shapes of parameters, frozen and tied ones, and the module's tensors. Stages 1 and 2
(`runtime/zero/stage_1_and_2.py`) flatten a parameter group and split it into one partition per rank; stage 3 splits
every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmconv.convert.algebra import concat, reshaped, slice_rows
from llmconv.convert.state_dicts.files import tracked
from llmconv.errors import MalformedInput, UnsupportedInput, listing, short
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import LazyTensor

MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
ZERO_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
EXPERT = re.compile(r"(?:(?:layer_\d+_)?expert|expp_rank)_\d+_mp_rank_\d+_(?:model|optim)_states\.pt")
PIPELINE = re.compile(r"layer_\d+-.*model_states\.pt")
KINDS = (MODEL, ZERO_MODEL, OPTIMIZER, EXPERT, PIPELINE)

# Files that contain the name of the newest save; `ds_to_universal` writes the second
POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True)
class Save:
    """One save."""

    path: Path
    home: Path  # the folder that may contain `config.json` and the tokenizer
    model: Path | None  # the model states of ZeRO stages 0 to 2; None if there are none
    zero_models: Mapping[int, Path]  # data-parallel rank to model states (stage 3)
    optimizers: Mapping[int, Path]  # data-parallel rank to optimizer states
    universal: Path | None  # the folder with one folder per parameter; None if `ds_to_universal` did not make one

    @property
    def name(self) -> str:
        return self.path.name


def is_deepspeed(path: Path) -> bool:
    """Whether `path` is the folder of a save, or contains one."""
    return path.is_dir() and (_holds_states(path) or next(_saves(path), None) is not None)


def _holds_states(folder: Path) -> bool:
    try:
        return any(kind.fullmatch(entry.name) for entry in folder.iterdir() for kind in KINDS)
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return False


def _saves(folder: Path) -> Iterator[Path]:
    return (entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _holds_states(entry))


def open_save(path: Path) -> Save:
    """The save at `path`, or the newest of those in it; InputRefused for several without `latest`.

    Raises MalformedInput for a wrong `latest` or two files of one rank, UnsupportedInput for tensor, pipeline or expert
    parallelism.
    """
    folder = path
    if not _holds_states(path):
        saves = {save.name: save for save in _saves(path)}
        folder = tracked(
            path, saves, next((path / name for name in POINTERS if (path / name).is_file()), path / POINTERS[0])
        )
    # the folder above the given one has the configuration only if it is DeepSpeed's, too
    known = [path, folder] + [folder.parent] * any((folder.parent / pointer).is_file() for pointer in POINTERS)
    places = [place for place in (folder, folder.parent) if place in known and (place / "config.json").is_file()]
    home = places[0] if places else path
    files = {entry.name: entry for entry in sorted(folder.iterdir()) if entry.is_file()}
    # refuses checkpoints that are split in another way than by data-parallel rank
    kinds = {
        "mixture-of-experts": [name for name in files if EXPERT.fullmatch(name)],
        "pipeline-parallel": [name for name in files if PIPELINE.fullmatch(name)],
        "tensor-parallel": [
            name
            for name in files
            for kind in (MODEL, ZERO_MODEL, OPTIMIZER)
            if (match := kind.fullmatch(name)) and int(match[kind.groups])
        ],
    }
    for kind, found in kinds.items():
        if found:
            raise UnsupportedInput(
                f"`{folder.name}` is a {kind} checkpoint of DeepSpeed (`{found[0]}`), which is unsupported",
                hint="gather the model with the code that trained it, and save it with `save_pretrained`",
            )
    universal = folder / "zero" if (folder / "zero").is_dir() else None
    model = files.get("mp_rank_00_model_states.pt")
    return Save(folder, home, model, _by_rank(files, ZERO_MODEL), _by_rank(files, OPTIMIZER), universal)


def _by_rank(files: Mapping[str, Path], kind: re.Pattern[str]) -> dict[int, Path]:
    ranks: dict[int, Path] = {}
    for name, file in files.items():
        if match := kind.fullmatch(name):
            rank = int(match[1])
            if rank in ranks:
                raise MalformedInput(
                    f"`{ranks[rank].name}` and `{name}` both belong to rank {rank}",
                    hint="two saves were written into one folder; keep the files of one of them",
                )
            ranks[rank] = file
    return dict(sorted(ranks.items()))


NUMEL_LIMIT = 1 << 48
RANK_LIMIT = 16


class ModelStates:
    """One opened file of model states; the tensors in `content`, the saved dict, are TensorRef."""

    def __init__(self, path: Path) -> None:
        self._file = open_torch_file(path)
        self.path = path
        if not isinstance(self._file.content, dict):
            refuse(path, "does not contain a dict")
        self.content: Mapping[Any, Any] = self._file.content

    def tensors(self, field: str) -> dict[str, LazyTensor]:
        """Name to tensor of a dict in the file; empty if there is no such dict."""
        return {
            name: self._file.tensor(name, ref)
            for name, ref in self.table(field).items()
            if isinstance(name, str) and isinstance(ref, TensorRef)
        }

    def table(self, field: str) -> Mapping[Any, Any]:
        """A dict in the file; empty if there is none."""
        value = self.content.get(field)
        return value if isinstance(value, dict) else {}

    def param_shapes(self) -> list[dict[str, tuple[int, ...]]] | None:
        """Shapes of trained parameters per group, in order (else MalformedInput); None in stage 0."""
        if (value := self.content.get("param_shapes")) is None:
            return None
        groups = [value] if isinstance(value, dict) else value
        if not isinstance(groups, list):
            refuse(self.path, "has `param_shapes` that are not a list")
        checked = [self.shapes(group, "param_shapes") for group in groups]
        names = [name for group in checked for name in group]
        if len(set(names)) != len(names):
            refuse(self.path, "has a duplicate parameter name in two groups")
        return checked

    def shapes(self, value: Any, field: str) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters in `value`, the content of `field`; MalformedInput if they are not such."""
        if not isinstance(value, dict):
            refuse(self.path, f"has `{field}` that are not a dict")
        for name, shape in value.items():
            is_shape = (
                isinstance(shape, tuple) and len(shape) <= RANK_LIMIT and all(type(n) is int and n >= 0 for n in shape)
            )
            if not isinstance(name, str) or not is_shape or prod(filter(None, shape)) >= NUMEL_LIMIT:
                refuse(self.path, f"has an invalid shape for `{short(name, 80)}` in `{field}`")
        return dict(value)


def refuse(path: Path, problem: str) -> NoReturn:
    """Raises MalformedInput with the message "`path` `problem`"."""
    raise MalformedInput(
        f"`{path.name}` {problem}", hint="the file is damaged or was changed; copy it again from where it was saved"
    )


def open_masters(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Master weights by name, in the optimizer's dtype; MalformedInput: a rank is missing, or sizes contradict."""
    if (groups := states.param_shapes()) is None:
        raise _mismatch(save, "optimizer states, but no `param_shapes` in its model states")
    ranks = [RankStates(file) for file in save.optimizers.values()]
    check_ranks(save, save.optimizers, ranks[0].count)
    kind = (ranks[0].stage, ranks[0].count)
    if other := next((rank for rank in ranks if (rank.stage, rank.count) != kind), None):
        refuse(other.path, f"belongs to another run than `{ranks[0].path.name}`: its stage or number of ranks differs")
    if ranks[0].stage == 3:
        return _stage_3(save, ranks, {name: shape for group in groups for name, shape in group.items()})
    partitions = [rank.flat_weights() for rank in ranks]
    if any(len(flat_weights) != len(groups) for flat_weights in partitions):
        raise _mismatch(save, f"{len(partitions[0])} groups of flat weights for {len(groups)} groups of parameters")
    masters: dict[str, LazyTensor] = {}
    for number, group in enumerate(groups):
        # parameters follow each other, each with its padding; the rest pads to a multiple of twice the number of ranks
        # (`zero2_align`), of which some releases store only a part
        whole, alignment = _flat(save, [flat_weights[number] for flat_weights in partitions]), 2 * len(partitions)
        end, numel, start = 0, whole.shape[0], 0
        for (name, shape), padding in zip(group.items(), ranks[0].paddings(number, len(group)), strict=True):
            masters[name] = parameter(save, whole, shape, start)
            end = start + prod(shape)
            start = end + padding
        if end > numel or -(-start // alignment) != -(-numel // alignment):
            raise _mismatch(save, f"{numel} elements in a group of parameters that need {start}")
    return masters


def _stage_3(save: Save, ranks: Sequence[RankStates], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    partitions = [_flat(save, rank.flat_weights()) for rank in ranks]
    shares = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    needed = sum(shares.values())
    for rank, flat in enumerate(partitions):
        if flat.shape[0] != needed:
            raise _mismatch(save, f"{flat.shape[0]} elements of rank {rank}, whose parameters need {needed}")
    parts = {
        name: [slice_rows(flat, start, start + shares[name]) for flat in partitions]
        for name, start in zip(shapes, accumulate(shares.values(), initial=0), strict=False)
    }
    return {name: parameter(save, _flat(save, parts[name]), shape) for name, shape in shapes.items()}


def open_frozen(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Frozen parameters in the model's dtype: whole in stage 2, fragments in stage 3; errors as in `open_masters`."""
    # stage 1 does not store them
    if not (shapes := states.shapes(states.content.get("frozen_param_shapes") or {}, "frozen_param_shapes")):
        return {}
    files = [states]
    if states.path != save.model:
        check_ranks(save, save.zero_models, len(save.optimizers) or max(save.zero_models) + 1)
        files = [ModelStates(file) for file in save.zero_models.values()]
    fragments = [file.tensors("frozen_param_fragments") for file in files]
    if missing := [name for name in shapes if any(name not in rank for rank in fragments)]:
        raise _mismatch(save, f"no weights of {len(missing)} frozen parameters: {listing(missing)}")
    frozen: dict[str, LazyTensor] = {}
    for name, shape in shapes.items():
        parts = [rank[name] for rank in fragments]
        if len(parts) == 1 and parts[0].shape == shape:
            frozen[name] = parts[0]
            continue
        if any(len(part.shape) != 1 for part in parts):
            raise _mismatch(save, f"frozen weights of shape {list(parts[0].shape)} for a parameter of {list(shape)}")
        frozen[name] = parameter(save, _flat(save, parts), shape)
    return frozen


def _flat(save: Save, parts: Sequence[LazyTensor]) -> LazyTensor:
    """One-dimensional tensors, one after the other."""
    if len({part.dtype for part in parts}) > 1:
        raise _mismatch(save, "flat weights of several kinds: the dtypes differ between ranks")
    return concat(parts, 0)


def parameter(save: Save, flat: LazyTensor, shape: tuple[int, ...], start: int = 0) -> LazyTensor:
    """The parameter of this shape whose elements begin at `start` of `flat`; MalformedInput if there are too few."""
    numel, found = prod(shape), max(0, flat.shape[0] - start)
    if found < numel:
        raise _mismatch(
            save, f"weights that make no parameter of shape {list(shape)}: expected {numel} elements, got {found}"
        )
    return reshaped(slice_rows(flat, start, start + numel), shape)


def _mismatch(save: Save, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{save.name}` has {problem}",
        hint="files of the last ranks are missing, those of two saves are mixed, or the weights were kept elsewhere "
        "(NVMe); copy the folder again",
    )


# The key of the flat weights, by stage; stage 1 has that of stage 2
GROUPS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
OLD_GROUPS = ("local_sub_partitions_of_fp32_groups", "fp32_groups")  # the keys in releases before 0.3.17


class RankStates:
    """The optimizer states of one of `count` ranks; `stage` is 2 (as stage 1 and BF16_Optimizer store theirs) or 3."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_torch_file(path)
        content = self._file.content
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            refuse(path, "contains no `optimizer_state_dict`")
        self._state: Mapping[Any, Any] = state
        value = state.get("zero_stage")
        if isinstance(value, Stub):  # an enum, stored by its value
            value = value.args[0] if value.args else None
        if value is None and GROUPS[2] in state:
            value = 2
        if type(value) is not int or value not in (1, 2, 3):
            raise UnsupportedInput(
                f"`{path.name}` declares no ZeRO stage from 1 to 3",
                hint="old releases are unsupported; convert it with the `zero_to_fp32.py` next to it, in a sandbox",
            )
        self.stage = max(2, value)
        stored = state.get("partition_count")
        counts = stored if isinstance(stored, list) and stored else [stored]
        if any(type(count) is not int or count < 1 for count in counts):
            refuse(path, "does not contain the number of ranks (`partition_count`)")
        self.count = int(max(counts))

    def flat_weights(self) -> list[LazyTensor]:
        """Flat weights, one per group (else MalformedInput); UnsupportedInput: a very old layout, or experts."""
        groups = self._state.get(GROUPS[self.stage])
        if groups is None and any(field in self._state for field in OLD_GROUPS):
            raise UnsupportedInput(
                f"`{self.path.name}` was written by a DeepSpeed before 0.3.17, whose layout is unsupported",
                hint="load it with the release that wrote it, and save it with a newer one",
            )
        if self._state.get("ds_zero_partition_groups"):
            raise UnsupportedInput(
                f"`{self.path.name}` divides experts among separate ranks, which is unsupported",
                hint="gather the model with the code that trained it, and save it with `save_pretrained`",
            )
        if not isinstance(groups, list) or not groups or not all(isinstance(group, TensorRef) for group in groups):
            refuse(self.path, f"has no list of tensors in `{GROUPS[self.stage]}`")
        if any(len(group.shape) != 1 for group in groups):
            refuse(self.path, f"has tensors in `{GROUPS[self.stage]}` that are not flat")
        return [self._file.tensor(f"{GROUPS[self.stage]}.{number}", group) for number, group in enumerate(groups)]

    def paddings(self, group: int, parameters: int) -> Sequence[int]:
        """Padding elements after each parameter of a group (`parameter_alignment`, since DeepSpeed 0.19.7)."""
        if (stored := self._state.get("param_alignment_paddings")) is None:
            return [0] * parameters
        paddings = stored[group] if isinstance(stored, list) and group < len(stored) else None
        if (
            not isinstance(paddings, list)
            or any(type(gap) is not int or gap < 0 for gap in paddings)
            or len(paddings) != parameters
        ):
            refuse(self.path, f"has paddings that do not match the {parameters} parameters of group {group}")
        return list(paddings)


def check_ranks(save: Save, files: Mapping[int, Path], count: int) -> None:
    """Raises MalformedInput unless there is one file for each of the ranks 0 to `count` - 1, and no other."""
    if len(files) > count:
        raise MalformedInput(
            f"`{save.name}` contains the files of {len(files)} ranks, but was saved by {count}",
            hint="an older save of more ranks lies in the same folder; remove its files",
        )
    for rank in range(count):
        if rank not in files:
            like = next(iter(files.values()), None)
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", like.name) if like else f"that of rank {rank}"
            raise MalformedInput(
                f"`{name}` is missing from `{save.name}`, which {count} ranks saved",
                hint="every rank writes a file on its own machine; copy all of them into one folder",
            )
