"""`--method awq`: norms divided by powers of two, so that blocks of 4 bits lose less on a text; verify finds faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmconv.checkpoint import open_weights
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export, quantize
from llmconv.export.export_options import DEFAULTS
from llmconv.export.quantization.activation_aware import SampledMatrix, least_error, measure_activation_aware
from llmconv.export.quantization.block_rounding import NONE, BlockFormat
from llmconv.export.quantization.quantized_tensor import OUTPUTS
from llmconv.export.quantization.settings import QuantizationSettings
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.output.manifest import read_manifest
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import default_positions
from llmconv.tensors import BY_NAME, Array
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor
from tests.builders.talking import save_letters
from tests.export.quantization.test_smoothing import (
    FIRST,
    GATE,
    NORM,
    OTHER,
    QUERY,
    SMOOTHING,
    doubled,
    failures,
    tiny_talking,
    uneven,
)
from tests.runtime.onnxruntime.test_packed_cache import wide_llama
from tests.verify.test_quantized_folder import damaged

FLOAT32 = BY_NAME["float32"]
RANDOM = np.random.default_rng(0)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gpt_oss", "phi3", "bloom")]


def exported(model: Path, folder: Path, **options: Any) -> Path:
    export(model, folder, incremental=True, calibrate="default", method="awq", **{"quant": "int4", **options})
    return folder


@pytest.fixture(scope="module")
def model(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with outliers and a tokenizer."""
    return uneven(talking, tmp_path_factory.mktemp("uneven") / "llama")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs of a Llama with scaled norms."""
    return exported(model, tmp_path_factory.mktemp("aware") / "out")


def test_a_weight_that_is_not_finite_is_named(model: Path, tmp_path: Path) -> None:
    broken, name = Path(shutil.copytree(model, tmp_path / "broken")), "model.layers.1.mlp.gate_proj.weight"
    change_tensor(broken / "model.safetensors", name, lambda values: np.where(values == values[0, 0], np.nan, values))
    with pytest.raises(InputRefused) as error:
        exported(broken, tmp_path / "out")
    assert name in error.value.message


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[str, Array]:
    return load_file(folder / "quantized.safetensors")


@pytest.mark.parametrize("louder", [1, 64])
def test_the_factors_with_the_least_error_are_taken(louder: int) -> None:
    """Columns that are multiplied with large values gain from factors; where all are alike, none are taken."""
    inputs = RANDOM.normal(size=(256, 64)).astype(np.float32)
    inputs[:, 5] *= louder
    rows, products = RANDOM.normal(size=(32, 64)).astype(np.float32), inputs.T @ inputs
    matrix = SampledMatrix(rows, 1.0, BlockFormat(search=False), FLOAT32, NONE)
    ones, factors = np.ones(64, np.float32), np.ones(64, np.float32)
    factors[5] = 2
    chosen = least_error([ones, factors], [matrix], products)
    assert matrix.error(chosen, products) == min(matrix.error(ones, products), matrix.error(factors, products))
    assert (chosen[5] > 1) == (louder > 1)


def test_of_equal_errors_the_first_counts() -> None:
    matrix = SampledMatrix(np.zeros((4, 32), np.float32), 1.0, BlockFormat(), FLOAT32, NONE)
    ones = np.ones(32, np.float32)
    assert least_error([ones, 2 * ones], [matrix], np.eye(32, dtype=np.float32)) is ones


@pytest.mark.slow
def test_verify_accepts_it(model: Path, folder: Path) -> None:
    report = verify(folder, reference=model)
    assert report.verdict == "pass", report.closing_lines()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks of 64 per row, with outliers and a tokenizer."""
    home = tmp_path_factory.mktemp("wide")
    return uneven(save_letters(wide_llama(home / "even")), home / "model")


@pytest.fixture(scope="module")
def default(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its graphs, quantized without further options."""
    return export(wide, tmp_path_factory.mktemp("default") / "out", incremental=True, quant="int4").folder


def logits(folder: Path) -> Array:
    """Of 40 random tokens, float32."""
    ids = np.random.default_rng(1).integers(1, 90, (1, 40))
    mask = np.ones_like(ids)
    return OrtRunner.from_folder(folder).prefill(ids, mask, default_positions(mask, 40)).logits


def test_without_options_columns_are_measured_on_a_text_of_llmconvs_own(
    wide: Path, default: Path, tmp_path: Path
) -> None:
    """The codes lose less than those of the weights alone, on tokens that were not measured."""
    options = read_manifest(default).steps[-1]["options"]
    assert (options["method"], options["calibrate_tokens"]) == ("awq-columns", 256)
    assert any(name.endswith(SMOOTHING) for name in load_file(default / "quantized.safetensors"))
    plain = logits(export(wide, tmp_path / "plain", incremental=True).folder)
    alone = export(wide, tmp_path / "alone", incremental=True, quant="int4", method="search").folder
    lost = [float(np.square(logits(one) - plain).mean()) for one in (default, alone)]
    assert lost[0] < 0.95 * lost[1]


@pytest.mark.slow
def test_verify_accepts_the_default(wide: Path, default: Path) -> None:
    report = verify(default, reference=wide)
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.parametrize("end", [".scales", ".importance"])
def test_a_scale_that_the_search_would_not_choose_is_named(end: str, wide: Path, default: Path, tmp_path: Path) -> None:
    """Scales are searched again with the importance of columns that the export has stored."""

    def changed(values: Array) -> Array:
        values = values.copy()
        values[3] *= np.float32(1.0002 if end == ".scales" else 50)
        return values

    broken = damaged(default, tmp_path / "broken", GATE + end, changed)
    report = verify(broken, reference=wide, scenario=FIRST)
    assert f"`{GATE}`" in failures(report) and "search of an export" in failures(report)


def test_a_model_that_cannot_run_the_text_is_rounded_by_its_weights_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = Path(shutil.copytree(model, tmp_path / "silent"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (silent / name).unlink()
    found = export(silent, tmp_path / "out", incremental=True, quant="int4").folder
    assert "by the weights alone (`--method search`): " in capsys.readouterr().err
    assert not {"method", "calibrate", "calibrate_tokens"} & read_manifest(found).steps[-1]["options"].keys()
    asked = export(silent, tmp_path / "asked", incremental=True, quant="int4", method="search").folder
    first, second = (one / "quantized.safetensors" for one in (found, asked))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", *OTHERS])
def test_other_families_have_factors_and_pass(model_type: str, tmp_path: Path) -> None:
    source = tiny_talking(model_type, tmp_path)
    made = exported(source, tmp_path / "out")
    assert any(name.endswith(SMOOTHING) for name in load_file(made / "quantized.safetensors"))
    assert verify(made, reference=source, scenario=FIRST).verdict == "pass"


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "float16"},
        {"quant": "int4-mixed"},
        {"quant": "int4-small", "quant_block": 64},
        {"symmetric": True},
    ],
    ids=str,
)
def test_other_formats_pass(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    made = exported(model, tmp_path / "out", **options)
    assert any(name.endswith(SMOOTHING) for name in load_file(made / "quantized.safetensors"))
    assert verify(made, reference=model, scenario=FIRST).verdict == "pass"


def test_a_norm_is_stored_as_its_exact_quotient(model: Path, stored: dict[str, Array]) -> None:
    assert np.array_equal(stored[NORM] * stored[NORM + SMOOTHING], open_weights(model)[NORM].read())


def test_all_products_behind_a_norm_have_its_factors(stored: dict[str, Array]) -> None:
    for norm, names in ((NORM, ("self_attn.q", "self_attn.k", "self_attn.v")), (OTHER, ("mlp.gate", "mlp.up"))):
        for name in names:
            assert np.array_equal(stored[f"model.layers.1.{name}_proj.weight{SMOOTHING}"], stored[norm + SMOOTHING])


@pytest.mark.slow
def test_rows_of_a_gated_matrix_are_divided_by_the_factors_behind_it(model: Path, tmp_path: Path) -> None:
    loud = Path(shutil.copytree(model, tmp_path / "loud"))
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))

    def louder(rows: Array) -> Array:
        return rows * np.where(np.arange(len(rows)) % 9, 1, 30)[:, None]

    change_tensor(loud / "model.safetensors", up, louder)
    stored = load_file(exported(loud, tmp_path / "out") / "quantized.safetensors")
    factors = stored[down + SMOOTHING]
    assert np.array_equal(stored[up + OUTPUTS], 1 / factors[:, None]) and (factors[::9] > np.median(factors)).all()
    assert not any(name.endswith(OUTPUTS) and "up_proj" not in name for name in stored)
    assert verify(tmp_path / "out", reference=loud, scenario=FIRST).verdict == "pass"
    broken = damaged(tmp_path / "out", tmp_path / "broken", up + OUTPUTS, partial(doubled, at=5))
    assert up in failures(verify(broken, reference=loud, scenario=FIRST))


@pytest.mark.slow
def test_two_exports_are_equal_whatever_the_number_of_threads(model: Path, folder: Path, tmp_path: Path) -> None:
    code = f"from tests.export.quantization.test_activation_aware import exported; exported({str(model)!r}, 'out')"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    again = tmp_path / "out" / "quantized.safetensors"
    assert again.read_bytes() == (folder / "quantized.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUERY, GATE, NORM])
def test_a_wrong_factor_is_named(name: str, model: Path, folder: Path, tmp_path: Path) -> None:
    broken = damaged(folder, tmp_path / "broken", name + SMOOTHING, partial(doubled, at=5))
    assert name in failures(verify(broken, reference=model, scenario=FIRST))


def without_norms(found: Smoothing) -> Smoothing:
    return replace(found, norms={})


def of_the_other_norm(found: Smoothing) -> Smoothing:
    return replace(found, norms={**found.norms, NORM: found.norms[OTHER]})


def without_outputs(found: Smoothing) -> Smoothing:
    return replace(found, outputs={})


def with_one_product_less(found: Smoothing) -> Smoothing:
    return replace(found, matrices={name: factors for name, factors in found.matrices.items() if name != QUERY})


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", [without_norms, of_the_other_norm, with_one_product_less, without_outputs])
def test_factors_that_do_not_cancel_fail_in_the_scenarios(
    fault: Callable[[Smoothing], Smoothing], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is consistent in itself: codes, norms and recorded factors agree."""
    measured = partial(measure_activation_aware)
    monkeypatch.setattr(quantize, "measure_activation_aware", lambda *given: fault(measured(*given)))
    report = verify(exported(model, tmp_path / "out"), reference=model, scenario=FIRST)
    assert not failures(report)
    assert any(check.verdict == "fail" and check.name.startswith(FIRST) for check in report.checks)


def far_apart(found: Smoothing) -> Smoothing:
    """Every second column vanishes in the steps of its neighbors."""

    def worse(factors: Array) -> Array:
        flat = np.where(np.arange(factors.size) % 2, np.float32(1), np.float32(2**6)).astype(np.float32)
        return flat.reshape(factors.shape)

    outputs = {name: 1 / worse(1 / one) for name, one in found.outputs.items()}
    matrices, norms = ({name: worse(one) for name, one in kind.items()} for kind in (found.matrices, found.norms))
    return Smoothing(matrices, norms, outputs)


def test_factors_that_cancel_but_cost_more_than_plain_rounding_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounding, by which 4 bits are judged, has no factors."""
    measured = partial(measure_activation_aware)
    monkeypatch.setattr(quantize, "measure_activation_aware", lambda *given: far_apart(measured(*given)))
    report = verify(exported(model, tmp_path / "out"), reference=model, scenario=FIRST)
    assert [check.name for check in report.checks if check.verdict == "fail"] == ["cost of quantization"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "int4"}, "`--method awq` needs a text"),
        ({"quant": "int8", "calibrate": "default"}, "is for weights of 4 bits, which `--quant int8`"),
        ({"quant": "a8w8", "calibrate": "default"}, "is for weights of 4 bits, which `--quant a8w8`"),
    ],
)
def test_a_method_without_anything_to_work_on_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        QuantizationSettings.parse({**DEFAULTS, "method": "awq", **options})
