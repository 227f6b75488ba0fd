"""The optimizer states of all data-parallel ranks: flat weights, and how many ranks there should be.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `_save_zero_checkpoint`; `checkpoint/constants.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.convert.formats.deepspeed.model_states import refuse
from llmconv.convert.formats.deepspeed.save_folder import Save
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.pickles.machine import Stub
from llmconv.files.pickles.reader import TensorRef
from llmconv.files.torch.reader import open_torch_file
from llmconv.tensors import LazyTensor

GROUPS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""Where the flat weights lie, by stage; stage 1 has them where stage 2 has."""

OLD_GROUPS = ("local_sub_partitions_of_fp32_groups", "fp32_groups")
"""Where releases before 0.3.17 kept them."""


class Rank:
    """The optimizer states of one rank, opened; moments are never read.

    Attributes:
        path: the file.
        stage: 2 or 3; stage 1, and BF16_Optimizer, which tells no stage, lay out their weights as stage 2 does.
        count: how many ranks shared the weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_torch_file(path)
        content = self._file.content
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            refuse(path, "holds no `optimizer_state_dict`")
        self._state: Mapping[Any, Any] = state
        self.stage = self._stage()
        self.count = self._count()

    def _stage(self) -> int:
        value = self._state.get("zero_stage")
        if isinstance(value, Stub):  # an enumeration, of which the file gives the value
            value = value.args[0] if value.args else None
        if value is None and GROUPS[2] in self._state:
            return 2
        if type(value) is not int or value not in (1, 2, 3):
            raise UnsupportedInput(
                f"`{self.path.name}` tells no ZeRO stage from 1 to 3",
                hint="old releases are not read; convert it with the `zero_to_fp32.py` next to it, in a safe place",
            )
        return max(2, value)

    def _count(self) -> int:
        value = self._state.get("partition_count")
        counts = value if isinstance(value, list) and value else [value]
        if any(type(count) is not int or count < 1 for count in counts):
            refuse(self.path, "does not tell how many ranks there were (`partition_count`)")
        return int(max(counts))

    def flats(self) -> list[LazyTensor]:
        """This rank's flat weights, one tensor of rank 1 per group.

        Raises:
            MalformedInput: there are none, or they are not flat.
            UnsupportedInput: the layout of a very old release, or of experts.
        """
        groups = self._state.get(GROUPS[self.stage])
        if groups is None and any(field in self._state for field in OLD_GROUPS):
            raise UnsupportedInput(
                f"`{self.path.name}` is of a DeepSpeed before 0.3.17, whose layout is not read",
                hint="load it with the release that wrote it, and save it with a newer one",
            )
        if self._state.get("ds_zero_partition_groups"):
            raise UnsupportedInput(
                f"`{self.path.name}` divides experts among ranks of their own, which is not read",
                hint="gather the model with the code that trained it, and save it with `save_pretrained`",
            )
        if not isinstance(groups, list) or not groups or not all(isinstance(group, TensorRef) for group in groups):
            refuse(self.path, f"has no list of tensors in `{GROUPS[self.stage]}`")
        if any(len(group.shape) != 1 for group in groups):
            refuse(self.path, f"has tensors in `{GROUPS[self.stage]}` that are not flat")
        return [self._file.tensor(f"{GROUPS[self.stage]}.{number}", group) for number, group in enumerate(groups)]

    def gaps(self, group: int, parameters: int) -> Sequence[int]:
        """Elements of padding after each parameter of a group (`parameter_alignment`, since DeepSpeed 0.19.7)."""
        stored = self._state.get("param_alignment_paddings")
        if stored is None:
            return [0] * parameters
        gaps = stored[group] if isinstance(stored, list) and group < len(stored) else None
        if (
            not isinstance(gaps, list)
            or any(type(gap) is not int or gap < 0 for gap in gaps)
            or len(gaps) != parameters
        ):
            refuse(self.path, f"has paddings that do not fit the {parameters} parameters of group {group}")
        return list(gaps)


def open_ranks(save: Save) -> list[Rank]:
    """The optimizer states of all ranks, in order.

    Raises:
        MalformedInput: the file of a rank is missing, or there are too many, or they belong to different runs.
    """
    ranks = [Rank(file) for file in save.optimizers.values()]
    check_ranks(save, save.optimizers, ranks[0].count)
    if len({(rank.stage, rank.count) for rank in ranks}) > 1:
        odd = next(rank for rank in ranks if (rank.stage, rank.count) != (ranks[0].stage, ranks[0].count))
        refuse(odd.path, f"belongs to another run than `{ranks[0].path.name}`: its stage or number of ranks differs")
    return ranks


def check_ranks(save: Save, files: Mapping[int, Path], count: int) -> None:
    """Checks that `files` are those of ranks 0 to `count` - 1.

    Raises:
        MalformedInput: one is missing, or there are more.
    """
    if len(files) > count:
        raise MalformedInput(
            f"`{save.name}` holds the files of {len(files)} ranks, but was saved by {count}",
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
