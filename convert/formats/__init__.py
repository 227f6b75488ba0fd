"""The training formats: one package or file per training system, found by listing this folder.

A package contains everything about one system: `format.py` (the constant `FORMAT`), and as needed `read.py`,
`names.py`, `config.py`. `ADAPTER` (its LoRA files) is in `format.py` or `adapter.py`, `DELTA` in `format.py` or
`delta.py`. A small format is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.state_dicts.files import Sign, StateFile, peek_state
from llmconv.errors import UsageProblem
from llmconv.output.plan import Plan
from llmconv.plugins import each_plugin
from llmconv.tensors import LazyTensor

if TYPE_CHECKING:
    from llmconv.convert.adapters.adapter import Adapter
    from llmconv.convert.deltas.arithmetic import WrittenDelta


@dataclass(frozen=True)
class Format:
    """One kind of training checkpoint; the constant `FORMAT` of its package or file."""

    name: str  # the value of `--from`, equal to the name of the package or file
    title: str  # one line for people
    detect: Callable[[Path], bool]  # whether a path has this format, decided by its content
    # `open(path, config, tokenizer)` returns the Checkpoint in Hugging Face names; `config` contains fields that the
    # user adds or overrides, `tokenizer` is a file or folder to use instead of the checkpoint's own
    open: Callable[[Path, Mapping[str, Any], Path | None], Checkpoint]
    covers: str = ""  # supported models and variants, a few phrases for the table of `llmconv formats`
    # options of `to-hf` that only some formats have; they are passed as fields of `config`
    options: tuple[str, ...] = ()
    # the tensors in their own names, for `inspect` if `open` needs more than the checkpoint contains; without it
    # `inspect` lists the torch and safetensors files at the path
    peek: Callable[[Path], Mapping[str, LazyTensor]] | None = None
    # for `from-hf`: `save(checkpoint, shards)` returns the Plan of the files, in this number of shards, from which
    # `open` returns the same model, bit for bit. It reads no tensor. It raises UnsupportedInput for everything that the
    # format cannot hold, MalformedInput if config and tensors contradict each other, and UsageProblem for a number of
    # shards that does not divide the model. None if the format cannot be written
    save: Callable[[Checkpoint, int], Plan] | None = None
    # other values of `--dtype` of `from-hf`, such as `q8_0`, and what saves a model so, with `--imatrix` if given
    dtypes: Mapping[str, Callable[[Checkpoint, int, Path | None], Plan]] = field(default_factory=dict)
    # how its state dicts are recognized, if single torch or safetensors files are its checkpoints
    sign: Sign | None = None


@dataclass(frozen=True)
class AdapterFormat:
    """The adapter files of one program; `convert/formats/<name>/adapter.py` has one as its constant `ADAPTER`."""

    title: str  # for people: the program that writes it, and the files that identify it
    # whether a path is of this format, decided by its content; no two formats accept the same path
    detect: Callable[[Path], bool]
    # `open(path, base, alpha)` returns the adapter in the names of `base`, the model it is merged into; `alpha` is
    # `lora_alpha` where the files do not contain it
    open: Callable[[Path, Checkpoint, float | None], Adapter]


@dataclass(frozen=True)
class DeltaFormat:
    """The deltas of one training system; `convert/formats/<name>/delta.py` has one as its constant `DELTA`."""

    detect: Callable[[Path], bool]  # whether a path is of this format, decided by its content
    # `apply(base, path, dtype)` returns the tuned model in Hugging Face names; `dtype` is `keep` or a float type
    apply: Callable[[Checkpoint, Path, str], Checkpoint]
    # `save(base, tuned, shards)` returns the files of a delta, in this number of shards or (with None) in as many as
    # the base has. None if the system's deltas cannot be written
    save: Callable[[Checkpoint, Checkpoint, int | None], WrittenDelta] | None = None


@lru_cache(maxsize=1)
def formats() -> dict[str, Format]:
    """Every format by name, in alphabetical order."""
    return dict(each_plugin(__name__, "FORMAT", Format, "format"))


@lru_cache(maxsize=1)
def adapter_formats() -> dict[str, AdapterFormat]:
    """Every format of adapters other than PEFT's, by the name of its package."""
    return dict(each_plugin(__name__, "ADAPTER", AdapterFormat, "adapter", "format"))


@lru_cache(maxsize=1)
def delta_formats() -> dict[str, DeltaFormat]:
    """Every delta format of a training system, by the name of its package."""
    return dict(each_plugin(__name__, "DELTA", DeltaFormat, "delta", "format"))


def detect(path: Path) -> Format | None:
    """The format of `path`, or None; formats after it in the alphabet are not loaded."""
    each = each_plugin(__name__, "FORMAT", Format, "format")
    return next((candidate for _, candidate in each if candidate.detect(path)), None)


def owner(found: StateFile) -> str | None:
    """Name of the format whose sign a state dict has; None if it has none, as a plain Hugging Face model."""
    signs = {name: candidate.sign for name, candidate in formats().items() if candidate.sign}
    keys = {str(key) for key in found.around}
    if with_key := [name for name, sign in signs.items() if keys.intersection(sign.keys)]:
        return next((name for name in with_key if signs[name].has_names(found)), with_key[0])
    return next((name for name, sign in signs.items() if not sign.keys and sign.has_names(found)), None)


def has_sign_of(name: str, path: Path) -> bool:
    """Whether `path` is a torch or safetensors file with the sign of the format `name`, and of no other format."""
    found = peek_state(path) if path.is_file() else None
    sign = formats()[name].sign
    return bool(found and sign and owner(found) == name and sign.has_names(found))


def adapter_format(path: Path) -> AdapterFormat | None:
    """The adapter format of `path`; None for PEFT's adapters, and for other paths."""
    return next((candidate for candidate in adapter_formats().values() if candidate.detect(path)), None)


def by_name(name: str) -> Format:
    """The format called `name`; UsageProblem if it is unknown."""
    if name not in formats():
        raise UsageProblem(f"unknown format `{name}`", hint=f"one of: {', '.join(formats())}")
    return formats()[name]
