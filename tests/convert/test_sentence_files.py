"""What sentence-transformers needs besides the model is written, too: without it that library takes the mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmconv.checkpoint import sentence_files
from llmconv.compressed.folder import quantize
from llmconv.convert import apply_delta, extract_delta, from_hf, merge_lora, to_hf
from llmconv.errors import InputRefused, MalformedInput
from tests.builders.embedding_models import TANH, save_model, save_modules


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, whose embedding is its last token through a Dense module."""
    folder = save_modules(
        save_model(tmp_path_factory.mktemp("embeds"), "qwen3", AutoModelForCausalLM), "lasttoken", [(48, TANH, True)]
    )
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Query: "}}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    return folder


def _merged(model: Path, out: Path) -> None:
    adapter, place = out.with_name("adapter"), "base_model.model.model.layers.0.self_attn.q_proj"
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"{place}.lora_A.weight": torch.ones(2, 64), f"{place}.lora_B.weight": torch.ones(64, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    merge_lora(model, [adapter], out)


def _restored(model: Path, out: Path) -> None:
    to_hf(model, out.with_name("tuned"), dtype="float16")
    extract_delta(out.with_name("tuned"), model, out.with_name("delta"))
    apply_delta(out.with_name("tuned"), out.with_name("delta"), out)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "to-hf": lambda model, out: to_hf(model, out, dtype="bfloat16"),
    "merge-lora": _merged,
    "quantize": lambda model, out: quantize(model, out, scheme="fp8-dynamic"),
    "delta apply": _restored,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_modules_and_prompts_are_written_too(model: Path, tmp_path: Path, command: str) -> None:
    COMMANDS[command](model, tmp_path / "out")
    found = sentence_files(tmp_path / "out")
    assert found == sentence_files(model)
    assert {"1_Pooling/config.json", "2_Dense/model.safetensors", "sentence_bert_config.json"} < found.keys()


@pytest.mark.parametrize("home", ["../other", "/etc", ".hidden", 7])
def test_a_module_elsewhere_is_refused(model: Path, tmp_path: Path, home: object) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": home}]))
    with pytest.raises(MalformedInput, match="modules"):
        sentence_files(tmp_path)


def test_a_module_that_is_a_link_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "1_Pooling"}]))
    (tmp_path / "1_Pooling").symlink_to(model / "1_Pooling")
    with pytest.raises(MalformedInput, match="is a link"):
        sentence_files(tmp_path)


def test_a_gguf_file_of_another_pooling_is_not_resumed(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    from_hf(folder, tmp_path / "out", to="gguf")
    from_hf(folder, tmp_path / "out", to="gguf", resume=True)
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(pooling.read_text().replace("lasttoken", "mean"))
    with pytest.raises(InputRefused, match="would differ"):
        from_hf(folder, tmp_path / "out", to="gguf", resume=True)
