"""The exported graphs: equal to eager, mapping every weight in place, with the promised signature."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export import export
from llmconv.output.manifest import read_manifest
from tests.builders.slow_rows import slow_but
from tests.export.conftest import DEPTH, FAMILIES, as_past, eager_logits, run_graph, tokens

GRAPHS = ["prefill.onnx", "decode.onnx", "model.onnx"]


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", slow_but(FAMILIES, "llama"))
def test_a_prompt_and_its_continuation_equal_the_eager_model(deep: Callable[[str], Path], model_type: str) -> None:
    folder = deep(model_type)
    inputs = tokens(batch=3, length=20, left_padding=4)
    expected = eager_logits(folder, inputs)
    head = {name: value[:, :15] for name, value in inputs.items()}
    prefill = run_graph(folder / "prefill.onnx", head)
    tail = {name: value[:, 15:] for name, value in inputs.items()} | {"attention_mask": inputs["attention_mask"]}
    decode = run_graph(folder / "decode.onnx", tail, as_past(prefill))
    seen = head["attention_mask"] == 1
    np.testing.assert_allclose(prefill["logits"][seen], expected[:, :15][seen], atol=3e-6)
    np.testing.assert_allclose(decode["logits"], expected[:, 15:], atol=3e-6)


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_beyond_the_traced_ones_are_replicated(deep: Callable[[str], Path], model_type: str) -> None:
    step = read_manifest(deep(model_type)).steps[-1]
    assert step["options"]["layers_traced"] == (6 if model_type == "gemma2" else 3)
    assert len(read_manifest(deep(model_type)).graphs["decode"]["outputs"]) == 1 + 2 * DEPTH


@pytest.mark.parametrize("model_type", slow_but(FAMILIES, "llama"))
def test_every_weight_is_mapped_in_place(deep: Callable[[str], Path], model_type: str) -> None:
    folder = deep(model_type)
    checkpoint = open_checkpoint(folder)
    for name in GRAPHS:
        graph = onnx.load(folder / name, load_external_data=False).graph
        external = {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer if t.external_data}
        assert set(external) == set(checkpoint)
        for tensor, place in external.items():
            source = checkpoint[tensor]
            assert place == {
                "location": source.path.name,  # type: ignore[attr-defined]
                "offset": str(source.offset),  # type: ignore[attr-defined]
                "length": str(source.nbytes),
            }


def test_the_graphs_pass_the_onnx_checker(deep: Callable[[str], Path]) -> None:
    onnx.checker.check_model(str(deep("llama") / "model.onnx"), full_check=True)


def test_constants_inside_a_graph_are_small(deep: Callable[[str], Path]) -> None:
    assert (deep("llama") / "model.onnx").stat().st_size < 200_000


@pytest.mark.slow
def test_only_graphs_and_manifest_are_added_to_the_folder(llama: Path) -> None:
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    export(llama)
    after = {path.name: path.read_bytes() for path in llama.iterdir()}
    assert set(after) - set(before) == {"prefill.onnx", "decode.onnx", "llmconv.json"}
    assert all(after[name] == content for name, content in before.items())


def test_symbols_and_names_are_those_that_clients_expect(deep: Callable[[str], Path]) -> None:
    graph = onnx.load(deep("llama") / "decode.onnx", load_external_data=False).graph
    axes = {
        port.name: [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]
        for port in [*graph.input, *graph.output]
    }
    names = list(axes)
    assert names[:5] == [
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    assert axes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert axes["past_key_values.7.value"] == ["batch_size", 2, "past_sequence_length", 16]
    assert axes["present.7.value"] == ["batch_size", 2, "total_sequence_length", 16]
    assert axes["logits"] == ["batch_size", "sequence_length", 96]


@pytest.mark.slow
def test_bloom_has_no_position_ids(deep: Callable[[str], Path]) -> None:
    graph = onnx.load(deep("bloom") / "decode.onnx", load_external_data=False).graph
    assert "position_ids" not in [port.name for port in graph.input]


def test_nodes_are_named_after_their_modules(deep: Callable[[str], Path]) -> None:
    graph = onnx.load(deep("llama") / "decode.onnx", load_external_data=False).graph
    names = [node.name for node in graph.node]
    assert "model.layers.7.self_attn.q_proj/Gemm" in names
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_tied_head_is_the_embedding_itself(deep: Callable[[str], Path]) -> None:
    graph = onnx.load(deep("gpt2") / "decode.onnx", load_external_data=False).graph
    readers = [node.op_type for node in graph.node if "transformer.wte.weight" in node.input]
    assert readers == ["Gather", "Gemm"]


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes_anywhere(deep: Callable[[str], Path], exported: Path) -> None:
    export(exported, incremental=True, overwrite=True)
    content = (exported / "decode.onnx").read_bytes()
    assert content == (deep("llama") / "decode.onnx").read_bytes()
    assert str(exported).encode() not in content and b".py" not in content


def test_the_manifest_lists_the_graphs_and_their_hashes(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest.graphs["decode"]["file"] == "decode.onnx"
    digest = hashlib.sha256((exported / "decode.onnx").read_bytes()).hexdigest()
    assert manifest.files["decode.onnx"]["sha256"] == digest
    assert manifest.steps[-1]["command"] == "export"


def test_existing_graphs_need_overwrite(exported: Path) -> None:
    with pytest.raises(InputRefused, match="already exists"):
        export(exported, incremental=True)


@pytest.mark.slow
def test_another_graph_can_be_added_later(llama: Path) -> None:
    export(llama, incremental=True)
    export(llama, unified=True)
    assert set(read_manifest(llama).graphs) == {"decode", "unified"}


def test_deleted_graphs_are_removed_from_the_manifest(exported: Path) -> None:
    for name in ("prefill.onnx", "decode.onnx"):
        (exported / name).unlink()
    export(exported, unified=True, overwrite=True)
    assert set(read_manifest(exported).graphs) == {"unified"}
    assert not {"prefill.onnx", "decode.onnx"} & read_manifest(exported).files.keys()


@pytest.mark.slow
def test_a_killed_export_can_be_run_again(exported: Path) -> None:
    (exported / "llmconv.json").unlink()  # the state after kill -9 before the last step
    export(exported)
    assert set(read_manifest(exported).graphs) == {"prefill", "decode"}


@pytest.mark.slow
def test_a_dry_run_writes_nothing(llama: Path) -> None:
    before = sorted(path.name for path in llama.iterdir())
    assert export(llama, dry_run=True).sizes is None
    assert sorted(path.name for path in llama.iterdir()) == before


def test_an_unknown_model_type_lists_close_matches(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    with pytest.raises(UnsupportedInput, match="lama.*close matches: llama"):
        export(llama)


@pytest.mark.slow
def test_the_command_prints_the_bytes_that_it_did_not_copy(llama: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(llama), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    weights = open_checkpoint(llama).nbytes
    assert printed["weight_bytes_copied"] == 0
    assert printed["weight_bytes_not_copied"] == printed["weight_bytes_mapped"] == weights


def test_a_refusal_is_one_line_and_a_hint(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path)])
    assert result.exit_code == 3
    message, blank, hint = result.stderr.splitlines()
    assert message.startswith("error: ") and not blank and hint.startswith("hint: ")
