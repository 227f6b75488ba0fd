"""Opens the adapters of a merge: PEFT's folders and files, and those of other tools.

PiSSA, OLoRA, CorDA and LoRA-GA subtract the initial adapter from the base and train on W − s·B₀·A₀, so the trained
weight is W + s·(B·A − B₀·A₀) (PEFT `tuners/lora/model.py`, `subtract_mutated_init`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmconv.checkpoint import LEFT_OUT, VALUE_HEAD, Checkpoint, is_model_folder, read_json
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.peft_file import (
    CONFIG,
    WEIGHTS,
    is_tuned,
    open_adapter,
    open_tuned,
    read_tensors,
    saved_name,
    weights_of,
)
from llmconv.convert.algebra import equal
from llmconv.errors import (
    InputRefused,
    LlmconvError,
    MalformedInput,
    UnsupportedInput,
    UsageProblem,
    listing,
    short,
    word,
)
from llmconv.files.sources import local_path, reading_safely
from llmconv.not_a_model_folder import SUFFIXES_OF_TORCH, litgpt_prompts, training_file_kind
from llmconv.tensors import cast

if TYPE_CHECKING:
    from llmconv.convert.formats import AdapterFormat, Format

PREFIX = "base_model.model."
BASE_CONFIG = "config.json"
SMALL = (".json", ".md", ".txt", ".jinja", ".model")  # suffixes of the files next to the weights of an adapter
ADAPTER_SUFFIXES = (".safetensors", *SUFFIXES_OF_TORCH)  # suffixes of files of weights
OWN = re.compile(r"(?:adapter_model|README)\..*")  # PEFT's file in its two forms, of which it reads one
# The weights of a model in whose folder an adapter lies
WHOLE_MODEL = re.compile(r"(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
PLAIN = ("safetensors", "torch")  # formats of any file of tensors


def open_adapters(
    adapters: Sequence[str | Path], initial: Sequence[str | Path], base: Checkpoint, alpha: float | None
) -> list[Adapter]:
    """Opens a merge's adapters (folders, files, hub ids), with `initial` ones (none, or one each, `-` for none).

    `alpha` is `lora_alpha` where files lack it. Raises UsageProblem for another number of initial ones or a
    contradiction, InputRefused for missing files, and what the openers of each kind raise.
    """
    if initial and len(initial) != len(adapters):
        raise UsageProblem(
            f"{len(initial)} initial adapters are given for {len(adapters)} adapters",
            hint="give `--initial-adapter` once per adapter, `-` for one that needs none",
        )
    before = [None if str(path) == "-" else path for path in initial] or [None] * len(adapters)
    opened = []
    for path, start in zip(adapters, before, strict=True):
        try:
            if start is None:
                opened.append(_open(path, base, alpha))
                continue
            pair = []
            for place in (path, start):  # only PEFT has initializations that change the base
                with reading_safely(place):
                    pair.append(open_adapter(local_path(place, in_parts=True), alpha, initial=True))
            opened.append(with_initial(*pair))
        except LlmconvError as error:  # the files of several adapters have the same names
            if len(adapters) > 1 and str(path) not in error.message:
                error.message = f"in `{path}`: {error.message}"
            raise
    return opened


def _open(adapter: str | Path, base: Checkpoint, alpha: float | None) -> Adapter:
    with reading_safely(adapter):
        path = local_path(adapter, in_parts=True)
        if path.is_dir():
            _require_same_rope(path, base)
        if not is_plainly_peft(path):
            if problem := litgpt_prompts(path):
                raise problem
            if kind := _other_format(path):
                return kind.open(path, base, alpha)
        folder = path if path.is_dir() else path.parent
        homes = [home for home in (folder, folder.parent) if (home / CONFIG).is_file()]
        alone = homes and weights_of(folder) is not None
        if not alone and (whole := _training_format(path)):  # the adapter and its base together, which `to-hf` merges
            from llmconv.convert.state_dicts.files import ADAPTER_NAMES  # noqa: PLC0415 - only for a refusal

            names = [*whole.peek(path)] if whole.peek and whole.name not in PLAIN else []
            if names and all(map(ADAPTER_NAMES.search, names)):
                raise InputRefused(
                    f"`{path}` is of the format `{whole.name}`, with an adapter",
                    hint=f"merge it: `llmconv to-hf {word(path)} --base {word(base.path)} -o OUT`",
                )
            if homes:
                raise InputRefused(
                    f"`{path}` is of the format `{whole.name}`, with the adapter and the model that it was trained on",
                    hint="merge the two: "
                    f"`llmconv to-hf {word(path)} --config {word(base.path / 'config.json')} -o OUT`",
                )
            if whole.name not in PLAIN:
                raise InputRefused(
                    f"`{path}` is a training checkpoint (`{whole.name}`), not an adapter",
                    hint=f"convert it: `llmconv to-hf {word(path)} -o OUT`, which merges its adapter, if it has one",
                )
        opened = open_tuned(path, alpha) if is_tuned(path) else open_adapter(path, alpha)
        return _with_all_weights(opened) if path.is_dir() else opened


def _require_same_rope(folder: Path, base: Checkpoint) -> None:
    """Raises UnsupportedInput if the configuration next to an adapter has other rotary frequencies than the base.

    LongLoRA's callback saves that of the running model, whose positions were scaled for the training.
    """
    if not (folder / BASE_CONFIG).is_file() or is_model_folder(folder):
        return
    stored = read_json(folder / BASE_CONFIG)
    if stored.get("model_type") != base.config.get("model_type"):
        return
    from llmconv.convert.models.model_config import rope_fields  # noqa: PLC0415 - few adapters have a configuration

    own, given = rope_fields(stored), rope_fields(base.config)
    if any(own[name] != given[name] for name in own.keys() & given.keys()):
        raise UnsupportedInput(
            f"`{BASE_CONFIG}` next to the adapter `{folder.name}` has other rotary positions than the base: "
            f"{_settings(own)}, and not {_settings(given)}",
            hint="if it was trained with them, give the base those: "
            f"`llmconv to-hf {word(base.path)} --config {word(folder / BASE_CONFIG)} -o BASE`, and merge into BASE; "
            "if not, move the file elsewhere",
        )


def _settings(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {short(value)}" for name, value in rope.items())


def _with_all_weights(adapter: Adapter) -> Adapter:
    """The adapter of a folder in which no other file holds weights that were trained with it (else UnsupportedInput).

    PEFT saves the adapter alone; what else a trainer changed (a vision tower, a projector, new embeddings) is next to
    it, in a file of the trainer's own (LLaVA's `non_lora_trainables.bin`, LongLoRA's `trainable_params.bin`). A second
    copy of the adapter does not count.
    """
    others = (file for file in sorted(adapter.path.iterdir()) if file.suffix in ADAPTER_SUFFIXES and file.is_file())
    names = [file.name for file in others if not (OWN.fullmatch(file.name) or training_file_kind(file.name))]
    if is_model_folder(adapter.path):
        names = [name for name in names if not WHOLE_MODEL.fullmatch(name)]
    names = [name for name in names if not _repeats(adapter.path / name, adapter.weights[0])]
    heads = [name for name in names if VALUE_HEAD.fullmatch(name) or _is_value_head(adapter.path / name)]
    if rest := [name for name in names if name not in heads]:
        raise UnsupportedInput(
            f"the folder of the adapter `{adapter.name}` contains other weights, which no merge would add: "
            f"{listing(rest)}",
            hint="were they trained with the adapter, put them into the base first; if not, move them elsewhere, or "
            f"give the adapter's file alone: `{adapter.weights[0]}`",
        )
    if not heads:
        return adapter
    note = LEFT_OUT.format(listing(heads))
    return replace(adapter, config=replace(adapter.config, warnings=(*adapter.config.warnings, note)))


def _is_value_head(file: Path) -> bool:
    """Whether a file contains only a value head, as the `pytorch_model.bin` that TRL saves with an adapter."""
    try:
        found = read_tensors(file)
    except LlmconvError:
        return False
    return bool(found) and all(VALUE_HEAD.fullmatch(name) for name in found)


def _repeats(file: Path, weights: Path) -> bool:
    """Whether a file contains only tensors of the adapter, as accelerate's `pytorch_model_fsdp.bin` may."""
    try:
        found = {saved_name(name)[0] or name: tensor for name, tensor in read_tensors(file).items()}
        own = {saved_name(name)[0] or name: tensor for name, tensor in read_tensors(weights).items()}
    except LlmconvError:
        return False
    if not found.keys() <= own.keys():
        return False
    pairs = [(tensor, own[name]) for name, tensor in found.items()]  # one of each may be rounded
    return all(equal(one, cast(two, one.dtype)) or equal(cast(one, two.dtype), two) for one, two in pairs)


def is_plainly_peft(path: Path) -> bool:
    """Whether a folder contains only PEFT's own files and names: other formats are not tried, which takes long."""
    weights = path / WEIGHTS[0]
    if not weights.is_file() or not (path / CONFIG).is_file() or not read_json(path / CONFIG).get("peft_type"):
        return False
    others = (file for file in path.iterdir() if file != weights)
    return all(file.suffix in SMALL for file in others) and all(one.startswith(PREFIX) for one in read_tensors(weights))


def _other_format(path: Path) -> AdapterFormat | None:
    from llmconv.convert.formats import adapter_format  # noqa: PLC0415 - PEFT's own files need none of them

    return adapter_format(path)


def _training_format(path: Path) -> Format | None:
    from llmconv.convert.formats import detect  # noqa: PLC0415 - as above

    return detect(path)


def is_for_peft(path: Path) -> bool:
    """Whether PEFT itself loads an adapter: its own files, with safetensors weights."""
    named = (path / CONFIG).is_file() and (path / WEIGHTS[0]).is_file()
    return named and (is_plainly_peft(path) or _other_format(path) is None)


def with_initial(trained: Adapter, initial: Adapter) -> Adapter:
    """`trained` with where it started; MalformedInput: not of one run, UnsupportedInput: fused experts."""
    if trained.config.parameters or initial.config.parameters:
        raise UnsupportedInput(
            f"`{trained.name}` sets `target_parameters`, which no initial adapter goes with",
            hint="no initialization changes such weights; leave out `--initial-adapter`",
        )
    for module in sorted(trained.pairs.keys() | initial.pairs.keys()):
        after, before = trained.pairs.get(module), initial.pairs.get(module)
        if after is None or before is None:
            raise _unlike(trained, f"only {'the trained' if after else 'the initial'} one adapts `{module}`")
        if (after.a.shape, after.b.shape) != (before.a.shape, before.b.shape):
            raise _unlike(trained, f"`{module}` has rank {before.rank} in the initial one, {after.rank} in the trained")
    return replace(trained, initial=initial)


def _unlike(trained: Adapter, why: str) -> MalformedInput:
    return MalformedInput(
        f"the initial adapter is not the one that `{trained.name}` was trained from: {why}",
        hint="give the adapter saved before the first step; an adapter that PEFT has converted needs none",
    )
