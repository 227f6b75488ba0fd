"""nanochat's checkpoints: the logits of its own formula, and what its later models have more is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput

WIDTH, HEADS, WORDS, LAYERS = 32, 4, 24, 2
SIZES = {"sequence_len": 16, "vocab_size": WORDS, "n_layer": LAYERS, "n_head": HEADS, "n_kv_head": 2, "n_embd": WIDTH}
IDS = np.array([[1, 5, 9, 3, 20, 7]])


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    state = {"transformer.wte.weight": drawn(WORDS, WIDTH).bfloat16(), "lm_head.weight": drawn(WORDS, WIDTH)}
    for layer in range(LAYERS):
        shapes = {"c_q": WIDTH, "c_k": WIDTH // 2, "c_v": WIDTH // 2, "c_proj": WIDTH}
        stem = f"transformer.h.{layer}"
        state |= {f"{stem}.attn.{name}.weight": drawn(rows, WIDTH) for name, rows in shapes.items()}
        state[f"{stem}.mlp.c_fc.weight"] = drawn(4 * WIDTH, WIDTH)
        state[f"{stem}.mlp.c_proj.weight"] = drawn(WIDTH, 4 * WIDTH)
    return state


def logits(state: dict[str, torch.Tensor]) -> Any:
    """The formula of nanochat's `gpt.py`: norms without weights, rotation before the norm, a soft cap."""
    size, length = WIDTH // HEADS, IDS.shape[1]
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, size, 2).float() / size))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    x = norm(state["transformer.wte.weight"].float()[torch.from_numpy(IDS[0])])
    for layer in range(LAYERS):
        own = {name.split(".", 3)[3]: one for name, one in state.items() if name.startswith(f"transformer.h.{layer}.")}
        q, k, v = ((norm(x) @ own[f"attn.c_{one}.weight"].T).view(length, -1, size) for one in "qkv")
        q, k, v = (one.transpose(0, 1) for one in (norm(rotated(q)), norm(rotated(k)), v))
        k, v = (one.repeat_interleave(2, 0) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(length, WIDTH)
        x = x + mixed @ own["attn.c_proj.weight"].T
        x = x + F.relu(norm(x) @ own["mlp.c_fc.weight"].T).square() @ own["mlp.c_proj.weight"].T
    return (15 * torch.tanh(norm(x) @ state["lm_head.weight"].T / 15)).numpy()


def save(folder: Path, step: int, state: dict[str, torch.Tensor], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"model_{step:06d}.pt")
    torch.save([{"state": {}, "param_groups": []}], folder / f"optim_{step:06d}_rank0.pt")
    meta = {"step": step, "model_config": {**SIZES, **fields}, "user_config": {}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return folder / f"model_{step:06d}.pt"


def test_logits_are_those_of_the_newest_step(tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    save(tmp_path / "d2", 9, weights(9))
    save(tmp_path / "d2", 10, {f"_orig_mod.{name}": tensor for name, tensor in weights(10).items()})
    to_hf(tmp_path / "d2", tmp_path / "hf")
    assert np.abs(logits_of(tmp_path / "hf", IDS)[0] - logits(weights(10))).max() < 1e-5
    to_hf(tmp_path / "d2" / "model_000009.pt", tmp_path / "older")
    assert np.abs(logits_of(tmp_path / "older", IDS)[0] - logits(weights(9))).max() < 1e-5


def test_only_this_format_claims_folder_and_file(tmp_path: Path) -> None:
    file = save(tmp_path / "d2", 10, weights(10))
    for path in (file, file.parent):
        assert [name for name, found in formats().items() if found.detect(path)] == ["nanochat"]


@pytest.mark.parametrize(
    ("name", "fields"), [("resid_lambdas", {}), ("value_embeds.0.weight", {}), ("", {"window_pattern": "SSSL"})]
)
def test_what_later_models_have_more_is_named(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    file = save(tmp_path / "d2", 10, weights(10) | ({name: torch.ones(LAYERS)} if name else {}), **fields)
    with pytest.raises(UnsupportedInput, match=f"nanochat model that has `{name or 'window_pattern'}`") as refused:
        to_hf(file, tmp_path / "out")
    assert "run it with nanochat" in refused.value.hint


@pytest.mark.parametrize("field", ["n_layer", "n_head", "n_kv_head", "vocab_size"])
@pytest.mark.parametrize("value", [3 << 20, "2", 0, None])
def test_sizes_that_no_model_has_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    file = save(tmp_path / "d2", 10, weights(10), **{field: value})
    with pytest.raises(MalformedInput):
        to_hf(file, tmp_path / "out")


def test_the_file_with_the_sizes_is_named_where_it_is_missing(tmp_path: Path) -> None:
    file = save(tmp_path / "d2", 10, weights(10))
    (tmp_path / "d2" / "meta_000010.json").unlink()
    for path in (file, file.parent):
        with pytest.raises(InputRefused, match=r"sizes are in `meta_000010\.json`"):
            to_hf(path, tmp_path / "out")
