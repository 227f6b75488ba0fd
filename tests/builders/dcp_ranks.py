"""Distributed checkpoints of four gloo processes: FSDP 2 over tensor parallelism, as torch of any age saves it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.builders.rank_saves import Run, State, tiny_llama

RUN = Run(4, 2, {"fsdp": 2, "tp": 2})
PLAN = {"mlp.up_proj": ColwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}


def save_sharded(folder: Path, *, early: bool) -> State:
    """Saves tiny Llama's state dict as `model`, and returns it; `early`: with the placements of torch before 2.5.

    Those had no `_StridedShard`, so they computed the places of parts as if FSDP split a tensor first.
    """
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as meeting:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_rank, (folder, f"file://{meeting}/ranks", early), nprocs=RUN.ranks)
    state: State = tiny_llama(RUN).state_dict()
    return state


def _rank(rank: int, folder: Path, meeting: str, early: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RUN.ranks)
    model: Any = tiny_llama(RUN)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {name: kind() for name, kind in PLAN.items()})
    fully_shard(model, mesh=mesh["fsdp"])
    state = model.state_dict()
    if early:
        state = {name: _early(one) if isinstance(one, DTensor) else one for name, one in state.items()}
    dist.checkpoint.save({"model": state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


def _early(tensor: DTensor) -> DTensor:
    placements: Any = tensor.placements
    kinds = [Shard(one.dim) if type(one).__name__ == "_StridedShard" else one for one in placements]
    given: Any = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(tensor.to_local(), tensor.device_mesh, kinds, **given)
