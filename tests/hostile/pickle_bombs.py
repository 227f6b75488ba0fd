"""Opcodes of pickles of a few megabytes that ask for minutes or gigabytes."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.hostile.pickles import named, text

SIZE = 4 << 20
"""Bytes of a bomb, about."""

PRIME = (1 << 61) - 1
"""CPython's hash of a number is the number modulo this."""

WORD = (1 << 64) - 1
PRIMES_OF_XXHASH = 11400714785074694791, 14029467366897019727, 2870177450012600261
"""With which CPython makes the hash of a tuple (`Objects/tupleobject.c`)."""


def times(part: bytes, per: int | None = None) -> bytes:
    """`part` as often as fits into a bomb; each costs `per` bytes where that is more than its own."""
    return part * (SIZE // (per or len(part)))


def number(value: int) -> bytes:
    """Pushes a number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def items(*parts: bytes) -> bytes:
    """A list of what the parts push."""
    return b"](" + b"".join(parts) + b"e"


def keys(*parts: bytes) -> bytes:
    """A dict of the keys that the parts push, each with None."""
    return b"}(" + b"".join(part + b"N" for part in parts) + b"u"


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers whose tuples have one hash: the second number undoes what the first did."""
    one, two, five = PRIMES_OF_XXHASH
    undo, first = pow(two, -1, 1 << 64), 0
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        first += 1
        lane = five + first * two & WORD
        lane = (lane << 31 | lane >> 33) * one & WORD
        second = (12345 - lane) * undo & WORD
        if second < PRIME:
            pairs.append((first, second))
    return pairs


def laughs(leaf: bytes, levels: int = 40, each: int = 10) -> bytes:
    """A list of ten references to a list of ten references, and so on; memo 240 is its own."""
    return leaf + b"".join(b"q\xf00](" + b"h\xf0" * each + b"e" for _ in range(levels))


def memo(number: int, value: bytes) -> bytes:
    """Remembers a value, and pushes nothing."""
    return value + b"q" + bytes([number]) + b"0"


EVIL = named("evil", "Evil")
LONG = "x" * (SIZE // 2)

PICKLES: dict[str, Callable[[], bytes]] = {
    "a million sets": lambda: items(times(b"\x8f")),
    "a million dicts": lambda: items(times(b"}")),
    "a million lists": lambda: items(times(b"]")),
    "a million lists of one": lambda: items(times(b"]Na")),
    "a million dicts of one": lambda: items(times(b"}NNs")),
    "a million sets of one": lambda: items(times(b"\x8f(N\x90")),
    "a million frozen sets": lambda: items(times(b"(\x91")),
    "a million tuples": lambda: items(times(b"N\x85")),
    "a million memo entries": lambda: times(b"\x94").join((b"N", b"")),
    "a million texts": lambda: items(times(text("ab"))),
    "a million objects": lambda: memo(1, EVIL) + items(times(b"h\x01)\x81")),
    "a million objects of objects": lambda: EVIL + times(b")R"),
    "a million results as keys": lambda: memo(1, EVIL) + b"}(" + times(b"h\x01)RN") + b"u",
    "objects of objects as a key": lambda: b"}" + EVIL + times(b")R") + b"Ns",
    "lists as keys": lambda: b"}(" + times(b"]N") + b"u",
    "lists in a set": lambda: b"\x8f(" + times(b"]") + b"\x90",
    "a large tuple as a key, again and again": lambda: (
        memo(1, b"(" + b"N" * (SIZE // 4) + b"t") + b"}" + times(b"h\x01Ns", 6)
    ),
    "large tuples in a set": lambda: (
        memo(1, b"(" + b"N" * (SIZE // 4) + b"t") + b"\x8f(" + times(b"h\x01", 3) + b"\x90"
    ),
    "numbers of one hash": lambda: keys(*(number(PRIME * n) for n in range(1, SIZE // 12))),
    "numbers of one hash in a set": lambda: (
        b"\x8f(" + b"".join(number(PRIME * n) for n in range(1, SIZE // 12)) + b"\x90"
    ),
    "numbers of one hash in a frozen set": lambda: (
        b"(" + b"".join(number(PRIME * n) for n in range(1, SIZE // 12)) + b"\x91"
    ),
    "numbers of one hash in many dicts": lambda: items(keys(*(number(PRIME * n) for n in range(1, 100))) * 3500),
    "pairs of one hash": lambda: keys(*(number(a) + number(b) + b"\x86" for a, b in colliding_pairs(SIZE // 20))),
    "floats of near hashes": lambda: keys(
        *(b"G" + struct.pack(">d", 2.0**n * m) for n in range(900) for m in range(1, 400))
    ),
    "long names": lambda: memo(1, text(LONG)) + memo(2, text(LONG)) + times(b"h\x01h\x02\x930", 12),
    "calls of long names": lambda: memo(1, text(LONG)) + times(b"h\x01h\x01\x93)R0", 14),
    "names of 1000 characters": lambda: memo(1, text("x" * 1000)) + times(b"h\x01h\x01\x93)R0"),
    "a large dict made of pairs, again and again": lambda: (
        memo(1, items(b"NN\x86q\x030" + times(b"h\x03", 8)))
        + memo(2, named("collections", "OrderedDict"))
        + times(b"h\x02h\x01\x85R0", 16)
    ),
    "a large size, again and again": lambda: (
        memo(1, items(times(b"N", 4))) + memo(2, named("torch", "Size")) + times(b"h\x02h\x01\x85R0", 12)
    ),
    "a long text encoded, again and again": lambda: (
        memo(1, text(LONG))
        + memo(2, text("latin1"))
        + memo(3, named("_codecs", "encode"))
        + items(times(b"h\x03h\x01h\x02\x86R", 18))
    ),
    "arguments that are a long list": lambda: (
        memo(1, items(times(b"N", 4))) + memo(2, EVIL) + times(b"h\x02h\x01\x810", 10)
    ),
    "arguments that are a long text": lambda: memo(1, text(LONG)) + memo(2, EVIL) + times(b"h\x02h\x01\x810", 14),
    "many arguments and a keyword": lambda: (
        memo(1, b"(" + times(b"N", 4) + b"t") + memo(2, EVIL) + items(times(b"h\x02h\x01}\x92", 10))
    ),
    "a tensor of a long shape, again and again": lambda: (
        memo(1, b"(" + times(b"K\x00", 8) + b"t")
        + memo(2, b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x08tQ")
        + memo(3, named("torch._utils", "_rebuild_tensor_v2"))
        + memo(4, b"(h\x02K\x00h\x01h\x01NNt")
        + times(b"h\x03h\x04R0", 14)
    ),
    "states, again and again": lambda: (
        memo(1, EVIL + b")R") + memo(2, items(times(b"N", 4))) + times(b"h\x01h\x02b0", 8)
    ),
    "ten references to ten references": lambda: laughs(b"]"),
    "ten references to ten tuples": lambda: b"N" + b"".join(b"q\xf00(" + b"h\xf0" * 10 + b"t" for _ in range(40)),
    "two references to two references": lambda: b"]" + b"2\x86" * 60,
    "a thousand references to a thousand": lambda: laughs(b"](" + b"N" * 1000 + b"e", 3, 1000),
    "ten dicts of ten dicts": lambda: (
        b"}" + b"".join(b"q\xf00}(" + b"".join(text(str(n)) + b"h\xf0" for n in range(10)) + b"u" for _ in range(40))
    ),
    "objects in objects, ten each": lambda: (
        memo(1, EVIL) + b"]" + b"".join(b"q\xf00h\x01(" + b"h\xf0" * 10 + b"t\x81" for _ in range(40))
    ),
    "an object of references as a key": lambda: b"}" + EVIL + laughs(b"]") + b"\x85R" + b"Ns",
    "references as a key": lambda: b"}" + laughs(b"]") + b"Ns",
    "a long text, a million times": lambda: memo(1, text(LONG)) + items(times(b"h\x01", 4)),
    "a million lists deep": lambda: b"]" * (SIZE // 2) + b"a" * (SIZE // 2 - 1),
    "a million tuples deep": lambda: b")" + times(b"\x85"),
    "a million objects deep": lambda: memo(1, EVIL) + b"N" + times(b"\x85q\x020h\x01h\x02R", 9),
    "bytes of opcodes": lambda: times(b"N0"),
    "numbers of 64 bytes": lambda: items(times(number(1 << 500))),
}
"""Opcodes that push a value."""
