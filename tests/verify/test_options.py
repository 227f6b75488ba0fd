"""Every option's graphs equal the eager model, and a bug in what the option adds is caught."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.verify import verify
from llmconv.verify.truth import Eager
from tests.verify.option_mutants import OPTION_MUTANTS, OptionMutant

Optioned = Callable[..., Path]

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"last_logits": True}),
    ("gemma2", {"last_logits": True}),
    ("gpt2", {"last_logits": True}),
    ("bloom", {"last_logits": True}),
    ("llama", {"postprocess": "argmax"}),
    ("gemma2", {"postprocess": "topk:5"}),
    ("llama", {"postprocess": "topk:3", "last_logits": True, "unified": True}),
)


def title(options: dict[str, Any]) -> str:
    """Options as they are typed."""
    return " ".join(name if value is True else f"{name}={value}" for name, value in options.items())


@pytest.mark.parametrize(("model_type", "options"), OPTIONS, ids=[f"{name} {title(given)}" for name, given in OPTIONS])
def test_an_export_with_options_passes(
    model_type: str, options: dict[str, Any], optioned: Optioned, eager: Callable[[str], Eager]
) -> None:
    report = verify(optioned(model_type, **options), eager=eager(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert report.worst and 0.3 < report.worst.sigma < 2.5


@pytest.mark.parametrize("mutant", OPTION_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_in_an_option_is_caught(
    mutant: OptionMutant, optioned: Optioned, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(optioned("llama", **mutant.options), tmp_path / "mutant"))
    for path in folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        mutant.apply(model)
        onnx.save(model, path)
    report = verify(folder, eager=eager("llama"))
    assert report.verdict == "fail"
    assert report.where and report.where.text
