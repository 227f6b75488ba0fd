"""DeepSpeed checkpoints: genuine ones give what `zero_to_fp32` gives, whoever saved them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.checkpoint import Checkpoint
from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused
from llmconv.files import safetensors_file
from llmconv.files.source_file import read_into
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import BY_NAME, cast

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"

PLACES = {
    "z0_bf16": "z0_bf16",
    "z1_fp32_gpt2_tied": "z1_fp32_gpt2_tied",
    "z1_bf16_frozen": "z1_bf16_frozen",
    "z1_bf16_optimizer": "z1_bf16_optimizer",
    "z2_bf16_groups": "z2_bf16_groups",
    "z2_bf16_aligned": "z2_bf16_aligned",
    "z2_bf16_frozen_tied": "z2_bf16_frozen_tied",
    "z3_bf16_subgroups": "z3_bf16_subgroups",
    "z3_bf16_frozen_tied": "z3_bf16_frozen_tied",
    "universal_z3": "universal_z3",
    "trainer_z3": "trainer_z3/checkpoint-3",
    "lightning_z2": "lightning_z2/run.ckpt",
}
CONFIG = {"lightning_z2": (FIXTURES / "lightning_z2" / "config.json",)}

FROM_THE_MODULE = {"z1_bf16_frozen": 5}
"""Weights that `zero_to_fp32` leaves out, though they are in the save."""


def open_case(case: str) -> Checkpoint:
    return open_training(FIXTURES / PLACES[case], config=CONFIG.get(case, ()))


def reference(case: str) -> dict[str, list[Any]]:
    content = json.loads((FIXTURES / case / "reference.json").read_text())
    return dict(content["tensors"])


@pytest.mark.parametrize("case", PLACES)
def test_every_tensor_has_the_bits_that_zero_to_fp32_gives(case: str) -> None:
    expected = reference(case)
    found = {
        name: [tensor.dtype.name, list(tensor.shape), hashlib.sha256(tensor.read().tobytes()).hexdigest()]
        for name, tensor in open_case(case).items()
    }
    assert {name: entry for name, entry in found.items() if name in expected} == {
        name: entry for name, entry in expected.items() if name in found
    }
    assert set(expected) - set(found) <= {"lm_head.weight"}
    assert len(set(found) - set(expected)) == FROM_THE_MODULE.get(case, 0)


@pytest.mark.slow_rows("z1_fp32_gpt2_tied", "z2_bf16_aligned")
@pytest.mark.parametrize("case", PLACES)
def test_logits_are_those_of_the_trained_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FIXTURES / PLACES[case], tmp_path / "hf", config=CONFIG.get(case, ()))
    with np.load(FIXTURES / case / "reference.npz") as expected:
        logits = logits_of(tmp_path / "hf", expected["input_ids"])
        assert np.abs(logits - expected["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", ["z1_bf16_frozen", "z2_bf16_groups", "z2_bf16_aligned", "z2_bf16_frozen_tied"])
def test_masters_rounded_once_are_the_weights_that_the_model_ran_with(case: str) -> None:
    file = open_torch_file(FIXTURES / case / "global_step3" / "mp_rank_00_model_states.pt")
    module = {name: file.tensor(name, ref) for name, ref in file.content["module"].items()}
    for name, tensor in open_case(case).items():
        assert cast(tensor, BY_NAME["bfloat16"]).read().tobytes() == module[name].read().tobytes(), name


@pytest.mark.parametrize("case", PLACES)
def test_exactly_one_format_claims_it(case: str) -> None:
    claims = [name for name, format in formats().items() if format.detect(FIXTURES / PLACES[case])]
    assert claims == ["deepspeed"]


def test_the_version_the_ranks_and_the_dropped_parts_are_reported() -> None:
    opened = open_case("z2_bf16_groups")
    assert (opened.version, opened.shards) == ("deepspeed 0.14.5", 3)
    assert opened.dropped == ("the optimizer's moments", "the module's copies of the master weights")
    assert "`--dtype bfloat16` converts to the dtype of the run" in opened.warnings[0]


def test_a_run_in_float32_gets_no_hint_to_round() -> None:
    assert not any("--dtype" in warning for warning in open_case("z1_fp32_gpt2_tied").warnings)


def test_no_byte_is_read_but_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[int] = []
    read = read_into

    def counting(path: Path, buffer: memoryview, offset: int) -> None:
        spans.append(len(buffer))
        read(path, buffer, offset)

    monkeypatch.setattr(safetensors_file, "read_into", counting)
    plan = to_hf(FIXTURES / "z3_bf16_subgroups", tmp_path / "hf")
    assert sum(spans) == plan.nbytes


def test_torch_is_not_imported() -> None:
    code = "import sys; from llmconv.convert import to_hf; to_hf(sys.argv[1], sys.argv[2], dry_run=True); "
    command = [sys.executable, "-c", code + "assert 'torch' not in sys.modules", str(FIXTURES / "z3_bf16_subgroups")]
    assert subprocess.run([*command, "unused"], check=False).returncode == 0


def test_inspect_reports_the_format_and_counts_every_file() -> None:
    found = inspect(FIXTURES / "z3_bf16_subgroups")
    assert (found.format, found.config["model_type"]) == ("deepspeed", "llama")
    assert found.file_bytes > 3 * found.nbytes


def test_inspect_without_a_config_lists_tensors_and_reports_the_missing_file() -> None:
    found = inspect(FIXTURES / "lightning_z2" / "run.ckpt")
    assert found.format == "deepspeed" and "net.lm_head.weight" in found.tensors
    assert "not contain a model configuration" in found.warnings[0]


# Which folder is meant


def test_the_folder_of_the_save_itself_finds_the_config_above_it() -> None:
    save = FIXTURES / "z2_bf16_groups" / "global_step3"
    assert set(open_training(save)) == set(open_case("z2_bf16_groups"))


def test_a_config_above_a_folder_that_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    save = shutil.copytree(FIXTURES / "z2_bf16_groups" / "global_step3", tmp_path / "global_step3")
    (tmp_path / "config.json").write_text("of something else")
    with pytest.raises(InputRefused, match="does not contain a model configuration"):
        open_training(save)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of one checkpoint, to be changed."""
    return shutil.copytree(FIXTURES / "z2_bf16_groups", tmp_path / "run")


def test_latest_decides_between_saves(copy: Path) -> None:
    shutil.copytree(copy / "global_step3", copy / "global_step9")
    (copy / "global_step9" / "mp_rank_00_model_states.pt").unlink()
    assert len(open_training(copy)) == 29


def test_one_save_needs_no_latest(copy: Path) -> None:
    (copy / "latest").unlink()
    assert len(open_training(copy)) == 29


def test_several_saves_without_latest_are_refused_with_their_names(copy: Path) -> None:
    (copy / "latest").unlink()
    shutil.copytree(copy / "global_step3", copy / "global_step9")
    with pytest.raises(InputRefused, match="`global_step3`, `global_step9`"):
        open_training(copy)


def test_a_folder_of_trainer_gives_its_side_files_and_no_code(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURES / "trainer_z3" / "checkpoint-3", tmp_path / "run")
    (run / "zero_to_fp32.py").write_text("raise SystemExit('executed')")
    (run / "tokenizer.json").write_text("{}")
    to_hf(run, tmp_path / "hf")
    names = {entry.name for entry in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "llmconv.json"}


@pytest.mark.parametrize("prefix", ["module.", "_forward_module.", "_forward_module.net.", "net.module."])
def test_a_trainers_prefix_of_every_name_is_removed(copy: Path, prefix: str) -> None:
    path = copy / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["module"] = {prefix + name: tensor for name, tensor in content["module"].items()}
    content["param_shapes"] = [{prefix + name: shape for name, shape in g.items()} for g in content["param_shapes"]]
    torch.save(content, path)
    assert set(open_training(copy)) == set(open_case("z2_bf16_groups"))


def test_16_bit_weights_next_to_the_save_are_not_taken_but_named() -> None:
    opened = open_case("trainer_z3")
    assert {tensor.dtype.name for tensor in opened.values()} == {"float32"}
    assert any("it already is a Hugging Face folder" in warning for warning in opened.warnings)


def test_without_optimizer_states_the_module_is_used(copy: Path) -> None:
    for file in copy.glob("global_step3/*optim_states.pt"):
        file.unlink()
    opened = open_training(copy)
    assert {tensor.dtype.name for tensor in opened.values()} == {"bfloat16"} and len(opened) == 29
    assert "not the master weights" in opened.warnings[0]


def test_a_tokenizer_given_replaces_the_one_next_to_the_save(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"given")
    opened = open_training(copy, tokenizer=tmp_path / "tokenizer.model")
    assert opened.side_files == {"tokenizer.model": b"given"}
