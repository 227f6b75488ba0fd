"""Opening a training checkpoint of any known format, in Hugging Face names: detect, open, check that it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint
from llmconv.convert.deltas import is_recorded_delta
from llmconv.convert.formats import Format, by_name, detect
from llmconv.convert.models.code_model import with_code
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.models.config_file import merged_configs
from llmconv.convert.models.trusted_code import OPTION, trusted_code
from llmconv.convert.opening.rewrite_model_folder import open_again, refuse_options
from llmconv.convert.opening.unclaimed_files import only_checkpoint_file
from llmconv.convert.opening.unrecognized import explain
from llmconv.convert.state_dicts.safetensors_files import is_model_folder
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.files.packing.unpack import unpacked
from llmconv.files.sources import local_path, reading_safely
from llmconv.model_code import has_code
from llmconv.quantized_export import is_quantized_export


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
        path = local_path(source, in_parts=True)
        if is_recorded_delta(path):
            raise UnsupportedInput(
                f"`{path}` is a delta, not a model",
                hint=f"add it to its base: `llmconv delta apply BASE {path} -o OUT`",
            )
        inside, found = (unpacked(path), by_name(format)) if format else recognized(path)
        given = {name: value for name, value in (options or {}).items() if value}
        if found is None and not is_model_folder(inside) and trusted_code(given):
            found = _plain_tensors(inside)
        if found is None and rewrite and is_model_folder(inside):
            return open_again(inside, path.name, config, tokenizer, searching_next_to(given, path, config))
        if found is None:
            raise explain(inside)
        if format and not found.detect(inside) and not (trusted_code(given) and found == _plain_tensors(inside)):
            raise UsageProblem(
                f"`{path.name}` is not of the format `{format}`",
                hint="leave out `--from`; formats are detected by content",
            )
        refuse_options(given, found.options, f"the format `{found.name}`")
        given = searching_next_to(given, path, config)
        opened = open_format(found, inside, path.name, {**merged_configs(config), **given}, tokenizer)
        return replace(opened, path=path)


def _plain_tensors(path: Path) -> Format | None:
    """The format of a state dict in names that only a model's own code knows; None for anything else."""
    for name in ("safetensors", "torch"):
        found = by_name(name)
        try:
            if found.peek and found.peek(path):
                return found
        except InputRefused:
            continue
    return None


def searching_next_to(options: Mapping[str, Any], path: Path, config: tuple[Path, ...]) -> dict[str, Any]:
    """The options, where consent to a model's code finds it next to the user's, the checkpoint's or the base's config.

    Args:
        options: those of `to_hf`.
        path: the checkpoint.
        config: configuration files or folders of the user.
    """
    code = trusted_code(options)
    if code is None:
        return dict(options)
    folder = path if path.is_dir() else path.absolute().parent
    above = [home for home in folder.absolute().parents[:2] if (home / "config.json").is_file()]
    given = [place if place.is_dir() else place.absolute().parent for place in config]
    base = [options["base"]] if options.get("base") else []
    return {**options, OPTION: replace(code, others=(*given, folder, *above, *base))}


def recognized(path: Path) -> tuple[Path, Format | None]:
    """The unpacked checkpoint at a path and its format; of a folder without a format, the only checkpoint file."""
    inside = unpacked(path)
    if is_quantized_export(inside):
        return inside, None
    found = detect(inside)
    is_other = found or is_model_folder(inside) or (inside / ADAPTER_CONFIG).is_file()
    if not is_other and (file := only_checkpoint_file(inside)):
        return file, detect(file)
    return inside, found


def open_format(
    found: Format, inside: Path, name: str, config: Mapping[str, Any], tokenizer: Path | None
) -> Checkpoint:
    """Opens a checkpoint whose format is known, and checks that it is a whole model.

    Args:
        found: the format.
        inside: the checkpoint, unpacked.
        name: of the checkpoint, for messages.
        config: fields that the user adds or overrides, and the format's own options.
        tokenizer: a tokenizer file or folder to use instead of the checkpoint's own.

    Raises:
        InputRefused: see `to_hf`.
    """
    opened = found.open(inside, config, tokenizer)
    code = trusted_code(config)
    if code and has_code(opened.config, opened.side_files):
        return with_code(opened, code, name)
    notes = check_complete(opened.tensors, opened.config, name) if opened.tensors else []
    return replace(opened, warnings=(*opened.warnings, *notes))
