"""Weights are held once: one session for equal graphs, shared float32 copies for different ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.files.safetensors_file import read_header
from llmconv.generation import TextModel, runners
from llmconv.generation.runners import WeightMemory
from llmconv.runtime.onnxruntime import session_settings
from llmconv.runtime.onnxruntime.guard import EXACT
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, exact_number
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from tests.builders.talking import save_letters
from tests.conftest import save_tiny
from tests.export.test_precision import cast_folder

IDS = np.arange(14).reshape(2, 7) + 3


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sessions that are opened from now on."""
    found: list[object] = []
    original = ort.InferenceSession.__init__

    def noted(self: ort.InferenceSession, *args: object, **kwargs: object) -> None:
        found.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(ort.InferenceSession, "__init__", noted)
    return found


def logits(runner: OrtRunner) -> Array:
    """Logits of a prompt and of one step after it."""
    mask = np.ones((2, 8), dtype=np.int64)
    first = runner.prefill(IDS, mask[:, :7], default_positions(mask[:, :7], 7))
    second = runner.decode(IDS[:, :1], mask, default_positions(mask, 1), first.present)
    return np.concatenate([first.logits, second.logits], axis=1)


def half(folder: Path, dtype: str = "bfloat16") -> Path:
    return cast_folder(save_tiny("llama", folder), dtype)


@pytest.mark.slow
def test_equal_graphs_share_one_session(talking: Path, opened: list[object]) -> None:
    OrtRunner.from_folder(talking)
    assert len(opened) == 1


@pytest.mark.slow
def test_equal_graphs_by_path_share_one_session(talking: Path, opened: list[object]) -> None:
    OrtRunner.from_files(talking / "prefill.onnx", talking / "decode.onnx")
    assert len(opened) == 1


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])  # onnxruntime folds the 1 + weight of Gemma's norms
def test_different_graphs_share_float32_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder = cast_folder(save_tiny(model_type, tmp_path / "model"), "bfloat16")
    export(folder, cache="shared-buffer", target="ort-cpu")
    made = Counter[tuple[object, ...]]()
    original = session_settings.widened

    def counted(path: Path, offset: int, kind: int, shape: tuple[int, ...]) -> Array:
        made[path, offset] += 1
        return original(path, offset, kind, shape)

    monkeypatch.setattr(session_settings, "widened", counted)
    runner = OrtRunner.from_folder(folder)
    assert (folder / "prefill.onnx").read_bytes() != (folder / "decode.onnx").read_bytes()
    assert made and set(made.values()) == {1}
    separate = OrtRunner.from_folder(folder, SessionSettings(prepack=True))
    assert np.allclose(logits(runner), logits(separate), atol=1e-5)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_graphs_run_on_the_cpu(tmp_path: Path, dtype: str) -> None:
    folder = half(tmp_path / "model", dtype)
    export(folder)
    in_float32 = logits(OrtRunner.from_folder(folder))
    export(folder, precision=dtype, overwrite=True)
    assert np.allclose(logits(OrtRunner.from_folder(folder)), in_float32, atol=0.02)


def test_float32_weights_are_mapped_and_not_copied(talking: Path) -> None:
    memory = WeightMemory.of([talking / "prefill.onnx", talking / "decode.onnx"], SessionSettings())
    assert memory.copied == 0
    assert 0 < memory.mapped < (talking / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_half_precision_weights_are_copied_once_in_float32(tmp_path: Path) -> None:
    folder = half(tmp_path / "model")
    export(folder, cache="shared-buffer", target="ort-cpu")
    memory = WeightMemory.of([folder / "prefill.onnx", folder / "decode.onnx"], SessionSettings())
    table = read_header(folder / "model.safetensors").tensors["model.embed_tokens.weight"]
    assert memory.copied == 2 * (memory.mapped - table.nbytes)  # rows of the embedding are looked up where they are


@pytest.mark.slow
def test_packed_codes_are_copied_and_the_embedding_is_not(tmp_path: Path) -> None:
    out = export(save_tiny("llama", tmp_path / "model"), tmp_path / "out", incremental=True, quant="int4").folder
    memory = WeightMemory.of([out / "decode.onnx"], SessionSettings())
    table = read_header(out / "quantized.safetensors").tensors["model.embed_tokens.weight"]
    assert memory.copied == memory.mapped - table.nbytes
    assert "--packed-cache" in memory.other_way


def test_copies_that_exceed_the_memory_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_letters(half(tmp_path / "model"))
    export(folder)
    monkeypatch.setattr(runners, "available_memory", lambda: 1000)
    with pytest.raises(InputRefused, match="GB of memory") as caught:
        TextModel.open(folder)
    assert "--dtype float32" in caught.value.hint


def test_weights_without_a_recorded_length_end_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64))
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[12], data_location="EXTERNAL")
    tensor.external_data.add(key="location", value="w.bin")
    tensor.external_data.add(key="offset", value="16")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [12])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [output], [tensor])), tmp_path / "g.onnx")
    assert WeightMemory.of([tmp_path / "g.onnx"], SessionSettings()) == WeightMemory(48, 0)


@pytest.mark.parametrize("text", ["0.7071", "0.9", "nan", "1e400", "x"])
def test_a_recorded_number_counts_only_if_it_rounds_to_the_constant(text: str) -> None:
    tensor = onnx.numpy_helper.from_array(np.array(0.7071, np.float16), "c")
    tensor.metadata_props.add(key=EXACT, value=text)
    found = exact_number(tensor)
    assert (found is not None) == (text == "0.7071")
