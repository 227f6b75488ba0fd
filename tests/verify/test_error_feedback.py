"""`verify` of codes by `--method gptq`, which are not the nearest: faults in them are found all the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmconv.export import export
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.talking import save_letters
from tests.verify.test_quantized_folder import DOWN, FAULTS, Edit, damaged, replaced
from tools.tiny_models import depth, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("feedback") / "model"
    save_tiny("llama", folder, depth("llama"))
    return save_letters(folder) or folder


@pytest.fixture(scope="module")
def four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with 4 bits and error feedback on random letters."""
    home = tmp_path_factory.mktemp("feedback")
    (home / "text").write_text("".join(np.random.default_rng(0).choice(list("abcdefghij klmno"), 3000)))
    export(model, home / "out", incremental=True, quant="int4", method="gptq", calibrate=home / "text")
    return home / "out"


@pytest.mark.slow
def test_the_clean_folder_passes(model: Path, four: Path) -> None:
    report = verify(four, reference=model, scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.closing_lines()


def two_points_more(zeros: Array) -> Array:
    zeros[3, 0] ^= 2
    return zeros


FEEDBACK_FAULTS: dict[str, tuple[str, Edit]] = {
    "a zero point two off": (".zeros", two_points_more),
    **{
        name: FAULTS[name]
        for name in ("codes of a pair exchanged", "scales of the next block", "codes of the next row")
    },
}
"""Faults of one row or block; a single wrong code, or a zero point that is one off, is within this method's errors."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FEEDBACK_FAULTS)
def test_a_fault_of_a_quantizer_is_named(fault: str, model: Path, four: Path, tmp_path: Path) -> None:
    suffix, edit = FEEDBACK_FAULTS[fault]
    report = verify(
        damaged(four, tmp_path / "broken", DOWN + suffix, edit), reference=model, scenario=["prefill, 7 tokens"]
    )
    assert report.verdict == "fail"
    assert any(DOWN in check.detail for check in report.checks if check.verdict == "fail" and check.name == "weights")


@pytest.mark.slow
def test_codes_of_another_layer_are_found(model: Path, four: Path, tmp_path: Path) -> None:
    stored = load_file(four / "quantized.safetensors")
    broken = four
    for suffix in (".codes", ".scales", ".zeros"):
        other = stored[DOWN.replace(".1.", ".2.") + suffix]
        broken = damaged(broken, tmp_path / suffix, DOWN + suffix, partial(replaced, other=other))
    assert verify(broken, reference=model, scenario=["prefill, 7 tokens"]).verdict == "fail"


@pytest.mark.slow
def test_a_few_codes_that_are_not_the_nearest_fail_in_a_matrix_that_claims_feedback(
    model: Path, tmp_path: Path
) -> None:
    export(model, out := tmp_path / "out", incremental=True, quant="int4")
    manifest = json.loads((out / "llmconv.json").read_text())
    manifest["steps"][0]["options"]["method"] = "gptq"
    (out / "llmconv.json").write_text(json.dumps(manifest))
    assert verify(out, reference=model, scenario=["prefill, 7 tokens"]).verdict == "pass", (
        "it fell back for want of tokens"
    )
    for number, (row, place) in enumerate(((7, 4), (3, 0))):
        broken = damaged(out, tmp_path / str(number), DOWN + ".codes", partial(one_bit, row=row, place=place))
        assert verify(broken, reference=model, scenario=["prefill, 7 tokens"]).verdict == "fail"


def one_bit(codes: Array, row: int, place: int) -> Array:
    codes[row, 0, place] ^= 1
    return codes
