"""A `genai_config.json` that loads code, writes files or points outside of its folder is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import MalformedInput
from llmconv.runtime.onnxruntime.session_file import read_genai_config


def save(folder: Path, **decoder: Any) -> Path:
    content = {"model": {"context_length": 8, "decoder": {"filename": "model.onnx", **decoder}}, "search": {}}
    (folder / "genai_config.json").write_text(json.dumps(content))
    return folder


HOSTILE: dict[str, dict[str, Any]] = {
    "a library": {"session_options": {"custom_ops_library": "evil.so"}},
    "a profile": {"session_options": {"enable_profiling": "/tmp/x"}},
    "a context cache": {"session_options": {"ep.context_file_path": "/tmp/x"}},
    "an optimized model": {"session_options": {"session.optimized_model_filepath": "x"}},
    "options that are a list": {"session_options": []},
    "a provider's library": {"session_options": {"provider_options": [{"QNN": {"backend_path": "evil"}}]}},
    "a provider's library by its value": {"session_options": {"provider_options": [{"x": {"y": "evil.so"}}]}},
    "a provider that is a text": {"session_options": {"provider_options": [{"x": "y"}]}},
    "providers that are an object": {"session_options": {"provider_options": {}}},
    "a stage's library": {"pipeline": [{"prefill": {"session_options": {"custom_ops_library": "x"}}}]},
    "a graph elsewhere": {"filename": "../other/model.onnx"},
    "a graph that is a number": {"filename": 3},
    "a graph of a stage elsewhere": {"pipeline": [{"prefill": {"filename": "/etc/passwd"}}]},
    "an adapter elsewhere": {"adapter_filename": "../../x"},
    "weights elsewhere": {"shared_initializers": [{"name": "x", "data_file": "../../x"}]},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_options_that_load_or_write_files_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match=r"`genai_config\.json` is refused: "):
        read_genai_config(save(tmp_path, **HOSTILE[case]))


def test_files_of_the_builder_and_the_layout_pass(tmp_path: Path) -> None:
    options = {"log_id": "onnxruntime-genai", "provider_options": [{"cuda": {"enable_cuda_graph": "0"}}]}
    folder = save(tmp_path, session_options={**options, "session.disable_prepacking": "1"})
    assert read_genai_config(folder)["context_length"] == 8


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": []}', '{"model": null}'])
def test_an_invalid_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(MalformedInput, match=r"genai_config\.json"):
        read_genai_config(tmp_path)


@pytest.mark.slow
def test_an_exported_folder_passes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from llmconv.export import export  # noqa: PLC0415

    export(tiny("llama"), tmp_path / "out", layout="genai", unified=True)
    assert read_genai_config(tmp_path / "out")["decoder"]["filename"] == "model.onnx"
