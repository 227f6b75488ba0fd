"""Opening the adapters of a merge, whichever program wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.peft_file import WEIGHTS, open_adapter, read_tensors
from llmconv.convert.adapters.peft_tensors import CONFIG
from llmconv.convert.adapters.peft_tuner_file import is_tuned, open_tuned
from llmconv.convert.adapters.placement.initial_weights import with_initial
from llmconv.convert.formats import adapter_format, detect
from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.files.sources import local_path, reading_safely

PREFIX = "base_model.model."
SMALL = (".json", ".md", ".txt", ".jinja", ".model")
"""Suffixes of the files next to the weights of an adapter."""


def open_adapters(
    adapters: Sequence[str | Path], initial: Sequence[str | Path], base: Checkpoint, alpha: float | None
) -> list[Adapter]:
    """Opens all adapters of a merge, each with its state before training where that is given.

    Args:
        adapters: folders, files or hub ids.
        initial: one per adapter, `-` for none; or nothing at all.
        base: the model that they are merged into.
        alpha: `lora_alpha` for adapters whose files do not contain it.

    Raises:
        UsageProblem: not as many initial adapters as adapters, or options that an adapter contradicts.
        InputRefused: a file is missing; see also the openers of each kind.
    """
    if initial and len(initial) != len(adapters):
        raise UsageProblem(
            f"{len(initial)} initial adapters are given for {len(adapters)} adapters",
            hint="give `--initial-adapter` once per adapter, `-` for one that needs none",
        )
    before = [None if str(path) == "-" else path for path in initial] or [None] * len(adapters)
    opened = []
    for path, start in zip(adapters, before, strict=True):
        with _named(path, len(adapters)):
            opened.append(_open_trained(path, start, base, alpha))
    return opened


@contextmanager
def _named(path: str | Path, count: int) -> Iterator[None]:
    """Adds the path to errors about one of several adapters, whose files have the same names."""
    try:
        yield
    except LlmconvError as error:
        if count > 1 and str(path) not in error.message:
            error.message = f"in `{path}`: {error.message}"
        raise


def _open_trained(adapter: str | Path, initial: str | Path | None, base: Checkpoint, alpha: float | None) -> Adapter:
    if initial is None:
        return _open(adapter, base, alpha)
    trained, before = (_open_initial(path, alpha) for path in (adapter, initial))
    return with_initial(trained, before)


def _open(adapter: str | Path, base: Checkpoint, alpha: float | None) -> Adapter:
    with reading_safely(adapter):
        path = local_path(adapter, in_parts=True)
        if not is_plainly_peft(path) and (kind := adapter_format(path)):
            return kind.open(path, base, alpha)
        _refuse_whole_run(path, base)
        return open_tuned(path, alpha) if is_tuned(path) else open_adapter(path, alpha)


def _refuse_whole_run(path: Path, base: Checkpoint) -> None:
    """Refuses a checkpoint that has the adapter and its base together; `to-hf` merges the two."""
    folder = path if path.is_dir() else path.parent
    homes = [home for home in (folder, folder.parent) if (home / CONFIG).is_file()]
    if not homes or any((folder / name).is_file() for name in WEIGHTS) or not (found := detect(path)):
        return
    raise InputRefused(
        f"`{path}` is of the format `{found.name}`, with the adapter and the model that it was trained on",
        hint=f"merge the two: `llmconv to-hf {path} --config {base.path / 'config.json'} -o OUT`",
    )


def is_plainly_peft(path: Path) -> bool:
    """Whether a folder contains only PEFT's own files, safetensors in PEFT's names, and a config with a `peft_type`.

    Then the formats of other tools need not be tried, which takes as long as planning a merge.
    """
    weights = path / WEIGHTS[0]
    if not weights.is_file() or not (path / CONFIG).is_file() or not read_json(path / CONFIG).get("peft_type"):
        return False
    others = (file for file in path.iterdir() if file != weights)
    return all(file.suffix in SMALL for file in others) and all(
        name.startswith(PREFIX) for name in read_tensors(weights)
    )


def is_for_peft(path: Path) -> bool:
    """Whether PEFT itself loads an adapter: its own files, with safetensors weights."""
    named = (path / CONFIG).is_file() and (path / WEIGHTS[0]).is_file()
    return named and (is_plainly_peft(path) or adapter_format(path) is None)


def _open_initial(adapter: str | Path, alpha: float | None) -> Adapter:
    """One of a pair: only PEFT has initializations that change the base."""
    with reading_safely(adapter):
        return open_adapter(local_path(adapter, in_parts=True), alpha, initial=True)
