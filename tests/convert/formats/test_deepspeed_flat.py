"""Flat weights: whatever the ranks, groups and shapes, each parameter comes back bit for bit, whole and in rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zlib
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zero_checkpoint import crc_of_zeros, deep, save
from llmconv.convert.algebra import concat
from llmconv.convert.formats.deepspeed.format import open_model
from llmconv.convert.formats.deepspeed.save_folder import open_save, parameter
from llmconv.convert.opening import open_training
from llmconv.errors import MalformedInput
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from tests.builders.zero_saves import Groups, save_zero_2, save_zero_3

FLOAT = BY_NAME["float32"]
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3)
RANKS = st.integers(1, 6)


def counted(shapes: list[list[tuple[int, ...]]]) -> Groups:
    """Groups of parameters whose elements are all different."""
    numbers = iter(range(1, 1 << 20))
    return [
        {
            f"p{group}.{index}": torch.tensor([float(next(numbers)) for _ in range(prod(shape))]).reshape(shape)
            for index, shape in enumerate(members)
        }
        for group, members in enumerate(shapes)
    ]


def check(folder: Path, groups: Groups) -> None:
    found = open_model(open_save(folder)).tensors
    expected = {name: tensor.numpy() for group in groups for name, tensor in group.items()}
    assert list(found) == list(expected)
    for name, tensor in found.items():
        rows = [tensor.rows(start, start + 1) for start in range(tensor.num_rows)]
        assert tensor.read().tobytes() == np.concatenate(rows).tobytes() == expected[name].tobytes()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shapes=GROUPS, ranks=RANKS, trimmed=st.booleans())
def test_stage_2_comes_back(shapes: list[list[tuple[int, ...]]], ranks: int, trimmed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(save_zero_2(Path(folder), counted(shapes), ranks, trimmed), counted(shapes))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shapes=GROUPS, ranks=RANKS, per_flat=st.integers(1, 5))
def test_stage_3_comes_back(shapes: list[list[tuple[int, ...]]], ranks: int, per_flat: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(save_zero_3(Path(folder), counted(shapes), ranks, per_flat), counted(shapes))


def test_a_tied_parameter_is_the_tensor_that_it_is_tied_to(tmp_path: Path) -> None:
    folder = save_zero_2(tmp_path, counted([[(3, 2)]]), 2, shared_params={"head": "p0.0"})
    found = open_model(open_save(folder)).tensors
    assert found["head"] is found["p0.0"]


def flats(sizes: list[int]) -> list[LazyTensor]:
    """Flat tensors that together count from 0."""
    ends = np.cumsum([0, *sizes])
    return [in_memory(np.arange(start, stop, dtype=np.float32), FLOAT) for start, stop in pairwise(ends)]


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), data=st.data())
def test_a_cut_holds_the_elements_of_the_range(sizes: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    with tempfile.TemporaryDirectory() as folder:
        save = open_save(save_zero_2(Path(folder), counted([[(3, 2)]]), 2))
    tensor = parameter(save, concat(flats(sizes), 0), (stop - start,), start)
    assert tensor.read().tolist() == list(range(start, stop))


def test_only_the_ranges_that_rows_touch_are_read(tmp_path: Path) -> None:
    touched: list[tuple[int, int]] = []
    (flat,) = flats([40])

    def load(start: int, stop: int) -> np.ndarray:
        touched.append((start, stop))
        return flat.rows(start, stop)

    save = open_save(save_zero_2(tmp_path, counted([[(3, 2)]]), 2))
    tensor = parameter(save, LazyTensor(FLOAT, (40,), load), (3, 4), 10)
    assert tensor.rows(1, 2).tolist() == [[14, 15, 16, 17]] and touched == [(14, 18)]


def test_too_few_elements_for_a_shape_are_refused(tmp_path: Path) -> None:
    (flat,), save = flats([4]), open_save(save_zero_2(tmp_path, counted([[(3, 2)]]), 2))
    with pytest.raises(MalformedInput, match="expected 5 elements, got 4"):
        parameter(save, flat, (5,))


# The sparse checkpoints of the benchmarks


@pytest.mark.parametrize("count", [0, 1, 2, 63, 100_003])
def test_the_crc_of_zeros_is_that_of_zlib(count: int) -> None:
    assert crc_of_zeros(count) == zlib.crc32(bytes(count))


def test_torch_reads_a_sparse_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, {"a": (3, 5)}, {})
    content = torch.load(next(tmp_path.glob("*/*rank_1*optim*")), weights_only=True)
    assert content["optimizer_state_dict"]["fp32_flat_groups"][0].tolist() == [0.0] * 8


@pytest.mark.slow
def test_a_checkpoint_of_30_gb_opens_and_a_block_of_it_reads(tmp_path: Path) -> None:
    shapes, config = deep(30e9)
    save(tmp_path / "run", shapes, config, ranks=8)
    opened = open_training(tmp_path / "run")
    assert sum(tensor.nbytes for tensor in opened.values()) == pytest.approx(10e9, rel=0.05)
    last = opened[f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight"]
    assert not last.rows(100, 200).any()


MEASURE = """
import sys
from pathlib import Path
from llmconv.convert import to_hf
to_hf(sys.argv[1], sys.argv[2], dtype="bfloat16", dry_run=sys.argv[3] == "plan")
# not `ru_maxrss`, in which the memory of whoever started this process counts
print(1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]))
"""


def peak_memory(home: Path, size: float, what: str) -> int:
    """Bytes that a conversion of a checkpoint of `size` bytes takes."""
    shapes, config = deep(size)
    save(home / "run", shapes, config, ranks=4)
    command = [sys.executable, "-c", MEASURE, str(home / "run"), str(home / "hf"), what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("size", "what"), [(30e9, "plan"), (6e9, "convert")])
def test_memory_follows_a_block_and_not_the_checkpoint(tmp_path: Path, size: float, what: str) -> None:
    assert peak_memory(tmp_path / "large", size, what) < min(300e6, peak_memory(tmp_path / "small", 1e8, what) + 100e6)
