"""Low-bit integers in words: the stream, and that packing gives back what was unpacked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmconv.quantized_weights.methods.awq import pack_outputs, unpack_outputs
from llmconv.quantized_weights.packed_weight import WIDTHS, float8, pack, unpack


@pytest.mark.slow
@given(st.sampled_from(WIDTHS), st.integers(1, 3), st.integers(1, 70), st.integers(0, 1 << 32))
def test_numbers_come_back_from_words(bits: int, rows: int, columns: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    words = pack(numbers, bits, -(-columns * bits // 32))
    assert words.shape == (rows, -(-columns * bits // 32))
    assert np.array_equal(unpack(words, bits)[:, :columns], numbers)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_first_number_lies_in_the_lowest_bits(bits: int) -> None:
    numbers = np.arange(32, dtype=np.uint8)[np.newaxis] & np.uint8((1 << bits) - 1)
    stream = sum(int(number) << (bits * place) for place, number in enumerate(numbers[0]))
    assert pack(numbers, bits, bits).tobytes() == stream.to_bytes(4 * bits, "little")


def test_outputs_of_awq_are_interleaved() -> None:
    words = np.array([[0x75316420]], dtype=np.uint32).view(np.int32)
    assert unpack_outputs(words)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert np.array_equal(pack_outputs(unpack_outputs(words)), words)


def test_float8_is_rounded_as_by_the_reference() -> None:
    exact = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    ties = (exact[:-1] + exact[1:]) / 2
    values = np.concatenate(
        [exact, ties, np.nextafter(ties, -500), np.nextafter(ties, 500), [1e-30, -1e-30, 0.0, -0.0]]
    )
    values = np.clip(values.astype(np.float32), -448, 448)
    assert float8(values).tolist() == values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
