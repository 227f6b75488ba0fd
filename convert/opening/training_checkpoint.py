"""open_training: a training checkpoint of any known format, in Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats import by_name, detect
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.models.config_file import merged_configs
from llmconv.convert.models.rewrite import open_again, refuse_options
from llmconv.convert.opening.single_file import alone
from llmconv.convert.opening.unrecognized import explain
from llmconv.convert.state_dicts.safetensors_files import is_model_folder
from llmconv.errors import UsageProblem
from llmconv.files.packing.unpack import unpacked
from llmconv.files.sources import local_path, reading_safely


def open_training(
    source: str | Path,
    format: str | None = None,
    config: tuple[Path, ...] = (),
    tokenizer: Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    rewrite: bool = False,
) -> Checkpoint:
    """Opens a training checkpoint of any known format, in Hugging Face names.

    Args:
        source, format, config, tokenizer: see `to_hf`.
        options: those of `to_hf` that only some formats have.
        rewrite: take a folder that already is a Hugging Face model, too.

    Raises:
        InputRefused: see `to_hf`.
    """
    with reading_safely(source):
        path = local_path(source)
        inside = unpacked(path)
        if rewrite and not format and is_model_folder(inside) and detect(inside) is None:
            return open_again(inside, path.name, config, tokenizer, options or {})
        return replace(_open(inside, path, format, config, tokenizer, options), path=path)


def _open(
    inside: Path,
    path: Path,
    format: str | None,
    config: tuple[Path, ...],
    tokenizer: Path | None,
    options: Mapping[str, Any] | None,
) -> Checkpoint:
    chosen = by_name(format) if format else detect(inside)
    if chosen is None and (file := alone(inside)) and not is_model_folder(inside):
        inside, chosen = file, detect(file)
    if chosen is None:
        raise explain(inside)
    if format and not chosen.detect(inside):
        raise UsageProblem(
            f"`{path.name}` is not of the format `{format}`", hint="leave out `--from`; formats are told by content"
        )
    given = {name: value for name, value in (options or {}).items() if value}
    refuse_options(given, chosen.options, f"the format `{chosen.name}`")
    opened = chosen.open(inside, {**merged_configs(config), **given}, tokenizer)
    if opened.tensors:  # whatever the user's fields have made of the configuration since the format checked its own
        check_complete(opened.tensors, opened.config, path.name)
    return opened
