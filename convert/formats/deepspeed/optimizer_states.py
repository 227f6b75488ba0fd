"""Reads DeepSpeed's optimizer states of all data-parallel ranks: flat master weights.

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
"""The key of the flat weights, by stage; stage 1 has that of stage 2."""

OLD_GROUPS = ("local_sub_partitions_of_fp32_groups", "fp32_groups")
"""The keys in releases before 0.3.17."""


class RankStates:
    """The optimizer states of one rank, opened; moments are never read.

    Attributes:
        path: the file.
        stage: 2 or 3; stage 1, and BF16_Optimizer, which has no stage, store their weights as stage 2 does.
        count: number of ranks that shared the weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_torch_file(path)
        content = self._file.content
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            refuse(path, "contains no `optimizer_state_dict`")
        self._state: Mapping[Any, Any] = state
        self.stage = self._stage()
        self.count = self._count()

    def _stage(self) -> int:
        value = self._state.get("zero_stage")
        if isinstance(value, Stub):  # an enum, stored by its value
            value = value.args[0] if value.args else None
        if value is None and GROUPS[2] in self._state:
            return 2
        if type(value) is not int or value not in (1, 2, 3):
            raise UnsupportedInput(
                f"`{self.path.name}` declares no ZeRO stage from 1 to 3",
                hint="old releases are unsupported; convert it with the `zero_to_fp32.py` next to it, in a sandbox",
            )
        return max(2, value)

    def _count(self) -> int:
        value = self._state.get("partition_count")
        counts = value if isinstance(value, list) and value else [value]
        if any(type(count) is not int or count < 1 for count in counts):
            refuse(self.path, "does not contain the number of ranks (`partition_count`)")
        return int(max(counts))

    def flat_weights(self) -> list[LazyTensor]:
        """This rank's flat weights, one tensor of rank 1 per group.

        Raises:
            MalformedInput: there are none, or they are not flat.
            UnsupportedInput: the layout is that of a very old release, or of experts.
        """
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
        stored = self._state.get("param_alignment_paddings")
        if stored is None:
            return [0] * parameters
        paddings = stored[group] if isinstance(stored, list) and group < len(stored) else None
        if (
            not isinstance(paddings, list)
            or any(type(gap) is not int or gap < 0 for gap in paddings)
            or len(paddings) != parameters
        ):
            refuse(self.path, f"has paddings that do not match the {parameters} parameters of group {group}")
        return list(paddings)


def open_ranks(save: Save) -> list[RankStates]:
    """The optimizer states of all ranks, in order.

    Raises:
        MalformedInput: the file of a rank is missing, there are too many files, or they belong to different runs.
    """
    ranks = [RankStates(file) for file in save.optimizers.values()]
    check_ranks(save, save.optimizers, ranks[0].count)
    if len({(rank.stage, rank.count) for rank in ranks}) > 1:
        other = next(rank for rank in ranks if (rank.stage, rank.count) != (ranks[0].stage, ranks[0].count))
        refuse(other.path, f"belongs to another run than `{ranks[0].path.name}`: its stage or number of ranks differs")
    return ranks


def check_ranks(save: Save, files: Mapping[int, Path], count: int) -> None:
    """Checks that there is one file for each of the ranks 0 to `count` - 1.

    Args:
        save: named in error messages.
        files: rank to file.
        count: expected number of ranks.

    Raises:
        MalformedInput: a file is missing, or there are more.
    """
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
