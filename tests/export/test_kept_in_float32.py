"""Half precision in a new folder keeps in float32 what transformers keeps when it loads the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmconv.export import export
from llmconv.verify import verify
from tests.builders.seeded import TEXT, save_seeded
from tools.tiny_models import tiny_config


def types(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: str(tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("deepseek_v3", {"dtype": "bfloat16"}),
        pytest.param("deepseek_v3", {"precision": "float16"}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"precision": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_types_are_those_of_a_model_that_transformers_loads(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = save_seeded(tiny_config(kind, 4), tmp_path / "base", TEXT)
    export(base, tmp_path / "out", **options)
    (dtype,) = options.values()
    AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).save_pretrained(tmp_path / "loaded")
    found, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "loaded/model.safetensors")
    assert types(found) == types(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert "torch.float32" in types(found).values()
    reference = base if "dtype" not in options else None
    assert verify(tmp_path / "out", reference=reference, scenario=["second turn"]).exit_code == 0
