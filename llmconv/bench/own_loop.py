"""The graphs of a folder under llmconv's own loop; a folder without a tokenizer will do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.generation.model import TextModel
from llmconv.generation.model_files import ModelFiles
from llmconv.generation.positions import positions_of
from llmconv.generation.runners import load_runner
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.tokenizer import TOKENIZER_FILES, load_tokenizer


class NoTokenizer:
    """Gives no text."""

    def decode(self, tokens: Any, **_: Any) -> str:
        """Nothing."""
        return ""


def open_text_model(folder: str, threads: int, prepack: bool) -> TextModel:
    """The model, with no end token; the text of every token is made where there is a tokenizer."""
    path = Path(folder)
    has_tokenizer = any((path / name).is_file() for name in TOKENIZER_FILES)
    return TextModel(
        tokenizer=load_tokenizer(path) if has_tokenizer else NoTokenizer(),
        runner=load_runner(ModelFiles.find(path), "onnx", SessionSettings(threads=threads, prepack=prepack)),
        defaults=GenerationSettings(),
        positions=positions_of(path),
        folder=path,
    )
