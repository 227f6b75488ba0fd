"""Changes of bytes, and of values in JSON, that parsers of file formats trip over; used where atheris is missing."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, float("inf"), float("nan"), 1 << 31, 1 << 63, 10**30),
    *("", "x", "0", "-1", "../x", "a/b", "\ud800", "\0", "é" * 300, "(" * 50 + "a+)+$", "nan", "1e999"),
    *([], {}, [[]], {"": None}, [None], ["x"] * 50, {"x": {"x": {}}}, [0] * 100),
)
NESTED = 2_000
CHANGES = 4


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> bytes:
    """One of the seeds after a few changes.

    Args:
        seeds: whole inputs.
        words: pieces that mean something in their format.
        draw: where chance comes from.
    """
    data = draw.choice(seeds)
    if data[:1] in (b"{", b"[") and draw.random() < 0.6:
        try:
            return json.dumps(_changed(json.loads(data), draw)).encode()
        except (ValueError, RecursionError):
            pass
    for _ in range(draw.randint(1, CHANGES)):
        data = _bytes_changed(data, seeds, words, draw)
    return data


def _bytes_changed(data: bytes, seeds: Sequence[bytes], words: Sequence[bytes], draw: random.Random) -> bytes:
    start = draw.randint(0, len(data))
    stop = min(len(data), start + int(draw.expovariate(1 / 8)))
    other = draw.choice(seeds)
    match draw.randrange(9):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:start] + data[start:stop] * draw.choice((2, 3, 100)) + data[stop:]
        case 3:
            return data[:start] + bytes(draw.randrange(256) for _ in range(stop - start)) + data[stop:]
        case 4 if words:
            return data[:start] + draw.choice(words) + data[draw.choice((start, stop)) :]
        case 5:
            layout = draw.choice(("<B", "<H", "<I", "<Q", ">I", ">Q"))
            number = struct.pack(layout, draw.choice(NUMBERS) & (1 << 8 * struct.calcsize(layout)) - 1)
            return data[:start] + number + data[start + len(number) :]
        case 6:
            return data[:start] + other[draw.randint(0, len(other)) :]
        case 7 if data:
            at = min(start, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case _:
            piece = other[draw.randint(0, len(other)) :][: draw.randint(1, 64)]
            return data[:start] + piece + data[start:]


def _changed(value: Any, draw: random.Random) -> Any:
    """A JSON value in which one part is odd."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {**{name: item for name, item in value.items() if name != key}, draw.choice(list(value)): value[key]}
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(value[at], draw), *value[at + draw.randint(0, 1) :]]
    if draw.random() < 0.02:
        for _ in range(NESTED // 4):
            value = [value]
        return value
    return draw.choice(ODD)
