"""Texts that ship with llmconv: one on which quantization is calibrated, another on which its cost is measured.

Prose, conversations, instructions, code and tables, mostly English, with paragraphs in six other languages. They were
written for llmconv and have its license. No passage is in both: figures on the calibration text would be too good.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from llmconv.errors import UsageProblem

DEFAULT = "default"  # the word for the calibration text, in place of a file


def calibration_text() -> str:
    """The text for `llmconv export --calibrate default`: more than 4,096 tokens with common vocabularies."""
    return _read("calibration.txt")


def evaluation_text() -> str:
    """The text for `llmconv verify` of quantized weights: more than 2,048 tokens with common vocabularies."""
    return _read("evaluation.txt")


def is_default(name: str | Path) -> bool:
    """Whether `name`, never a Path, is the word for the calibration text; UsageProblem if a file has it, too."""
    if not isinstance(name, str) or name != DEFAULT:
        return False
    if Path(name).exists():
        hint = f"give `./{name}` for the file, or run the command in another folder for llmconv's text"
        raise UsageProblem(f"`{name}` is the name of llmconv's own text, and of a file here", hint=hint)
    return True


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
