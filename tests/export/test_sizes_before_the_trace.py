"""Weights that do not fit the config are refused before anything is traced."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import save_tiny

EXPORT = """
import sys
from llmconv.errors import InputRefused
from llmconv.export import export
for folder in sys.argv[1:]:
    try:
        export(folder)
    except InputRefused as error:
        print(error.message)
print("torch.export._trace" in sys.modules)
"""
CHANGES = {
    "more layers": {"num_hidden_layers": 6},
    "another width": {"hidden_size": 32, "head_dim": 16},
    "another vocabulary": {"vocab_size": 100},
}


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_refused_before_the_trace(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama")
    for name, change in CHANGES.items():
        shutil.copytree(tmp_path / "llama", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **change}))
    line = [sys.executable, "-c", EXPORT, *(str(tmp_path / name) for name in CHANGES)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    layers, width, vocabulary, traced = done.stdout.splitlines()
    assert layers.startswith("missing keys: `model.layers.4.")
    assert "shape mismatch for `model.embed_tokens.weight`: expected [96, 32]" in width
    assert "shape mismatch for `model.embed_tokens.weight`: expected [100, 64]" in vocabulary
    assert traced == "False"
