"""Tensors that contradict their storage, and views that cost more than they contain."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import Case
from tests.hostile.honest import composer, members, repacked, save
from tests.hostile.pickles import call, named, text

MARK = "put the forged tensor here"
STORAGE = 64
"""Elements of the one storage that the forged tensor looks at."""


def made(value: Any) -> bytes:
    """Pushes a plain value, without touching the memo."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def forged(
    shape: Any,
    stride: Any,
    offset: Any = 0,
    numel: Any = STORAGE,
    kind: str = "FloatStorage",
    refused: str | None = "",
) -> Case:
    """A run whose output head (8, 4) looks at a storage of 64 floats."""
    storage = b"(" + made("storage") + named("torch", kind) + made("evil") + made("cpu") + made(numel) + b"tQ"
    hooks = call("collections", "OrderedDict")
    view = call("torch._utils", "_rebuild_tensor_v2", storage, made(offset), made(shape), made(stride), b"\x89", hooks)

    def build(folder: Path) -> Path:
        parts = members(composer({"model.lm_head.weight": MARK}))
        data = parts["x/data.pkl"].replace(text(MARK), view)
        return repacked(folder, {**parts, "x/data.pkl": data, "x/data/evil": bytes(4 * STORAGE)})

    return Case(build, refused)


def names(*keys: Any, refused: str | None) -> Case:
    """A run with tensors under these names."""
    return Case(lambda folder: save(folder, composer({key: torch.ones(2) for key in keys})), refused)


ONE = torch.ones(2)
FOREIGN = "does not have; unexpected keys: `"
LIE = "larger than its storage|invalid shape|has 6[0-9] elements|without a storage"

CASES: dict[str, Case] = {
    "honest: a forged view that is true": forged((8, 4), (4, 1), refused=None),
    "a shape beyond the storage": forged((65,), (1,), refused=LIE),
    "an offset beyond the storage": forged((8,), (1,), offset=57, refused=LIE),
    "a stride beyond the storage": forged((2,), (64,), refused=LIE),
    "a negative offset": forged((8,), (1,), offset=-1, refused=LIE),
    "a negative stride": forged((8,), (-1,), offset=7, refused=LIE),
    "a negative size": forged((-8,), (1,), refused=LIE),
    "an offset of 2^63": forged((1,), (1,), offset=1 << 63, refused=LIE),
    "a size of 2^62": forged((1 << 62,), (0,), refused=LIE),
    "sizes whose product overflows 64 bits": forged((1 << 33, 1 << 33), (0, 0), refused=LIE),
    "sizes whose product overflows, with a zero": forged((1 << 61, 1 << 61, 0), (1, 1, 1), refused="another shape"),
    "expanded from one element": forged((1 << 40,), (0,), refused=LIE),
    "rows that overlap": forged((32, 32), (1, 1), refused=LIE),
    "rows that overlap within the storage": forged((8, 4), (2, 1), refused=None),
    "more axes than numpy has": forged((1,) * 100, (1,) * 100, refused=LIE),
    "a thousand axes": forged((1,) * 1000, (1,) * 1000, refused=LIE),
    "a float as size": forged((3.0,), (1,), refused=LIE),
    "a bool as size": forged((True,), (1,), refused=LIE),
    "a text as shape": forged("88", (1, 1), refused=LIE),
    "a nested shape": forged(((8,),), (1,), refused=LIE),
    "strides of another rank": forged((8, 8), (1,), refused=LIE),
    "a float as offset": forged((8,), (1,), offset=0.5, refused=LIE),
    "a storage that declares a larger size": forged((64,), (1,), numel=65, refused="its record has"),
    "a storage that declares doubles": forged((64,), (1,), kind="DoubleStorage", refused="its record has"),
    "a storage of an unknown type": forged((64,), (1,), kind="EvilStorage", refused="stored as"),
    "a complex storage": forged((64,), (1,), kind="ComplexFloatStorage", refused="stored as"),
    "a storage whose size is a text": forged((64,), (1,), numel="64", refused="not a storage"),
    "a storage whose size is a bool": forged((1,), (1,), numel=True, refused="its record has|not a storage"),
    "a scalar": forged((), (), refused="another shape"),
    "an empty tensor": forged((0, 8), (8, 1), refused="another shape"),
    "an empty tensor outside the storage": forged((0, 8), (8, 1), offset=1 << 50, refused=LIE),
    "names that are paths": names("model.../../evil", "model./etc/passwd", refused=FOREIGN),
    "a name with an escape sequence": names("model.\x1b]0;evil\x07", refused=FOREIGN),
    "a name with line breaks": names("model.evil\nhint: all is well", refused=FOREIGN),
    "a name with half a surrogate": names("model.\ud800", refused=FOREIGN),
    "a name of a million letters": names("model." + "a" * 1_000_000, refused=FOREIGN),
    "a name that is a number": names(7, refused="lacks"),
    "a name that is nothing": names("model.", refused=FOREIGN),
    "a name that is __metadata__": names("model.__metadata__", refused=FOREIGN),
    "two names that become one": names("model.evil", "model.module.evil", refused="duplicate key"),
    "20,000 tensors of one storage": Case(
        lambda folder: save(folder, composer({f"model.e{n}": ONE for n in range(20_000)})), FOREIGN
    ),
}
