"""The tokenizer files of a PaddleNLP folder, under the names that transformers looks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_side_files


def read_paddle_tokenizer(folder: Path, config: Mapping[str, Any], warnings: list[str]) -> dict[str, bytes]:
    """Tokenizer files by plain name."""
    return {name: content for name, content in read_side_files(folder).items() if name != "generation_config.json"}
