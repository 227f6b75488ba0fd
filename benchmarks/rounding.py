"""How many elements of a merged folder are the float64 sum, rounded: every element of every adapted tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def share(base: Path, adapter: Path, merged: Path) -> float:
    """The share of elements of the adapted weights that equal round(W + s·B·A), all in float64 and rounded by torch.

    Args:
        base: folder of one safetensors file.
        adapter: plain LoRA of one scale, as PEFT saves it.
        merged: folder of one or more safetensors files.
    """
    import torch  # noqa: PLC0415 - what runs in this process counts in the peak memory of what it starts

    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    files = [_open(file) for file in sorted(merged.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
    equal = total = 0
    with _open(base / "model.safetensors") as weights, _open(adapter / "adapter_model.safetensors") as factors:
        for name in (name for name in factors.keys() if ".lora_A." in name):  # noqa: SIM118
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = (factors.get_tensor(name.replace("lora_A", part)).double() for part in ("lora_A", "lora_B"))
            weight = weights.get_tensor(f"{module}.weight")
            exact = torch.addmm(weight.double(), b, a, alpha=scale).to(weight.dtype)
            equal += int((exact == places[f"{module}.weight"].get_tensor(f"{module}.weight")).sum())
            total += exact.numel()
    return equal / total


def _open(path: Path) -> Any:
    """Opens a file; the library has no types."""
    from safetensors import safe_open  # noqa: PLC0415

    return safe_open(path, framework="pt")
