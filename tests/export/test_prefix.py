"""Graphs with a prefix are equal to PEFT and PaddleNLP with that prefix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.output.manifest import read_manifest
from llmconv.runtime import OrtRunner, default_positions
from llmconv.verify import verify
from tests.builders.prefix_models import LENGTH, peft_logits, random_ids, save_adapter
from tests.export.test_precision import cast_folder

pytestmark = pytest.mark.slow

PADDLE = Path(__file__).parents[1] / "fixtures/paddle/prefix_llama_bf16"
KINDS = ("PrefixTuning", "PromptTuning", "PromptEncoder")
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def prefixed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """`prefixed(model_type, kind)` is a folder exported with an adapter, and the adapter; do not write into them."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(model_type: str, kind: str) -> tuple[Path, Path]:
        if (model_type, kind) not in made:
            home = tmp_path_factory.mktemp("prefixed")
            folder = Path(shutil.copytree(tiny(model_type), home / model_type))
            adapter = save_adapter(folder, home / "adapter", kind)
            export(folder, prefill=True, incremental=True, unified=True, prefix=adapter)
            made[model_type, kind] = folder, adapter
        return made[model_type, kind]

    return make


def piecewise_logits(folder: Path, ids: np.ndarray[Any, Any], lengths: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Logits of a batch that is fed piece by piece, the first piece to the prefill graph."""
    runner, past, pieces, done = OrtRunner.from_folder(folder), None, [], 0
    for length in lengths:
        mask = np.ones((len(ids), done + length), dtype=np.int64)
        run = runner.decode if done else runner.prefill
        step = run(ids[:, done : done + length], mask, default_positions(mask, length), past)
        past, done = step.present, done + length
        pieces.append(step.logits)
    return np.concatenate(pieces, axis=1)


OTHERS = ("gpt2", "bloom", "gemma2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_prompt_and_steps_equal_peft(
    model_type: str, kind: str, prefixed: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, adapter = prefixed(model_type, kind)
    ids = random_ids(2, 9)
    expected = peft_logits(folder, adapter, ids)
    np.testing.assert_allclose(piecewise_logits(folder, ids, (6, 1, 2)), expected, atol=1e-5)


def test_a_soft_prompt_comes_before_the_scale_of_half_precision_embeddings(tiny: Tiny, tmp_path: Path) -> None:
    folder = cast_folder(Path(shutil.copytree(tiny("gemma2"), tmp_path / "gemma2")), "bfloat16")
    adapter = save_adapter(folder, tmp_path / "adapter", "PromptTuning")
    export(folder, prefix=adapter, overwrite=True)
    assert verify(folder, scenario=["prefill, 7 tokens"]).verdict == "pass"


def test_the_cache_is_longer_by_the_prefix(prefixed: Callable[[str, str], tuple[Path, Path]]) -> None:
    folder, _ = prefixed("llama", "PrefixTuning")
    mask = np.ones((2, 4), dtype=np.int64)
    step = OrtRunner.from_folder(folder).prefill(random_ids(2, 4), mask, default_positions(mask, 4))
    assert step.present.length == LENGTH + 4


def test_a_one_token_prompt_has_the_prefix_too(prefixed: Callable[[str, str], tuple[Path, Path]]) -> None:
    folder, adapter = prefixed("llama", "PrefixTuning")
    ids, mask = random_ids(1, 1), np.ones((1, 1), dtype=np.int64)
    logits = OrtRunner.from_folder(folder).decode(ids, mask, default_positions(mask, 1)).logits
    np.testing.assert_allclose(logits, peft_logits(folder, adapter, ids), atol=1e-5)


def test_a_projected_prefix_is_the_same_once_saved(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "llama"))
    adapter = save_adapter(folder, tmp_path / "adapter", "PrefixTuning", prefix_projection=True, encoder_hidden_size=24)
    export(folder, prefix=adapter)
    ids = random_ids(1, 5)
    np.testing.assert_allclose(piecewise_logits(folder, ids, (4, 1)), peft_logits(folder, adapter, ids), atol=1e-5)


def test_pre_caches_equal_paddlenlp(tmp_path: Path) -> None:
    to_hf(PADDLE / "base", tmp_path / "hf")
    export(tmp_path / "hf", prefix=PADDLE / "prefix")
    reference = np.load(PADDLE / "reference.npz")
    logits = piecewise_logits(tmp_path / "hf", reference["input_ids"], (5, 1, 3))
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-5)
    assert np.abs(logits - reference["logits_no_prefix"]).max() > 0.1


def test_the_prefix_is_one_small_file(prefixed: Callable[[str, str], tuple[Path, Path]]) -> None:
    folder, _ = prefixed("llama", "PrefixTuning")
    manifest = read_manifest(folder)
    prefix = manifest.graphs["prefill"]["prefix"]
    assert prefix == {"file": prefix["file"], "kind": "prefix_tuning", "length": LENGTH, "first_position": LENGTH}
    assert manifest.files[prefix["file"]]["bytes"] < 15_000
    assert "prefix" not in manifest.graphs["decode"]


def test_the_decode_graph_alone_can_have_no_prefix(tiny: Tiny, tmp_path: Path) -> None:
    adapter = save_adapter(tiny("llama"), tmp_path / "adapter", "PromptTuning")
    with pytest.raises(UsageProblem, match="the graph for prompts, which is not exported"):
        export(tiny("llama"), incremental=True, prefix=adapter, dry_run=True)


def test_a_prefix_of_another_model_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    for kind in ("PrefixTuning", "PromptTuning"):
        adapter = save_adapter(tiny("llama"), tmp_path / kind, kind)
        other = Path(shutil.copytree(tiny("bloom"), tmp_path / f"bloom-{kind}"))
        if kind == "PromptTuning":
            _narrow(adapter)
        with pytest.raises(InputRefused, match="mismatch"):
            export(other, prefix=adapter)


def _narrow(adapter: Path) -> None:
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415

    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: value[:, :-1].copy() for name, value in tensors.items()}, adapter / "adapter_model.safetensors")


def test_an_adapter_that_is_not_a_prefix_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UnsupportedInput, match="`LORA`"):
        export(tiny("llama"), prefix=tmp_path, dry_run=True)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"garbage" * 9])
def test_a_broken_array_is_refused(tiny: Tiny, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pre_caches.npy").write_bytes(content)
    with pytest.raises(MalformedInput, match="pre_caches"):
        export(tiny("llama"), prefix=tmp_path, dry_run=True)


def test_objects_in_an_array_are_not_unpickled(tiny: Tiny, tmp_path: Path) -> None:
    np.save(tmp_path / "pre_caches.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(MalformedInput, match="pre_caches"):
        export(tiny("llama"), prefix=tmp_path, dry_run=True)


def test_a_folder_without_a_prefix_is_refused_with_a_hint(tiny: Tiny, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tiny("llama")), "--prefix", str(tmp_path), "--dry-run"])
    assert result.exit_code == 3
    assert "does not contain a prefix" in result.stderr and "hint: " in result.stderr


def test_a_missing_prefix_is_reported_as_missing(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="does not exist"):
        export(tiny("llama"), prefix=tmp_path / "nope")
