"""Blocks of any bytes become numbers: no scale, not even an infinite one, is a warning or an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llmconv.files.gguf_file import BLOCKS, OTHERS, PLAIN, read_gguf
from tests.hostile.gguf import info


@pytest.mark.parametrize("number", BLOCKS)
@pytest.mark.parametrize("fill", ["chance", "ones"])
def test_blocks_of_any_bytes_are_numbers(number: int, fill: str, tmp_path: Path) -> None:
    kind, chance = BLOCKS[number], np.random.default_rng(number)
    data = chance.bytes(kind.width * 600) if fill == "chance" else b"\xff\x7c" * (kind.width * 300)
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(8)
    head += info("x", (kind.elements * 6, 100), number, 0)
    (tmp_path / "x.gguf").write_bytes(head + bytes(-len(head) % 32) + data)
    values = read_gguf(tmp_path / "x.gguf").tensors["x"].values
    assert values.read().shape == (100, kind.elements * 6)
    assert np.array_equal(values.rows(7, 9), values.read()[7:9], equal_nan=True)


def test_every_type_of_the_package_is_read_or_has_its_name() -> None:
    names = {number: names[0] for number, names in PLAIN.items()} | OTHERS
    assert {one.value for one in GGMLQuantizationType} == BLOCKS.keys() | names.keys()
    assert all(GGMLQuantizationType(number).name == name for number, name in names.items())
