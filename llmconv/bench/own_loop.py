"""Opens the graphs of a folder for llmconv's own loop; the folder need not have a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.generation.model import TextModel
from llmconv.generation.row import positions_of
from llmconv.generation.runners import ModelFiles, load_runner
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.tokenizer import TOKENIZER_FILES, load_tokenizer


class NoTokenizer:
    """Decodes to no text, for folders without a tokenizer."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return ""


def open_text_model(
    folder: str, threads: int, prepack: bool, provider: str = "cpu", speculate: str = "off"
) -> TextModel:
    """The model without an end token; every token is decoded if there is a tokenizer."""
    settings = SessionSettings(threads=threads, prepack=prepack, provider=provider)
    path = Path(folder)
    has_tokenizer = any((path / name).is_file() for name in TOKENIZER_FILES)
    return TextModel(
        tokenizer=load_tokenizer(path) if has_tokenizer else NoTokenizer(),
        runner=load_runner(ModelFiles.find(path), "onnx", settings, form="auto" if prepack else "mapped"),
        defaults=GenerationSettings(),
        positions=positions_of(path),
        folder=path,
        speculate=speculate,
    )
