"""Values on a device: arrays get there and back, and what is bound once is bound again where onnxruntime copies it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.output.manifest import graph_entries
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.runner import OrtRunner, require_right
from llmconv.runtime.onnxruntime.session_settings import Device, SessionSettings, as_array, host_value
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from tests.conftest import save_tiny

IDS = np.random.default_rng(0).integers(3, 90, (1, 9))
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int64)


@pytest.fixture(scope="module")
def buffered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with graphs over a shared buffer."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("buffered"))
    export(folder, cache="shared-buffer")
    return folder


def three_steps(runner: OrtRunner) -> tuple[list[Array], dict[str, Array]]:
    """Logits of a prompt and of three steps, and the cache."""
    mask, found, past, start = np.ones((1, 9), dtype=np.int64), [], None, 0
    for end in (6, 7, 8, 9):
        positions = default_positions(mask[:, :end], end - start)
        step = runner.decode(IDS[:, start:end], mask[:, :end], positions, past)
        past, start = step.present, end
        found.append(step.logits[:, -1])
    assert past is not None
    return found, dict(past.arrays())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_becomes_a_value_and_an_array_again(dtype: type) -> None:
    array: Array = np.arange(6).reshape(2, 3).astype(dtype)
    for value in (host_value(array), Device().place(array)):
        assert as_array(value).dtype == array.dtype
        assert np.array_equal(as_array(value), array)


@pytest.mark.slow
def test_an_empty_value_of_bfloat16_has_its_shape() -> None:
    array = np.zeros((1, 2, 0, 4), ml_dtypes.bfloat16)
    assert as_array(Device().place(array)).shape == (1, 2, 0, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_start_is_refused_instead_of_replaced_by_the_cpu(
    buffered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(UsageProblem, match="could not start `CUDAExecutionProvider`"):
        OrtRunner.from_folder(buffered, SessionSettings(provider="cuda"))


@pytest.mark.slow
def test_an_array_outlives_the_value_that_it_was_read_from() -> None:
    expected = np.arange(60_000).reshape(3, 20_000).astype(np.float32)
    found = [as_array(Device().place(expected + number)) for number in range(4)]
    assert all(np.array_equal(array, expected + number) for number, array in enumerate(found))


@pytest.mark.slow
def test_a_device_is_that_of_the_provider() -> None:
    assert Device.of("CUDAExecutionProvider", {"device_id": "1"}) == Device("cuda", 1, copies=True)
    assert Device.of("CPUExecutionProvider", {"device_id": "1"}) == Device("cpu", 0, copies=False)
    assert Device.of("OpenVINOExecutionProvider", {}) == Device("cpu", 0, copies=True)


@pytest.mark.slow
def test_a_provider_that_copies_its_inputs_gives_the_same_steps(
    buffered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, cache = three_steps(OrtRunner.from_folder(buffered))
    bound: dict[str, list[ort.OrtValue]] = {}
    original = ort.IOBinding.bind_ortvalue_input

    def noted(self: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
        copied = ort.OrtValue.ortvalue_from_numpy(as_array(value).copy())  # as onnxruntime does on a GPU
        bound.setdefault(name, []).append(copied)
        original(self, name, copied)

    monkeypatch.setattr(ort.IOBinding, "bind_ortvalue_input", noted)
    monkeypatch.setattr(SessionSettings, "device", Device(copies=True))
    found, other = three_steps(OrtRunner.from_folder(buffered))
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(np.array_equal(cache[name], other[name]) for name in cache)
    assert len(bound["past_key_values.0.key"]) > 4


@pytest.mark.slow
def test_outputs_stay_where_they_are_asked_to(buffered: Path) -> None:
    export(buffered, cache="growing", overwrite=True)
    graph = OrtRunner.from_folder(buffered)._step_graph
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(9)[None]}
    values = {name: host_value(array) for name, array in feeds.items() if name in graph.inputs}
    values |= zip(graph.past_names, graph._past_values(None, 1), strict=True)
    names = list(graph.outputs)
    expected = graph._session.last.run_with_ort_values(names, values)
    found = graph._session.last.run_on_device(dict.fromkeys(names, "cpu"), values, 0)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
def test_products_of_float32_are_not_rounded_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    assert SessionSettings(provider="cuda").providers()[0] == ("CUDAExecutionProvider", {"use_tf32": "0"})
    chosen = SessionSettings(provider="cuda", provider_options={"use_tf32": "1"})
    assert chosen.providers()[0][1] == {"use_tf32": "1"}


def test_a_buffer_on_webgpu_needs_a_release_that_computes_it_right(
    buffered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = open_graph(buffered, graph_entries(buffered)[0])
    webgpu = SessionSettings(provider="webgpu")
    assert require_right(graph, webgpu) is graph  # onnxruntime is newer here
    monkeypatch.setattr(ort, "__version__", "1.27.0")
    assert require_right(graph, SessionSettings()) is graph
    with pytest.raises(UnsupportedInput, match=r"onnxruntime 1\.27\.0 computes .* wrongly on WebGPU") as caught:
        require_right(graph, webgpu)
    assert "--target ort-webgpu" in caught.value.hint
