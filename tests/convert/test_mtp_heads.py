"""Layers that predict further tokens (MTP heads) survive each command bit for bit, and alarm nobody."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmconv.cli import main
from llmconv.convert import to_hf
from tests.builders.lora_models import train
from tests.builders.mtp_models import FIELDS, State, save_with_head
from tests.builders.slow_rows import slow_but

KINDS = pytest.mark.parametrize("kind", slow_but(FIELDS, "deepseek_v3", "mellum"))
NOTE = "{} tensors of the MTP head, which predicts further tokens, are kept as they are"


def assert_kept(folder: Path, head: State) -> None:
    found = load_file(folder / "model.safetensors")
    assert [name for name, tensor in head.items() if not torch.equal(found[name], tensor)] == []


@KINDS
def test_to_hf_keeps_the_head_of_a_state_dict(kind: str, tmp_path: Path) -> None:
    head = save_with_head(tmp_path / kind, kind)
    run = tmp_path / "run"
    run.mkdir()
    torch.save(load_file(tmp_path / kind / "model.safetensors"), run / "model.pt")
    shutil.copy(tmp_path / kind / "config.json", run)
    opened = to_hf(run / "model.pt", tmp_path / "out").checkpoint
    assert opened.warnings == (NOTE.format(len(head)),) and opened.dropped == ()
    assert_kept(tmp_path / "out", head)


@KINDS
def test_to_hf_of_a_folder_keeps_the_head(kind: str, tmp_path: Path) -> None:
    head = save_with_head(tmp_path / kind, kind)
    to_hf(tmp_path / kind, tmp_path / "out", dtype="float32")
    assert_kept(tmp_path / "out", head)


@KINDS
def test_a_merge_keeps_the_head_with_one_note(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FIELDS[kind]))
    case = train(model, tmp_path, merge=False, target_modules=["embed_tokens", "o_proj"])
    head = save_with_head(case.base, kind)
    result = CliRunner().invoke(main, ["merge-lora", str(case.base), str(case.adapter), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert [line for line in result.stderr.splitlines() if "warning" in line] == [f"warning: {NOTE.format(len(head))}"]
    assert_kept(tmp_path / "out", head)
