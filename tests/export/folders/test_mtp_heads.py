"""MTP heads are in a new folder of `export` bit for bit, with and without `--quant`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmconv.export import export
from tests.builders.mtp_models import save_with_head
from tests.builders.slow_rows import slow_but

KINDS = pytest.mark.parametrize("kind", slow_but(("glm4_moe", "deepseek_v3", "mellum", "qwen3_5_text"), "glm4_moe"))


@KINDS
@pytest.mark.parametrize("quant", slow_but((None, "int8"), "int8"))
def test_export_keeps_the_head(kind: str, quant: str | None, tmp_path: Path) -> None:
    head = save_with_head(tmp_path / kind, kind)
    export(tmp_path / kind, tmp_path / "out", quant=quant, method="rtn" if quant else None)
    files = (tmp_path / "out").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert [name for name, tensor in head.items() if not torch.equal(found[name], tensor)] == []
