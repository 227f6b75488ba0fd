"""Composer (LLM Foundry) monolithic `.pt`: `state.model`, `state.integrations.huggingface`, and much that is not read.

Layout (mosaicml/composer `core/state.py`, `utils/checkpoint.py`, `models/huggingface.py`): the state dict of a
ComposerModel, so each Hugging Face name has one `model.` in front, and wrappers may have left theirs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.composer.run import Run, branch, is_run, open_run
from llmconv.convert.configs import causal_lm_config
from llmconv.convert.formats import Format
from llmconv.convert.mapping import listing
from llmconv.convert.state_dict import check_complete, select, untie
from llmconv.convert.tokenizers.embedded_files import plain, restore_files
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import InputRefused, UnsupportedInput


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
    integration = run.branch("state", "integrations", "huggingface", "model")
    _refuse_adapter(path, model, integration)
    warnings: list[str] = []
    embedded = plain(branch(integration, "config", "content"), path.name)
    settings = causal_lm_config(embedded, config, path.name, warnings)
    tensors = select(model, run.tensor, path.name, warnings, prefix="model.")
    settings = untie(tensors, settings, warnings)
    check_complete(tensors, settings, path.name)
    side_files = read_tokenizer(tokenizer) if tokenizer else _tokenizer(path, run, warnings)
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings))


def _refuse_adapter(path: Path, model: Mapping[Any, Any], integration: Mapping[Any, Any]) -> None:
    if integration.get("peft_config") or any("lora_" in str(key) for key in model):
        raise UnsupportedInput(
            f"`{path.name}` is a PEFT (LoRA) run; its adapter is not part of a plain model",
            hint="save the adapter with PEFT and use `llmconv merge-lora BASE ADAPTER`; reading it here comes later",
        )


def _tokenizer(path: Path, run: Run, warnings: list[str]) -> dict[str, bytes]:
    files, left_out = restore_files(run.branch("state", "integrations", "huggingface", "tokenizer"), path.name)
    if left_out:
        warnings.append(f"left out {listing(left_out)}: not among the files a tokenizer needs")
    if not files:
        warnings.append(f"`{path.name}` holds no tokenizer; give one with `--tokenizer` if you need it")
    return files


FORMAT = Format(
    name="composer",
    title="MosaicML Composer and LLM Foundry: one `.pt` file",
    covers="with or without optimizer state; config and tokenizer are taken from it",
    detect=_detect,
    open=_open,
)
