"""One changed bit anywhere in a torch file: the conversion is refused, or gives what it gave before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llmconv.convert import to_hf
from llmconv.errors import InputRefused
from tests.hostile.honest import composer, meta, save

FLIPS = 80


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["composer", "meta"])
def test_a_changed_bit_is_refused_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    source = save(tmp_path / "in", composer()) if kind == "composer" else meta(tmp_path / "in")
    file = source if source.is_file() else source / "consolidated.00.pth"
    honest = file.read_bytes()
    to_hf(source, tmp_path / "honest")
    weights = (tmp_path / "honest" / "model.safetensors").read_bytes()
    chance, refused = random.Random(0), 0
    for number in range(FLIPS):
        data = bytearray(honest)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            to_hf(source, tmp_path / f"out{number}")
        except InputRefused:
            refused += 1
        else:
            assert (tmp_path / f"out{number}" / "model.safetensors").read_bytes() == weights
    assert refused > FLIPS // 4  # the rest hit the padding that torch leaves between records
