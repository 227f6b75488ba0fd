"""Importance matrices for GGUF: what hooks see in transformers, under the names that llama.cpp's converter gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGUFReader
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from llmconv import to_gguf
from llmconv.causal_lm import context_length
from llmconv.cli import main
from llmconv.compressed import importance_matrix
from llmconv.runtime.tokenizer import PIECE, CalibrationText, load_tokenizer
from tests.builders.talking import save_letters
from tests.conftest import save_tiny
from tests.convert.formats.test_gguf import PRE, trained
from tests.convert.formats.test_gguf_families import save_family

WORDS = "Once there was a clever robot named Bolt. Bolt sailed an iron ship over the cold sea. " * 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(WORDS)
    return path


def seen(model: Path, text: Path) -> dict[str, Any]:
    """Mean squares of what each module of matrices multiplies, by its name."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Any:
        def add(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].detach().double().reshape(-1, inputs[0].shape[-1])
            sums[name] = sums.get(name, torch.zeros(())) + (rows**2).sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

        return add

    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for piece in CalibrationText.read(text).tokens(model, context_length(model)):
            plain(torch.from_numpy(piece))
    return {name: (sums[name] / counts[name]).numpy() for name in sums}


def stored(file: Path) -> dict[str, Any]:
    """Mean squares [experts, columns] by llama.cpp's name, read by its own package."""
    tensors = {one.name: np.asarray(one.data) for one in GGUFReader(file).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    return {name: tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"].reshape(-1, 1) for name in names}


PAIRS = {
    "llama": {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"},
    "gpt2": {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_down": "mlp.c_proj"},
    "falcon": {"attn_qkv": "self_attention.query_key_value", "ffn_up": "mlp.dense_h_to_4h"},
    "gemma3": {"attn_k": "self_attn.k_proj", "ffn_gate": "mlp.gate_proj"},
}
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h", "falcon": "transformer.h", "gemma3": "model.layers"}


@pytest.mark.quick_rows("gpt2")
@pytest.mark.parametrize("kind", PAIRS)
def test_columns_count_as_what_they_are_multiplied_with(kind: str, text: Path, tmp_path: Path) -> None:
    model = save_letters(save_family(kind, tmp_path / kind))
    importance_matrix(model, tmp_path / "imatrix.gguf", calibrate=text)
    found, expected = stored(tmp_path / "imatrix.gguf"), seen(model, text)
    assert all(name.startswith("blk.") for name in found)  # no embedding, no head
    for ours, theirs in PAIRS[kind].items():
        columns, wanted = found[f"blk.1.{ours}.weight"], expected[f"{LAYERS[kind]}.1.{theirs}"]
        assert columns.shape == (1, len(wanted))
        assert np.allclose(columns[0] / columns.mean(), wanted / wanted.mean(), rtol=1e-3)


PROGRAM = Path("build/llama.cpp-sources/made/bin/llama-imatrix")


@pytest.mark.slow
def test_columns_are_those_of_llama_imatrix(tmp_path: Path) -> None:
    """The same tokens, in pieces of the same length."""
    if not PROGRAM.exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp's programs")
    model = with_words(tmp_path / "llama")
    size = min(context_length(model) or PIECE, PIECE)
    tokenizer = load_tokenizer(model)
    ids = tokenizer(WORDS * 4)["input_ids"]
    text = tmp_path / "whole.txt"
    text.write_text(tokenizer.decode(ids[: len(ids) // size * size]))
    assert len(tokenizer(text.read_text())["input_ids"]) % size == 0
    importance_matrix(model, tmp_path / "ours.gguf", calibrate=text)
    to_gguf(model, tmp_path / "model.gguf", type="f32")
    given = ["-m", tmp_path / "model.gguf", "-f", text, "-c", size, "-o", tmp_path / "theirs.gguf", "--no-ppl"]
    subprocess.run([PROGRAM, *map(str, given)], check=True, capture_output=True)
    ours, theirs = stored(tmp_path / "ours.gguf"), stored(tmp_path / "theirs.gguf")
    assert ours.keys() == theirs.keys()
    for name, sums in theirs.items():
        found, wanted = ours[name] / ours[name].mean(), sums / sums.mean()
        assert np.abs(found - wanted).max() < 1e-3 * wanted.max()


@pytest.mark.slow
def test_each_expert_has_columns_of_its_own(text: Path, tmp_path: Path) -> None:
    model = save_letters(save_family("mixtral", tmp_path / "mixtral"))
    importance_matrix(model, tmp_path / "imatrix.gguf", calibrate=text)
    down = stored(tmp_path / "imatrix.gguf")["blk.1.ffn_down_exps.weight"]
    assert len(down) > 1
    assert not any(np.allclose(down[0], other, rtol=1e-2) for other in down[1:])


def with_words(folder: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer, the kind that GGUF has."""
    model = save_tiny("llama", folder, vocab_size=512)
    (model / "tokenizer.json").write_text(json.dumps(trained(**PRE["llama-bpe"])))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return model


@pytest.mark.slow  # the rows of GPT-2 below are measured, too
def test_a_file_says_what_it_was_measured_on(text: Path, tmp_path: Path) -> None:
    model = with_words(tmp_path / "llama")
    given = ["to-gguf", str(model), "-o", str(tmp_path / "x.gguf"), "--type", "q4_0", "--calibrate", str(text)]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    fields = GGUFReader(tmp_path / "x.gguf").fields
    assert fields["quantize.imatrix.dataset"].contents() == "prose.txt"
    importance_matrix(model, tmp_path / "imatrix.gguf", calibrate=text)
    to_gguf(model, tmp_path / "same.gguf", type="q4_0", imatrix=tmp_path / "imatrix.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "same.gguf").read_bytes()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--type", "f16", "--calibrate", "default"], "`--calibrate` is for types with blocks of 4 to 6 bits"),
        (["--calibrate", "default"], "`--calibrate` is for types with blocks of 4 to 6 bits"),
        (["--type", "q4_0", "--calibrate", "default", "--imatrix", "x"], "makes the importance matrix"),
        (["--type", "q4_0", "--calibrate", "nowhere.txt"], "cannot read `nowhere.txt`"),
    ],
    ids=str,
)
def test_wrong_options_leave_no_file(options: list[str], problem: str, tmp_path: Path) -> None:
    model = with_words(tmp_path / "llama")
    done = CliRunner().invoke(main, ["to-gguf", str(model), "-o", str(tmp_path / "x.gguf"), *options])
    assert done.exit_code in (2, 3)
    assert problem in done.output
    assert "hint:" in done.output
    assert not (tmp_path / "x.gguf").exists()
