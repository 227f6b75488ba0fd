"""`export --quant`: graphs over codes that verify accepts, in a folder of their own."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.files.safetensors_file import read_header
from llmconv.generation import generate
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor
from tools.tiny_models import depth, save_tiny

Quantized = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`models(model_type)` is a tiny model."""
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp("models") / model_type
            save_tiny(model_type, made[model_type], depth(model_type))
        return made[model_type]

    return folder


@pytest.fixture(scope="module")
def quantized(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(model_type, **options)` is a folder of quantized graphs, by default `int4`."""
    made: dict[tuple[str, str], Path] = {}

    def folder(model_type: str, **options: Any) -> Path:
        key = model_type, repr(options)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("quantized") / model_type
            export(models(model_type), made[key], incremental=True, **{"quant": "int4", **options})
        return made[key]

    return folder


def operators(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(folder / "decode.onnx", load_external_data=False).graph.node)


OPTIONS: list[dict[str, Any]] = [
    {"quant": "int8"},
    {"quant": "int4-mixed", "symmetric": True},
    {"quant": "int4-small", "quant_block": 64},
    {"method": "rtn", "cache": "shared-buffer"},
    {"quant_exclude": ["o_proj"], "quant_bits": ["q_proj=8"], "target": "ort-cpu"},
    {"precision": "float16"},
]


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "mixtral", "bloom", "phi3"))],
)
def test_verify_accepts_a_quantized_folder(
    model_type: str, quantized: Quantized, models: Callable[[str], Path]
) -> None:
    report = verify(quantized(model_type), reference=models(model_type))
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_verify_accepts_every_option(
    options: dict[str, Any], quantized: Quantized, models: Callable[[str], Path]
) -> None:
    report = verify(quantized("llama", **options), reference=models("llama"))
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_every_product_but_a_routers_reads_codes(quantized: Quantized) -> None:
    found = operators(quantized("mixtral"))
    assert found["MatMulNBits"] > found["Gemm"] == depth("mixtral")  # the routers


@pytest.mark.slow
def test_a_tied_embedding_reads_the_codes_of_the_head(quantized: Quantized) -> None:
    model = onnx.load(quantized("gemma2") / "decode.onnx", load_external_data=False)
    lookup = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    head = [node for node in model.graph.node if node.op_type == "MatMulNBits"][-1]
    places = {t.name: {entry.key: entry.value for entry in t.external_data} for t in model.graph.initializer}
    assert places[lookup.input[0]] == places[head.input[1]]
    assert len(lookup.input) == 4, "kernels disagree about the zero point where there is none"


def test_a_quantized_weight_is_stored_once(quantized: Quantized, models: Callable[[str], Path]) -> None:
    folder = quantized("llama")
    stored = load_file(folder / "quantized.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert name not in stored and {f"{name}.codes", f"{name}.scales", f"{name}.zeros"} <= stored.keys()
    assert np.array_equal(
        stored["model.norm.weight"], load_file(models("llama") / "model.safetensors")["model.norm.weight"]
    )
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_two_exports_are_equal(quantized: Quantized, models: Callable[[str], Path], tmp_path: Path) -> None:
    export(models("llama"), tmp_path / "again", incremental=True, quant="int4")
    again = (tmp_path / "again" / "quantized.safetensors").read_bytes()
    assert again == (quantized("llama") / "quantized.safetensors").read_bytes()


@pytest.mark.slow
def test_logits_of_the_last_position_are_those_of_all(quantized: Quantized, talking: Path, tmp_path: Path) -> None:
    texts = []
    for last in (False, True):
        out = tmp_path / f"last-{last}"
        export(talking, out, quant="int4", last_logits=last)
        texts.append(generate(out, ["ab", "ba ab"], max_new_tokens=8).completions)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_shards_have_a_name_of_their_own(models: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(models("llama"), out, quant="int4", max_shard_size="60KB")
    assert (out / "quantized.safetensors.index.json").is_file()
    assert sorted(path.name for path in out.glob("*.safetensors"))[0].startswith("quantized-00001-of-")
    assert verify(out, reference=models("llama"), scenario=["prefill, 7 tokens"]).verdict == "pass"


@pytest.mark.slow
def test_the_options_are_recorded(quantized: Quantized) -> None:
    entry = json.loads((quantized("llama", quant="int8") / "llmconv.json").read_text())["graphs"]["decode"]
    assert entry["quant"] == "int8"


def test_codes_need_a_folder_of_their_own(models: Callable[[str], Path]) -> None:
    with pytest.raises(UsageProblem, match="`--quant` writes new weights"):
        export(models("llama"), quant="int4")


def test_the_model_folder_is_no_place_for_codes(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("llama"), folder)
    with pytest.raises(UsageProblem, match="`--quant` writes new weights"):
        export(folder, folder, quant="int4", overwrite=True)


def test_a_dtype_that_rounds_only_what_has_no_codes_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(
        UsageProblem, match="`--dtype bfloat16` would round the weights that `--quant` leaves as they are"
    ):
        export(models("llama"), tmp_path / "out", quant="int4", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_dtype_that_a_model_has_is_taken(models: Callable[[str], Path], tmp_path: Path) -> None:
    to_hf(models("llama"), tmp_path / "half", dtype="bfloat16")
    export(tmp_path / "half", tmp_path / "out", quant="int4", dtype="bfloat16")
    assert read_header(tmp_path / "out" / "quantized.safetensors").tensors["model.norm.weight"].dtype.name == "bfloat16"


def test_quantizing_nothing_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no weight of this model can be quantized"):
        export(models("llama"), tmp_path / "out", quant="int4", quant_exclude=["."])
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_no_number_leaves_nothing_behind(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("llama"), folder)
    change_tensor(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight", lambda array: array * np.nan)
    with pytest.raises(InputRefused, match=r"`model.layers.1.mlp.up_proj.weight` contains infinite or NaN"):
        export(folder, tmp_path / "out", quant="int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_takes_all_options(models: Callable[[str], Path], tmp_path: Path) -> None:
    given = ["--quant", "int4", "--quant-block", "16", "--symmetric", "--quant-exclude", "lm_head", "--method", "rtn"]
    given += ["--quant-bits", "down_proj=8", "--incremental"]
    result = CliRunner().invoke(main, ["export", str(models("llama")), "-o", str(tmp_path / "out"), *given])
    assert result.exit_code == 0, result.output
    stored = load_file(tmp_path / "out" / "quantized.safetensors")
    assert "lm_head.weight" in stored and not [name for name in stored if name.endswith(".zeros")]
    assert stored["model.layers.0.mlp.down_proj.weight.codes"].shape[-1] == 16
