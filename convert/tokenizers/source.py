"""Reads the tokenizer that the user gives with `--tokenizer`: a folder, or one file of it."""

from __future__ import annotations

from pathlib import Path

from llmconv.checkpoint import SIDE_FILES, read_side_files, read_small
from llmconv.errors import InputRefused


def read_tokenizer(path: Path) -> dict[str, bytes]:
    """The tokenizer files at `path`, by plain name; InputRefused if there is none."""
    if path.is_dir():
        files = {name: content for name, content in read_side_files(path).items() if name != "generation_config.json"}
    else:
        files = {path.name: read_small(path)} if path.is_file() and path.name in SIDE_FILES else {}
    if not files:
        raise InputRefused(
            f"`{path}` contains no tokenizer",
            hint="give a folder with `tokenizer.json` or `tokenizer.model`, or the file",
        )
    return files
