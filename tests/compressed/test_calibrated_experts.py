"""`quantize --calibrate` of mixtures: experts one by one or in stacks, and gate and up in one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Phi3Config, Qwen3_5MoeTextConfig, Qwen3MoeConfig

from llmconv.compressed import quantize
from llmconv.export import export
from llmconv.verify import verify
from tests.builders.safetensors import change_tensor
from tests.compressed.test_calibrated import SMALL, codes_of, copied, doubled, exported_codes, save
from tests.compressed.test_calibrated import text as text

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, Any] = {
    "one by one": Qwen3MoeConfig(**SMALL, **EXPERTS, decoder_sparse_step=1),
    "stacked": Qwen3_5MoeTextConfig(
        **SMALL,
        **EXPERTS,
        shared_expert_intermediate_size=64,
        layer_types=["full_attention"] * 2,
    ),
    "fused": Phi3Config(**SMALL, pad_token_id=0),
}
NORM, ROUTER = (f"model.layers.1.{name}.weight" for name in ("post_attention_layernorm", "mlp.gate"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("mixtures")
    made = {kind: save(home / kind.replace(" ", "_"), config, torch.float32) for kind, config in MODELS.items()}
    stack(made["stacked"] / "model.safetensors")
    return made


def stack(file: Path) -> None:
    """Rewrites a file with experts one by one, as transformers saves them, with stacks, as Qwen3.5 is released."""
    tensors = load_file(file)
    for prefix in {name[: name.index(".experts.")] + ".experts." for name in tensors if ".experts." in name}:
        parts = [
            [tensors.pop(f"{prefix}{number}.{name}_proj.weight") for number in range(EXPERTS["num_experts"])]
            for name in ("gate", "up", "down")
        ]
        gate, up, down = (np.stack(several) for several in parts)
        tensors |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}down_proj": down}
    save_file(tensors, file, {"format": "pt"})


def made(model: Path, folder: Path, text: Path, method: str = "awq") -> Path:
    quantize(model, folder, scheme="w4a16", quant_block=32, method=method, calibrate=text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_with_factors_is_verified(kind: str, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    folder = made(models[kind], tmp_path / "out", text)
    report = verify(folder, reference=models[kind])
    assert report.exit_code == 0, report.lines()
    checks = {check.name: check.detail for check in report.checks}
    assert "gated matrices" in checks["factors"] and not checks["factors"].split(", ")[1].startswith("0 ")
    if kind == "one by one":
        stored, plain = (load_file(path / "model.safetensors") for path in (folder, models[kind]))
        factors = plain[NORM] / stored[NORM]
        assert (factors != 1).any() and np.array_equal(stored[ROUTER], plain[ROUTER] * factors)
        assert "2 multiplied with the same" in checks["kept tensors"]
        broken = copied(folder, tmp_path)
        change_tensor(broken / "model.safetensors", ROUTER, lambda rows: doubled(rows.T).T.copy())
        failed = [check for check in verify(broken, reference=models[kind]).checks if check.verdict == "fail"]
        assert failed[0].name == "kept tensors" and f"`{ROUTER}` differs" in failed[0].detail


@pytest.mark.slow
@pytest.mark.parametrize("method", ["search", "gptq", "awq"])
def test_codes_of_stacks_are_those_of_an_export(
    method: str, models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"quant": "int4", "quant_block": 32, "symmetric": True}
    export(models["stacked"], tmp_path / "graphs", unified=True, method=method, calibrate=text, **options)
    found = codes_of(made(models["stacked"], tmp_path / "out", text, method))
    names = {name: name.rpartition(".experts.")[2] for name in found if ".experts." in name}
    assert len(names) == 2 * 4 * 3
    for name, rest in names.items():
        number, part = rest.split(".")[:2]
        stack = name.replace(rest, "down_proj" if part == "down_proj" else "gate_up_proj")
        codes, scales, _ = exported_codes(tmp_path / "graphs", stack)
        rows = {"gate_proj": slice(0, 64), "up_proj": slice(64, 128), "down_proj": slice(None)}[part]
        whole = codes.reshape(4, -1, found[name][0].shape[1])[int(number), rows]
        assert np.array_equal(found[name][0], whole)
        assert np.array_equal(found[name][1], scales[int(number), rows])
