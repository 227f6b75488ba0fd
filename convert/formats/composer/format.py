"""Composer (LLM Foundry) runs: `state.model`, `state.integrations.huggingface`, and parts that are not read.

Layout (mosaicml/composer `core/state.py`, `utils/checkpoint.py`, `models/huggingface.py`): the state dict of a
ComposerModel, so each Hugging Face name has the prefix `model.`, and wrappers may have added theirs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats import Format
from llmconv.convert.formats.composer.read import ComposerRun, branch, is_run, open_run
from llmconv.convert.formats.composer.run_info import dropped, version
from llmconv.convert.models.completeness import as_loaded, select
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.models.mpt_tensors import enlarged, native_tensors
from llmconv.convert.models.trusted_code import OPTION, own_fields
from llmconv.convert.peft_runs.outputs import (
    OPTIONS,
    differences,
    generation_settings,
    with_adapter,
    without_adapter,
)
from llmconv.convert.peft_runs.split import find_adapter
from llmconv.convert.state_dicts.recognition import Sign
from llmconv.convert.tokenizers.embedded_files import plain, restore_files
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import InputRefused, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor


def _detect(path: Path) -> bool:
    return is_run(path)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    run = open_run(path)
    model = run.branch("state", "model")
    if not model:
        raise InputRefused(
            f"`{path.name}` has no `state.model`, so there are no weights in it",
            hint="it was saved without the model; give another checkpoint of the run",
        )
    warnings: list[str] = []
    given = {name: value for name, value in config.items() if name not in OPTIONS}
    own = own_fields(_embedded(run, path.name), given, path.name) is not None
    tensors = select(model, run.tensor, path.name, warnings, prefix="model.", buffers=own)
    open_model = partial(_open_model, path, run, given, tokenizer, warnings)
    stored = branch(run.branch("state", "integrations", "huggingface", "model"), "peft_config", "content")
    if adapted := find_adapter(plain(stored, path.name), tensors, path):
        return with_adapter(adapted, config, open_model)
    without_adapter(config, path.name)
    return open_model(tensors)


def _open_model(
    path: Path,
    run: ComposerRun,
    given: Mapping[str, Any],
    tokenizer: Path | None,
    warnings: list[str],
    tensors: dict[str, LazyTensor],
    base: Checkpoint | None = None,
) -> Checkpoint:
    """The model of `tensors` with the run's configuration and tokenizer, or those of `base` if the run has none."""
    settings: dict[str, Any] = {}
    if tensors:
        embedded = _embedded(run, path.name)
        warnings += differences(embedded, base.config) if embedded and base else []
        settings = causal_lm_config(embedded or (base.config if base else {}), given, path.name, warnings)
        if AUTO_MAP not in settings:
            if settings["model_type"] == "mpt":
                tensors = enlarged(native_tensors(tensors, path.name), settings)
            settings = as_loaded(tensors, settings)
    side_files = read_tokenizer(tokenizer) if tokenizer else _tokenizer(path, run, base, warnings)
    side_files = {**generation_settings(base), **side_files}
    info = (version(run), run.shards, dropped(run))
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), *info)


def _embedded(run: ComposerRun, source: str) -> dict[str, Any]:
    """The model's `config.json` in the run; empty if it has none."""
    found: dict[str, Any] = plain(
        run.branch("state", "integrations", "huggingface", "model", "config", "content"), source
    )
    return found


def _tokenizer(path: Path, run: ComposerRun, base: Checkpoint | None, warnings: list[str]) -> dict[str, bytes]:
    files, left_out = restore_files(run.branch("state", "integrations", "huggingface", "tokenizer"), path.name)
    if left_out:
        warnings.append(f"left out {listing(left_out)}: not among the files of a tokenizer")
    if not files and base:
        return dict(base.side_files)
    if not files:
        warnings.append(f"`{path.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    return files


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    run = open_run(path)
    return select(run.branch("state", "model"), run.tensor, path.name, [], prefix="model.")


FORMAT = Format(
    name="composer",
    title="MosaicML Composer and LLM Foundry: one `.pt` file, packed or not, or a folder, sharded or not",
    detect=_detect,
    sign=Sign(keys=("state",)),
    open=_open,
    covers=(
        "runs of Composer 0.13 to 0.32 with any causal language model of transformers, in one file, packed (`.gz`, "
        "`.zst`, `.tar`, …), through a `.symlink` pointer or in a folder; LoRA runs, merged or kept apart; MPT as far "
        "as transformers' own computes the same"
    ),
    options=(*OPTIONS, OPTION),
    peek=_peek,
)
