"""A DeepSpeed ZeRO-3 folder of any size in a second: every weight is zero, and lies in a hole that takes no disk.

`python -m benchmarks.zero_checkpoint FOLDER 30` makes one of 30 GB, as two ranks would save it.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from benchmarks.models import CONFIG, shapes
from llmconv.files.source_file import combine
from llmconv.files.torch_reader import LOCAL_HEADER, PADDING, UINT32_MAX, usual_start

Shape = tuple[int, ...]
TAG = "global_step1"
BYTES_PER_PARAMETER = 12
"""A float32 master and Adam's two moments."""

SUB_GROUP = 1_000_000_000
"""Elements of one flat tensor, as DeepSpeed's `sub_group_size`."""


class Zeros:
    """A float32 tensor of zeros, pickled as the call that rebuilds a torch tensor."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __reduce__(self) -> Any:
        stride = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        storage = Storage(prod(self.shape))
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, stride, False, OrderedDict())


class Storage:
    """The storage of a tensor of zeros."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class Pickler(pickle.Pickler):
    """Gives every storage a key, and remembers how large it is."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, 2)
        self.sizes: list[int] = []

    def persistent_id(self, value: Any) -> Any:
        """The reference that `torch.save` writes in place of a storage."""
        if not isinstance(value, Storage):
            return None
        self.sizes.append(value.numel * 4)
        return ("storage", torch.FloatStorage, str(len(self.sizes) - 1), "cpu", value.numel)


def crc_of_zeros(count: int) -> int:
    """CRC-32 of `count` zero bytes, in log2(count) steps."""
    total, block, size = 0, zlib.crc32(b"\0"), 1
    while count:
        total = combine(total, block, size) if count & 1 else total
        block, size, count = combine(block, block, size), 2 * size, count >> 1
    return total


def save_sparse(path: Path, content: Any) -> None:
    """Writes `content` as `torch.save` does, its `Zeros` as holes."""
    stream = io.BytesIO()
    pickler = Pickler(stream)
    pickler.dump(content)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for key, nbytes in enumerate(pickler.sizes):
            _hole(archive, file, f"archive/data/{key}", nbytes)
        for name, data in {"data.pkl": stream.getvalue(), "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", data)


def _hole(archive: zipfile.ZipFile, file: BinaryIO, name: str, nbytes: int) -> None:
    """Adds a member of zeros where torch would place it."""
    info = zipfile.ZipInfo(name)
    info.file_size = info.compress_size = nbytes
    info.CRC, info.header_offset = crc_of_zeros(nbytes), file.tell()
    large = nbytes >= UINT32_MAX
    used = LOCAL_HEADER.size + len(name) + 20 * large + 4
    padding = usual_start(info) - info.header_offset - used
    info.extra = PADDING + padding.to_bytes(2, "little") + b"Z" * padding
    file.write(info.FileHeader(zip64=large))
    info.extra = b""
    file.seek(nbytes, io.SEEK_CUR)
    archive.filelist.append(info)
    archive.NameToInfo[name] = info
    archive.start_dir = file.tell()


def save(folder: Path, parameters: Mapping[str, Shape], config: Mapping[str, Any], ranks: int = 2) -> None:
    """Saves a ZeRO-3 checkpoint with Adam's moments, as `ranks` processes would."""
    save_to = folder / TAG
    save_to.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = OrderedDict((name, torch.Size(shape)) for name, shape in parameters.items())
    states: dict[str, Any] = {
        "module": OrderedDict((name, Zeros(0)) for name in sizes),
        "buffer_names": [],
        "param_shapes": [sizes],
    }
    states |= {"shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None, "ds_version": "0.19.8"}
    groups = _sub_groups([-(-prod(shape) // ranks) for shape in parameters.values()])
    for rank in range(ranks):
        moments = {number: {"exp_avg": Zeros(numel), "exp_avg_sq": Zeros(numel)} for number, numel in enumerate(groups)}
        optimizer = {"zero_stage": 3, "partition_count": ranks, "optimizer_state_dict": {"state": moments}}
        optimizer["fp32_flat_groups"] = [Zeros(numel) for numel in groups]
        save_sparse(save_to / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", states)
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save_sparse(save_to / name, {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"})


def _sub_groups(shares: list[int]) -> list[int]:
    groups = [0]
    for share in shares:
        if groups[-1] and groups[-1] + share > SUB_GROUP:
            groups.append(0)
        groups[-1] += share
    return groups


def deep(nbytes: float) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Shapes and configuration of the benchmark Llama with as many layers as make a checkpoint of about `nbytes`."""
    one = {name: shape for name, shape in shapes().items() if ".layers.0." in name}
    ends = {name: shape for name, shape in shapes().items() if ".layers." not in name}
    per_layer, rest = (sum(map(prod, part.values())) * BYTES_PER_PARAMETER for part in (one, ends))
    layers = max(1, round((nbytes - rest) / per_layer))
    repeated = {name.replace(".0.", f".{n}."): shape for n in range(layers) for name, shape in one.items()}
    return {**ends, **repeated}, {**CONFIG, "num_hidden_layers": layers}


if __name__ == "__main__":
    gigabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    save(Path(sys.argv[1]), *deep(gigabytes * 1e9))
