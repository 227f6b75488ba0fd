"""The reported sizes of weights: in the folder, mapped by graphs, and written."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import InputMap, export, register_input_map
from llmconv.export.families import INPUT_MAPS
from llmconv.export.input_map import Port
from tests.builders.talking import save_letters

DEMO = Path(__file__).parents[2] / "examples/demo.py"
BYTES = ("weight_bytes", "weight_bytes_mapped", "weight_bytes_copied", "weight_bytes_not_copied")


def reported(*line: Any) -> tuple[list[int], str]:
    """The sizes in JSON, and the sentence of the same run."""
    words = [str(word) for word in line]
    dry = CliRunner().invoke(main, ["export", *words, "--dry-run"])
    result = CliRunner().invoke(main, ["export", *words, "--json"])
    assert (dry.exit_code, result.exit_code) == (0, 0), result.output
    printed = json.loads(result.stdout)
    return [printed[name] for name in BYTES], dry.stderr


@pytest.mark.quick_rows("two graphs")
@pytest.mark.parametrize("more", [[], ["--unified"], ["--stages", "2"]], ids=["two graphs", "one", "stages"])
def test_in_place_nothing_is_copied_and_each_weight_counts_once(llama: Path, more: list[str]) -> None:
    held = open_checkpoint(llama).nbytes
    sizes, message = reported(llama, *more)
    assert sizes == [held, held, 0, held]
    assert f"{held:,} bytes of weights, 0 written" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--dtype", "float16"], ["--dtype", "bfloat16", "--max-shard-size", "100KB"], ["--max-shard-size", "200KB"]],
    ids=["cast", "cast and sharded", "sharded"],
)
def test_in_a_new_folder_the_weights_of_that_folder_count(llama: Path, tmp_path: Path, more: list[str]) -> None:
    sizes, message = reported(llama, "-o", tmp_path / "out", *more)
    held = open_checkpoint(tmp_path / "out").nbytes
    assert held == open_checkpoint(llama).nbytes // (2 if "--dtype" in more else 1)
    assert sizes == [held, held, held, 0]
    assert f"{held:,} bytes of weights, {held:,} written" in message


@pytest.mark.slow
def test_a_weight_that_no_graph_reads_is_not_mapped(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    unread = next(iter(tensors.values()))[:1].copy()
    save_file({**tensors, "model.rotary_emb.inv_freq": unread}, llama / "model.safetensors", {"format": "pt"})
    exported = export(llama)
    assert exported.weight_bytes == exported.weight_bytes_mapped + unread.nbytes


def test_a_result_is_one_short_line_and_a_token_without_a_row_is_named(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((llama / "config.json").read_text())["vocab_size"]
    (llama / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": rows, "content": "<call>"}]}))
    exported = export(str(llama), dry_run=True)
    assert "1 token that the model has no row for (`<call>`)" in capsys.readouterr().err
    assert "prefill.onnx, decode.onnx; a dry run" in repr(exported)
    assert len(repr(exported)) < 400


def test_the_demo_counts_a_weight_once(exported: Path) -> None:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec
    assert spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    graphs = [exported / "prefill.onnx", exported / "decode.onnx"]
    assert demo.mapped_bytes(graphs) == open_checkpoint(exported).nbytes


@pytest.mark.slow
def test_rotary_positions_beyond_the_context_cause_a_warning(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(llama, tmp_path / "out", shapes="static", max_seq_len=4096, dry_run=True)
    assert "4,096 tokens is longer than the model's context of 128" in capsys.readouterr().err
    export(llama, tmp_path / "out", shapes="static", max_seq_len=128, dry_run=True)
    assert "longer than" not in capsys.readouterr().err


def test_a_table_of_positions_ends_at_the_context(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="its table of positions ends there") as caught:
        export(tiny("gpt2"), tmp_path / "out", shapes="static", max_seq_len=129, dry_run=True)
    assert "`--max-seq-len 128`" in caught.value.hint


class Counting(InputMap):
    """A row with an input of its own."""

    def inputs(self, config: Any) -> tuple[Port, ...]:
        """As every family's, and one more."""
        tokens, *rest = super().inputs(config)
        return (tokens, Port("token_type_ids", "int64", tokens.axes), *rest)


def test_an_unsupported_input_is_reported(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INPUT_MAPS, "llama", Counting())
    with pytest.raises(UnsupportedInput, match="an unsupported input `token_type_ids`"):
        export(llama)


def test_only_an_input_map_can_be_registered() -> None:
    with pytest.raises(UsageProblem, match="not a `InputMap`"):
        register_input_map("x", {"position_ids": True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8", "output": "out"},
        {"dtype": "fp8", "output": "out"},
        {"shapes": "statik"},
        {"cache": "shared_buffer"},
        {"target": "ort-gpu"},
        {"stages": 0},
        {"batch_size": -1, "shapes": "static", "max_seq_len": 8},
        {"max_seq_len": 0, "shapes": "static"},
        {"max_shard_size": "1MB"},
        {"layout": "genais"},
    ],
    ids=str,
)
def test_invalid_values_are_refused(
    tiny: Any, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageProblem):
        export(tiny("llama"), **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_dry_run_lists_the_files_that_a_run_writes(llama: Path, tmp_path: Path) -> None:
    words = ["export", str(llama), "-o", str(tmp_path / "out"), "--quant", "int4", "--incremental"]
    listed = CliRunner().invoke(main, [*words, "--dry-run"]).stdout.splitlines()
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(main, words).exit_code == 0
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != "llmconv.json"}
    assert listed[0] == f"would write {tmp_path / 'out'}: {len(written)} files, {sum(written.values()):,} bytes"
    assert sorted(listed[1:]) == sorted(f"  {name}  {size:,} bytes" for name, size in written.items())


def test_what_was_quantized_is_summarized(llama: Path, tmp_path: Path) -> None:
    words = ["export", str(llama), "-o", str(tmp_path / "out"), "--quant", "int4", "--incremental"]
    printed = CliRunner().invoke(main, words).stderr
    found = json.loads(CliRunner().invoke(main, [*words, "--overwrite", "--json"]).stdout)["quantized"]
    kinds = [{"bits": 4, "block": 32, "count": 7 * 8}, {"bits": 8, "block": 32, "count": 1}]
    assert found["matrices"] == kinds and found["bytes"] < found["bytes_before"] / 4
    assert "quantized: 57 matrices (56 of 4 bits in blocks of 32, 1 of 8 bits in blocks of 32), " in printed
    assert f"{found['bytes']:,} bytes instead of {found['bytes_before']:,}; 18 tensors as they are" in printed


@pytest.mark.slow
def test_factors_that_no_graph_maps_are_counted(talking: Path, tmp_path: Path) -> None:
    exported = export(talking, tmp_path / "out", unified=True, quant="a8w8", calibrate="default")
    assert exported.quantized
    assert exported.weight_bytes_written == exported.weight_bytes_mapped + exported.quantized.factors
    assert f"{exported.quantized.factors:,} bytes of factors, which only `verify` reads" in exported.quantized.line


@pytest.mark.slow_rows("gpt2", "qwen3_moe")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_a_dry_run_counts_what_a_text_will_tell(tiny: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """No fewer bytes than the run writes, and as many where it finds factors for all that may have some."""
    folder = Path(shutil.copytree(tiny(kind), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    spread = np.random.default_rng(1)
    for name, one in tensors.items():  # columns of very different sizes, so that factors pay
        if one.ndim > 1:
            tensors[name] = one * np.exp(spread.standard_normal(one.shape[-1]) * 2).astype(one.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_letters(folder)
    dry, made = (export(folder, tmp_path / "out", quant="int4", dry_run=dry) for dry in (True, False))
    assert dry.quantized and made.quantized
    assert dry.quantized.fields()["factor_bytes"] >= made.quantized.fields()["factor_bytes"] > 0
    assert dry.files["quantized.safetensors"] >= made.files["quantized.safetensors"]
