"""verify proves graphs of embeddings, and finds every fault of what follows the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llmconv.checkpoint import write_small
from llmconv.convert.inspection import inspect
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.tracing import single_pass
from llmconv.verify import Report, verify
from llmconv.verify.other_exporters.quantized.dequantized_reference import plain_model
from tests.builders.embedding_models import (
    IDENTITY,
    TANH,
    save_model,
    save_modules,
    save_reranker,
    write_config,
    write_modules,
)
from tests.builders.quantized_models import FOLDER as QUANTIZED
from tests.builders.tracing import trace_once

trace_once()

DENSE = ((96, IDENTITY, False), (48, TANH, True))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Qwen3-Embedding: no head, the last token, normalized; do not write into it."""
    return save_modules(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like EmbeddingGemma: attention in both directions, mean pooling, two Dense modules; do not write into it."""
    folder = save_model(tmp_path_factory.mktemp("models") / "gemma", "gemma3_text")
    return save_modules(folder, "mean", DENSE)


def failures(report: Report) -> set[str]:
    """Outputs that differ."""
    return {check.output for check in report.checks if check.verdict == "fail"}


@pytest.mark.parametrize("name", ["qwen", pytest.param("gemma", marks=pytest.mark.slow)])
def test_a_correct_graph_passes_with_padding_on_every_side(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(name), tmp_path / name)
    export(folder, task="embed")
    report = verify(folder)
    names = {check.name for check in report.checks}
    assert report.verdict == "pass" and {"one token", "padding on the left", "padding on the right"} <= names
    assert {check.output for check in report.checks} >= {"last_hidden_state", "sentence_embedding"}


@pytest.mark.slow
def test_inspect_reports_the_verdict_on_a_graph_that_maps_weights_of_modules(gemma: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gemma, tmp_path / "gemma"))
    export(folder, task="embed")
    assert verify(folder)
    found = inspect(folder)
    assert [graph.line.partition(":")[0] for graph in found.graphs] == ["embed"] and "no cache" in found.graphs[0].line
    assert found.verified and "PASS" in str(found.verified).upper()


@pytest.mark.slow
def test_long_texts_cross_the_window_of_a_model(gemma: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gemma, tmp_path / "gemma")
    export(folder, task="embed")
    assert any("longer than the window" in check.name for check in verify(folder).checks)


def exported_as(folder: Path, wrong: Callable[[Path], object], tmp_path: Path) -> Path:
    """A folder whose graph was made for a changed model; the change is undone afterwards."""
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    wrong(changed)
    export(changed, task="embed")
    for path in folder.rglob("*"):
        if path.is_file():
            shutil.copy(path, changed / path.relative_to(folder))
    return changed


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "mean",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("cls", "max", "weightedmean", "mean_sqrt_len_tokens")
        ),
    ],
)
def test_another_pooling_fails(mode: str, qwen: Path, tmp_path: Path) -> None:
    report = verify(exported_as(qwen, lambda path: save_modules(path, mode), tmp_path))
    assert failures(report) == {"sentence_embedding"}


@pytest.mark.slow
def test_a_missing_normalization_fails(qwen: Path, tmp_path: Path) -> None:
    report = verify(exported_as(qwen, lambda path: save_modules(path, normalize=False), tmp_path))
    assert failures(report) == {"sentence_embedding"}


@pytest.mark.slow
def test_another_activation_fails(gemma: Path, tmp_path: Path) -> None:
    other = ((96, IDENTITY, False), (48, IDENTITY, True))
    report = verify(exported_as(gemma, lambda path: save_modules(path, "mean", other), tmp_path))
    assert failures(report) == {"sentence_embedding"}


@pytest.mark.slow
def test_a_missing_dense_module_fails(gemma: Path, tmp_path: Path) -> None:
    report = verify(exported_as(gemma, lambda path: save_modules(path, "mean", DENSE[:1]), tmp_path))
    assert failures(report) == {"sentence_embedding"}


@pytest.mark.slow
def test_causal_attention_instead_of_bidirectional_fails(gemma: Path, tmp_path: Path) -> None:
    causal = {"use_bidirectional_attention": False}
    report = verify(exported_as(gemma, lambda path: write_config(path, causal), tmp_path))
    assert failures(report) == {"last_hidden_state", "sentence_embedding"}


@pytest.mark.slow
def test_another_window_fails(gemma: Path, tmp_path: Path) -> None:
    report = verify(exported_as(gemma, lambda path: write_config(path, {"sliding_window": 10}), tmp_path))
    assert failures(report) == {"last_hidden_state", "sentence_embedding"}


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 1])
def test_the_token_before_or_after_the_last_fails(shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        index = (single_pass.last_index(mask) + shift).clamp(min=0)
        return single_pass.pick(hidden, torch.minimum(index, torch.full_like(index, mask.shape[1] - 1)))

    monkeypatch.setitem(single_pass.POOLING, "lasttoken", shifted)
    folder = save_modules(save_model(tmp_path / "model", "qwen3", rms_norm_eps=1e-5 * (3 + shift)))
    export(folder, task="embed")
    assert failures(verify(folder)) == {"sentence_embedding"}


@pytest.mark.slow
def test_the_last_column_instead_of_the_last_token_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(single_pass.POOLING, "lasttoken", lambda hidden, mask: hidden[:, -1])
    folder = save_modules(save_model(tmp_path / "model", "qwen3", rms_norm_eps=7e-6))
    export(folder, task="embed")
    found = {check.name for check in verify(folder).checks if check.verdict == "fail"}
    assert found == {"two texts", "padding on the right", "padding on both sides", "many texts"}


@pytest.mark.slow
def test_a_changed_weight_of_a_dense_module_fails_in_a_new_folder(gemma: Path, tmp_path: Path) -> None:
    export(gemma, tmp_path / "new", task="embed")
    path = tmp_path / "new" / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    tensors["linear.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    report = verify(tmp_path / "new", reference=gemma)
    assert any(check.name == "weights" and check.verdict == "fail" for check in report.checks)


@pytest.mark.slow
def test_a_graph_that_maps_another_tensor_fails_in_the_audit_of_weights(qwen: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "model"))
    export(folder, task="embed")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    first, second = (
        t for t in model.graph.initializer if "k_proj" in t.name and ("s.0." in t.name or "s.1." in t.name)
    )
    first.external_data[1].value = second.external_data[1].value
    onnx.save(model, folder / "model.onnx")
    report = verify(folder, allow_changed=True)
    assert [check.verdict for check in report.checks if check.name == "weights"][-1] == "fail"


@pytest.mark.slow
def test_a_graph_without_the_embedding_fails(qwen: Path, tmp_path: Path) -> None:
    report = verify(exported_as(qwen, lambda path: (path / "modules.json").unlink(), tmp_path))
    assert any("outputs are last_hidden_state" in check.detail for check in report.checks)
    assert report.exit_code == 1


@pytest.mark.slow
def test_a_changed_epsilon_fails(qwen: Path, tmp_path: Path) -> None:
    report = verify(exported_as(qwen, lambda path: write_config(path, {"rms_norm_eps": 1e-4}), tmp_path))
    assert failures(report) == {"last_hidden_state", "sentence_embedding"}


@pytest.mark.slow
def test_a_classifier_passes_and_one_with_another_padding_token_fails(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3", AutoModelForSequenceClassification, num_labels=3)
    export(folder, task="classify")
    assert verify(folder)
    write_config(folder, {"pad_token_id": 5})
    export(folder, task="classify", overwrite=True)
    write_config(folder, {"pad_token_id": 0})
    report = verify(folder)
    assert failures(report) == {"logits", ""}  # and the audit of decisions
    assert [check.name for check in report.checks if check.verdict == "fail" and not check.output] == ["decisions"]


@pytest.mark.slow
def test_a_reranker_passes_and_one_with_exchanged_tokens_fails(tmp_path: Path) -> None:
    folder = save_reranker(save_model(tmp_path / "model", "qwen3", AutoModelForCausalLM))
    export(folder, task="rerank")
    assert verify(folder)
    save_reranker(folder, true_token_id=9, false_token_id=7)
    assert failures(verify(folder)) == {"scores"}


@pytest.mark.slow
def test_logits_without_a_cache_pass_next_to_graphs_with_one(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "llama"))
    export(folder)
    export(folder, no_cache=True)
    report = verify(folder)
    assert report.verdict == "pass"
    assert {check.graph for check in report.checks} >= {"prefill.onnx", "decode.onnx", "scoring.onnx"}
    assert set(json.loads((folder / "llmconv.json").read_text())["verified"]["graphs"]) >= {"scoring.onnx"}


@pytest.mark.slow
def test_a_changed_constant_of_a_scoring_graph_fails(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "llama"))
    export(folder, no_cache=True)
    model = onnx.load(folder / "scoring.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    scale = next(attribute for attribute in node.attribute if attribute.name == "scale")
    scale.f *= 1.01
    onnx.save(model, folder / "scoring.onnx")
    assert "logits" in failures(verify(folder, allow_changed=True))


@pytest.mark.quick_rows("option2")
@pytest.mark.parametrize(
    "option",
    [
        {"method": "induction"},
        {"scenario": ["left padding"]},
        {"low_memory": True},
        {"repeat": 2},
        {"budget": 60.0},
        {"text": "text.txt"},
        {"max_divergence": 0.1},
        {"min_agreement": 0.5},
        {"calibrate": "text.txt"},
    ],
)
def test_options_of_graphs_with_a_cache_are_refused(option: dict[str, object], qwen: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "model"))
    export(folder, task="embed")
    with pytest.raises(UsageProblem, match="applies to graphs with a cache"):
        verify(folder, **option)  # type: ignore[arg-type]


def test_a_module_that_verify_does_not_know_is_refused(qwen: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "model"))
    export(folder, task="embed")
    write_modules(folder, [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_LayerNorm", "LayerNorm")])
    with pytest.raises(UnsupportedInput, match="2_LayerNorm"):
        verify(folder)


def test_the_plain_copy_of_a_quantized_model_takes_its_further_chat_templates(tmp_path: Path) -> None:
    folder = shutil.copytree(QUANTIZED / "gptq_4bit_sym", tmp_path / "base")
    write_small(folder, {"additional_chat_templates/tool_use.jinja": b"tools"})
    with ExitStack() as stack:
        copy = plain_model(folder, stack).folder
        assert (copy / "additional_chat_templates/tool_use.jinja").read_bytes() == b"tools"
