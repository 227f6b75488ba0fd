"""The training formats: one package or file each in this folder, found by listing it.

A package contains all that llmconv knows of one training system: `format.py` (the constant `FORMAT`), and where there
is such a thing `read.py`, `names.py`, `config.py`, `write.py`, `tokenizer.py`, `adapter.py` (`ADAPTER`: its LoRA files)
and `delta.py` (`DELTA`). A small format is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.other_tools import AdapterFormat
from llmconv.convert.deltas import DeltaFormat
from llmconv.convert.state_dicts.files import StateFile, peek_state
from llmconv.convert.state_dicts.signs import Sign
from llmconv.errors import UsageProblem
from llmconv.output.plan import Plan
from llmconv.plugins import plugins
from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class Format:
    """One kind of training checkpoint; each has one as its constant `FORMAT`.

    Attributes:
        name: what `--from` takes, equal to the name of the package or file.
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
        sign: what its state dicts have and those of other systems lack, where single torch or safetensors files are
            its checkpoints.
    """

    name: str
    title: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Mapping[str, Any], Path | None], Checkpoint]
    covers: str = ""
    options: tuple[str, ...] = ()
    peek: Callable[[Path], Mapping[str, LazyTensor]] | None = None
    save: Callable[[Checkpoint, int], Plan] | None = None
    sign: Sign | None = None


@lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Every format by name, in alphabetical order."""
    return plugins(__name__, "FORMAT", Format, inside="format")


@lru_cache(maxsize=1)
def adapter_formats() -> dict[str, AdapterFormat]:
    """Every format of adapters that are not PEFT's, by the name of its package."""
    return plugins(__name__, "ADAPTER", AdapterFormat, inside="adapter")


@lru_cache(maxsize=1)
def delta_formats() -> dict[str, DeltaFormat]:
    """Every format of deltas that a training system writes, by the name of its package."""
    return plugins(__name__, "DELTA", DeltaFormat, inside="delta")


def detect(path: Path) -> Format | None:
    """The format that claims `path`, or None."""
    return next((candidate for candidate in formats().values() if candidate.detect(path)), None)


def owner(found: StateFile) -> str | None:
    """Name of the format whose sign a state dict has; None where it has none, as a plain Hugging Face model."""
    signs = {name: candidate.sign for name, candidate in formats().items() if candidate.sign}
    if with_key := next((name for name, sign in signs.items() if sign.has_key(found)), None):
        return with_key
    return next((name for name, sign in signs.items() if not sign.keys and sign.has_names(found)), None)


def has_sign_of(name: str, path: Path) -> bool:
    """Whether `path` is a file with a state dict of the format `name` and of no other."""
    found = peek_state(path) if path.is_file() else None
    sign = formats()[name].sign
    return bool(found and sign and owner(found) == name and sign.has_names(found))


def adapter_format(path: Path) -> AdapterFormat | None:
    """The format of adapters that claims `path`; None for PEFT's, and for what is not an adapter."""
    return next((candidate for candidate in adapter_formats().values() if candidate.detect(path)), None)


def by_name(name: str) -> Format:
    """The format called `name`.

    Raises:
        UsageProblem: there is none.
    """
    if name not in formats():
        raise UsageProblem(f"there is no format `{name}`", hint=f"one of: {', '.join(formats())}")
    return formats()[name]
