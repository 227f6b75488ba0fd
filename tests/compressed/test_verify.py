"""`verify` of a quantized folder: what it finds, and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.compressed import quantize
from llmconv.compressed.schemes import SCHEMES
from llmconv.errors import InputRefused, UsageProblem
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def made(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a scheme, made once."""
    home = tmp_path_factory.mktemp("verified")

    def folder(scheme: str) -> Path:
        if not (home / scheme).exists():
            quantize(llama, home / scheme, scheme=scheme)
        return home / scheme

    return folder


@pytest.fixture
def copied(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def folder(scheme: str) -> Path:
        path = Path(shutil.copytree(made(scheme), tmp_path / scheme))
        record = json.loads((path / "llmconv.json").read_text())
        del record["files"]["model.safetensors"]  # whose hash would tell of a change, too
        (path / "llmconv.json").write_text(json.dumps(record))
        return path

    return folder


def problem(folder: Path, reference: Path, name: str) -> str:
    report = verify(folder, reference=reference)
    assert report.exit_code == 1
    failed = [check for check in report.checks if check.verdict == "fail"]
    assert [check.name for check in failed] == [name]
    return failed[0].detail


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick_rows("w4a16")
def test_an_honest_folder_passes(scheme: str, llama: Path, made: Callable[[str], Path]) -> None:
    report = verify(made(scheme), reference=llama, min_agreement=0.2)
    assert report.exit_code == 0
    assert report.quantization and report.quantization.cost and len(report.quantization.weights) == 14
    assert report.quantization.rounding is None  # it is plain rounding itself
    assert 0 < report.quantization.cost.divergence["mean"] < 0.1


def test_a_search_is_compared_with_plain_rounding(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme="w4a16", method="search")
    report = verify(tmp_path / "out", reference=llama, min_agreement=0.2)
    assert report.exit_code == 0
    assert report.quantization and report.quantization.rounding


def nudged(array: Array) -> Array:
    """One more in the byte at row 3, place 20."""
    raw = array.copy().view(np.uint8)
    raw[3, 20] += 1
    return raw.view(array.dtype)


CODES = [
    ("fp8-dynamic", "weight", "row 3, column 20"),
    ("fp8-block", "weight", "row 3, column 20"),
    ("w8a8", "weight", "row 3, column 20"),
    ("w4a16", "weight_packed", "row 3, column 40"),
    ("w4a16-asym", "weight_packed", "row 3, column 40"),
    ("nvfp4a16", "weight_packed", "row 3, column 40"),
    ("mxfp4", "weight_packed", "row 3, column 40"),
]


@pytest.mark.parametrize(("scheme", "part", "place"), CODES, ids=[row[0] for row in CODES])
@pytest.mark.quick_rows("fp8-dynamic", "w4a16", "nvfp4a16")
def test_a_changed_code_is_found(
    scheme: str, part: str, place: str, llama: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied(scheme)
    change_tensor(folder / "model.safetensors", f"{UP}.{part}", nudged)
    assert f"`{UP}.weight` has a code that is not the nearest at {place}" in problem(folder, llama, "codes")


SCALES = [
    ("fp8-dynamic", "weight_scale", "scale that is not its scheme's at row 2, column 0"),
    ("fp8-block", "weight_scale", "scale that is not its scheme's at row 2, column 0"),
    ("w4a16", "weight_scale", "the scale of row 2"),
    ("w4a16-asym", "weight_zero_point", "row"),
    ("nvfp4a16", "weight_scale", "scale that is not its scheme's at row 2, column 0"),
    ("nvfp4a16", "weight_global_scale", f"`{UP}.weight_global_scale` is"),
    ("mxfp4", "weight_scale", "scale that is not its scheme's at row 2, column 0"),
]


@pytest.mark.parametrize(("scheme", "part", "words"), SCALES, ids=[f"{row[0]}-{row[1]}" for row in SCALES])
@pytest.mark.quick_rows("fp8-block-weight_scale", "w4a16-weight_scale", "nvfp4a16-weight_global_scale")
def test_a_changed_scale_is_found(
    scheme: str, part: str, words: str, llama: Path, copied: Callable[[str], Path]
) -> None:
    def edit(array: Array) -> Array:
        changed = array.copy()
        at = (2, 0) if array.ndim == 2 else (0,)
        changed[at] = changed[at] + 1 if array.dtype.kind in "iu" else changed[at].astype(np.float32) * 1.25
        return changed

    folder = copied(scheme)
    change_tensor(folder / "model.safetensors", f"{UP}.{part}", edit)
    assert words in problem(folder, llama, "codes")


def test_a_changed_kept_tensor_is_found(llama: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("fp8-dynamic")
    change_tensor(folder / "model.safetensors", "lm_head.weight", nudged)
    assert "`lm_head.weight` differs from the model's at row 3, column 10" in problem(folder, llama, "kept tensors")


def lacking(settings: dict[str, Any]) -> None:
    settings["ignore"] = []


def too_much(settings: dict[str, Any]) -> None:
    settings["ignore"] = ["lm_head", UP]


def pattern(settings: dict[str, Any]) -> None:
    settings["ignore"] = ["lm_head", "re:.*q_proj"]


def twice(settings: dict[str, Any]) -> None:
    settings["ignore"] = ["lm_head", "lm_head"]


def other_number(settings: dict[str, Any]) -> None:
    settings["config_groups"]["group_0"]["weights"]["dynamic"] = 0  # equal to False in Python


def cached(settings: dict[str, Any]) -> None:
    settings["kv_cache_scheme"] = {"num_bits": 8}


def nested(settings: dict[str, Any]) -> None:
    settings["ignore"] = [["lm_head"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lacking, "`ignore` lacks `lm_head`"),
        (too_much, f"`ignore` has `{UP}`, which is quantized"),
        (pattern, "`ignore` has `re:.*q_proj`, a module that is not kept"),
        (twice, "`ignore` has a module twice"),
        (other_number, "is not that of `fp8-dynamic`"),
        (cached, "is not that of `fp8-dynamic`"),
        (nested, "is not that of `fp8-dynamic`"),
    ],
)
def test_an_untrue_configuration_is_found(
    change: Callable[[dict[str, Any]], None], words: str, llama: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied("fp8-dynamic")
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    assert words in problem(folder, llama, "configuration")


def test_a_dtype_that_no_weight_had_is_found(llama: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("fp8-dynamic")
    config = json.loads((folder / "config.json").read_text())
    name = "dtype" if "dtype" in config else "torch_dtype"
    (folder / "config.json").write_text(json.dumps({**config, name: "float16"}))
    assert f"`{name}` is float16, which is not the dtype of the model" in problem(folder, llama, "configuration")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        # columns in other groups
        (f"{UP}.weight_g_idx", lambda shape: np.zeros(shape[1], np.int32), "is not of the model"),
        ("model.layers.0.self_attn.k_scale", lambda shape: np.ones(1, np.float32), "is not of the model"),
        (f"{UP}.weight_shape", lambda shape: shape.astype(np.int32), "is int32 [2], not int64 [2]"),
    ],
    ids=["order of columns", "scale of a cache", "dtype"],
)
def test_a_tensor_that_the_scheme_does_not_make_is_found(
    name: str, value: Callable[[Array], Array], words: str, llama: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied("w4a16")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: value(tensors[f"{UP}.weight_shape"])}, folder / "model.safetensors")
    report = verify(folder, reference=llama)
    details = [check.detail for check in report.checks if check.verdict == "fail" and check.name == "names"]
    assert report.exit_code == 1 and f"`{name}` {words}" in details[0]


def test_another_model_is_no_reference(llama: Path, experts: Path, made: Callable[[str], Path]) -> None:
    assert verify(made("fp8-dynamic"), reference=experts).exit_code == 1
    with pytest.raises(UsageProblem, match="compared with the model they were made from"):
        verify(made("fp8-dynamic"))
    with pytest.raises(UsageProblem, match="`--repeat` applies to graphs"):
        verify(made("fp8-dynamic"), reference=llama, repeat=2)


def test_codes_of_other_programs_are_refused(llama: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("fp8-dynamic")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputRefused, match="does not write"):
        verify(folder, reference=llama)
    assert open_checkpoint(folder).config["quantization_config"]
