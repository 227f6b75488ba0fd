"""The kinds of LoRA adapters that are not PEFT's: one file each in `kinds/`, found by listing it.

Each opens a file or folder as an `Adapter` in Hugging Face names; what they share is in `adapters/foreign/factors.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.reading import Adapter


@dataclass(frozen=True)
class Foreign:
    """One kind of adapter; each file of `kinds/` has one as its constant `FOREIGN`.

    Attributes:
        title: for people: who writes it, and the files it is told by.
        detect: whether a path is of this kind, decided by what is in it; at most one kind says so.
        open: `open(path, base, alpha)` gives the adapter in the names of `base`, the model it is merged into; `alpha`
            is `lora_alpha` where the files do not carry it.
    """

    title: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Checkpoint, float | None], Adapter]


@lru_cache(maxsize=1)
def foreign_kinds() -> dict[str, Foreign]:
    """Every kind by the name of its file."""
    found = sorted(module.name for module in pkgutil.iter_modules([f"{__path__[0]}/kinds"]))
    return {name: importlib.import_module(f"{__name__}.kinds.{name}").FOREIGN for name in found}


def foreign_kind(path: Path) -> Foreign | None:
    """The kind that claims `path`, or None: then it is PEFT's or nobody's."""
    return next((kind for kind in foreign_kinds().values() if kind.detect(path)), None)
