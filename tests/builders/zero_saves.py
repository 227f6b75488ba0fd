"""Writes DeepSpeed ZeRO folders of given weights, as its engine lays them out; independent of the reader."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Groups = Sequence[Mapping[str, torch.Tensor]]

TAG = "global_step7"


def save_zero_2(folder: Path, groups: Groups, ranks: int, trimmed: bool = True, **states: Any) -> Path:
    """Stage 2: each group flattened, padded to a multiple of twice the ranks, and cut into one partition per rank.

    Args:
        folder: to write into.
        groups: parameter groups.
        ranks: data-parallel size.
        trimmed: without the last rank's padding, as `_get_groups_without_padding` leaves it.
        states: fields of the model states to set.
    """
    flats = [_padded(torch.cat([tensor.reshape(-1) for tensor in group.values()]), 2 * ranks) for group in groups]
    needed = [sum(tensor.numel() for tensor in group.values()) for group in groups]
    module = OrderedDict((name, tensor.bfloat16()) for group in groups for name, tensor in group.items())
    model = {**model_states(groups), "module": module, **states}
    write(folder, "mp_rank_00_model_states.pt", model)
    for rank in range(ranks):
        parts = [flat.chunk(ranks)[rank] for flat in flats]
        if trimmed and rank == ranks - 1:
            parts = [
                part[: part.numel() - (flat.numel() - count)]
                for part, flat, count in zip(parts, flats, needed, strict=True)
            ]
        state = {"zero_stage": 2, "partition_count": [ranks] * len(groups), "single_partition_of_fp32_groups": parts}
        write(folder, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    return folder


def save_zero_3(folder: Path, groups: Groups, ranks: int, per_flat: int = 2, **states: Any) -> Path:
    """Stage 3: each parameter padded to a multiple of the ranks and cut; the shares of a rank flattened in sub-groups.

    Args:
        folder: to write into.
        groups: parameter groups.
        ranks: data-parallel size.
        per_flat: parameters in one flat tensor.
        states: fields of the model states to set.
    """
    tensors = [tensor for group in groups for tensor in group.values()]
    module = OrderedDict((name, torch.empty(0)) for group in groups for name in group)
    for rank in range(ranks):
        shares = [_padded(tensor.reshape(-1), ranks).chunk(ranks)[rank] for tensor in tensors]
        flats = [torch.cat(shares[start : start + per_flat]) for start in range(0, len(shares), per_flat)]
        state = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": flats}
        model = {**model_states(groups), "module": module, **states}
        write(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model)
        write(folder, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    return folder


def model_states(groups: Groups) -> dict[str, Any]:
    """What the model states say of the parameters."""
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups]
    return {"param_shapes": shapes, "buffer_names": [], "shared_params": {}, "ds_version": "0.0.0"}


def write(folder: Path, name: str, content: Any) -> None:
    """Saves one file of the save in `folder`, to which `latest` points."""
    (folder / TAG).mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(TAG)
    torch.save(content, folder / TAG / name)


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(-flat.numel() % multiple)])
