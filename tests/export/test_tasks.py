"""Graphs without a cache: which files and ports they have, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from llmconv.cli import main
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.sentence_modules import Dense, read_sentence_modules
from tests.builders.embedding_models import (
    IDENTITY,
    TANH,
    save_model,
    save_modules,
    save_reranker,
    write_config,
    write_modules,
)
from tests.builders.tracing import trace_once
from tests.conftest import save_tiny

trace_once()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 without a head, with two Dense modules; do not write into it."""
    folder = save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
    return save_modules(folder, ["cls", "lasttoken"], ((96, TANH, True), (48, IDENTITY, False)))


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def graph(path: Path) -> onnx.GraphProto:
    """A graph without its weights."""
    return onnx.load(path, load_external_data=False).graph


@pytest.mark.slow
def test_an_embedding_graph_maps_the_weights_of_model_and_modules_in_place(copied: Path) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*.safetensors")}
    exported = export(copied, task="embed")
    made = graph(copied / "model.onnx")
    places = {entry.value for t in made.initializer for entry in t.external_data if entry.key == "location"}
    assert places == {"model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors"}
    assert exported.graphs == {"embed": ["model.onnx"]} and exported.weight_bytes_written == 0
    assert before == {path: path.read_bytes() for path in copied.rglob("*.safetensors")}


@pytest.mark.slow
def test_an_embedding_graph_has_no_cache(copied: Path) -> None:
    export(copied, task="embed")
    made = graph(copied / "model.onnx")
    assert [port.name for port in made.input] == ["input_ids", "attention_mask"]
    assert [port.name for port in made.output] == ["last_hidden_state", "sentence_embedding"]
    assert made.output[1].type.tensor_type.shape.dim[1].dim_value == 48


@pytest.mark.slow
def test_a_new_folder_has_the_files_of_sentence_transformers(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "new", task="embed", dtype="float16")
    kept = {path.relative_to(model) for path in model.rglob("*") if path.is_file()}
    assert kept <= {path.relative_to(tmp_path / "new") for path in (tmp_path / "new").rglob("*")}
    found, source = read_sentence_modules(tmp_path / "new"), read_sentence_modules(model)
    assert found and source and found.head == source.head
    assert {tensor.dtype.name for tensor in found.tensors.values()} == {"float16"}


@pytest.mark.slow
def test_a_model_without_modules_returns_hidden_states_alone(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (copied / "modules.json").unlink()
    export(copied, task="embed")
    assert [port.name for port in graph(copied / "model.onnx").output] == ["last_hidden_state"]
    assert "no pooling module" in capfd.readouterr().err


@pytest.mark.slow
def test_layers_are_replicated(tmp_path: Path) -> None:
    folder = save_modules(save_model(tmp_path / "deep", "qwen3", num_hidden_layers=8))
    assert export(folder, task="embed").traced_layers == 3


@pytest.mark.slow
def test_a_scoring_graph_takes_tokens_and_returns_logits(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    export(folder, no_cache=True)
    made = graph(folder / "scoring.onnx")
    assert [port.name for port in made.input] == ["input_ids", "attention_mask", "position_ids"]
    assert [port.name for port in made.output] == ["logits"]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": True},
        {"stages": 2},
        {"layout": "genai"},
        {"cache": "shared-buffer"},
        {"quant": "int4", "calibrate": "default"},
        {"precision": "float16"},
        {"last_logits": True},
        {"target": "ort-cpu"},
        {"no_cache": True},
        {"trust_remote_code": True},
        {"shapes": "static"},
    ],
)
def test_an_option_of_graphs_that_generate_is_refused(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(UsageProblem):
        export(model, task="embed", **options)


def test_an_unknown_task_is_refused(model: Path) -> None:
    with pytest.raises(UsageProblem, match="task"):
        export(model, task="summarize")


def test_a_model_without_a_head_names_the_task_that_exports_it(model: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(model)])
    assert result.exit_code == 3 and "--task embed" in result.stderr


def test_a_bidirectional_model_does_not_generate(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gemma3_text", AutoModelForCausalLM)
    with pytest.raises(UnsupportedInput, match="attend to later tokens"):
        export(folder)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    write_config(tmp_path, {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 9, **fields})
    shutil.copy(save_model(tmp_path / "other", "qwen3") / "model.safetensors", tmp_path)
    with pytest.raises(UnsupportedInput, match="is an encoder"):
        export(tmp_path, task="embed")


def test_a_language_model_is_not_a_classifier(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="no head for classes"):
        export(save_tiny("llama", tmp_path / "llama"), task="classify")


def test_a_reranker_without_its_tokens_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    with pytest.raises(InputRefused, match="LogitScore"):
        export(folder, task="rerank")
    save_reranker(folder, true_token_id="yes")
    with pytest.raises(MalformedInput, match="token ids"):
        export(folder, task="rerank")


MODULES: list[tuple[list[tuple[str, str]], str]] = [
    ([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_LSTM", "LSTM")], "`LSTM`"),
    ([("", "Transformer"), ("", "Transformer")], "`Transformer` at place 2"),
    ([("1_Pooling", "Pooling")], "folder `1_Pooling`"),
    ([("", "Transformer"), ("../x", "Pooling")], "names the folder"),
    ([("", "Transformer"), ("a/b", "Pooling")], "names the folder"),
    ([("", "Transformer"), ("2_Dense", "Dense")], "`Dense`"),
    ([("", "Transformer"), ("1_Pooling", "Pooling"), ("4_Dense", "Dense")], "4_Dense"),
    ([], "not a list of modules"),
]


@pytest.mark.parametrize(("modules", "message"), MODULES)
def test_other_modules_are_refused_by_name(modules: list[tuple[str, str]], message: str, copied: Path) -> None:
    write_modules(copied, modules)
    with pytest.raises(LlmconvError) as caught:
        export(copied, task="embed")
    assert message in caught.value.message and caught.value.exit_code == 3
    assert not (copied / "model.onnx").exists()


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("1_Pooling", {"pooling_mode": "attention"}, "pooling mode 'attention'"),
    ("1_Pooling", {"include_prompt": False}, "include_prompt"),
    ("2_Dense", {"activation_function": "os.system"}, "activation `os.system`"),
    ("2_Dense", {"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU"),
    ("2_Dense", {"use_residual": True}, "use_residual"),
    ("2_Dense", {"module_input_name": "token_embeddings"}, "module_input_name"),
    ("2_Dense", {"out_features": 40}, "declares"),
    ("2_Dense", {"bias": False}, "declares"),
    ("2_Dense", {"in_features": None}, "in_features"),
]


@pytest.mark.parametrize(("module", "fields", "message"), CONFIGS)
def test_an_unsupported_option_of_a_module_is_refused(
    module: str, fields: dict[str, Any], message: str, copied: Path
) -> None:
    write_config(copied / module, fields)
    with pytest.raises(LlmconvError) as caught:
        export(copied, task="embed")
    assert message in caught.value.message and caught.value.exit_code == 3


def test_a_linked_module_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "2_Dense").rename(tmp_path / "elsewhere")
    (copied / "2_Dense").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedInput, match="a link"):
        export(copied, task="embed")


def test_the_fields_before_version_6_are_read(copied: Path) -> None:
    old = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    (copied / "1_Pooling" / "config.json").write_text(json.dumps(old))
    found = read_sentence_modules(copied)
    assert found and found.head and found.head.pooling == ("cls", "mean")


def test_a_dense_module_has_a_tanh_and_a_bias_by_default(copied: Path) -> None:
    (copied / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 128, "out_features": 96}))
    found = read_sentence_modules(copied)
    assert found and found.head and found.head.layers[0] == Dense("2_Dense", 128, 96, True, "Tanh")
