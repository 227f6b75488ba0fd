"""A Hugging Face folder that is written anew: with other element types, other shards, other side files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.models.code_model import with_code
from llmconv.convert.models.completeness import check_folder, why_incomplete
from llmconv.convert.models.config_file import CODE_FIELDS, merged_configs
from llmconv.convert.models.trusted_code import OPTION, own_fields, trusted_code
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.model_code import AUTO_MAP, has_code

DROPPED_CODE = "dropped {} from the configuration: no code comes from a checkpoint, except with `--trust-remote-code`"


def open_again(
    folder: Path, name: str, config: tuple[Path, ...], tokenizer: Path | None, options: Mapping[str, Any]
) -> Checkpoint:
    """The model of a Hugging Face folder, every tensor under its own name.

    Args:
        folder: the Hugging Face folder.
        name: what messages call it.
        config: JSON or YAML files whose fields replace those of `config.json`.
        tokenizer: a tokenizer file or folder to use instead of the folder's own.
        options: those of `to-hf` that only training formats have; refused.

    Raises:
        UsageProblem: one of `options` is given.
        UnsupportedInput: the weights are quantized.
        MalformedInput: the folder is damaged, or its weights are not those of the given configuration.
    """
    refuse_options(options, (OPTION,), "a Hugging Face folder")
    opened = open_checkpoint(folder)
    if opened.config.get("quantization_config"):
        raise UnsupportedInput(
            f"`{name}` is quantized (`quantization_config`), and its packed weights have no other element type",
            hint="give the weights from before quantization",
        )
    settings = {**opened.config, **merged_configs(config)}
    require_model_type(settings, name)
    own = own_fields(opened.config, {**merged_configs(config), **options}, name)
    code = [field for field in CODE_FIELDS if settings.pop(field, None)]
    warnings = [DROPPED_CODE.format(listing(code))] if code and not own else []
    settings |= {AUTO_MAP: own[AUTO_MAP]} if own else {}
    side_files = dict(opened.side_files)
    if tokenizer:
        kept = {key: content for key, content in side_files.items() if key == "generation_config.json"}
        side_files = kept | read_tokenizer(tokenizer)
    result = replace(opened, config=settings, side_files=side_files)
    if (trusted := trusted_code(options)) and has_code(settings, side_files):
        return with_code(result, trusted, name)
    try:
        warnings += check_folder(result.tensors, result.config, result.path.name)
    except MalformedInput as why:
        if config and not why_incomplete(opened.tensors, opened.config, opened.path.name):
            raise MalformedInput(
                f"the weights are not those of the configuration: {why.message}",
                hint="give `--config` the configuration of these weights, or leave it out",
            ) from why
        raise
    return replace(result, warnings=tuple(warnings))


def refuse_options(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses options that do not apply to a format.

    Args:
        given: names of the options that the user gave.
        known: names of those that have an effect.
        what: the format, for the message.

    Raises:
        UsageProblem: names the first.
    """
    if foreign := sorted({*given} - {*known}):
        raise UsageProblem(f"`--{foreign[0].replace('_', '-')}` does not apply to {what}", hint="leave it out")
