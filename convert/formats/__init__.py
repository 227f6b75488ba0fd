"""The training formats: one file each in this folder, found by listing it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UsageProblem
from llmconv.plan import Plan
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Format:
    """One kind of training checkpoint; each file of this folder has one as its constant `FORMAT`.

    Attributes:
        name: what `--from` takes, equal to the file's name.
        title: one line for people.
        covers: what of it is converted, a few phrases for the table that `llmconv formats` prints.
        detect: whether a path is of this format, decided by what is in it.
        open: `open(path, config, tokenizer)` gives the Checkpoint in Hugging Face names; `config` are fields that the
            user adds or overrides, `tokenizer` a file or folder to use instead of the checkpoint's own.
        options: those of `to-hf` that only some formats have; they come as fields of `config`.
        peek: the tensors under their own names, for `inspect` where `open` needs to be told more than is in the file;
            without it those of the torch and safetensors files at the path.
        save: the way back, for `from-hf`: `save(checkpoint, shards)` gives the Plan of the files that hold a model in
            Hugging Face names in so many shards, such that `open` gives it back bit for bit; it reads no tensor, and
            refuses by name what the format cannot hold. None where there is no way back.
    """

    name: str
    title: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Mapping[str, Any], Path | None], Checkpoint]
    covers: str = ""
    options: tuple[str, ...] = ()
    peek: Callable[[Path], Mapping[str, LazyTensor]] | None = None
    save: Callable[[Checkpoint, int], Plan] | None = None


@lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Every format by name, in alphabetical order."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").FORMAT for name in found}


def detect(path: Path) -> Format | None:
    """The format that claims `path`, or None."""
    return next((candidate for candidate in formats().values() if candidate.detect(path)), None)


def by_name(name: str) -> Format:
    """The format called `name`.

    Raises:
        UsageProblem: there is none.
    """
    if name not in formats():
        raise UsageProblem(f"there is no format `{name}`", hint=f"one of: {', '.join(formats())}")
    return formats()[name]
