"""Multi-modal checkpoints: the language model on embeddings, and the embedding table as a separate graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llmconv.errors import UnsupportedInput
from llmconv.export import export
from llmconv.export.families import INPUT_MAPS
from llmconv.export.vision_towers import VISION_TOWERS
from llmconv.runtime import OrtRunner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.verify import verify
from tests.builders.mutants.surgery import users
from tests.builders.seeded import save_seeded
from tests.conftest import DECODER

VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}


def save_llava(folder: Path, text: dict[str, Any]) -> Path:
    """A seeded float32 LLaVA with that language model."""
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model("llava", text_config=text, vision_config=VISION, image_token_index=95)
    return save_seeded(config, folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA of four layers with its three graphs."""
    folder = save_llava(tmp_path_factory.mktemp("multimodal") / "llava", {**DECODER, "model_type": "llama"})
    export(folder)
    return folder


@pytest.mark.slow
def test_the_graphs_take_embeddings_and_map_the_language_model_alone(llava: Path) -> None:
    model = onnx.load(llava / "decode.onnx", load_external_data=False)
    assert model.graph.input[0].name == "inputs_embeds"
    names = {tensor.name for tensor in model.graph.initializer if tensor.external_data}
    assert not any("vision" in name or "embed_tokens" in name for name in names)
    table = onnx.load(llava / "embeddings.onnx", load_external_data=False)
    assert [port.name for port in (*table.graph.input, *table.graph.output)] == ["input_ids", "inputs_embeds"]


@pytest.mark.slow
def test_text_equals_the_eager_multi_modal_model(llava: Path) -> None:
    report = verify(llava)
    assert report.verdict == "pass", report.closing_lines()
    assert any(check.graph == "embeddings.onnx" and check.output for check in report.checks)


@pytest.mark.slow
def test_a_wrong_embedding_table_is_caught(llava: Path, tmp_path: Path) -> None:
    import shutil  # noqa: PLC0415

    folder = Path(shutil.copytree(llava, tmp_path / "mutant"))
    model = onnx.load(folder / "embeddings.onnx", load_external_data=False)
    gather = users(model, "Gather")[0]
    model.graph.node.insert(0, onnx.helper.make_node("Abs", [gather.input[0]], ["changed"]))
    gather.input[0] = "changed"
    onnx.save(model, folder / "embeddings.onnx")
    report = verify(folder, allow_changed=True)
    assert report.verdict == "fail"
    assert any(check.graph == "embeddings.onnx" and check.verdict == "fail" for check in report.checks)


@pytest.mark.slow
def test_static_graphs_take_embeddings_too(llava: Path, tmp_path: Path) -> None:
    made = export(llava, tmp_path / "static", shapes="static", max_seq_len=32, batch_size=2)
    mask = np.ones((2, 9), dtype=np.int64)
    ids, positions = np.random.default_rng(0).integers(0, 90, mask.shape), default_positions(mask, 9)
    found = OrtRunner.from_folder(made.folder).prefill(ids, mask, positions)
    expected = EagerRunner(llava, "float64").prefill(ids, mask, positions)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


@pytest.mark.slow
def test_a_language_model_without_input_map_is_refused(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(INPUT_MAPS, "llama")
    with pytest.raises(UnsupportedInput, match="no input map"):
        export(llava, overwrite=True)


@pytest.mark.slow
def test_verify_names_what_it_did_not_see_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(VISION_TOWERS, "llava")
    save_llava(tmp_path, {**DECODER, "model_type": "llama"})
    made = export(tmp_path)
    assert "vision" not in made.graphs
    report = verify(tmp_path, scenario=["prefill, 7 tokens"])
    assert "faults of prompts with images" in report.unseen
