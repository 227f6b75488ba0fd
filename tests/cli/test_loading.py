"""Help and conversions load no heavy package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import CHECKPOINT, LEAVES

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "huggingface_hub")


def loaded_by(*arguments: str) -> set[str]:
    """The packages that `llmconv ARGUMENTS` has imported when it ends."""
    code = f"""
import sys, llmconv.cli
try:
    llmconv.cli.main({list(arguments)!r})
finally:
    print("\\n" + " ".join({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_by("--help") & {*HEAVY, "numpy"}


@pytest.mark.parametrize("name", LEAVES)
def test_the_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    assert not loaded_by(*name.split(), "--help") & set(HEAVY)


def test_a_conversion_does_not_load_torch(tmp_path: Path) -> None:
    loaded = loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    assert (tmp_path / "base/model.safetensors").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


def test_from_hf_does_not_load_torch(tmp_path: Path) -> None:
    loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    loaded = loaded_by("from-hf", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--to", "meta")
    assert (tmp_path / "out/consolidated.00.pth").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}
