"""llama.cpp computes from a file of `from-hf` what transformers computes from the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import environments
from llmconv.convert import from_hf
from tests.conftest import save_tiny
from tests.convert.formats.test_gguf_families import ALTERNATING, FAMILIES, LATENT, save_family

ROOT = Path(__file__).parents[3]
HOME = ROOT / environments.folder("llama.cpp")
IDS = [*range(3, 33)]
THETA = {"rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
SHORT = {**YARN, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
# the range of YaRN is that of all pairs, rounded or not; llama.cpp rounds it
WHOLE = {**YARN, "original_max_position_embeddings": 200, "rope_theta": 5.0, "truncate": False}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss, yarn": ("gpt_oss", {**ALTERNATING, "rope_parameters": WHOLE}),
    "deepseek v2, yarn": (
        "deepseek_v2",
        {**LATENT, "rope_parameters": {**SHORT, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v3, yarn": (
        "deepseek_v3",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": {**SHORT, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **THETA}}),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}},
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                **THETA,
            }
        },
    ),
}
GELU = ("gemma", "starcoder2", "gpt2", "bloom", "falcon", "mpt")
"""Types whose activation llama.cpp reads from a table of float16."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_its_logits_are_those_of_the_model(tmp_path: Path, logits_of: Callable[..., Any], name: str) -> None:
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    kind, changes = (FAMILIES | OTHERS)[name]
    folder = tmp_path / "model"
    model = save_family(name, folder) if name in FAMILIES else save_tiny(kind, folder, **changes)
    from_hf(model, tmp_path / "out", to="gguf")
    script, output = ROOT / "tests/builders/run_gguf.py", tmp_path / "logits.npy"
    command = [HOME / "bin/python", script, tmp_path / "out/model.gguf", json.dumps(IDS), output]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = logits_of(model, np.array([IDS]))[0]
    found = np.load(output)
    assert np.abs(found - expected).max() < (2e-3 if kind.startswith(GELU) else 1e-5)
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))
