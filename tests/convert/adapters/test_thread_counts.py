"""merge-lora gives the same bytes however many threads the BLAS under numpy has."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftConfig
from safetensors.torch import save_file

from llmconv.convert.adapters.combining import METHODS
from tests.builders.tuned_models import train

MERGES = """
import sys
from pathlib import Path
from llmconv.convert import merge_lora
from llmconv.convert.adapters.combining import METHODS
folder, out = map(Path, sys.argv[1:3])
adapters = sorted(folder.glob("adapter-*"))
for adapter in adapters:
    merge_lora(folder / "base", adapter, out / adapter.name)
for name, method in METHODS.items():
    options = {"densities": [0.5]} if method.prunes else {"rank": 8} if method.truncates else {}
    merge_lora(folder / "base", adapters, out / name, weights=[1.0, -0.5, 2.0], combine=name, **options)
merge_lora(folder / "base", [adapters[-1]] * 2, out / "thin", combine="svd", rank=8)
"""


class Wide(torch.nn.Module):
    """A layer large enough for OpenBLAS to divide its products among threads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(600, 800, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Never run; PEFT asks for it."""
        return values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and three adapters of it: LoRA, DoRA, LoHa."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    base = Wide()
    (folder / "base").mkdir()
    save_file(base.double().state_dict(), folder / "base/model.safetensors")  # a type that no last bit hides in
    (folder / "base/config.json").write_text('{"model_type": "wide"}')
    lora = {"r": 16, "target_modules": ["linear"], "init_lora_weights": False}
    configs: dict[str, PeftConfig] = {
        "lora": LoraConfig(**lora),
        "dora": LoraConfig(**lora, use_dora=True),
        "loha": LoHaConfig(r=16, target_modules=["linear"], init_weights=False),
    }
    for name, config in configs.items():
        train(Wide(), folder / f"adapter-{name}", config)
    return folder


def test_one_thread_or_two_give_the_same_bytes(models: Path, tmp_path: Path) -> None:
    sums = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", MERGES, str(models), str(tmp_path / threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        files = sorted((tmp_path / threads).glob("*/*.safetensors"))
        sums.append({file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    assert len(sums[0]) == 4 + len(METHODS) and len(set(sums[0].values())) > 8
    assert sums[0] == sums[1]
