"""Every option's graphs equal the eager model, and a bug in what the option adds is caught."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from llmconv.errors import MalformedInput
from llmconv.export import export
from llmconv.verify import verify
from llmconv.verify.float_folder import routes
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.options import OPTION_MUTANTS, OptionMutant

Optioned = Callable[..., Path]

QUICK = "llama"
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"last_logits": True}),
    ("gemma2", {"last_logits": True}),
    ("gpt2", {"last_logits": True}),
    ("bloom", {"last_logits": True}),
    ("llama", {"cache": "shared-buffer", "last_logits": True}),
    ("llama", {"postprocess": "argmax"}),
    ("gemma2", {"postprocess": "topk:5"}),
    ("llama", {"postprocess": "topk:3", "last_logits": True}),
    ("llama", {"stages": 2}),
    ("gemma2", {"stages": 3, "last_logits": True}),
    ("bloom", {"stages": 2}),
    ("gpt2", {"stages": 4, "postprocess": "argmax"}),
    ("llama", {"opset": 21}),
    ("gemma2", {"opset": 21, "stages": 2}),
    ("gpt2", {"opset": 24}),
    ("llama", {"prefix": "PrefixTuning"}),
    ("gpt2", {"prefix": "PromptTuning"}),
    ("bloom", {"prefix": "PrefixTuning", "stages": 2}),
    ("gemma2", {"prefix": "PromptEncoder", "opset": 21, "last_logits": True, "unified": True}),
)


def title(options: dict[str, Any]) -> str:
    """Options as they are typed."""
    return " ".join(name if value is True else f"{name}={value}" for name, value in options.items())


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param(name, given, id=f"{name} {title(given)}", marks=() if name == QUICK else pytest.mark.slow)
        for name, given in OPTIONS
    ],
)
def test_an_export_with_options_passes(
    model_type: str, options: dict[str, Any], optioned: Optioned, eager: Callable[[str], Eager]
) -> None:
    report = verify(optioned(model_type, **options), eager=eager(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert report.worst and 0.3 < report.worst.sigma < 2.5


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", OPTION_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_in_an_option_is_caught(
    mutant: OptionMutant, optioned: Optioned, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(optioned("llama", **mutant.options), tmp_path / "mutant"))
    changed = 0
    for path in folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        changed += mutant.apply(model)
        onnx.save(model, path)
    assert changed, "the graphs have no place for this mutant"
    report = verify(folder, allow_changed=True, eager=eager("llama"))
    assert report.verdict == "fail"
    assert report.where and report.where.text


def test_stages_in_another_order_are_caught(optioned: Optioned, eager: Callable[[str], Eager], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(optioned("llama", stages=2), tmp_path / "mutant"))
    manifest = json.loads((folder / "llmconv.json").read_text())
    manifest["graphs"]["decode"]["stages"].reverse()
    (folder / "llmconv.json").write_text(json.dumps(manifest))
    assert verify(folder, eager=eager("llama")).verdict == "fail"


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        ({"stages": []}, "entry of the decode graph in the manifest"),
        ({"stages": ["a.onnx"]}, "does not name plain files"),
        ({"file": "a.onnx", "prefix": {"file": "b"}}, "entry of the decode graph in the manifest"),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, graph: dict[str, Any], problem: str) -> None:
    (tmp_path / "llmconv.json").write_text(json.dumps({"graphs": {"decode": graph}}))
    with pytest.raises(MalformedInput, match=problem):
        verify(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [("llama", False), ("qwen3_moe", True)])
def test_the_likeliest_tokens_are_no_choice_of_experts(
    kind: str, expected: bool, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny(kind), tmp_path / kind)
    export(folder, postprocess="topk:3")
    model = onnx.load(folder / "prefill.onnx", load_external_data=False)
    assert any(node.op_type == "TopK" for node in model.graph.node)
    assert routes(model) is expected
