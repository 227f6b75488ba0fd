"""Tiny models with graphs in stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.export.exporter import export
from tests.builders.talking import save_letters
from tests.builders.tracing import trace_once

Staged = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def staged(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Staged:
    """`staged(model_type, count)`: weights, graphs in so many stages and a tokenizer; do not write into it."""
    trace_once()
    folders: dict[tuple[str, int], Path] = {}

    def folder(model_type: str, count: int) -> Path:
        key = model_type, count
        if key not in folders:
            home = tmp_path_factory.mktemp("staged")
            source = save_letters(Path(shutil.copytree(tiny(model_type), home / "source")))
            export(source, home / "model", stages=count)
            folders[key] = home / "model"
        return folders[key]

    return folder
