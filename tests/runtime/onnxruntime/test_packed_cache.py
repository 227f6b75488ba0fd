"""Packed weights in files: made once, mapped afterwards, never stale."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from llmconv.cli import main
from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.files.safe_folder import UNFINISHED
from llmconv.runtime import OrtRunner, SessionSettings, default_positions
from llmconv.tensors import Array
from tests.builders.talking import save_letters

IDS = np.random.default_rng(0).integers(3, 90, (1, 7))
MASK = np.ones_like(IDS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one quantized graph, of matrices with at least 65,536 elements; it is not changed."""
    home = tmp_path_factory.mktemp("packed")
    save_letters(wide_llama(home / "model"))
    # blocks of 32 and a head of 8 bits: scales of fewer bytes stay in the graph, which onnxruntime does not read back
    return export(
        home / "model", home / "out", unified=True, quant="int4", quant_block=32, quant_bits="lm_head=8"
    ).folder


def wide_llama(folder: Path) -> Path:
    """A Llama of two layers, 256 wide."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Folder of packed weights, not made yet."""
    return tmp_path / "cache"


def logits(folder: Path, cache: Path | None = None) -> Array:
    """Logits of a prompt; with packed weights in memory, or from `cache`."""
    settings = SessionSettings(threads=1, prepack=True, packed_cache=cache)
    return OrtRunner.from_folder(folder, settings).prefill(IDS, MASK, default_positions(MASK, 7)).logits


def entries(cache: Path) -> list[Path]:
    """Folders with a graph each."""
    return sorted(path.parent for path in cache.glob("*/*/graph.onnx"))


@pytest.mark.slow
def test_packed_weights_of_a_file_give_bit_identical_logits(folder: Path, cache: Path) -> None:
    expected = logits(folder)
    assert all(np.array_equal(logits(folder, cache), expected) for _ in range(2))


@pytest.mark.slow
def test_the_second_session_writes_nothing(folder: Path, cache: Path) -> None:
    logits(folder, cache)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    logits(folder, cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


@pytest.mark.slow
def test_the_second_session_reads_the_packed_weights(folder: Path, cache: Path) -> None:
    expected = logits(folder, cache)
    weights = entries(cache)[0] / "weights.data"
    content = bytearray(weights.read_bytes())
    weights.write_bytes(bytes(255 - byte if byte else byte for byte in content))
    assert not np.array_equal(logits(folder, cache), expected)


def test_weights_that_changed_in_place_are_packed_again_and_the_old_ones_removed(folder: Path, cache: Path) -> None:
    before = logits(folder, cache)
    old = entries(cache)
    weights = folder / "quantized.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    content = bytearray(weights.read_bytes())
    content[-4096:] = content[-8192:-4096]
    weights.write_bytes(content)
    os.utime(weights, ns=times)  # as `cp -p` and `rsync -t` leave them

    after = logits(folder, cache)

    assert np.array_equal(after, logits(folder)) and not np.array_equal(after, before)
    assert len(entries(cache)) == 1 and entries(cache) != old


@pytest.mark.slow
def test_other_session_options_have_packed_weights_of_their_own(folder: Path, cache: Path) -> None:
    logits(folder, cache)
    (before,) = entries(cache)
    settings = SessionSettings(packed_cache=cache, optimization="basic")
    OrtRunner.from_folder(folder, settings)
    assert before not in entries(cache)


@pytest.mark.quick_rows("graph.onnx")
@pytest.mark.parametrize("name", ["graph.onnx", "weights.data"])
def test_a_damaged_file_is_written_again(folder: Path, cache: Path, name: str) -> None:
    expected = logits(folder, cache)
    (entries(cache)[0] / name).write_bytes(b"")
    assert all(np.array_equal(logits(folder, cache), expected) for _ in range(2))
    assert (entries(cache)[0] / name).stat().st_size


def test_without_a_writable_folder_weights_are_packed_in_memory(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file")
    assert np.array_equal(logits(folder, cache), logits(folder))
    assert "warning: packed weights cannot be kept" in capsys.readouterr().err


def test_matrices_that_onnxruntime_reads_back_wrongly_are_packed_in_memory(
    talking: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = export(talking, tmp_path / "small", quant="int4", unified=True).folder
    assert np.array_equal(logits(small, cache), logits(small))
    assert "does not read them back" in capsys.readouterr().err
    assert not entries(cache) and not list(cache.glob("*"))


def test_a_folder_that_others_can_change_is_refused(folder: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(UsageProblem, match="other users can change"):
        logits(folder, cache)


def test_what_a_killed_run_left_is_removed(folder: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    left = cache / f"{UNFINISHED}left"
    left.mkdir()
    logits(folder, cache)
    assert not left.exists()


def test_the_command_keeps_them_in_the_users_cache(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    said = [generated(folder, *options) for options in ((), ("--packed-cache",), ("--packed-cache",))]
    assert [code for code, _ in said] == [0, 0, 0]
    assert said[0] == said[1] == said[2]
    assert len(entries(cache / "llmconv" / "packed")) == 1


def test_the_eager_model_has_no_packed_weights(talking: Path) -> None:
    code, _ = generated(talking, "--backend", "torch", "--packed-cache")
    assert code == UsageProblem.exit_code


def generated(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `llmconv generate`."""
    given = ["generate", str(folder), "--prompt", "hello", "--max-new-tokens", "4", *options]
    result = CliRunner().invoke(main, given)
    return result.exit_code, result.stdout
