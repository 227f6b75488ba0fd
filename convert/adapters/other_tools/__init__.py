"""LoRA adapters that are not PEFT's: one `ADAPTER` each, in the package of the program in `convert/formats/`.

Each opens a file or folder as an `Adapter` in Hugging Face names, with the functions of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter


@dataclass(frozen=True)
class AdapterFormat:
    """The adapter files of one program; `convert/formats/<name>/adapter.py` has one as its constant `ADAPTER`.

    Attributes:
        title: for people: the program that writes it, and the files that identify it.
        detect: whether a path is of this format, decided by its content; no two formats accept the same path.
        open: `open(path, base, alpha)` returns the adapter in the names of `base`, the model it is merged into; `alpha`
            is `lora_alpha` where the files do not contain it.
    """

    title: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Checkpoint, float | None], Adapter]
