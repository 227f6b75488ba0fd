"""Runs of verl's kind: a tiny Llama sharded by torch itself over gloo processes, each of which saves its part.

`python -m tests.builders.rank_saves` writes the fixtures of `tests/fixtures/verl`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).parents[1] / "fixtures" / "verl"
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """How a model is sharded."""

    ranks: int
    version: int  # of FSDP
    mesh: dict[str, int] | None = None  # names and sizes of the dims of the mesh; None: a process group
    dtype: torch.dtype = torch.float32
    lora: bool = False


RUNS = {
    "fsdp2_uneven": Run(3, 2, {"fsdp": 3}),
    "fsdp1_group": Run(2, 1, dtype=torch.bfloat16),
    "fsdp1_replicas": Run(4, 1, {"ddp": 2, "fsdp": 2}),
    "tensor_parallel": Run(4, 2, {"fsdp": 2, "tp": 2}),
    "lora": Run(2, 2, {"fsdp": 2}, lora=True),
    "one_rank": Run(1, 1, {"fsdp": 1}),
}


def tiny_llama(run: Run) -> nn.Module:
    """The seeded model; of a LoRA run a PeftModel, whose factors are not zero."""
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(run.dtype)
    if run.lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
    return model  # type: ignore[no-any-return]


def save_run(run: Run, folder: Path) -> State:
    """Writes what verl's `FSDPCheckpointManager` writes, and returns the state dict that torch gathers."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as meeting:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_rank, (run, folder, f"file://{meeting}/ranks"), nprocs=run.ranks)
    state: State = torch.load(folder / "gathered.pt")
    (folder / "gathered.pt").unlink()
    (folder / "huggingface").mkdir()
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": run.version, "world_size": run.ranks}))
    if run.lora:
        (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    return state


def _rank(rank: int, run: Run, folder: Path, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=run.ranks)
    mesh = init_device_mesh("cpu", (*run.mesh.values(),), mesh_dim_names=(*run.mesh,)) if run.mesh else None
    state, gathered = (_first_version if run.version == 1 else _second_version)(tiny_llama(run), mesh)
    name = f"world_size_{run.ranks}_rank_{rank}.pt"
    torch.save(state, folder / f"model_{name}")
    torch.save({"lr_scheduler": {"last_epoch": 20}, "rng": {"cpu": torch.zeros(3)}}, folder / f"extra_state_{name}")
    if rank == 0:
        torch.save(gathered, folder / "gathered.pt")
    dist.barrier()
    dist.destroy_process_group()


def _first_version(model: nn.Module, mesh: Any) -> tuple[dict[str, Any], State]:
    kind = ShardingStrategy.HYBRID_SHARD if mesh and mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    device = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, device_mesh=mesh, sharding_strategy=kind, device_id=device)
    sharded = partial(FullyShardedDataParallel.state_dict_type, wrapped)
    with sharded(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)):
        state = wrapped.state_dict()
    with sharded(StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False)):
        return state, wrapped.state_dict()


def _second_version(model: Any, mesh: Any) -> tuple[dict[str, Any], State]:
    layers = (model.base_model.model if hasattr(model, "peft_config") else model).model.layers
    if "tp" in mesh.mesh_dim_names:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in layers:
            parallelize_module(layer, mesh["tp"], plan)
    for layer in layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    state = model.state_dict()
    return state, {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in state.items()
    }


def digests(state: State) -> dict[str, list[Any]]:
    """Element type, shape and SHA-256 of each tensor."""
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in state.items()
    }


def main(names: list[str]) -> None:
    for name in names or RUNS:
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        state = save_run(RUNS[name], FIXTURES / name)
        (FIXTURES / name / "reference.json").write_text(json.dumps(digests(state), indent=0) + "\n")
        if RUNS[name].lora:
            save_file({one: tensor.contiguous() for one, tensor in state.items()}, FIXTURES / f"{name}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
