"""Which merges import torch: only those of adapters whose names the files do not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.lora_models import causal_lm, train
from tests.builders.tiny_models import FIELDS

CODE = """
import sys
from llmconv.convert import merge_lora
merge_lora(sys.argv[1], [sys.argv[2]], sys.argv[3])
print("torch" in sys.modules)
"""


@pytest.mark.quick_rows("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_plain_adapter_is_merged_without_torch(kind: str, tmp_path: Path) -> None:
    case = train(causal_lm(kind, **FIELDS[kind]), tmp_path, merge=False, target_modules="all-linear")
    paths = map(str, (case.base, case.adapter, tmp_path / "out"))
    run = subprocess.run([sys.executable, "-c", CODE, *paths], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "False"
