"""Codes of float8 without a `quantization_config` have no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmconv.errors import InputRefused
from llmconv.export import export


@pytest.mark.parametrize("dtype", ["keep", "float32"])
def test_codes_without_settings_are_refused_without_a_way_that_leads_back(
    tiny: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    tensors = load_file(tiny("llama") / "model.safetensors")
    codes = {name: one.to(torch.float8_e4m3fn) if "_proj" in name else one for name, one in tensors.items()}
    (tmp_path / "model").mkdir()
    save_file(codes, tmp_path / "model/model.safetensors", {"format": "pt"})
    (tmp_path / "model/config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    with pytest.raises(InputRefused, match="float8_e4m3fn") as refusal:
        export(tmp_path / "model", tmp_path / "out", dtype=dtype)
    assert "`quantization_config`" in str(refusal.value.hint)
