"""What each target decides, and what wins over it."""

from __future__ import annotations

import pytest

from llmconv.errors import UsageProblem
from llmconv.export.export_options import Preset, find_preset

NOTHING = Preset("", "", None)


def preset(target: str, stored: str, given: Preset = NOTHING, *, buffers: bool = True) -> Preset:
    return find_preset(target, given, stored, buffers=buffers, growing=True)


@pytest.mark.parametrize(
    ("target", "stored", "expected"),
    [
        ("ort-cpu", "bfloat16", Preset("float32", "growing", None)),
        ("ort-cuda", "bfloat16", Preset("bfloat16", "shared-buffer", None)),
        ("ort-cuda", "float16", Preset("float16", "shared-buffer", None)),
        ("ort-cuda", "float32", Preset("float32", "growing", None)),
        ("ort-webgpu", "bfloat16", Preset("float16", "growing", 21)),
        ("ort-dml", "float32", Preset("float16", "growing", 21)),
    ],
)
def test_a_target_decides_precision_cache_and_opset(target: str, stored: str, expected: Preset) -> None:
    assert preset(target, stored) == expected


def test_the_cache_grows_where_grouped_query_attention_does_not_fit() -> None:
    assert preset("ort-cuda", "float16", buffers=False).cache == "growing"


def test_given_options_win() -> None:
    given = Preset("float32", "growing", 23)
    assert preset("ort-dml", "float16", given) == given


@pytest.mark.parametrize("target", ["ort-webgpu", "ort-dml"])
def test_bfloat16_is_refused_where_no_kernel_takes_it(target: str) -> None:
    with pytest.raises(UsageProblem, match="no kernels for `--precision bfloat16`"):
        preset(target, "bfloat16", Preset("bfloat16", "", None))


@pytest.mark.parametrize(
    ("target", "why"), [("ort-dml", "does not read the mask"), ("ort-webgpu", "wrong numbers for several new tokens")]
)
def test_a_shared_buffer_is_refused_where_its_attention_is_wrong(target: str, why: str) -> None:
    with pytest.raises(UsageProblem, match=why):
        preset(target, "float16", Preset("", "shared-buffer", None))
